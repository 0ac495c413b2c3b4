#include "core.h"

#include "unexpected.h"
#include "egress.h"
#include "link.h"
#include "link_send.h"
#include "link_watch.h"
#include "links.h"
#include "matching.h"
#include "open_ops.h"
#include "receiver.h"
#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEND_BYTES_MAX = PCCL_SIZE(1 << 20, 1024), /* per link and turn, so that receiving gets its own */
    TICK_MS = 100,
    LATE_MS_MIN = 20 /* what a machine that is not too busy makes of a timeout */
};

struct pccl_core {
    pccl_receiver receiver;
    pccl_links links;
    pccl_open_ops ops;
    pccl_groups groups;
    pccl_event_queue *events;
    uint32_t stall_ms;
    uint32_t link_timeout_ms; /* 0: none; written by any thread */
    int64_t tick_at_ms; /* -1: none is due */
    int64_t ticked_ms;
    uint64_t late_ms; /* of all ticks; read by any thread */
};

pccl_core *pccl_core_create(pccl_poller *poller, pccl_event_queue *events, uint32_t eager_bytes_max, uint32_t stall_ms,
    uint64_t pace_bytes_per_s, uint32_t records)
{
    pccl_core *core = calloc(1, sizeof *core);
    uint8_t *staging = NULL;
    if (core == NULL || posix_memalign((void **)&staging, 64, PCCL_STAGING_BYTES) != 0) {
        free(core);
        return NULL;
    }
    if (pccl_open_ops_init(&core->ops, events, eager_bytes_max, records) != 0) {
        free(staging);
        free(core);
        return NULL;
    }
    pccl_receiver_init(&core->receiver, &core->ops, &core->groups);
    pccl_conn_host *host = &core->receiver.host;
    host->poller = poller;
    host->staging = staging;
    pccl_list_init(&host->failed_links);
    pccl_list_init(&host->lost_conns);
    pccl_list_init(&host->nomem_conns);
    pccl_list_init(&host->ending_conns);
    pccl_list_init(&host->pending_links);
    pccl_egress_init(&host->egress, pace_bytes_per_s);
    pccl_links_init(&core->links, host, events);
    pccl_groups_init(&core->groups);
    core->events = events;
    core->stall_ms = stall_ms;
    core->tick_at_ms = -1;
    return core;
}

void pccl_core_count(const pccl_core *core, pccl_engine_stats *stats)
{
    const pccl_conn_counters *counters = &core->receiver.host.counters;
    stats->tx_payload_bytes = __atomic_load_n(&counters->tx_payload_bytes, __ATOMIC_RELAXED);
    stats->rx_payload_bytes = __atomic_load_n(&counters->rx_payload_bytes, __ATOMIC_RELAXED);
    stats->tx_wire_bytes = __atomic_load_n(&counters->tx_wire_bytes, __ATOMIC_RELAXED);
    stats->rx_wire_bytes = __atomic_load_n(&counters->rx_wire_bytes, __ATOMIC_RELAXED);
    stats->ops_open = __atomic_load_n(&core->ops.count, __ATOMIC_RELAXED);
    stats->connections = __atomic_load_n(&core->links.connections, __ATOMIC_RELAXED);
    const pccl_ops_time *times = core->ops.times;
    int64_t now_ns = pccl_now_ns();
    stats->in_ops_us = pccl_ops_time_ns(&times[0], now_ns) / 1000;
    stats->in_slices_us = pccl_ops_time_ns(&times[1], now_ns) / 1000;
    stats->late_ms = __atomic_load_n(&core->late_ms, __ATOMIC_RELAXED);
    stats->op_wait_us =
        pccl_max_u64(pccl_ops_waiting_ns(&times[0], now_ns), pccl_ops_waiting_ns(&times[1], now_ns)) / 1000;
}

uint64_t pccl_core_in_ops_ns(const pccl_core *core, int of_slices)
{
    return pccl_ops_time_ns(&core->ops.times[of_slices != 0], pccl_now_ns());
}

int pccl_core_read_records(const pccl_core *core, int64_t since_ns, pccl_op_record *records, int records_max)
{
    return pccl_recorder_read(&core->ops.recorder, since_ns, records, records_max);
}

void pccl_core_set_clock(pccl_core *core, int64_t now_ns)
{
    core->receiver.host.now_ns = core->ops.recorder.now_ns = now_ns;
}

static void group_forget_announcements(pccl_core *core, const pccl_group *group, uint64_t epoch)
{
    for (pccl_list *node = core->links.all.next; node != &core->links.all; node = node->next)
        pccl_unexpected_forget_epochs(
            &core->ops.unexpected, PCCL_CONTAINER_OF(node, pccl_link, in_links), group->number, epoch);
}

/* Commands */

