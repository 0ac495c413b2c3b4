#include "bbr.h"

#include "base.h"

#include <string.h>

enum {
    /* Gains in percent. */
    STARTUP_GAIN = 277, /* 4 ln 2: doubles the rate per round trip */
    DRAIN_GAIN = 50,
    PROBE_GAIN = 112,
    AFTER_PROBE_GAIN = 88,
    PROBE_GROWTH = 105,
    WINDOW_GAIN = 175, /* with 200 a CUBIC flow on the same path gets a sixth, with this a third */
    STARTUP_WINDOW_GAIN = 200,
    MARGIN = 99, /* of the pace, so that a queue shrinks in the long run */
    FULL_GROWTH = 125,

    CYCLE_PARTS = 8,
    FULL_ROUNDS = 3,
    FIRST_WINDOW_PACKETS = 128, /* less than 16 TCP connections have together */
    LEAST_WINDOW_PACKETS = 4,
    QUANTUM_PACKETS = 24, /* beyond the product, for acknowledgements that come in batches */
    FIRST_ROUND_TRIP_US = 100000,
    QUEUE_US_MIN = 4000,
    QUEUED_ACKS_MIN = 8,
    ROUND_TRIP_LIFE_US = 10000000,
    PROBE_TIME_US = 200000
};

static uint64_t percent(uint64_t value, uint64_t part) { return value / 100 * part + value % 100 * part / 100; }

void pccl_bbr_init(pccl_bbr *bbr, uint64_t packet_bytes, int64_t now_us)
{
    memset(bbr, 0, sizeof *bbr);
    bbr->packet_bytes = packet_bytes;
    bbr->window_bytes = FIRST_WINDOW_PACKETS * packet_bytes;
    bbr->round_trip_seen_us = now_us;
}

static uint64_t bbr_product(const pccl_bbr *bbr) { return bbr->rate * (uint64_t)bbr->round_trip_us / 1000000; }

static uint64_t bbr_pace_gain(const pccl_bbr *bbr)
{
    switch (bbr->phase) {
    case PCCL_BBR_STARTUP: return STARTUP_GAIN;
    case PCCL_BBR_DRAIN: return DRAIN_GAIN;
    case PCCL_BBR_PROBE_TIME: return 100;
    default: return bbr->cycle_at == 0 ? PROBE_GAIN : bbr->cycle_at == 1 ? AFTER_PROBE_GAIN : 100;
    }
}

uint64_t pccl_bbr_pace(const pccl_bbr *bbr)
{
    uint64_t rate = bbr->rate;
    if (bbr->phase == PCCL_BBR_STARTUP) {
        int64_t round_trip_us = bbr->round_trip_us > 0 ? bbr->round_trip_us : FIRST_ROUND_TRIP_US;
        rate = pccl_max_u64(rate, FIRST_WINDOW_PACKETS * bbr->packet_bytes * 1000000 / (uint64_t)round_trip_us);
    }
    uint64_t pace = percent(percent(rate, bbr_pace_gain(bbr)), MARGIN);
    return pccl_max_u64(pace, bbr->packet_bytes * 10);
}

void pccl_bbr_note_restart(pccl_bbr *bbr) { bbr->is_after_pause = 1; }

void pccl_bbr_note_silence(pccl_bbr *bbr)
{
    bbr->kept_window_bytes = pccl_max_u64(bbr->kept_window_bytes, bbr->window_bytes);
    bbr->window_bytes = LEAST_WINDOW_PACKETS * bbr->packet_bytes;
}

