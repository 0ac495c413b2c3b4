#include "link_watch.h"

#include <string.h>

/* Stands still while others of its link move. If none of them has had anything to move since, one gets a frame
 * to be acknowledged, whatever it says. */
static void link_look_at_stuck(pccl_link *link, pccl_conn *stuck, int64_t now_ms, int64_t stall_ms)
{
    int has_idle = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *other = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (other == stuck || other->is_lost)
            continue;
        has_idle |= other->tx_acked == other->tx_counted;
        if (other->moved_ms > stuck->progress_ms && now_ms - other->progress_ms <= stall_ms) {
            pccl_conn_lose(stuck, 0, "no progress for %lld ms", (long long)(now_ms - stuck->progress_ms));
            return;
        }
    }
    pccl_list_remove(&stuck->in_free);
    if (has_idle) {
        link->eager.is_credit_due = 1;
        pccl_link_note_pending(link);
    }
}

int pccl_link_tick(pccl_link *link, int64_t now_ms, int64_t stall_ms)
{
    int has_more = 0;
    pccl_list *conns = &link->conns;
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (!conn->is_lost)
            has_more |= pccl_conn_tick(conn, now_ms);
    }
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *stuck = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (!stuck->is_lost && now_ms - stuck->progress_ms > stall_ms)
            link_look_at_stuck(link, stuck, now_ms, stall_ms);
    }
    return has_more;
}

/* Inside a machine more connections do not help. */
static void growth_tick_add(pccl_growth_tick *tick, const pccl_conn *conn, const pccl_wire_limits *before)
{
    enum { BUSY_US_MIN = 50000 };
    const pccl_wire_limits *now = &conn->limits;
    uint64_t busy_us = now->busy_us - before->busy_us;
    tick->count++;
    if (conn->wire->is_local || conn->wire->takes_over)
        return;
    tick->far += (unsigned)pccl_growth_is_far(conn->wire->yields_to_loss, now->round_trip_us_min);
    if (busy_us < BUSY_US_MIN)
        return;
    tick->busy++;
    tick->by_window += (now->window_us - before->window_us) * 2 > busy_us;
    tick->yielding += conn->wire->yields_to_loss;
    tick->lost += now->resent - before->resent;
    tick->delivered += now->delivered - before->delivered;
    if (tick->round_trip_us == 0 || now->round_trip_us_min < tick->round_trip_us)
        tick->round_trip_us = now->round_trip_us_min;
    tick->queued += now->round_trip_us > now->round_trip_us_min / 4 * 5;
}

/* Adds the changes of one connection since the last look. */
static void link_add_health(pccl_link *link, pccl_conn *conn, const pccl_wire_limits *before, int64_t now_ms)
{
    const pccl_wire_limits *now = &conn->limits;
    pccl_link_health *health = &link->health;
    health->delivered += now->delivered - before->delivered;
    health->resent += now->resent - before->resent;
    health->unacked_bytes += (uint64_t)now->unacked * now->segment_bytes;
    health->round_trip_us = pccl_max_u64(health->round_trip_us, now->round_trip_us);
    if (now->acked_bytes != before->acked_bytes || now->unacked == 0 || conn->acked_ms == 0)
        conn->acked_ms = now_ms;
}

