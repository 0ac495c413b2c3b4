/* clock.c: preloaded into a process, moves its wall clock by what a file says.
 *
 * The file, named by NEMESIS_CLOCK, holds one 64-bit number: the nanoseconds by which CLOCK_REALTIME is ahead. Whoever
 * writes there makes the clock jump. CLOCK_MONOTONIC is left alone, as a real jump leaves it. Waits until a time of day
 * are given to the kernel in its own time, as a deadline and the clock would jump together. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none;
static const volatile int64_t *ahead_ns = &none;
enum { SECOND_NS = 1000000000 };

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("NEMESIS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *ahead_ns, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED)
        ahead_ns = page;
    close(file);
}

static struct timespec moved(struct timespec at, int64_t by_ns)
{
    int64_t ns = at.tv_nsec + by_ns % SECOND_NS;
    at.tv_sec += by_ns / SECOND_NS + (ns < 0 ? -1 : ns / SECOND_NS);
    at.tv_nsec = ns < 0 ? ns + SECOND_NS : ns % SECOND_NS;
    return at;
}

/* A deadline of a clock that counts from the machine's start is small. */
static int is_of_day(const struct timespec *at) { return at->tv_sec > SECOND_NS; }

int clock_gettime(clockid_t clock, struct timespec *at)
{
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = next(clock, at);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *at = moved(*at, *ahead_ns);
    return status;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    (void)zone;
    struct timespec now;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next)
        next = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT,
                                                                                           "pthread_cond_timedwait");
    struct timespec own = is_of_day(until) ? moved(*until, -*ahead_ns) : *until;
    return next(cond, mutex, &own);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*next)(sem_t *, const struct timespec *);
    if (!next)
        next = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec own = moved(*until, -*ahead_ns);
    return next(semaphore, &own);
}