/* Nonzero if a round trip has ended. Rounds in which there was little to send do not age the rate. */
static int bbr_learn_rate(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    int is_round_over = sample->sent_delivered_bytes >= bbr->round_end_bytes;
    if (is_round_over) {
        bbr->round_end_bytes = sample->delivered_bytes;
        if (bbr->has_round_rate) {
            bbr->rates_at = (bbr->rates_at + 1) % PCCL_BBR_RATE_ROUNDS;
            bbr->rates[bbr->rates_at] = 0;
            bbr->has_round_rate = 0;
        }
    }
    /* What took less than the least round trip is no rate: acknowledgements that have waited come at once. */
    if (sample->sample_us > 0 && sample->sample_us >= bbr->round_trip_us) {
        uint64_t rate = sample->sample_bytes * 1000000 / (uint64_t)sample->sample_us;
        if (!sample->is_app_limited || rate >= bbr->rate) {
            bbr->rates[bbr->rates_at] = pccl_max_u64(bbr->rates[bbr->rates_at], rate);
            bbr->has_round_rate = 1;
        }
    }
    bbr->rate = 0;
    for (unsigned i = 0; i < PCCL_BBR_RATE_ROUNDS; i++)
        bbr->rate = pccl_max_u64(bbr->rate, bbr->rates[i]);
    return is_round_over;
}

static void bbr_begin_probe_rate(pccl_bbr *bbr, int64_t now_us)
{
    bbr->phase = PCCL_BBR_PROBE_RATE;
    bbr->cycle_at = 2;
    bbr->cycle_began_us = now_us;
}

static int bbr_has_queued(const pccl_bbr *bbr, int64_t queue_us)
{
    return queue_us > QUEUE_US_MIN && queue_us > bbr->round_trip_us / 8;
}

static void bbr_note_queue(pccl_bbr *bbr, int64_t queue_us)
{
    if (queue_us < 0)
        return;
    bbr->round_acks++;
    bbr->round_queued_acks += bbr_has_queued(bbr, queue_us) != 0;
}

/* A round trip of startup has ended. */
static void bbr_look_at_startup(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    /* A few messages may wait in a queue of others' packets, and show no rate. */
    int has_queued = bbr->round_acks >= QUEUED_ACKS_MIN && bbr->round_queued_acks * 2 > bbr->round_acks;
    bbr->round_acks = bbr->round_queued_acks = 0;
    if (bbr->rate >= percent(bbr->full_rate, FULL_GROWTH)) {
        bbr->full_rate = bbr->rate;
        bbr->full_rounds = 0;
    } else if (has_queued) {
        bbr->full_rounds = FULL_ROUNDS;
    } else if (!sample->is_app_limited) {
        bbr->full_rounds++;
    }
    if (bbr->full_rounds >= FULL_ROUNDS)
        bbr->phase = PCCL_BBR_DRAIN;
}

static void bbr_look_at_cycle(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    int64_t us = sample->now_us - bbr->cycle_began_us;
    uint64_t product = bbr_product(bbr);
    int has_lasted = us >= bbr->round_trip_us;
    if (bbr->cycle_at == 0) {
        /* The first answers to a higher pace come after a round trip. */
        has_lasted = us >= 2 * bbr->round_trip_us || (has_lasted && bbr_has_queued(bbr, sample->queue_us));
        if (has_lasted && bbr->rate >= percent(bbr->cycle_rate, PROBE_GROWTH) &&
            !bbr_has_queued(bbr, sample->queue_us)) {
            bbr->cycle_rate = bbr->rate;
            bbr->cycle_began_us = sample->now_us - bbr->round_trip_us;
            return;
        }
    } else if (bbr->cycle_at == 1) {
        has_lasted |= sample->in_flight_bytes <= product;
    }
    if (!has_lasted)
        return;
    bbr->cycle_at = (bbr->cycle_at + 1) % CYCLE_PARTS;
    bbr->cycle_began_us = sample->now_us;
    bbr->cycle_rate = bbr->rate;
}

