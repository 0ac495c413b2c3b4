#include "growth.h"

enum {
    WINDOW_TICKS_MIN = 3,
    STARTING_ROUND_TRIPS = 4,
    DRAINING_ROUND_TRIPS = 5,
    DRAINING_ROUND_TRIPS_MAX = 30,
    CROWDED_PART = 32
};

static int64_t round_trips_ms(unsigned count, uint64_t round_trip_us)
{
    return (int64_t)(count * round_trip_us / 1000);
}

static void growth_settle(pccl_growth *growth, int64_t drained_ms, int64_t settled_ms)
{
    growth->drained_ms = drained_ms;
    growth->settled_ms = settled_ms;
    growth->lost = growth->delivered = 0;
}

int pccl_growth_is_far(int yields_to_loss, uint64_t round_trip_us)
{
    enum { VERY_FAR_US = 150000 };
    return round_trip_us >= (yields_to_loss ? PCCL_FAR_US : VERY_FAR_US);
}

void pccl_growth_note_added(pccl_growth *growth, int64_t now_ms, uint64_t round_trip_us)
{
    int64_t started_ms = now_ms + round_trips_ms(STARTING_ROUND_TRIPS, round_trip_us);
    int is_draining = growth->settled_ms > started_ms;
    growth_settle(growth, started_ms, is_draining ? growth->settled_ms : started_ms);
    growth->window_ticks = 0;
    growth->asked = PCCL_LIMIT_NONE;
}

/* Nonzero if the link loses packets where none queue. */
static int growth_is_lossy(pccl_growth *growth, const pccl_growth_tick *tick, int64_t now_ms)
{
    uint64_t round_trip_us = tick->round_trip_us;
    if (2 * tick->queued > tick->busy)
        growth_settle(growth, now_ms + round_trips_ms(DRAINING_ROUND_TRIPS, round_trip_us),
            now_ms + round_trips_ms(DRAINING_ROUND_TRIPS_MAX, round_trip_us));
    else if (tick->lost == 0 && now_ms >= growth->drained_ms)
        growth->settled_ms = growth->drained_ms;
    if (round_trip_us < PCCL_FAR_US || now_ms < growth->settled_ms)
        return 0;
    growth->lost += tick->lost;
    growth->delivered += tick->delivered;
    return growth->lost > 0;
}

enum pccl_limit pccl_growth_learn(pccl_growth *growth, const pccl_growth_tick *tick, int64_t now_ms)
{
    enum pccl_limit limit = PCCL_LIMIT_NONE;
    if (growth_is_lossy(growth, tick, now_ms)) {
        /* A few connections may have run out of frames, as at the end of an op. */
        int are_most = 4 * tick->yielding >= 3 * tick->count;
        int is_crowded = growth->lost > growth->delivered / CROWDED_PART;
        limit = are_most && !is_crowded ? PCCL_LIMIT_LOSS : PCCL_LIMIT_RECOVERY;
    }
    int are_all_windows = tick->count > 0 && tick->by_window == tick->count;
    growth->window_ticks = are_all_windows ? growth->window_ticks + 1 : 0;
    if (growth->window_ticks >= WINDOW_TICKS_MIN)
        limit = PCCL_LIMIT_WINDOWS;
    if (!growth->has_started && tick->far > 0) {
        growth->has_started = 1;
        return PCCL_LIMIT_START;
    }
    if (limit <= growth->asked)
        return PCCL_LIMIT_NONE;
    growth->asked = limit;
    return limit;
}