void pccl_core_link_add(pccl_core *core, pccl_conn *conn, pccl_link *spare)
{
    pccl_link *link = pccl_links_find(&core->links, spare->id);
    if (link == NULL) {
        link = spare;
        link->host = &core->receiver.host;
        link->is_local = conn->wire->is_local;
        pccl_table_insert(&core->links.by_id, &link->by_id, pccl_hash_u64(0, link->id));
        pccl_list_append(&core->links.all, &link->in_links);
        for (pccl_list *node = core->ops.open.next; node != &core->ops.open; node = node->next)
            pccl_match_attach(&core->ops, PCCL_CONTAINER_OF(node, pccl_op, in_ops), link);
    } else {
        pccl_link_destroy(spare);
    }
    if (link->is_failed) {
        pccl_conn_destroy(conn);
        pccl_event_queue_release(core->events, PCCL_EVENTS_PER_CONN);
        return;
    }
    if (conn->wire->type->watch(conn->wire, core->receiver.host.poller, conn) != 0) {
        int error = errno;
        pccl_conn_destroy(conn);
        link->conns_count++;
        link->events_promised += PCCL_EVENTS_PER_CONN;
        pccl_link_fail(link, error, "connection %u: cannot be watched: %s", link->conns_added + 1, strerror(error));
        return;
    }
    __atomic_fetch_add(&core->links.connections, 1, __ATOMIC_RELAXED);
    pccl_conn_join(conn, link);
    link->events_promised += PCCL_EVENTS_PER_CONN;
    pccl_growth_note_added(&link->growth, pccl_now_ms(), link->round_trip_us);
    pccl_link_note_pending(link);
}

void pccl_core_link_close(pccl_core *core, uint64_t id)
{
    pccl_link *link = pccl_links_find(&core->links, id);
    if (link != NULL)
        pccl_links_remove(&core->links, &core->ops, link);
}

void pccl_core_link_count(pccl_core *core, uint64_t id)
{
    const pccl_link *link = pccl_links_find(&core->links, id);
    if (link == NULL) {
        pccl_event_queue_release(core->events, 1);
        return;
    }
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_LINK_METRICS;
    event.id = id;
    event.tx_bytes = link->tx_payload_bytes;
    event.rx_bytes = link->rx_payload_bytes;
    event.full_ms = link->full_ms;
    event.full_bytes = link->full_bytes;
    event.busy_ms = link->health.busy_us / 1000;
    event.sender_ms = link->health.sender_us / 1000;
    event.receiver_ms = link->health.receiver_us / 1000;
    event.stuck_ms = link->health.stuck_ms;
    event.is_udp = link->over_count > 0;
    event.delivered = link->health.delivered;
    event.resent = link->health.resent;
    event.unacked_bytes = link->health.unacked_bytes;
    event.round_trip_us = link->health.round_trip_us;
    event.round_trip_us_min = link->round_trip_us;
    pccl_ops_waits waits = pccl_open_ops_waits(&core->ops, link);
    event.unheard_ops = waits.unheard;
    event.inbound_ops = waits.inbound;
    event.undone_ops = waits.undone;
    pccl_event_queue_post(core->events, &event);
}

void pccl_core_submit(pccl_core *core, pccl_op *op, pccl_group *spare)
{
    const pccl_op_request *request = &op->request;
    if (op->launched_ns > core->ops.recorder.now_ns) /* while this batch of events was dealt with */
        pccl_core_set_clock(core, op->launched_ns);
    pccl_open_ops_add(&core->ops, op);
    pccl_group *group = pccl_groups_find_or_add(&core->groups, request->key.group, spare);
    if (request->key.epoch > group->newest_epoch) {
        group->newest_epoch = request->key.epoch;
        group_forget_announcements(core, group, request->key.epoch - 1);
    }
    if (pccl_group_has_frozen(group, request->key.epoch))
        pccl_op_stop(op);
    if (request->shape.world_size == 1 && !op->is_stopped) {
        pccl_op_run_alone(op);
        pccl_open_ops_note_done(&core->ops, op);
    }
    pccl_match_attach_all(&core->ops, &core->links, op);
}

void pccl_core_freeze(pccl_core *core, uint32_t number, uint64_t epoch, pccl_group *spare)
{
    pccl_group *group = pccl_groups_find_or_add(&core->groups, number, spare);
    if (!pccl_group_has_frozen(group, epoch)) {
        group->is_frozen = 1;
        group->frozen_epoch = epoch;
        group_forget_announcements(core, group, epoch);
    }
    for (pccl_list *node = core->ops.open.next; node != &core->ops.open; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        if (op->request.key.group == number && op->request.key.epoch <= epoch) {
            pccl_open_ops_silence(&core->ops, op);
        }
    }
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_GROUP_FROZEN;
    event.group = number;
    event.id = epoch;
    pccl_event_queue_post(core->events, &event);
}

