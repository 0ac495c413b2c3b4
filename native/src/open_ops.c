#include "open_ops.h"

#include "completion.h"
#include "fast_path.h"

#include <errno.h>
#include <string.h>

int pccl_open_ops_init(pccl_open_ops *ops, pccl_event_queue *events, uint32_t eager_bytes_max, uint32_t records)
{
    int status = pccl_recorder_init(&ops->recorder, records);
    if (status != 0)
        return status;
    pccl_table_init(&ops->by_id);
    pccl_table_init(&ops->by_key);
    pccl_list_init(&ops->open);
    pccl_list_init(&ops->reached);
    pccl_list_init(&ops->ran);
    pccl_unexpected_init(&ops->unexpected);
    ops->events = events;
    ops->eager_bytes_max = eager_bytes_max;
    return 0;
}

void pccl_open_ops_free(pccl_open_ops *ops)
{
    pccl_recorder_free(&ops->recorder);
    pccl_unexpected_free(&ops->unexpected);
    pccl_table_free(&ops->by_id);
    pccl_table_free(&ops->by_key);
}

/* Events */

pccl_event pccl_op_event(const pccl_op *op, enum pccl_event_kind kind)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = kind;
    event.group = op->request.key.group;
    event.id = op->request.op;
    event.tx_bytes = op->tx_bytes;
    event.rx_bytes = op->rx_bytes;
    return event;
}

void pccl_open_ops_post(pccl_open_ops *ops, pccl_op *op, const pccl_event *event)
{
    PCCL_ASSERT(op->events_promised > 0);
    op->events_promised--;
    pccl_event_queue_post(ops->events, event);
}

/* The owner need not know of the event before it knows of another. */
static void op_post_quietly(pccl_open_ops *ops, pccl_op *op, const pccl_event *event)
{
    PCCL_ASSERT(op->events_promised > 0);
    op->events_promised--;
    pccl_event_queue_post_quietly(ops->events, event);
}

/* Times
 *
 * Any thread may ask for the time in ops by now, at the very moment when an op begins or ends. So all that it needs is
 * in one word, the account: twice the time so far where no op is in flight; else twice that less the time when the
 * first of them began, to which the clock has to be added, plus one. */

static void time_publish(pccl_ops_time *time)
{
    int64_t account = time->count > 0 ? 2 * (time->total_ns - time->since_ns) + 1 : 2 * time->total_ns;
    __atomic_store_n(&time->account, account, __ATOMIC_RELEASE);
}

static pccl_ops_time *op_time(pccl_open_ops *ops, const pccl_op *op)
{
    return &ops->times[op->request.shape.last_slice > 0];
}

static void op_begin_time(pccl_open_ops *ops, pccl_op *op)
{
    const pccl_op_shape *shape = &op->request.shape;
    if (shape->world_size < 2 || shape->collective == PCCL_SEND || op->request.is_overlapped)
        return;
    op->timed_ns = op->launched_ns != 0 ? op->launched_ns : ops->recorder.now_ns;
    pccl_ops_time *time = op_time(ops, op);
    if (time->count++ > 0)
        return;
    time->since_ns = op->timed_ns;
    __atomic_store_n(&time->oldest_ns, op->timed_ns, __ATOMIC_RELAXED);
    time_publish(time);
}

/* Ops without a waiting thread may be many: where those looked at are all of that kind, one is taken to begin now. */
static int64_t oldest_of(pccl_open_ops *ops, const pccl_ops_time *time)
{
    enum { LOOKS_MAX = 64 };
    int looks = 0;
    for (pccl_list *node = ops->open.next; node != &ops->open && looks < LOOKS_MAX; node = node->next, looks++) {
        const pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        if (op->timed_ns != 0 && op_time(ops, op) == time)
            return op->timed_ns;
    }
    return ops->recorder.now_ns;
}

