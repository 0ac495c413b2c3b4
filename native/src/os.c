#include "os.h"

#include "base.h"
#include "pccl_native.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/eventfd.h>
#endif

void pccl_assert_failed(const char *condition, const char *file, int line, const char *function)
{
    fprintf(stderr, "pccl: %s:%d: %s: broken invariant: %s\n", file, line, function, condition);
    fflush(stderr);
    abort();
}

enum { NS_PER_MS = 1000000, NS_PER_S = 1000000000 };

int64_t pccl_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * NS_PER_S + now.tv_nsec;
}

int64_t pccl_now_ms(void) { return pccl_now_ns() / NS_PER_MS; }

#if defined(__linux__)
uint64_t pccl_thread_id(void) { return (uint64_t)syscall(SYS_gettid); }
#elif defined(__APPLE__)
uint64_t pccl_thread_id(void)
{
    uint64_t id = 0;
    pthread_threadid_np(NULL, &id);
    return id;
}
#else
uint64_t pccl_thread_id(void) { return (uint64_t)(uintptr_t)pthread_self(); }
#endif

static struct timespec in_timespec(int64_t ns)
{
    struct timespec found;
    found.tv_sec = (time_t)(ns / NS_PER_S);
    found.tv_nsec = (long)(ns % NS_PER_S);
    return found;
}

#if defined(__APPLE__) /* has no clock for conditions, but waits for a span of time */
int pccl_cond_init(pthread_cond_t *cond) { return pthread_cond_init(cond, NULL); }

int pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns)
{
    int64_t left_ns = end_ns - pccl_now_ns();
    struct timespec left = in_timespec(left_ns > 0 ? left_ns : 0);
    return pthread_cond_timedwait_relative_np(cond, mutex, &left);
}
#else
int pccl_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    int rc = pthread_condattr_init(&attributes);
    if (rc != 0)
        return rc;
    rc = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
    return rc;
}

int pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns)
{
    struct timespec end = in_timespec(end_ns);
    return pthread_cond_timedwait(cond, mutex, &end);
}
#endif

int pccl_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc != 0)
        return rc;
    rc = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#if defined(__linux__)
    if (rc == 0)
        (void)pthread_setname_np(*thread, name);
#else
    (void)name;
#endif
    return rc;
}

void pccl_say_system_error(char *error, size_t error_bytes, const char *what, int system_error)
{
    snprintf(error, error_bytes, "%s: %s", what, strerror(system_error));
}

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

static volatile sig_atomic_t ending;

static void end_by_signal(void)
{
    const int number = ending;
    sigset_t it;
    fflush(NULL);
    signal(number, SIG_DFL);
    sigemptyset(&it);
    sigaddset(&it, number);
    sigprocmask(SIG_UNBLOCK, &it, NULL);
    raise(number);
}

int pccl_end_by_signal(int number)
{
    if (number <= 0)
        return PCCL_E_INVALID;
    if (ending == 0 && atexit(end_by_signal) != 0)
        return PCCL_E_MEMORY;
    ending = number;
    return PCCL_OK;
}