static void bbr_learn_round_trip(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    int64_t now_us = sample->now_us;
    if (sample->round_trip_us > 0) {
        bbr->latest_round_trip_us = sample->round_trip_us;
        int is_old = now_us - bbr->round_trip_seen_us > ROUND_TRIP_LIFE_US;
        if (bbr->round_trip_us == 0 || sample->round_trip_us <= bbr->round_trip_us || (is_old && bbr->is_after_pause)) {
            bbr->round_trip_us = sample->round_trip_us;
            bbr->round_trip_seen_us = now_us;
        } else if (is_old && bbr->phase != PCCL_BBR_PROBE_TIME) {
            bbr->kept_window_bytes = pccl_max_u64(bbr->kept_window_bytes, bbr->window_bytes);
            bbr->phase = PCCL_BBR_PROBE_TIME;
            bbr->probe_time_end_us = 0;
            bbr->round_trip_us = sample->round_trip_us;
        }
        bbr->is_after_pause = 0;
    }
    if (bbr->phase != PCCL_BBR_PROBE_TIME)
        return;
    if (sample->round_trip_us > 0 && sample->round_trip_us < bbr->round_trip_us)
        bbr->round_trip_us = sample->round_trip_us;
    if (bbr->probe_time_end_us == 0) {
        if (sample->in_flight_bytes <= pccl_max_u64(bbr_product(bbr) / 2, LEAST_WINDOW_PACKETS * bbr->packet_bytes)) {
            bbr->probe_time_end_us = now_us + PROBE_TIME_US;
            bbr->probe_time_round_bytes = sample->delivered_bytes;
        }
    } else if (now_us >= bbr->probe_time_end_us && sample->sent_delivered_bytes >= bbr->probe_time_round_bytes) {
        bbr->round_trip_seen_us = now_us;
        bbr->window_bytes = pccl_max_u64(bbr->window_bytes, bbr->kept_window_bytes);
        bbr->kept_window_bytes = 0;
        if (bbr->full_rounds >= FULL_ROUNDS)
            bbr_begin_probe_rate(bbr, now_us);
        else
            bbr->phase = PCCL_BBR_STARTUP;
    }
}

static void bbr_set_window(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    uint64_t least = LEAST_WINDOW_PACKETS * bbr->packet_bytes;
    int is_starting = bbr->full_rounds < FULL_ROUNDS;
    uint64_t target = percent(bbr_product(bbr), is_starting ? STARTUP_WINDOW_GAIN : WINDOW_GAIN) +
                      QUANTUM_PACKETS * bbr->packet_bytes;
    if (bbr->phase == PCCL_BBR_PROBE_TIME) {
        bbr->window_bytes = pccl_max_u64(least, pccl_min_u64(bbr->window_bytes, bbr_product(bbr) / 2));
        return;
    }
    if (bbr->kept_window_bytes > 0 && sample->acked_bytes > 0) {
        /* An answer after silence. */
        bbr->window_bytes = pccl_max_u64(bbr->window_bytes, pccl_min_u64(bbr->kept_window_bytes, target));
        bbr->kept_window_bytes = 0;
    }
    bbr->window_bytes += sample->acked_bytes;
    if (is_starting)
        target = pccl_max_u64(target, FIRST_WINDOW_PACKETS * bbr->packet_bytes);
    bbr->window_bytes = pccl_min_u64(bbr->window_bytes, target);
    bbr->window_bytes = pccl_max_u64(bbr->window_bytes, least);
}

void pccl_bbr_note_acked(pccl_bbr *bbr, const pccl_bbr_sample *sample)
{
    int is_round_over = bbr_learn_rate(bbr, sample);
    if (bbr->phase == PCCL_BBR_STARTUP && is_round_over)
        bbr_look_at_startup(bbr, sample);
    bbr_note_queue(bbr, sample->queue_us);
    if (bbr->phase == PCCL_BBR_DRAIN && sample->in_flight_bytes <= bbr_product(bbr))
        bbr_begin_probe_rate(bbr, sample->now_us);
    if (bbr->phase == PCCL_BBR_PROBE_RATE)
        bbr_look_at_cycle(bbr, sample);
    bbr_learn_round_trip(bbr, sample);
    bbr_set_window(bbr, sample);
}
