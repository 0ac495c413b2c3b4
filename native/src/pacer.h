/* pacer.h: how much may be under way to other machines at once, as arithmetic. No I/O, no clock.
 *
 * A direct op (plans.h) has segments for every other rank, and all could be handed to TCP at once. But TCP's
 * streams are independent. After a pause each goes on with the window and the rate that it had at best,
 * perhaps alone; several to each peer leave by one uplink, and what comes together there is a multiple of what it
 * carries. Its queue overflows, an eighth of all packets has to be sent again, and segments that everyone waits for
 * come round trips late, one stream's long after another's, while the uplink is idle.
 *
 * So what congestion control does for one stream is done here for all of them together, in the way of BBR: the rate is
 * the best delivery rate of late, the round trip the least that was seen, and the two make a window and a pace. Unlike
 * BBR there is no ProbeRTT, since the streams' own TCP measures the least round trip; and there is no limit at all
 * until the network drops packets for want of room. Time is divided into rounds of about a round trip, and it is known
 * how much each delivered.
 *
 *     rate       what was delivered in a stretch of rounds, the best of the last STRETCHES stretches. A stretch has
 *                several rounds, since acknowledgements wait in queues, too, and a single round may see twice as many
 *                as its share. It is made of rounds in which there was more to send than might be, and of these only
 *                of such that followed another: in the first one that arrives which was sent before
 *     no limit   as long as no round was crowded: a part of 1/CROWDED_PART was sent again while packets queued and
 *                several links carried, or one link over many connections. A network that takes all gets it at once
 *     limit      from then on. Under way are at most WINDOW_GAIN times what the rate delivers in a round trip; what is
 *                more than once that queues, or has arrived, and its acknowledgement waits behind what the receiver
 *                sends. And it gets there at PACE_GAIN times the rate, not at once. Where the network can do more,
 *                more is delivered, and the rate grows with every stretch
 *     no limit   again, when the rate has fallen to half of the best since the last crowded round: others have filled
 *                the queue, or the route is another one, and what was learnt is of no use any more
 *
 * Losses without a queue are the path's, and to send less would not make them fewer. */
#ifndef PCCL_PACER_H
#define PCCL_PACER_H

#include <stdint.h>

enum { PCCL_PACER_STRETCHES = 8 };

/* TCP's account of all connections to other machines since the round before. */
typedef struct {
    uint64_t delivered_bytes; /* in whatever order */
    uint64_t resent_bytes;
    uint64_t round_trip_us; /* the least possible, on average of the links that carried; 0: none did */
    uint8_t has_queued; /* round trips took a good deal longer than that */
    uint8_t is_shared; /* several links carried, or one with many connections */
} pccl_pacer_round;

typedef struct {
    uint64_t limit_rate; /* bytes per second; 0: no limit */
    uint64_t peak_rate; /* since the last crowded round */
    uint64_t window_bytes;
    uint64_t under_way_bytes; /* as looked at, and what has been sent since */
    int64_t credit_bytes; /* may be sent now; below zero, was sent before its time */
    int64_t looked_us;

    int64_t round_began_us;
    int64_t round_us; /* how long it is to be */
    uint8_t has_refused; /* in this round */
    uint8_t is_busy; /* the round before had more to send */

    uint32_t stretch_rounds;
    uint64_t stretch_us;
    uint64_t stretch_bytes;
    uint64_t rates[PCCL_PACER_STRETCHES]; /* of the last stretches, at their number modulo that */
    uint32_t rates_count;
} pccl_pacer;

void pccl_pacer_init(pccl_pacer *pacer, int64_t now_us);

static inline int pccl_pacer_is_limiting(const pccl_pacer *pacer) { return pacer->limit_rate != 0; }

/* Sets the limit. */
void pccl_pacer_limit(pccl_pacer *pacer, uint64_t rate, uint64_t round_trip_us);

/* Nonzero if more may be sent now. */
int pccl_pacer_allows(const pccl_pacer *pacer);

void pccl_pacer_note_sent(pccl_pacer *pacer, uint64_t bytes);

/* Something waits to be allowed. */
void pccl_pacer_note_refused(pccl_pacer *pacer);

/* Takes what is under way into account; at least every few milliseconds while anything waits. */
void pccl_pacer_look(pccl_pacer *pacer, int64_t now_us, uint64_t under_way_bytes);

int pccl_pacer_is_round_over(const pccl_pacer *pacer, int64_t now_us);

/* Ends the round, and learns from it. */
void pccl_pacer_learn(pccl_pacer *pacer, int64_t now_us, const pccl_pacer_round *round);

#endif
