/* os.h: clocks, threads, conditions, a descriptor that wakes a thread, and what the system knows of a TCP connection.
 * */
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

/* What keeps a TCP connection from sending, and what was delivered, since the connection began. */
typedef struct {
    uint64_t busy_us; /* with something to send or to be acknowledged */
    uint64_t acked_bytes;
    uint64_t unsent_bytes; /* right now: given to the system, which may not send it yet */
    uint64_t window_us; /* of that, held back by a full send buffer or receive window, not by the network */
    uint64_t receiver_us; /* of that, by the receive window: the other end does not read */
    uint64_t round_trip_us;
    uint64_t round_trip_us_min;
    uint32_t delivered; /* segments, in whatever order */
    uint32_t resent; /* segments that were lost: pccl_tcp_resent */
    uint32_t unacked; /* segments, right now */
    uint32_t segment_bytes;
} pccl_tcp_limits;

/* Segments that were lost, of those that were sent again: the receiver had got the others (`in_vain`), as when its
 * process stood still for longer than a round trip takes. That comes to be known a round trip later, so what was said
 * `before` may be too much: then it stays for a while. */
uint32_t pccl_tcp_resent(uint32_t before, uint32_t resent, uint32_t in_vain);

/* On shorter paths a queue cannot be told from noise. */
enum { PCCL_FAR_US = 2000 };

/* Nonzero if the connection's congestion control takes any loss for congestion, as CUBIC and Reno do. Where the round
 * trip is long and the system lets this process choose BBR, it does from now on. */
int pccl_tcp_yields_to_loss(int fd);

/* 0, or -1 where the system does not tell: not Linux, or not TCP. `limits` is what was read before, or zeros. */
int pccl_tcp_limits_read(int fd, pccl_tcp_limits *limits);

#endif
