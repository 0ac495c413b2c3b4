#include "thread.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
