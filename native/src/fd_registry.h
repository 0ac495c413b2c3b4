/* fd_registry.h: which descriptors the engine holds, in a form that a forked child can use.
 *
 * A child may be forked while the engine thread is in the middle of anything, so lists and locks are of no
 * use there. One bit per descriptor number, set and cleared atomically, always is. */
#ifndef PCCL_FD_REGISTRY_H
#define PCCL_FD_REGISTRY_H

typedef struct pccl_fd_registry pccl_fd_registry;

pccl_fd_registry *pccl_fd_registry_create(void);
void pccl_fd_registry_destroy(pccl_fd_registry *registry);

int pccl_fd_registry_add(pccl_fd_registry *registry, int fd); /* -1: the number is too large */

/* Shuts the socket down first, so that a child forked just now, with a copy that it does not use, does not
 * keep the connection alive. */
void pccl_fd_registry_close(pccl_fd_registry *registry, int fd);

/* Closes, in a forked child, every copy, without shutting anything down. */
void pccl_fd_registry_forget(pccl_fd_registry *registry);

#endif