static void op_end_time(pccl_open_ops *ops, pccl_op *op)
{
    if (op->timed_ns == 0)
        return;
    pccl_ops_time *time = op_time(ops, op);
    int64_t now_ns = ops->recorder.now_ns;
    int was_oldest = op->timed_ns <= time->oldest_ns;
    op->timed_ns = 0;
    if (--time->count > 0) {
        if (was_oldest)
            __atomic_store_n(&time->oldest_ns, oldest_of(ops, time), __ATOMIC_RELAXED);
        return;
    }
    time->total_ns += now_ns > time->since_ns ? now_ns - time->since_ns : 0;
    time_publish(time);
}

static void op_count_waits(const pccl_op *op, const pccl_link *link, pccl_ops_waits *waits)
{
    int is_unheard = 0;
    int is_inbound = 0;
    int is_undone = 0;
    for (uint32_t i = 0; i < op->peers_count; i++) {
        const pccl_op_peer *peer = &op->peers[i];
        if (peer->link != link)
            continue;
        is_unheard |= peer->is_target && !peer->is_heard;
        is_inbound |= peer->is_source && op->segments_left > 0;
    }
    for (uint32_t i = 0; op->is_done && op->completion != NULL && i < op->completion->count; i++) {
        const pccl_participant *participant = &op->completion->participants[i];
        is_undone |= participant->link == link && !participant->is_heard;
    }
    waits->unheard += (uint64_t)is_unheard;
    waits->inbound += (uint64_t)is_inbound;
    waits->undone += (uint64_t)is_undone;
}

pccl_ops_waits pccl_open_ops_waits(const pccl_open_ops *ops, const pccl_link *link)
{
    enum { LOOKS_MAX = 64 }; /* there may be thousands, and the oldest tell enough */
    pccl_ops_waits waits = {0, 0, 0};
    int looks = 0;
    for (const pccl_list *node = ops->open.next; node != &ops->open && looks < LOOKS_MAX; node = node->next, looks++)
        op_count_waits(PCCL_CONTAINER_OF(node, pccl_op, in_ops), link, &waits);
    return waits;
}

uint64_t pccl_ops_time_ns(const pccl_ops_time *time, int64_t now_ns)
{
    int64_t account = __atomic_load_n(&time->account, __ATOMIC_ACQUIRE);
    int64_t ns = account % 2 == 0 ? account / 2 : (account - 1) / 2 + now_ns;
    return ns > 0 ? (uint64_t)ns : 0;
}

uint64_t pccl_ops_waiting_ns(const pccl_ops_time *time, int64_t now_ns)
{
    int is_in_flight = __atomic_load_n(&time->account, __ATOMIC_ACQUIRE) % 2 != 0;
    int64_t oldest_ns = __atomic_load_n(&time->oldest_ns, __ATOMIC_RELAXED);
    return is_in_flight && oldest_ns < now_ns ? (uint64_t)(now_ns - oldest_ns) : 0;
}

void pccl_open_ops_add(pccl_open_ops *ops, pccl_op *op)
{
    int64_t launched_ns = op->launched_ns != 0 ? op->launched_ns : ops->recorder.now_ns;
    op->record = pccl_recorder_begin(&ops->recorder, &op->request, launched_ns, op->caller);
    pccl_record_awaits(op->record, pccl_op_awaits(op, 0));
    op_begin_time(ops, op);
    pccl_list_append(&ops->open, &op->in_ops);
    pccl_table_insert(&ops->by_id, &op->by_id, pccl_hash_u64(0, op->request.op));
    pccl_table_insert(&ops->by_key, &op->by_key, pccl_op_key_hash(&op->request.key));
    __atomic_fetch_add(&ops->count, 1, __ATOMIC_RELAXED);
}

pccl_op *pccl_open_ops_find(const pccl_open_ops *ops, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&ops->by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_id);
        if (op->request.op == id)
            return op;
    }
    return NULL;
}

