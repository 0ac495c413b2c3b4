#include "wake.h"

#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/eventfd.h>
#endif

#if defined(__linux__)

int pccl_wake_open(pccl_wake *wake)
{
    wake->read_fd = wake->write_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return wake->read_fd < 0 ? -1 : 0;
}

#else

int pccl_wake_open(pccl_wake *wake)
{
    int fds[2];
    if (pipe(fds) != 0)
        return -1;
    wake->read_fd = fds[0];
    wake->write_fd = fds[1];
    for (int i = 0; i < 2; i++) {
        if (fcntl(fds[i], F_SETFD, FD_CLOEXEC) != 0 || fcntl(fds[i], F_SETFL, O_NONBLOCK) != 0) {
            int saved = errno;
            pccl_wake_close(wake);
            errno = saved;
            return -1;
        }
    }
    return 0;
}

#endif

void pccl_wake_close(pccl_wake *wake)
{
    if (wake->write_fd >= 0 && wake->write_fd != wake->read_fd)
        close(wake->write_fd);
    if (wake->read_fd >= 0)
        close(wake->read_fd);
    wake->read_fd = wake->write_fd = -1;
}

static int wake_error(ssize_t n) { return n < 0 && errno != EAGAIN && errno != EWOULDBLOCK ? errno : 0; }

/* Eight bytes because that is what an eventfd takes. A full pipe is as good as a written one. */
int pccl_wake_signal(const pccl_wake *wake)
{
    uint64_t one = 1;
    ssize_t n;
    do
        n = write(wake->write_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
    return wake_error(n);
}

int pccl_wake_clear(const pccl_wake *wake)
{
    uint64_t bytes[32];
    ssize_t n;
    do
        n = read(wake->read_fd, bytes, sizeof bytes);
    while ((n < 0 && errno == EINTR) || n == (ssize_t)sizeof bytes);
    return wake_error(n);
}
