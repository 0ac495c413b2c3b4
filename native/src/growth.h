/* growth.h: whether a link would carry more over more connections, as arithmetic. No I/O, no clock.
 *
 * Three things hold a TCP connection below its share of the path, and each further connection adds as much again:
 *
 *     start      a loss-based congestion control (CUBIC, Reno) begins with ten segments, also after each pause, and
 *                doubles them once per round trip. On a far path the first look at such a link asks; on a very far one
 *                with any congestion control, since two windows carry little there
 *     windows    the send buffer or the receive window is full
 *     loss       a loss-based congestion control takes each lost packet for congestion. It carries about 1.2 segments /
 *                (round trip * sqrt(loss rate)), whatever the path could (Mathis et al., 1997). Packets are lost while
 *                round trips are short
 *
 * Other congestion controls bear losses, but TCP still waits for what it sends again (PCCL_LIMIT_RECOVERY): UDP (wire.h)
 * would help, more connections would not.
 *
 * Where packets queue the path is full, and more connections would only crowd it. What a full queue has dropped is sent
 * again for several round trips, in which the queue drains: until then losses say nothing.
 *
 * A path that drops a part of 1/CROWDED_PART may be crowded, too: a short queue shows in no round trip. More connections
 * would be wrong then, and UDP is not (PCCL_LIMIT_RECOVERY).
 *
 * After each growth the connections get a few round trips to start in, then the link must show again that it is held
 * back. So at a loss rate that few connections are enough for, few are added. */
#ifndef PCCL_GROWTH_H
#define PCCL_GROWTH_H

#include "pccl_native.h"

typedef struct {
    unsigned window_ticks; /* in a row in which windows held back all connections */
    uint32_t lost; /* segments, while round trips were short */
    uint32_t delivered; /* segments since then */
    int64_t settled_ms; /* losses count from then on */
    int64_t drained_ms; /* or from a look without losses from then on */
    enum pccl_limit asked; /* the last answer since a connection was added */
    uint8_t has_started; /* has asked for its start */
} pccl_growth;

/* A link's connections from one look to the next. */
typedef struct {
    unsigned count;
    unsigned far; /* pccl_growth_is_far */
    unsigned busy; /* had something under way for most of the time */
    unsigned by_window; /* of these, held back by a window for most of that */
    unsigned yielding; /* of these, with a loss-based congestion control */
    unsigned queued; /* of these, with round trips a good deal longer than the least */
    uint32_t lost; /* segments */
    uint32_t delivered;
    uint64_t round_trip_us; /* the least of those that are busy; 0: none is */
} pccl_growth_tick;

/* On shorter paths a queue cannot be told from noise. */
enum { PCCL_FAR_US = 2000 };

/* Nonzero if a connection asks for its link's start. */
int pccl_growth_is_far(int yields_to_loss, uint64_t round_trip_us);

/* A connection was added. */
void pccl_growth_note_added(pccl_growth *growth, int64_t now_ms, uint64_t round_trip_us);

/* Takes a look into account. Returns what more connections would help against: the start once in the link's life, other
 * limits once until a connection is added, and windows not after losses, for which a link may have more. */
enum pccl_limit pccl_growth_learn(pccl_growth *growth, const pccl_growth_tick *tick, int64_t now_ms);

#endif