pccl_op_peer *pccl_open_ops_find_peer(
    const pccl_open_ops *ops, const pccl_op_key *key, const pccl_link *link, int is_source, pccl_op **elsewhere)
{
    pccl_table_node *node = pccl_table_first(&ops->by_key, pccl_op_key_hash(key));
    *elsewhere = NULL;
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_key);
        if (!pccl_op_key_equal(&op->request.key, key))
            continue;
        pccl_op_peer *peer = is_source ? pccl_op_find_source(op, link->id) : pccl_op_find_target(op, link->id);
        if (peer != NULL)
            return peer;
        *elsewhere = op;
    }
    return NULL;
}

static void peer_lose_link(pccl_op_peer *peer)
{
    peer->link = NULL;
    peer->announcement = PCCL_ANNOUNCE_NOTHING;
    peer->is_payload_buffered = 0;
    pccl_list_remove(&peer->in_ready);
    pccl_list_remove(&peer->in_active);
}

void pccl_open_ops_lose_link(pccl_open_ops *ops, pccl_link *link)
{
    while (!pccl_list_is_empty(&link->dones))
        pccl_completion_take_done(link);
    for (pccl_list *node = ops->open.next; node != &ops->open; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        for (uint32_t i = 0; i < op->peers_count; i++)
            if (op->peers[i].link == link)
                peer_lose_link(&op->peers[i]);
        if (op->completion != NULL)
            pccl_completion_detach(op->completion, link);
    }
    pccl_unexpected_forget_link(&ops->unexpected, link);
}

/* The op has stopped: its announcement goes without payload. */
static void peer_announce_without_payload(pccl_op_peer *peer)
{
    if (peer->announcement != PCCL_ANNOUNCE_EAGER)
        return;
    pccl_link_cancel_eager(peer->link, peer->eager_bytes);
    peer->announcement = peer->is_source ? PCCL_ANNOUNCE_READY : PCCL_ANNOUNCE_NOTHING;
    if (!peer->is_source)
        pccl_list_remove(&peer->in_ready);
}

static void peer_drop_buffered_payload(pccl_open_ops *ops, pccl_op_peer *peer)
{
    if (!peer->is_payload_buffered)
        return;
    peer->is_payload_buffered = 0;
    pccl_unexpected_op *buffered = pccl_unexpected_find(&ops->unexpected, peer->link, &peer->op->request.key);
    if (buffered != NULL) /* its epoch may have been forgotten */
        pccl_unexpected_drop_payload(&ops->unexpected, buffered);
}

void pccl_open_ops_halt(pccl_open_ops *ops, pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_op_peer *peer = &op->peers[i];
        peer_announce_without_payload(peer);
        peer_drop_buffered_payload(ops, peer);
        pccl_list_remove(&peer->in_active);
        if (peer->link == NULL || !peer->is_source)
            continue;
        pccl_list *conns = &peer->link->conns;
        for (pccl_list *node = conns->next; node != conns; node = node->next)
            pccl_conn_release_rx(PCCL_CONTAINER_OF(node, pccl_conn, in_conns), op);
    }
    pccl_op_stop(op);
}

void pccl_open_ops_silence(pccl_open_ops *ops, pccl_op *op)
{
    pccl_open_ops_halt(ops, op);
    op->is_mismatched = 0;
    for (uint32_t i = 0; i < op->peers_count; i++) {
        op->peers[i].announcement = PCCL_ANNOUNCE_NOTHING;
        pccl_list_remove(&op->peers[i].in_ready);
    }
}

/* All connections that may hold frames of the op release those. */
static void op_release_frames(pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        if (op->peers[i].link == NULL)
            continue;
        pccl_list *lists[] = {&op->peers[i].link->conns, &op->peers[i].link->lost_conns};
        for (size_t k = 0; k < PCCL_COUNT_OF(lists); k++)
            for (pccl_list *node = lists[k]->next; node != lists[k]; node = node->next)
                pccl_conn_release_tx(PCCL_CONTAINER_OF(node, pccl_conn, in_conns), op);
    }
}

