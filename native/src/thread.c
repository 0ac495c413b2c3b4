#include "thread.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

int64_t pccl_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

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