void pccl_core_forget_ops(pccl_core *core, pccl_op_key last, uint64_t count)
{
    for (uint64_t left = count; left > 0; left--, last.sequence--) {
        for (pccl_list *node = core->links.all.next; node != &core->links.all; node = node->next)
            pccl_unexpected_refuse_op(&core->ops.unexpected, PCCL_CONTAINER_OF(node, pccl_link, in_links), &last);
        if (last.sequence == 0)
            break;
    }
}

void pccl_core_freeze_op(pccl_core *core, uint64_t id)
{
    pccl_op *op = pccl_open_ops_find(&core->ops, id);
    if (op == NULL) {
        pccl_event_queue_release(core->events, PCCL_EVENTS_PER_FREEZE);
        return;
    }
    pccl_open_ops_silence(&core->ops, op);
    pccl_event event = pccl_op_event(op, PCCL_EVENT_OP_FROZEN);
    pccl_event_queue_post(core->events, &event);
}

void pccl_core_detach(pccl_core *core, uint64_t id)
{
    pccl_op *op = pccl_open_ops_find(&core->ops, id);
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_OP_DETACHED;
    event.id = id;
    event.system_error = ENOENT;
    if (op != NULL) {
        pccl_open_ops_detach(&core->ops, op);
        event.group = op->request.key.group;
        event.system_error = 0;
    }
    pccl_event_queue_post(core->events, &event);
}

void pccl_core_end(pccl_core *core, uint64_t id, int verdict)
{
    pccl_op *op = pccl_open_ops_find(&core->ops, id);
    if (op != NULL)
        pccl_open_ops_end(&core->ops, op, verdict);
}

/* The loop's two halves */

static int core_send(pccl_core *core)
{
    if (core->receiver.host.fault.is_set)
        return 0;
    pccl_list *last = core->receiver.host.pending_links.previous;
    int is_more = 0;
    while (!pccl_list_is_empty(&core->receiver.host.pending_links)) {
        pccl_list *node = core->receiver.host.pending_links.next;
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_pending);
        pccl_list_remove(node);
        if (pccl_link_send(link, SEND_BYTES_MAX)) {
            pccl_link_note_pending(link);
            is_more = 1;
        }
        if (node == last)
            break;
    }
    pccl_egress_send(&core->receiver.host.egress, &core->links.all);
    return is_more;
}

const pccl_host_fault *pccl_core_fault(const pccl_core *core)
{
    return core->receiver.host.fault.is_set ? &core->receiver.host.fault : NULL;
}

void pccl_core_on_poll(pccl_core *core, const pccl_poll_event *event)
{
    pccl_conn *conn = event->entry->owner;
    pccl_link *link = conn->link;
    if (conn->is_lost || link->is_failed || core->receiver.host.fault.is_set)
        return;
    pccl_wire *wire = conn->wire;
    unsigned ready = wire->type->ready != NULL ? wire->type->ready(wire, event) : event->ready;
    if (ready & PCCL_POLL_OUT && pccl_conn_flush(conn))
        pccl_conn_offer(conn);
    if (ready & ~conn->nomem & PCCL_POLL_IN && !conn->is_lost)
        pccl_conn_receive(conn);
    core_send(core);
    if (!conn->is_lost && !link->is_failed && (pccl_conn_is_drained(conn) || conn->nomem != 0))
        pccl_conn_watch(conn);
}

static void core_end_ran(pccl_core *core)
{
    while (!pccl_list_is_empty(&core->ops.ran))
        pccl_open_ops_end(&core->ops, PCCL_CONTAINER_OF(core->ops.ran.next, pccl_op, in_ran), PCCL_COMMIT_BY_ALL);
}

int pccl_core_settle(pccl_core *core)
{
    int is_more = core_send(core);
    while (pccl_host_read_rest(&core->receiver.host))
        is_more |= core_send(core);
    pccl_open_ops_complete_reached(&core->ops);
    core_end_ran(core);
    pccl_links_close_lost(&core->links, &core->ops);
    return is_more;
}

int pccl_core_is_idle(const pccl_core *core)
{
    return pccl_list_is_empty(&core->ops.open) && pccl_core_is_drained(core);
}

int pccl_core_is_drained(const pccl_core *core)
{
    const pccl_conn_host *host = &core->receiver.host;
    if (!pccl_list_is_empty(&host->pending_links) || !pccl_list_is_empty(&host->nomem_conns) ||
        !pccl_list_is_empty(&host->lost_conns))
        return 0;
    return host->undrained == 0;
}

