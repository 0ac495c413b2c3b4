/* The limit on what is under way, beside a model of the network: a queue, a rate and a delay. TCP puts there at once
 * what it is given, and sends again what was dropped. */
#include "base.h"
#include "check.h"
#include "pacer.h"

#include <string.h>

enum {
    STEP_US = 1000,
    ROUND_TRIP_STEPS = 50,
    RESEND_STEPS = ROUND_TRIP_STEPS + 20,
    AHEAD_STEPS = 128, /* more than either */
    PAUSE_STEPS = 50,
    SEGMENT_BYTES = 64 << 10,
    OP_BYTES = 100 * SEGMENT_BYTES,
    OP_STEPS_MAX = 5000
};

typedef struct {
    pccl_pacer pacer;
    pccl_pacer_round round;
    uint64_t step;
    uint64_t step_bytes; /* the uplink's rate */
    uint64_t queue_bytes_max;
    uint64_t queue_bytes;
    uint64_t under_way_bytes;
    uint64_t acknowledged[AHEAD_STEPS]; /* in so many steps, at the step's number modulo that */
    uint64_t resent[AHEAD_STEPS];
    uint64_t dropped_bytes; /* in this op */
    int is_shared;
} network;

static int64_t network_us(const network *n) { return (int64_t)n->step * STEP_US; }

static network network_make(uint64_t step_bytes, uint64_t queue_bytes_max)
{
    network n;
    memset(&n, 0, sizeof n);
    pccl_pacer_init(&n.pacer, 0);
    n.step_bytes = step_bytes;
    n.queue_bytes_max = queue_bytes_max;
    n.is_shared = 1;
    return n;
}

static void network_put(network *n, uint64_t bytes)
{
    uint64_t fitting_bytes = pccl_min_u64(bytes, n->queue_bytes_max - n->queue_bytes);
    n->queue_bytes += fitting_bytes;
    n->dropped_bytes += bytes - fitting_bytes;
    n->resent[(n->step + RESEND_STEPS) % AHEAD_STEPS] += bytes - fitting_bytes;
}

static void network_step(network *n)
{
    uint64_t at = n->step % AHEAD_STEPS;
    n->under_way_bytes -= n->acknowledged[at];
    n->round.delivered_bytes += n->acknowledged[at];
    n->round.resent_bytes += n->resent[at];
    uint64_t again_bytes = n->resent[at];
    n->acknowledged[at] = n->resent[at] = 0;
    network_put(n, again_bytes);
    n->round.has_queued |= n->queue_bytes > n->step_bytes * ROUND_TRIP_STEPS / 4;
    uint64_t leaving_bytes = pccl_min_u64(n->queue_bytes, n->step_bytes);
    n->queue_bytes -= leaving_bytes;
    n->acknowledged[(n->step + ROUND_TRIP_STEPS) % AHEAD_STEPS] += leaving_bytes;
    n->step++;
    if (pccl_pacer_is_limiting(&n->pacer))
        pccl_pacer_look(&n->pacer, network_us(n), n->under_way_bytes);
    if (!pccl_pacer_is_round_over(&n->pacer, network_us(n)))
        return;
    n->round.round_trip_us = n->round.delivered_bytes > 0 ? ROUND_TRIP_STEPS * STEP_US : 0;
    n->round.is_shared = (uint8_t)n->is_shared;
    pccl_pacer_learn(&n->pacer, network_us(n), &n->round);
    memset(&n->round, 0, sizeof n->round);
}

/* In how many steps an op got across, a pause after it not counted. */
static uint64_t run_op(network *n)
{
    uint64_t left_bytes = OP_BYTES;
    uint64_t steps = 0;
    n->dropped_bytes = 0;
    for (; (left_bytes > 0 || n->under_way_bytes > 0) && steps < OP_STEPS_MAX; steps++) {
        for (; left_bytes > 0 && pccl_pacer_allows(&n->pacer); left_bytes -= SEGMENT_BYTES) {
            pccl_pacer_note_sent(&n->pacer, SEGMENT_BYTES);
            n->under_way_bytes += SEGMENT_BYTES;
            network_put(n, SEGMENT_BYTES);
        }
        if (left_bytes > 0)
            pccl_pacer_note_refused(&n->pacer);
        network_step(n);
    }
    for (int i = 0; i < PAUSE_STEPS; i++)
        network_step(n);
    return steps;
}

static uint64_t run_ops(network *n, int count)
{
    uint64_t steps = 0;
    for (int i = 0; i < count; i++)
        steps = run_op(n);
    return steps;
}

/* If the uplink is always busy. */
static uint64_t best_steps(const network *n) { return OP_BYTES / n->step_bytes + 1 + ROUND_TRIP_STEPS; }

static void check_next_op(network *n, uint64_t dropped_bytes_max, const char *when)
{
    uint64_t steps = run_op(n);
    CHECK_MSG(steps * 100 <= best_steps(n) * 105, "%s: %llu steps instead of %llu", when, (unsigned long long)steps,
        (unsigned long long)best_steps(n));
    CHECK_MSG(
        n->dropped_bytes <= dropped_bytes_max, "%s: %llu bytes dropped", when, (unsigned long long)n->dropped_bytes);
}

