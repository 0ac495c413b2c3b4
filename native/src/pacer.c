#include "pacer.h"

#include "base.h"

#include <string.h>

enum {
    CROWDED_PART = 32,
    RESENT_BYTES_MIN = 64 << 10, /* fewer are stray losses or probes */
    DELIVERED_BYTES_MIN = 64 << 10, /* in a round: else there was nothing to send */
    ROUND_US_MIN = 20000,
    STRETCH_ROUNDS = 6,
    BURST_US = 8000, /* of the rate: a late wake-up does not lose its turn */
    WINDOW_BYTES_MIN = 256 << 10,
    WINDOW_GAIN_EIGHTHS = 15,
    PACE_GAIN_QUARTERS = 5,
    SECOND_US = 1000000
};

static uint64_t pacer_bytes(uint64_t rate, uint64_t us) { return rate / 1000 * us / 1000; }

void pccl_pacer_init(pccl_pacer *pacer, int64_t now_us)
{
    memset(pacer, 0, sizeof *pacer);
    pacer->looked_us = pacer->round_began_us = now_us;
    pacer->round_us = ROUND_US_MIN;
}

void pccl_pacer_limit(pccl_pacer *pacer, uint64_t rate, uint64_t round_trip_us)
{
    PCCL_ASSERT(rate != 0);
    if (pacer->limit_rate == 0)
        pacer->credit_bytes = 0;
    pacer->limit_rate = rate;
    if (round_trip_us != 0)
        pacer->window_bytes =
            pccl_max_u64(WINDOW_BYTES_MIN, pacer_bytes(rate, round_trip_us) * WINDOW_GAIN_EIGHTHS / 8);
}

int pccl_pacer_allows(const pccl_pacer *pacer)
{
    return pacer->limit_rate == 0 || (pacer->credit_bytes > 0 && pacer->under_way_bytes < pacer->window_bytes);
}

void pccl_pacer_note_sent(pccl_pacer *pacer, uint64_t bytes)
{
    pacer->under_way_bytes += bytes;
    pacer->credit_bytes -= (int64_t)bytes;
}

void pccl_pacer_note_refused(pccl_pacer *pacer) { pacer->has_refused = 1; }

void pccl_pacer_look(pccl_pacer *pacer, int64_t now_us, uint64_t under_way_bytes)
{
    uint64_t pace = pacer->limit_rate * PACE_GAIN_QUARTERS / 4;
    int64_t burst_bytes = (int64_t)pacer_bytes(pace, BURST_US);
    uint64_t us = pccl_min_u64((uint64_t)(now_us - pacer->looked_us), SECOND_US);
    pacer->credit_bytes += (int64_t)pacer_bytes(pace, us);
    if (pacer->credit_bytes > burst_bytes || us == SECOND_US)
        pacer->credit_bytes = burst_bytes;
    pacer->looked_us = now_us;
    pacer->under_way_bytes = under_way_bytes;
}

int pccl_pacer_is_round_over(const pccl_pacer *pacer, int64_t now_us)
{
    return now_us - pacer->round_began_us >= pacer->round_us;
}

/* The best of the last stretches. 0: none is over. */
static uint64_t pacer_rate(const pccl_pacer *pacer)
{
    uint64_t best = 0;
    for (uint32_t i = 0; i < PCCL_PACER_STRETCHES; i++)
        best = pccl_max_u64(best, pacer->rates[i]);
    return best;
}

static void pacer_add_to_stretch(pccl_pacer *pacer, uint64_t us, uint64_t delivered_bytes)
{
    pacer->stretch_us += us;
    pacer->stretch_bytes += delivered_bytes;
    if (++pacer->stretch_rounds < STRETCH_ROUNDS)
        return;
    pacer->rates[pacer->rates_count++ % PCCL_PACER_STRETCHES] = pacer->stretch_bytes * 1000 / pacer->stretch_us * 1000;
    pacer->stretch_rounds = 0;
    pacer->stretch_us = pacer->stretch_bytes = 0;
}

static int pacer_is_crowded(const pccl_pacer_round *round)
{
    return round->is_shared && round->has_queued && round->resent_bytes >= RESENT_BYTES_MIN &&
           round->resent_bytes * CROWDED_PART >= round->delivered_bytes;
}

static void pacer_adapt(pccl_pacer *pacer, const pccl_pacer_round *round)
{
    uint64_t rate = pacer_rate(pacer);
    int is_crowded = pacer_is_crowded(round);
    if (rate == 0 || (!is_crowded && pacer->limit_rate == 0))
        return;
    pacer->peak_rate = is_crowded ? rate : pccl_max_u64(pacer->peak_rate, rate);
    if (rate <= pacer->peak_rate / 2)
        pacer->limit_rate = 0;
    else
        pccl_pacer_limit(pacer, rate, round->round_trip_us);
}

void pccl_pacer_learn(pccl_pacer *pacer, int64_t now_us, const pccl_pacer_round *round)
{
    int64_t us = now_us - pacer->round_began_us;
    int is_late = us > 2 * pacer->round_us; /* nothing went on in between */
    int was_busy = pacer->is_busy;
    PCCL_ASSERT(us > 0);
    pacer->is_busy =
        !is_late && round->delivered_bytes >= DELIVERED_BYTES_MIN && (pacer->limit_rate == 0 || pacer->has_refused);
    if (was_busy && pacer->is_busy)
        pacer_add_to_stretch(pacer, (uint64_t)us, round->delivered_bytes);
    if (!is_late)
        pacer_adapt(pacer, round);
    pacer->has_refused = 0;
    pacer->round_began_us = now_us;
    pacer->round_us = (int64_t)pccl_max_u64(ROUND_US_MIN, round->round_trip_us);
}
