/* os.h: clocks, threads, conditions, and a descriptor that wakes a thread. */
#ifndef PCCL_OS_H
#define PCCL_OS_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

/* Milliseconds of a clock that never goes back, from some point in the past. */
int64_t pccl_now_ms(void);
int64_t pccl_now_ns(void); /* the same in nanoseconds */

/* The system's number of the calling thread, where there is one: no other thread gets it for long. */
uint64_t pccl_thread_id(void);

/* Starts a thread that receives no signal: those are for the caller's threads. `name`, of at most 15 characters, is
 * what debuggers show. 0 or an error number. */
int pccl_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);

/* A condition, and the wait for it until that clock shows end_ns: 0, or an error number (ETIMEDOUT). */
int pccl_cond_init(pthread_cond_t *cond);
int pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns);

/* Writes "what: why" into the buffer that a create function was given. */
void pccl_say_system_error(char *error, size_t error_bytes, const char *what, int system_error);

/* A descriptor that is readable from pccl_wake_signal until pccl_wake_clear: an eventfd, or a pipe where there is none.
 * */
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
