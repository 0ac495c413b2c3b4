/* tcp_limits.h: what the system knows of a TCP connection: what keeps it from sending, and what was delivered. */
#ifndef PCCL_TCP_LIMITS_H
#define PCCL_TCP_LIMITS_H

#include <stdint.h>

/* All of it since the connection began. */
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

/* Segments that were lost, of those that were sent again: the receiver had got the others (`in_vain`), as when its process
 * stood still for longer than a round trip takes. That comes to be known a round trip later, so what was said `before` may
 * be too much: then it stays for a while. */
uint32_t pccl_tcp_resent(uint32_t before, uint32_t resent, uint32_t in_vain);

/* Nonzero if the connection's congestion control takes any loss for congestion, as CUBIC and Reno do. Where the round
 * trip is long and the system lets this process choose BBR, it does from now on. */
int pccl_tcp_yields_to_loss(int fd);

/* 0, or -1 where the system does not tell: not Linux, or not TCP. `limits` is what was read before, or zeros. */
int pccl_tcp_limits_read(int fd, pccl_tcp_limits *limits);

#endif
