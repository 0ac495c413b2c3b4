#include "fd_registry.h"

#include "base.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { FD_MAX = 1 << 20, FD_WORDS = FD_MAX / 32 };

struct pccl_fd_registry {
    uint32_t held[FD_WORDS]; /* untouched pages of it cost nothing */
};

pccl_fd_registry *pccl_fd_registry_create(void) { return calloc(1, sizeof(pccl_fd_registry)); }

void pccl_fd_registry_destroy(pccl_fd_registry *registry) { free(registry); }

int pccl_fd_registry_add(pccl_fd_registry *registry, int fd)
{
    if (fd < 0 || fd >= FD_MAX)
        return -1;
    __atomic_fetch_or(&registry->held[fd / 32], UINT32_C(1) << (fd % 32), __ATOMIC_SEQ_CST);
    return 0;
}

void pccl_fd_registry_close(pccl_fd_registry *registry, int fd)
{
    shutdown(fd, SHUT_RDWR);
    __atomic_fetch_and(&registry->held[fd / 32], ~(UINT32_C(1) << (fd % 32)), __ATOMIC_SEQ_CST);
    close(fd);
}

void pccl_fd_registry_forget(pccl_fd_registry *registry)
{
    for (int word = 0; word < FD_WORDS; word++)
        for (int bit = 0; registry->held[word] != 0 && bit < 32; bit++)
            if (registry->held[word] >> bit & 1) {
                registry->held[word] &= ~(UINT32_C(1) << bit);
                close(word * 32 + bit);
            }
}