/* Makes all connections forget the op. */
static void op_release(pccl_open_ops *ops, pccl_op *op)
{
    if (op->is_released)
        return;
    op->is_released = 1;
    pccl_open_ops_silence(ops, op);
    op_release_frames(op);
}

void pccl_open_ops_look_if_complete(pccl_open_ops *ops, pccl_op *op)
{
    if (!pccl_completion_is_reached(op->completion))
        return;
    op_end_time(ops, op);
    pccl_event event = pccl_op_event(op, PCCL_EVENT_OP_COMPLETED);
    pccl_record_completed(op->record, ops->recorder.now_ns, op->tx_bytes, op->rx_bytes);
    op_release(ops, op);
    if (op->fast_path != NULL && pccl_fast_path_complete(op->fast_path, op))
        pccl_list_append(&ops->ran, &op->in_ran); /* the caller may still look at it */
    else
        pccl_open_ops_post(ops, op, &event);
}

void pccl_open_ops_note_done(pccl_open_ops *ops, pccl_op *op)
{
    op->is_done = 1;
    pccl_record_done(op->record, ops->recorder.now_ns);
    pccl_event event = pccl_op_event(op, PCCL_EVENT_OP_DONE);
    event.tx_bytes = pccl_op_tx_bytes_planned(op);
    if (op->completion == NULL) {
        pccl_open_ops_post(ops, op, &event);
        return;
    }
    if (op->fast_path == NULL || !pccl_fast_path_note_done(op->fast_path, op, &event))
        op_post_quietly(ops, op, &event);
    pccl_completion_send_done(op->completion);
    if (pccl_completion_is_reached(op->completion))
        pccl_list_append(&ops->reached, &op->in_ran);
}

void pccl_open_ops_complete_reached(pccl_open_ops *ops)
{
    while (!pccl_list_is_empty(&ops->reached)) {
        pccl_op *op = PCCL_CONTAINER_OF(ops->reached.next, pccl_op, in_ran);
        pccl_list_remove(&op->in_ran);
        pccl_open_ops_look_if_complete(ops, op);
    }
}

void pccl_open_ops_detach(pccl_open_ops *ops, pccl_op *op)
{
    pccl_open_ops_halt(ops, op);
    op_release_frames(op);
    pccl_op_drop_buffers(op);
}

/* Peers may not know yet that the op has ended. One that is committed has been announced by all of them. */
static void op_refuse_late_peers(pccl_open_ops *ops, const pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link != NULL)
            pccl_unexpected_refuse_op(&ops->unexpected, op->peers[i].link, &op->request.key);
}

void pccl_open_ops_end(pccl_open_ops *ops, pccl_op *op, int verdict)
{
    op_release(ops, op);
    op_end_time(ops, op);
    if (op->completion != NULL)
        pccl_completion_end(op->completion);
    if (verdict == PCCL_ABORT || !op->is_done) {
        pccl_op_restore(op);
        op_refuse_late_peers(ops, op);
    }
    pccl_event event = pccl_op_event(op, PCCL_EVENT_OP_ENDED);
    event.system_error = verdict != PCCL_ABORT && !op->is_done ? EPROTO : 0;
    pccl_recorder_end(&ops->recorder, op->record, op->tx_bytes, op->rx_bytes, verdict != PCCL_ABORT);
    pccl_table_remove(&ops->by_id, &op->by_id);
    pccl_table_remove(&ops->by_key, &op->by_key);
    pccl_list_remove(&op->in_ops);
    pccl_list_remove(&op->in_ran);
    PCCL_ASSERT(op->call == NULL);
    PCCL_ASSERT(op->events_promised > 0);
    unsigned unused_promises = op->events_promised;
    pccl_op_destroy(op);
    __atomic_fetch_sub(&ops->count, 1, __ATOMIC_RELAXED);
    if (verdict != PCCL_COMMIT_BY_ALL) {
        unused_promises--;
        pccl_event_queue_post(ops->events, &event);
    }
    pccl_event_queue_release(ops->events, unused_promises);
}
