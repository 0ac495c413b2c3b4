/* thread.h: clocks, threads and conditions, for the threads of the engine and of the heartbeats. */
#ifndef PCCL_THREAD_H
#define PCCL_THREAD_H

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

#endif
