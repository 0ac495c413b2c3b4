/* wake.h: a descriptor that is readable from pccl_wake_signal until pccl_wake_clear: an eventfd, or a pipe
 * where there is none. */
#ifndef PCCL_WAKE_H
#define PCCL_WAKE_H

typedef struct {
    int read_fd;
    int write_fd; /* the same one for an eventfd */
} pccl_wake;

int pccl_wake_open(pccl_wake *wake); /* 0, or -1 with errno set */
void pccl_wake_close(pccl_wake *wake);

/* Return 0, or an errno: the descriptor is not there any more. */
int pccl_wake_signal(const pccl_wake *wake);
int pccl_wake_clear(const pccl_wake *wake);

#endif