/* An uplink of 25 MB/s whose queue holds a round trip, after a few ops. */
static network crowded(void)
{
    network n = network_make(25000, 25000 * ROUND_TRIP_STEPS);
    run_op(&n);
    CHECK(n.dropped_bytes > OP_BYTES / 10);
    run_ops(&n, 3);
    CHECK(pccl_pacer_is_limiting(&n.pacer));
    return n;
}

static void what_takes_everything_gets_it_at_once(void)
{
    network n = network_make(25000, OP_BYTES);
    for (int i = 0; i < 20; i++) {
        CHECK(run_op(&n) <= best_steps(&n) + 1);
        CHECK(!pccl_pacer_is_limiting(&n.pacer));
    }
}

static void a_crowded_uplink_is_kept_busy_without_drops(void)
{
    network n = crowded();
    for (int i = 0; i < 100; i++)
        check_next_op(&n, 0, "crowded");
    CHECK(n.pacer.limit_rate > 23000000 && n.pacer.limit_rate < 26000000);
}

static void losses_without_a_queue_do_not_limit(void)
{
    pccl_pacer_round lossy = {.delivered_bytes = 1250000, .resent_bytes = 200000, .round_trip_us = 50000};
    pccl_pacer pacer;
    pccl_pacer_init(&pacer, 0);
    lossy.is_shared = 1;
    for (int i = 1; i <= 100; i++)
        pccl_pacer_learn(&pacer, i * 50000, &lossy);
    CHECK(!pccl_pacer_is_limiting(&pacer));
    lossy.has_queued = 1;
    lossy.is_shared = 0;
    pccl_pacer_learn(&pacer, 101 * 50000, &lossy);
    CHECK(!pccl_pacer_is_limiting(&pacer));
    lossy.is_shared = 1;
    lossy.resent_bytes = 10000;
    pccl_pacer_learn(&pacer, 102 * 50000, &lossy);
    CHECK(!pccl_pacer_is_limiting(&pacer));
    lossy.resent_bytes = 200000;
    pccl_pacer_learn(&pacer, 103 * 50000, &lossy);
    CHECK(pccl_pacer_is_limiting(&pacer));
}

static void a_faster_uplink_is_found(void)
{
    network n = crowded();
    n.step_bytes *= 2;
    n.queue_bytes_max *= 2;
    run_ops(&n, 12);
    check_next_op(&n, 0, "twice as fast");
}

/* Beside a queue that is small, a segment is large. */
static void a_slower_uplink_is_found(void)
{
    for (uint64_t part = 2; part <= 3; part++) {
        network n = crowded();
        n.step_bytes /= part;
        n.queue_bytes_max /= part;
        run_ops(&n, 20);
        check_next_op(&n, 2 * SEGMENT_BYTES, "slower");
        CHECK(pccl_pacer_is_limiting(&n.pacer));
    }
}

/* Nothing is dropped, but everything takes long: others are in the queue. */
static void what_was_learnt_ends_where_it_is_of_no_use(void)
{
    network n = crowded();
    n.step_bytes /= 4;
    n.queue_bytes_max *= 4;
    for (int i = 0; i < 20 && pccl_pacer_is_limiting(&n.pacer); i++)
        run_op(&n);
    CHECK(!pccl_pacer_is_limiting(&n.pacer));
}

static void who_wakes_up_late_catches_up_but_does_not_burst(void)
{
    pccl_pacer pacer;
    pccl_pacer_init(&pacer, 0);
    pccl_pacer_limit(&pacer, 24000000, 50000);
    CHECK(!pccl_pacer_allows(&pacer));
    for (int64_t us = 1000; us <= 3600000000; us *= 60) {
        uint64_t sent_bytes = 0;
        pccl_pacer_look(&pacer, pacer.looked_us + us, 0);
        for (; pccl_pacer_allows(&pacer); sent_bytes += 1000)
            pccl_pacer_note_sent(&pacer, 1000);
        CHECK_MSG(sent_bytes <= 24000000 / 1000 * 10 + 1000, "%llu bytes", (unsigned long long)sent_bytes);
        CHECK(us > 1000 ? sent_bytes >= 200000 : sent_bytes >= 24000);
    }
}

static void no_more_than_the_window_is_under_way(void)
{
    pccl_pacer pacer;
    pccl_pacer_init(&pacer, 0);
    pccl_pacer_limit(&pacer, 24000000, 50000);
    CHECK(pacer.window_bytes == 2250000);
    pccl_pacer_look(&pacer, 1000000, 2250000);
    CHECK(!pccl_pacer_allows(&pacer));
    pccl_pacer_look(&pacer, 1001000, 2249999);
    CHECK(pccl_pacer_allows(&pacer));
    pccl_pacer_note_sent(&pacer, 1);
    CHECK(!pccl_pacer_allows(&pacer));
}

int main(void)
{
    RUN(what_takes_everything_gets_it_at_once);
    RUN(a_crowded_uplink_is_kept_busy_without_drops);
    RUN(losses_without_a_queue_do_not_limit);
    RUN(a_faster_uplink_is_found);
    RUN(a_slower_uplink_is_found);
    RUN(what_was_learnt_ends_where_it_is_of_no_use);
    RUN(who_wakes_up_late_catches_up_but_does_not_burst);
    RUN(no_more_than_the_window_is_under_way);
    return check_summary();
}
