/* bbr.h: congestion control by a model of the path, as arithmetic. No I/O, no clock.
 *
 * BBR (Cardwell et al., 2016; draft-cardwell-iccrg-bbr-congestion-control): the bottleneck's rate is the best delivery
 * rate of the last RATE_ROUNDS round trips, and the least round trip is that of an empty queue. Their product fits into
 * the path without a queue. Packets are paced at the rate, and at most twice the product is in flight. A lost packet
 * changes neither, so a lossy path carries what it can.
 *
 *     startup     the pace doubles the rate once per round trip, until three round trips have brought less than a
 *                 quarter more, or one has in which most packets waited in a queue
 *     drain       the queue that startup has built is emptied
 *     probe rate  up to two round trips, and more while that brings more, at 9/8 of the rate; one at 7/8; six at the
 *                 rate. Packets that wait in a queue end the first part
 *     probe time  half of the product in flight for a moment, if no packet has seen the least round trip for a while,
 *                 so that queues of this and other flows empty. A flow that pauses has the same effect and needs none
 *
 * Pauses leave the model as it is: the first packets after one leave at the rate that was known before it. */
#ifndef PCCL_BBR_H
#define PCCL_BBR_H

#include <stdint.h>

enum { PCCL_BBR_RATE_ROUNDS = 10 };

enum pccl_bbr_phase { PCCL_BBR_STARTUP, PCCL_BBR_DRAIN, PCCL_BBR_PROBE_RATE, PCCL_BBR_PROBE_TIME };

/* What one acknowledgement shows. */
typedef struct {
    int64_t now_us;
    uint64_t acked_bytes; /* by this acknowledgement */
    uint64_t delivered_bytes; /* by all of them */
    uint64_t in_flight_bytes; /* now */
    uint64_t sample_bytes; /* delivered in sample_us: from the sending of the latest packet acknowledged until now */
    int64_t sample_us; /* 0: no sample */
    uint64_t sent_delivered_bytes; /* delivered_bytes when that packet was sent */
    int64_t round_trip_us; /* of that packet; 0: not known */
    int64_t queue_us; /* for which it has waited on its path there; -1: not known */
    uint8_t is_app_limited; /* the sender had less to send than it might */
} pccl_bbr_sample;

typedef struct {
    enum pccl_bbr_phase phase;
    uint64_t rate; /* bytes per second; 0: not known */
    uint64_t rates[PCCL_BBR_RATE_ROUNDS]; /* the best of each round trip */
    unsigned rates_at;
    uint64_t round_end_bytes; /* the round trip ends when a packet is acknowledged that was sent after so many */
    uint8_t has_round_rate; /* the round trip has shown what the path carries */
    int64_t round_trip_us; /* the least; 0: not known */
    int64_t round_trip_seen_us; /* when */
    int64_t latest_round_trip_us;

    uint64_t full_rate; /* in startup: the rate to be exceeded by a quarter */
    unsigned full_rounds; /* that did not */
    unsigned round_acks; /* in startup: of this round trip */
    unsigned round_queued_acks; /* of these, for packets that had waited in a queue */

    unsigned cycle_at; /* which part of "probe rate" */
    int64_t cycle_began_us;
    uint64_t cycle_rate; /* at that time */
    int64_t probe_time_end_us; /* 0: the queue is not empty yet */
    uint64_t probe_time_round_bytes;

    uint64_t window_bytes; /* may be in flight */
    uint64_t kept_window_bytes; /* while fewer may */
    uint64_t packet_bytes; /* the most that one has */
    uint8_t is_after_pause; /* nothing was in flight when the latest packets were sent */
} pccl_bbr;

void pccl_bbr_init(pccl_bbr *bbr, uint64_t packet_bytes, int64_t now_us);

/* Packets are sent again after a time with none in flight. */
void pccl_bbr_note_restart(pccl_bbr *bbr);

void pccl_bbr_note_acked(pccl_bbr *bbr, const pccl_bbr_sample *sample);

/* Everything in flight is taken for lost. */
void pccl_bbr_note_silence(pccl_bbr *bbr);

/* Bytes per second. */
uint64_t pccl_bbr_pace(const pccl_bbr *bbr);

#endif