enum pccl_limit pccl_link_look(pccl_link *link, int64_t now_ms)
{
    pccl_growth_tick tick;
    memset(&tick, 0, sizeof tick);
    link->was_full = link->is_full;
    link->is_full = (uint8_t)(!link->is_failed && link->live_count > 0);
    link->acked_bytes = 0;
    link->looked_ms = now_ms;
    uint64_t busy_us = 0; /* of the busiest connection; so are the next two */
    uint64_t window_us = 0;
    uint64_t receiver_us = 0;
    int64_t stuck_ms = INT64_MAX;
    link->health.round_trip_us = 0;
    link->health.unacked_bytes = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        pccl_wire_limits before = conn->limits;
        if (conn->wire->type->read_limits(conn->wire, &conn->limits) != 0) {
            link->is_full = 0;
            tick.count++;
            continue;
        }
        if (link->round_trip_us == 0 || conn->limits.round_trip_us_min < link->round_trip_us)
            link->round_trip_us = conn->limits.round_trip_us_min;
        growth_tick_add(&tick, conn, &before);
        link->is_full &= conn->limits.unsent_bytes > 0;
        link->acked_bytes += conn->limits.acked_bytes - before.acked_bytes;
        link_add_health(link, conn, &before, now_ms);
        busy_us = pccl_max_u64(busy_us, conn->limits.busy_us - before.busy_us);
        window_us = pccl_max_u64(window_us, conn->limits.window_us - before.window_us);
        receiver_us = pccl_max_u64(receiver_us, conn->limits.receiver_us - before.receiver_us);
        if (conn->limits.unacked > 0 && now_ms - conn->acked_ms < stuck_ms)
            stuck_ms = now_ms - conn->acked_ms;
    }
    link->health.busy_us += busy_us;
    link->health.sender_us += window_us > receiver_us ? window_us - receiver_us : 0;
    link->health.receiver_us += receiver_us;
    link->health.stuck_ms = stuck_ms == INT64_MAX ? 0 : (uint64_t)stuck_ms;
    return pccl_growth_learn(&link->growth, &tick, now_ms);
}

uint64_t pccl_link_look_under_way(pccl_link *link)
{
    link->under_way_bytes = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        pccl_conn_look_under_way(conn);
        link->under_way_bytes += conn->under_way_bytes;
    }
    return link->under_way_bytes;
}

int pccl_link_add_to_round(pccl_link *link, pccl_pacer_round *round)
{
    int has_carried = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        pccl_wire_limits before = conn->round;
        if (conn->is_lost || conn->wire->type->read_limits(conn->wire, &conn->round) != 0)
            continue;
        const pccl_wire_limits *now = &conn->round;
        if (now->delivered == before.delivered)
            continue;
        has_carried = 1;
        round->delivered_bytes += (uint64_t)(now->delivered - before.delivered) * now->segment_bytes;
        round->resent_bytes += (uint64_t)(now->resent - before.resent) * now->segment_bytes;
        round->has_queued |= now->round_trip_us > now->round_trip_us_min / 4 * 5;
    }
    return has_carried;
}

void pccl_link_count_full(pccl_link *link, int is_only_full, int64_t since_ms)
{
    enum { FULL_RUN_MS = 500 };
    if (!is_only_full || !link->was_full) {
        link->run_ms = link->run_bytes = 0;
        link->is_run_long = 0;
        return;
    }
    link->run_ms += (uint64_t)(link->looked_ms - since_ms);
    link->run_bytes += link->acked_bytes;
    link->is_run_long |= link->run_ms >= FULL_RUN_MS;
    if (link->is_run_long) {
        link->full_ms += link->run_ms;
        link->full_bytes += link->run_bytes;
        link->run_ms = link->run_bytes = 0;
    }
}

int pccl_link_watch(pccl_link *link, int64_t now_ms, int64_t timeout_ms, int starts_anew)
{
    int is_loaded = 0;
    int is_over_loaded = 0; /* a wire that takes over knows silence by itself: it breaks before the link does */
    int has_carried = starts_anew;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        has_carried |= pccl_conn_has_carried(conn);
        int *loaded = conn->wire->takes_over ? &is_over_loaded : &is_loaded;
        *loaded |= conn->in_flight_bytes > 0;
    }
    if (has_carried || !(is_loaded || is_over_loaded) || link->carried_ms < 0)
        link->carried_ms = now_ms;
    else if (is_loaded && now_ms - link->carried_ms > timeout_ms)
        pccl_link_fail(link, 0, "nothing got through for %lld ms", (long long)(now_ms - link->carried_ms));
    return is_loaded || is_over_loaded;
}