unsigned pccl_core_local_links(const pccl_core *core)
{
    unsigned count = 0;
    for (const pccl_list *node = core->links.all.next; node != &core->links.all; node = node->next) {
        const pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        count += link->is_local && !link->is_failed;
    }
    return count;
}

static int timeout_to(int64_t at_ms, int64_t now_ms) { return at_ms <= now_ms ? 0 : (int)(at_ms - now_ms); }

/* -1: nothing is due. */
static int core_next_ms(pccl_core *core, int64_t now_ms)
{
    int is_waiting = pccl_egress_is_waiting(&core->receiver.host.egress);
    if (!core->receiver.host.wants_tick)
        return is_waiting ? 1 : -1;
    if (core->tick_at_ms < 0)
        core->tick_at_ms = now_ms + TICK_MS;
    if (core->tick_at_ms <= now_ms)
        return 0;
    return is_waiting ? 1 : timeout_to(core->tick_at_ms, now_ms);
}

int pccl_core_timeout_ms(pccl_core *core, int64_t now_ms)
{
    int timeout_ms = core_next_ms(core, now_ms);
    if (pccl_list_is_empty(&core->receiver.host.nomem_conns))
        return timeout_ms;
    int retry_ms = timeout_to(pccl_host_retry_ms(&core->receiver.host), now_ms);
    return timeout_ms < 0 || retry_ms < timeout_ms ? retry_ms : timeout_ms;
}

void pccl_core_set_link_timeout(pccl_core *core, uint32_t timeout_ms)
{
    __atomic_store_n(&core->link_timeout_ms, timeout_ms, __ATOMIC_RELAXED);
}

void pccl_core_tick(pccl_core *core, int64_t now_ms)
{
    pccl_host_retry(&core->receiver.host, now_ms);
    if (core->tick_at_ms < 0 || now_ms < core->tick_at_ms)
        return;
    if (now_ms - core->tick_at_ms >= LATE_MS_MIN)
        __atomic_fetch_add(&core->late_ms, (uint64_t)(now_ms - core->tick_at_ms), __ATOMIC_RELAXED);
    int has_more = 0;
    pccl_link *full = NULL;
    unsigned full_count = 0;
    uint32_t timeout_ms = __atomic_load_n(&core->link_timeout_ms, __ATOMIC_RELAXED);
    /* A process that was stopped cannot know what got through. */
    int was_away = now_ms - core->ticked_ms > (int64_t)pccl_max_size(timeout_ms / 2, 5 * TICK_MS);
    for (pccl_list *node = core->links.all.next; node != &core->links.all; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (link->is_failed)
            continue;
        has_more |= pccl_link_tick(link, now_ms, core->stall_ms);
        enum pccl_limit limit = pccl_link_look(link, now_ms);
        if (limit != PCCL_LIMIT_NONE) {
            pccl_event event;
            memset(&event, 0, sizeof event);
            event.kind = PCCL_EVENT_LINK_LIMITED;
            event.id = event.link = link->id;
            event.limit = (int32_t)limit;
            event.round_trip_us_min = link->round_trip_us;
            pccl_links_post(&core->links, link, &event);
        }
        if (timeout_ms > 0)
            has_more |= pccl_link_watch(link, now_ms, timeout_ms, was_away);
        if (link->is_full) {
            full = link;
            full_count++;
        }
    }
    pccl_egress_tick(&core->receiver.host.egress, &core->links.all);
    /* Several share what they have, an uplink as a rule, and none shows what it could carry. */
    if (full_count > 1 || now_ms - core->ticked_ms > 3 * TICK_MS)
        full = NULL;
    for (pccl_list *node = core->links.all.next; node != &core->links.all; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        pccl_link_count_full(link, link == full, core->ticked_ms);
    }
    core->ticked_ms = now_ms;
    core->receiver.host.wants_tick = (uint8_t)has_more;
    core->tick_at_ms = -1;
}

void pccl_core_destroy(pccl_core *core)
{
    core_end_ran(core); /* the engine may have failed before it could settle them; their callers know the result */
    while (!pccl_list_is_empty(&core->ops.open))
        pccl_open_ops_end(&core->ops, PCCL_CONTAINER_OF(core->ops.open.next, pccl_op, in_ops), PCCL_ABORT);
    pccl_links_free(&core->links, &core->ops);
    PCCL_ASSERT(core->receiver.host.undrained == 0);
    pccl_open_ops_free(&core->ops);
    pccl_groups_free(&core->groups);
    free(core->receiver.host.staging);
    free(core);
}

void pccl_host_fail(pccl_conn_host *host, int system_error, const char *detail)
{
    if (host->fault.is_set)
        return;
    host->fault.is_set = 1;
    host->fault.system_error = system_error;
    snprintf(host->fault.detail, sizeof host->fault.detail, "%s", detail);
}
