/* When more connections would help: looks at a link as the system would describe it, a tenth of a second apart. */
#include "check.h"
#include "growth.h"

#include <string.h>

enum { TICK_MS = 100, ROUND_TRIP_US = 100000, CONNS = 4, DELIVERED = 1000 };

typedef struct {
    pccl_growth growth;
    pccl_growth_tick tick;
    int64_t now_ms;
} path;

/* Connections of CUBIC that are busy all the time, on a path that is not full. */
static path cubic(void)
{
    path p;
    memset(&p, 0, sizeof p);
    p.tick.count = p.tick.busy = p.tick.yielding = CONNS;
    p.tick.round_trip_us = ROUND_TRIP_US;
    p.now_ms = 1000000;
    p.growth.has_started = 1;
    pccl_growth_note_added(&p.growth, p.now_ms, 0);
    return p;
}

static enum pccl_limit look(path *p, unsigned lost)
{
    p->now_ms += TICK_MS;
    p->tick.lost = lost;
    p->tick.delivered = DELIVERED;
    return pccl_growth_learn(&p->growth, &p->tick, p->now_ms);
}

/* Returns the number of looks after which the link asks for connections; 0: not within `most`. */
static unsigned looks_until_limited(path *p, unsigned lost, unsigned most, enum pccl_limit by)
{
    for (unsigned i = 1; i <= most; i++) {
        enum pccl_limit limit = look(p, lost);
        CHECK(limit == PCCL_LIMIT_NONE || limit == by);
        if (limit != PCCL_LIMIT_NONE)
            return i;
    }
    return 0;
}

static void losses_on_a_short_round_trip_ask_at_once(void)
{
    path p = cubic();
    CHECK(look(&p, 1) == PCCL_LIMIT_LOSS);
    CHECK(looks_until_limited(&p, 5, 50, PCCL_LIMIT_NONE) == 0); /* until a connection is added */
    pccl_growth_note_added(&p.growth, p.now_ms, ROUND_TRIP_US);
    CHECK(looks_until_limited(&p, 5, 50, PCCL_LIMIT_LOSS) == 4); /* it has started */
}

static void a_far_link_asks_for_its_start_once(void)
{
    path p = cubic();
    p.tick.busy = p.tick.yielding = 0;
    p.growth.has_started = 0;
    CHECK(look(&p, 0) == PCCL_LIMIT_NONE);
    p.tick.far = 1;
    CHECK(look(&p, 0) == PCCL_LIMIT_START);
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
    pccl_growth_note_added(&p.growth, p.now_ms, ROUND_TRIP_US);
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
}

static void bbr_asks_for_a_start_on_very_far_paths_only(void)
{
    CHECK(pccl_growth_is_far(1, 2000) && !pccl_growth_is_far(1, 1000));
    CHECK(pccl_growth_is_far(0, 200000) && !pccl_growth_is_far(0, 100000));
}

static void small_windows_ask_though_the_start_has_asked(void)
{
    path p = cubic();
    p.growth.has_started = 0;
    p.tick.far = CONNS;
    CHECK(look(&p, 0) == PCCL_LIMIT_START);
    p.tick.by_window = CONNS;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_WINDOWS) == 3);
}

static void a_link_that_has_started_slowly_asks_no_more_without_losses(void)
{
    path p = cubic();
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
}

/* A link that has all the connections it may have for its windows gets none, and loses packets later. */
static void losses_ask_though_windows_have_asked_in_vain(void)
{
    path p = cubic();
    p.tick.by_window = CONNS;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_WINDOWS) > 0);
    p.tick.by_window = 0;
    CHECK(look(&p, 1) == PCCL_LIMIT_LOSS);
    CHECK(looks_until_limited(&p, 5, 50, PCCL_LIMIT_NONE) == 0);
    p.tick.lost = 0;
    p.tick.by_window = CONNS;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
}

static void losses_of_a_full_queue_do_not_ask(void)
{
    path p = cubic();
    p.tick.queued = CONNS;
    CHECK(looks_until_limited(&p, 300, 50, PCCL_LIMIT_NONE) == 0);
    p.tick.queued = 0; /* drained, and what it dropped is sent again */
    CHECK(looks_until_limited(&p, 100, 20, PCCL_LIMIT_NONE) == 0);
    CHECK(looks_until_limited(&p, 0, 3, PCCL_LIMIT_NONE) == 0);
    CHECK(look(&p, 1) == PCCL_LIMIT_LOSS);
}

static void losses_that_never_end_are_the_paths_own(void)
{
    path p = cubic();
    p.tick.queued = CONNS;
    look(&p, 300);
    p.tick.queued = 0;
    CHECK(looks_until_limited(&p, 5, 50, PCCL_LIMIT_LOSS) > 0);
}

static void check_asks_for_udp_alone(path *p, unsigned lost)
{
    CHECK(looks_until_limited(p, lost, 50, PCCL_LIMIT_RECOVERY) == 1);
    CHECK(looks_until_limited(p, lost, 50, PCCL_LIMIT_NONE) == 0);
}

static void losses_of_a_queue_too_short_to_show_ask_for_udp_alone(void)
{
    path p = cubic();
    check_asks_for_udp_alone(&p, DELIVERED / 10);
}

static void few_busy_connections_ask_for_udp_alone(void)
{
    path p = cubic();
    p.tick.busy = p.tick.yielding = CONNS / 2;
    check_asks_for_udp_alone(&p, 5);
}

static void congestion_control_that_bears_losses_asks_for_udp_alone(void)
{
    path p = cubic();
    p.tick.yielding = 0;
    check_asks_for_udp_alone(&p, 5);
}

static void short_paths_do_not_ask(void)
{
    path p = cubic();
    p.tick.round_trip_us = 200;
    CHECK(looks_until_limited(&p, 5, 50, PCCL_LIMIT_NONE) == 0);
}

static void bbr_asks_for_its_windows_only(void)
{
    path p = cubic();
    p.growth.has_started = 0;
    p.tick.yielding = 0;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
    p.tick.by_window = CONNS - 1;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_NONE) == 0);
    p.tick.by_window = CONNS;
    CHECK(looks_until_limited(&p, 0, 50, PCCL_LIMIT_WINDOWS) == 3);
}

int main(void)
{
    RUN(losses_on_a_short_round_trip_ask_at_once);
    RUN(a_far_link_asks_for_its_start_once);
    RUN(bbr_asks_for_a_start_on_very_far_paths_only);
    RUN(small_windows_ask_though_the_start_has_asked);
    RUN(a_link_that_has_started_slowly_asks_no_more_without_losses);
    RUN(losses_ask_though_windows_have_asked_in_vain);
    RUN(losses_of_a_full_queue_do_not_ask);
    RUN(losses_that_never_end_are_the_paths_own);
    RUN(losses_of_a_queue_too_short_to_show_ask_for_udp_alone);
    RUN(few_busy_connections_ask_for_udp_alone);
    RUN(congestion_control_that_bears_losses_asks_for_udp_alone);
    RUN(short_paths_do_not_ask);
    RUN(bbr_asks_for_its_windows_only);
    return check_summary();
}
