#include "core.h"

#include "agreement.h"
#include "announcements.h"
#include "gate.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum {
    SEND_BYTES_MAX = 1 << 20, /* per link and turn, so that receiving gets its own */
    EAGER_AHEAD_BYTES_MAX = 768 << 10, /* to all peers of an op: what an uplink of 250 Mbit/s carries in 25 ms */
    EAGER_SEVERAL_BYTES_MAX = 256 << 10, /* to one of them */
    TICK_MS = 100
};

struct pccl_core {
    pccl_conn_host host;
    pccl_fd_registry *fds;
    pccl_event_queue *events;
    pccl_table links_by_id;
    pccl_list links;
    pccl_table ops_by_id;
    pccl_table ops_by_key;
    pccl_list ops;
    pccl_list ran_ops; /* told by their gate, to be ended */
    pccl_table groups;
    pccl_announcements announcements;
    uint32_t eager_bytes_max;
    uint32_t stall_ms;
    uint32_t link_timeout_ms; /* 0: none; written by any thread */
    int64_t tick_at_ms; /* -1: none is due */
    int64_t ticked_ms;
    uint64_t ops_open; /* read by any thread */
    uint64_t connections;
};

static const char *core_on_header(pccl_conn_host *host, pccl_conn *conn, const pccl_frame *frame);
static const char *core_on_done(pccl_conn_host *host, pccl_conn *conn, const pccl_op_key *key);
static void core_on_arrived(pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound);
static void core_on_sent(pccl_conn_host *host, pccl_op *op);
static void core_on_kept(pccl_conn_host *host, pccl_announcement *kept);
static void core_on_retract(pccl_conn_host *host, pccl_conn *conn);

pccl_core *pccl_core_create(
    pccl_poller *poller, pccl_fd_registry *fds, pccl_event_queue *events, uint32_t eager_bytes_max,
    uint32_t stall_ms, uint64_t pace_bytes_per_s)
{
    pccl_core *core = calloc(1, sizeof *core);
    uint8_t *staging = NULL;
    if (core == NULL || posix_memalign((void **)&staging, 64, PCCL_STAGING_BYTES) != 0) {
        free(core);
        return NULL;
    }
    core->host.poller = poller;
    core->host.staging = staging;
    core->host.on_header = core_on_header;
    core->host.on_done = core_on_done;
    core->host.on_arrived = core_on_arrived;
    core->host.on_sent = core_on_sent;
    core->host.on_kept = core_on_kept;
    core->host.on_retract = core_on_retract;
    pccl_uplink_init(&core->host.uplink, pace_bytes_per_s);
    core->eager_bytes_max = eager_bytes_max;
    core->stall_ms = stall_ms;
    core->tick_at_ms = -1;
    pccl_list_init(&core->host.lost_conns);
    pccl_list_init(&core->host.starved_conns);
    core->fds = fds;
    core->events = events;
    pccl_list_init(&core->host.failed_links);
    pccl_list_init(&core->links);
    pccl_list_init(&core->host.pending_links);
    pccl_list_init(&core->ops);
    pccl_list_init(&core->ran_ops);
    pccl_table_init(&core->links_by_id);
    pccl_table_init(&core->ops_by_id);
    pccl_table_init(&core->ops_by_key);
    pccl_table_init(&core->groups);
    pccl_announcements_init(&core->announcements);
    return core;
}

void pccl_core_count(const pccl_core *core, pccl_engine_stats *stats)
{
    const pccl_conn_counters *counters = &core->host.counters;
    stats->tx_payload_bytes = __atomic_load_n(&counters->tx_payload_bytes, __ATOMIC_RELAXED);
    stats->rx_payload_bytes = __atomic_load_n(&counters->rx_payload_bytes, __ATOMIC_RELAXED);
    stats->tx_wire_bytes = __atomic_load_n(&counters->tx_wire_bytes, __ATOMIC_RELAXED);
    stats->rx_wire_bytes = __atomic_load_n(&counters->rx_wire_bytes, __ATOMIC_RELAXED);
    stats->ops_open = __atomic_load_n(&core->ops_open, __ATOMIC_RELAXED);
    stats->connections = __atomic_load_n(&core->connections, __ATOMIC_RELAXED);
}

/* Events */

static pccl_event op_event(const pccl_op *op, enum pccl_event_kind kind)
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

static void op_post(pccl_core *core, pccl_op *op, const pccl_event *event)
{
    PCCL_ASSERT(op->events_promised > 0);
    op->events_promised--;
    pccl_event_queue_post(core->events, event);
}

/* It need not be known before something else is. */
static void op_post_quietly(pccl_core *core, pccl_op *op, const pccl_event *event)
{
    PCCL_ASSERT(op->events_promised > 0);
    op->events_promised--;
    pccl_event_queue_post_quietly(core->events, event);
}

/* Links */

static pccl_link *link_find(const pccl_core *core, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&core->links_by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, by_id);
        if (link->id == id)
            return link;
    }
    return NULL;
}

static void peer_lose_link(pccl_op_peer *peer)
{
    peer->link = NULL;
    peer->announcement = PCCL_ANNOUNCE_NOTHING;
    peer->is_payload_kept = 0;
    pccl_list_remove(&peer->in_ready);
    pccl_list_remove(&peer->in_active);
}

static void conn_close(pccl_core *core, pccl_conn *conn)
{
    pccl_poller_remove(core->host.poller, &conn->poll);
    pccl_fd_registry_close(core->fds, conn->poll.fd);
    __atomic_fetch_sub(&core->connections, 1, __ATOMIC_RELAXED);
}

static void conn_destroy(pccl_conn *conn)
{
    pccl_list_remove(&conn->in_conns);
    pccl_list_remove(&conn->in_free);
    pccl_list_remove(&conn->in_talk);
    pccl_list_remove(&conn->in_notices);
    pccl_list_remove(&conn->in_resend);
    pccl_list_remove(&conn->in_starved);
    pccl_conn_destroy(conn);
}

static void link_post(pccl_core *core, pccl_link *link, const pccl_event *event)
{
    PCCL_ASSERT(link->events_promised > 0);
    link->events_promised--;
    pccl_event_queue_post(core->events, event);
}

/* A lost connection of a link that has others. */
static void conn_bury(pccl_core *core, pccl_conn *conn)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_CONNECTION_LOST;
    event.id = event.link = conn->link->id;
    event.system_error = conn->system_error;
    memcpy(event.detail, conn->detail, sizeof event.detail);
    conn_close(core, conn);
    pccl_list_remove(&conn->in_lost);
    pccl_list_remove(&conn->in_conns);
    conn->link->conns_count--;
    link_post(core, conn->link, &event);
    pccl_link_note_buried(conn);
}

/* Takes all connections from a link, and the link from all that know it but the table. */
static void link_strip(pccl_core *core, pccl_link *link)
{
    while (!pccl_list_is_empty(&link->dones))
        pccl_agreement_take(link);
    for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        for (uint32_t i = 0; i < op->peers_count; i++)
            if (op->peers[i].link == link)
                peer_lose_link(&op->peers[i]);
        if (op->agreement != NULL)
            pccl_agreement_detach(op->agreement, link);
    }
    pccl_announcements_forget_link(&core->announcements, link);
    while (!pccl_list_is_empty(&link->conns)) {
        pccl_conn *conn = PCCL_CONTAINER_OF(link->conns.next, pccl_conn, in_conns);
        conn_close(core, conn);
        pccl_list_remove(&conn->in_lost);
        conn_destroy(conn);
    }
    while (!pccl_list_is_empty(&link->lost_conns))
        conn_destroy(PCCL_CONTAINER_OF(link->lost_conns.next, pccl_conn, in_conns));
    pccl_list_remove(&link->in_pending);
    pccl_list_remove(&link->in_waiting);
    pccl_list_remove(&link->in_failed);
}

static void link_bury(pccl_core *core, pccl_link *link)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_LINK_LOST;
    event.id = event.link = link->id;
    event.system_error = link->system_error;
    memcpy(event.detail, link->detail, sizeof event.detail);
    link_strip(core, link);
    link_post(core, link, &event);
    link->conns_count = 0;
}

static void link_remove(pccl_core *core, pccl_link *link)
{
    link_strip(core, link);
    pccl_event_queue_release(core->events, link->events_promised);
    pccl_table_remove(&core->links_by_id, &link->by_id);
    pccl_list_remove(&link->in_links);
    pccl_link_destroy(link);
}

/* Ops */

static pccl_op *op_find_by_id(const pccl_core *core, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&core->ops_by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_id);
        if (op->request.op == id)
            return op;
    }
    return NULL;
}

/* Several ranks of one op may live in one engine; the link tells them apart. The op's source or target behind
 * the link, or NULL with an op that has the key but not the link in `elsewhere`. */
static pccl_op_peer *op_find_peer(
    const pccl_core *core, const pccl_op_key *key, const pccl_link *link, int is_source, pccl_op **elsewhere)
{
    pccl_table_node *node = pccl_table_first(&core->ops_by_key, pccl_op_key_hash(key));
    *elsewhere = NULL;
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_key);
        if (!pccl_op_key_equal(&op->request.key, key))
            continue;
        pccl_op_peer *peer =
            is_source ? pccl_op_find_source(op, link->id) : pccl_op_find_target(op, link->id);
        if (peer != NULL)
            return peer;
        *elsewhere = op;
    }
    return NULL;
}

/* An announcement that will not have payload: the op has stopped. */
static void peer_announce_without_payload(pccl_op_peer *peer)
{
    if (peer->announcement != PCCL_ANNOUNCE_EAGER)
        return;
    pccl_link_cancel_eager(peer->link, peer->eager_bytes);
    peer->announcement = peer->is_source ? PCCL_ANNOUNCE_READY : PCCL_ANNOUNCE_NOTHING;
    if (!peer->is_source)
        pccl_list_remove(&peer->in_ready);
}

static void peer_drop_kept_payload(pccl_core *core, pccl_op_peer *peer)
{
    if (!peer->is_payload_kept)
        return;
    peer->is_payload_kept = 0;
    pccl_announcement *kept =
        pccl_announcements_find(&core->announcements, peer->link, &peer->op->request.key);
    if (kept != NULL) /* its epoch may have been forgotten */
        pccl_announcements_drop_payload(&core->announcements, kept);
}

/* Drops what is on its way to and from the op. Half-sent frames go on being sent, and so do announcements: a
 * mismatch is for both sides to know. */
static void op_halt(pccl_core *core, pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_op_peer *peer = &op->peers[i];
        peer_announce_without_payload(peer);
        peer_drop_kept_payload(core, peer);
        pccl_list_remove(&peer->in_active);
        if (peer->link == NULL || !peer->is_source)
            continue;
        pccl_list *conns = &peer->link->conns;
        for (pccl_list *node = conns->next; node != conns; node = node->next)
            pccl_conn_release_rx(PCCL_CONTAINER_OF(node, pccl_conn, in_conns), op);
    }
    pccl_op_stop(op);
}

/* Nothing more is said about the op either. */
static void op_silence(pccl_core *core, pccl_op *op)
{
    op_halt(core, op);
    op->is_mismatched = 0;
    for (uint32_t i = 0; i < op->peers_count; i++) {
        op->peers[i].announcement = PCCL_ANNOUNCE_NOTHING;
        pccl_list_remove(&op->peers[i].in_ready);
    }
}

static void peer_activate(pccl_op_peer *peer)
{
    if (peer->op->is_stopped || !peer->is_heard || peer->link == NULL || peer->link->is_failed)
        return;
    if (peer->announcement == PCCL_ANNOUNCE_EAGER) /* whose segment has to be the first */
        return;
    if (!pccl_op_has_sendable(peer) || pccl_list_is_member(&peer->in_active))
        return;
    pccl_list_append(&peer->link->active_ops, &peer->in_active);
    pccl_link_note_pending(peer->link);
}

/* All connections that may hold frames of the op either release those or, where there is a move, follow it. */
static void op_visit_conns(pccl_op *op, const pccl_op_move *move)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        if (op->peers[i].link == NULL)
            continue;
        pccl_list *lists[] = {&op->peers[i].link->conns, &op->peers[i].link->lost_conns};
        for (size_t k = 0; k < PCCL_COUNT_OF(lists); k++)
            for (pccl_list *node = lists[k]->next; node != lists[k]; node = node->next) {
                pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
                if (move != NULL)
                    pccl_conn_follow(conn, op, move);
                else
                    pccl_conn_release_tx(conn, op);
            }
    }
}

/* Nothing of the op is on its way any more, or comes. */
static void op_let_go(pccl_core *core, pccl_op *op)
{
    if (op->is_let_go)
        return;
    op->is_let_go = 1;
    op_silence(core, op);
    op_visit_conns(op, NULL);
}

/* All that any rank had to send has been received. */
static void op_look_if_agreed(pccl_core *core, pccl_op *op)
{
    if (!pccl_agreement_is_reached(op->agreement))
        return;
    pccl_event event = op_event(op, PCCL_EVENT_OP_AGREED);
    op_let_go(core, op);
    if (op->gate != NULL && pccl_gate_tell(op->gate, op))
        pccl_list_append(&core->ran_ops, &op->in_ran); /* who calls may still look at it */
    else
        op_post(core, op, &event);
}

static void op_note_done(pccl_core *core, pccl_op *op)
{
    op->is_done = 1;
    pccl_event event = op_event(op, PCCL_EVENT_OP_DONE);
    event.tx_bytes = pccl_op_tx_bytes_planned(op);
    if (op->agreement == NULL) {
        op_post(core, op, &event);
        return;
    }
    if (op->gate == NULL || !pccl_gate_note_done(op->gate, op, &event))
        op_post_quietly(core, op, &event);
    pccl_agreement_say(op->agreement);
    op_look_if_agreed(core, op);
}

/* A ring announces ops to their sources only; a target that describes the op in another way has to hear of
 * that too. */
static void op_contradict(pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs)
{
    pccl_op_peer *target = pccl_op_find_target(op, link->id);
    if (!op->is_mismatched || pccl_op_shape_equal(&op->request.shape, theirs))
        return;
    if (target == NULL || target->is_contradicted || target->link == NULL ||
        pccl_op_find_source(op, link->id) != NULL)
        return;
    PCCL_ASSERT(target->announcement == PCCL_ANNOUNCE_NOTHING);
    target->is_contradicted = 1;
    target->announcement = PCCL_ANNOUNCE_READY;
    pccl_list_append(&target->link->ready_ops, &target->in_ready);
    pccl_link_note_pending(target->link);
}

static void op_note_mismatch(pccl_core *core, pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs)
{
    PCCL_ASSERT(!op->is_stopped);
    pccl_event event = op_event(op, PCCL_EVENT_OP_MISMATCH);
    event.link = link->id;
    event.mine = op->request.shape;
    event.theirs = *theirs;
    if (op->gate != NULL)
        pccl_gate_show(op->gate, op);
    op_halt(core, op);
    op->is_mismatched = 1;
    op_contradict(op, link, theirs);
    op_post(core, op, &event);
}

/* A target has said that it has submitted the same op. An op without elements is done by that, so that it is
 * checked like any other. */
static void op_note_heard(pccl_core *core, pccl_op_peer *target)
{
    pccl_op_heard(target);
    if (pccl_op_is_complete(target->op) && !target->op->is_done)
        op_note_done(core, target->op);
    peer_activate(target);
}

static void op_note_arrived(pccl_core *core, pccl_op *op, const pccl_op_inbound *inbound)
{
    int has_more = pccl_op_arrived(op, inbound);
    if (pccl_op_is_complete(op) && !op->is_done)
        op_note_done(core, op);
    for (uint32_t i = 0; has_more && i < op->peers_count; i++)
        peer_activate(&op->peers[i]);
}

static const char *op_take_first(
    pccl_core *core, pccl_op_peer *source, uint32_t segment, const uint8_t *payload, uint32_t bytes)
{
    pccl_frame frame;
    pccl_op_inbound inbound;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_EAGER;
    frame.segment = segment;
    frame.payload_bytes = bytes;
    const char *broken_rule = pccl_op_accept(source, &frame, &inbound);
    if (broken_rule != NULL)
        return broken_rule;
    if (inbound.store != NULL)
        memcpy(inbound.store, payload, bytes);
    else
        pccl_op_reduce(source->op, &inbound, 0, payload, inbound.range.count, NULL);
    op_note_arrived(core, source->op, &inbound);
    return NULL;
}

/* Eager payload that was kept for the op goes where it would have gone at once, segment by segment. */
static void op_take_kept(pccl_core *core, pccl_op_peer *source, pccl_announcement *kept)
{
    source->is_payload_kept = 0;
    const char *broken_rule = pccl_op_check_eager(source, kept->payload_bytes);
    uint32_t taken_bytes = 0;
    for (uint32_t i = 0; broken_rule == NULL && taken_bytes < kept->payload_bytes && !source->op->is_stopped; i++) {
        uint32_t bytes = pccl_op_first_bytes(source, i);
        broken_rule = op_take_first(core, source, i, kept->payload + taken_bytes, bytes);
        taken_bytes += bytes;
    }
    if (broken_rule != NULL)
        pccl_link_fail(kept->link, 0, "protocol error: %s", broken_rule);
    else
        pccl_announcements_drop_payload(&core->announcements, kept);
}

/* Puts an announcement of the op on its way where it is due. */
static void peer_announce(pccl_core *core, pccl_op_peer *peer)
{
    uint32_t several_bytes_max = 0;
    if (!peer->link->is_local)
        several_bytes_max = pccl_min_u32(pccl_min_u32(core->eager_bytes_max, EAGER_SEVERAL_BYTES_MAX),
                                         EAGER_AHEAD_BYTES_MAX / peer->op->peers_count);
    peer->eager_bytes = pccl_op_eager_bytes(peer, core->eager_bytes_max, several_bytes_max);
    if (peer->op->is_stopped)
        return;
    if (peer->eager_bytes > 0 && pccl_link_reserve_eager(peer->link, peer->eager_bytes))
        peer->announcement = PCCL_ANNOUNCE_EAGER;
    else if (peer->is_source)
        peer->announcement = PCCL_ANNOUNCE_READY;
    else
        return;
    pccl_list_append(&peer->link->ready_ops, &peer->in_ready);
    pccl_link_note_pending(peer->link);
}

static void op_note_mismatch_kept(pccl_core *core, pccl_op *op, pccl_announcement *kept)
{
    pccl_op_shape theirs = kept->shape;
    const pccl_link *link = kept->link;
    kept->is_ready = 0;
    pccl_announcements_drop_payload(&core->announcements, kept);
    op_note_mismatch(core, op, link, &theirs);
}

/* Takes up what the peer has announced before. */
static void peer_meet(pccl_core *core, pccl_op_peer *peer)
{
    pccl_op *op = peer->op;
    if (peer->link == NULL || peer->link->is_failed)
        return;
    pccl_announcement *kept =
        pccl_announcements_find(&core->announcements, peer->link, &op->request.key);
    if (kept == NULL)
        return;
    if (op->is_stopped) {
        op_contradict(op, peer->link, &kept->shape);
        kept->is_ready = 0;
        pccl_announcements_drop_payload(&core->announcements, kept);
        return;
    }
    if (!pccl_op_shape_equal(&kept->shape, &op->request.shape)) {
        op_note_mismatch_kept(core, op, kept);
        return;
    }
    int is_payload_here = peer->is_source && kept->payload != NULL && kept->conn == NULL;
    peer->is_payload_kept = peer->is_source && kept->payload != NULL;
    if (peer->is_target && kept->is_ready) {
        pccl_announcements_drop_ready(&core->announcements, kept); /* which may be the end of it */
        op_note_heard(core, peer);
    }
    if (is_payload_here)
        op_take_kept(core, peer, kept);
}

/* Ranks that it exchanges no frames with may have announced another op by its name. Later they are heard anyway. */
static void op_meet_others(pccl_core *core, pccl_op *op)
{
    for (uint32_t i = 0; op->agreement != NULL && i < op->agreement->count && !op->is_stopped; i++) {
        pccl_link *link = op->agreement->parties[i].link;
        if (link == NULL || link->is_failed || link->announced_count == 0)
            continue;
        pccl_announcement *kept = pccl_announcements_find(&core->announcements, link, &op->request.key);
        if (kept == NULL || pccl_op_shape_equal(&kept->shape, &op->request.shape))
            continue;
        op_note_mismatch_kept(core, op, kept);
    }
}

/* Where the op uses the link: announces the op there, and finds what was announced. A mismatch with one peer
 * must not keep the others from hearing of the op. */
static void op_attach(pccl_core *core, pccl_op *op, pccl_link *link)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link_id == link->id && !link->is_failed) {
            op->peers[i].link = link;
            peer_announce(core, &op->peers[i]);
        }
    if (op->agreement != NULL)
        pccl_agreement_attach(op->agreement, link);
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link == link)
            peer_meet(core, &op->peers[i]);
}

static void op_attach_all(pccl_core *core, pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_link *link = link_find(core, op->peers[i].link_id);
        if (link == NULL || link->is_failed)
            continue;
        op->peers[i].link = link;
        peer_announce(core, &op->peers[i]);
    }
    for (uint32_t i = 0; op->agreement != NULL && i < op->agreement->count; i++) {
        pccl_link *link = link_find(core, op->agreement->parties[i].link_id);
        if (link != NULL)
            pccl_agreement_attach(op->agreement, link);
    }
    for (uint32_t i = 0; i < op->peers_count; i++)
        peer_meet(core, &op->peers[i]);
    op_meet_others(core, op);
}

/* Groups */

static pccl_group *group_find(const pccl_core *core, uint32_t number)
{
    pccl_table_node *node = pccl_table_first(&core->groups, pccl_hash_u64(0, number));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_group *group = PCCL_CONTAINER_OF(node, pccl_group, by_number);
        if (group->number == number)
            return group;
    }
    return NULL;
}

static pccl_group *group_find_or_add(pccl_core *core, uint32_t number, pccl_group *spare)
{
    pccl_group *group = group_find(core, number);
    if (group != NULL) {
        free(spare);
        return group;
    }
    spare->number = number;
    pccl_table_insert(&core->groups, &spare->by_number, pccl_hash_u64(0, number));
    return spare;
}

static void group_forget_announcements(pccl_core *core, const pccl_group *group, uint64_t epoch)
{
    for (pccl_list *node = core->links.next; node != &core->links; node = node->next)
        pccl_announcements_forget_epochs(
            &core->announcements, PCCL_CONTAINER_OF(node, pccl_link, in_links), group->number, epoch);
}

static int group_has_frozen(const pccl_group *group, uint64_t epoch)
{
    return group->is_frozen && epoch <= group->frozen_epoch;
}

/* Commands */

void pccl_core_link_add(pccl_core *core, pccl_conn *conn, pccl_link *spare)
{
    pccl_link *link = link_find(core, spare->id);
    if (link == NULL) {
        link = spare;
        link->host = &core->host;
        link->is_local = conn->is_local;
        pccl_table_insert(&core->links_by_id, &link->by_id, pccl_hash_u64(0, link->id));
        pccl_list_append(&core->links, &link->in_links);
        for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next)
            op_attach(core, PCCL_CONTAINER_OF(node, pccl_op, in_ops), link);
    } else {
        pccl_link_destroy(spare);
    }
    if (link->is_failed) {
        pccl_fd_registry_close(core->fds, conn->poll.fd);
        pccl_conn_destroy(conn);
        pccl_event_queue_release(core->events, PCCL_EVENTS_PER_CONN);
        return;
    }
    if (pccl_poller_add(core->host.poller, &conn->poll, conn->poll.fd, PCCL_POLL_IN) != 0) {
        int error = errno;
        pccl_fd_registry_close(core->fds, conn->poll.fd);
        pccl_conn_destroy(conn);
        link->conns_count++;
        link->events_promised += PCCL_EVENTS_PER_CONN;
        pccl_link_fail(
            link, error, "connection %u: cannot be watched: %s", link->conns_added + 1, strerror(error));
        return;
    }
    __atomic_fetch_add(&core->connections, 1, __ATOMIC_RELAXED);
    pccl_link_adopt(link, conn);
    link->events_promised += PCCL_EVENTS_PER_CONN;
    link->limited_ticks = 0;
    link->has_asked = 0;
    pccl_link_note_pending(link);
}

void pccl_core_link_close(pccl_core *core, uint64_t id)
{
    pccl_link *link = link_find(core, id);
    if (link != NULL)
        link_remove(core, link);
}

void pccl_core_link_count(pccl_core *core, uint64_t id)
{
    const pccl_link *link = link_find(core, id);
    if (link == NULL) {
        pccl_event_queue_release(core->events, 1);
        return;
    }
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_LINK_COUNTED;
    event.id = id;
    event.tx_bytes = link->tx_payload_bytes;
    event.rx_bytes = link->rx_payload_bytes;
    event.full_ms = link->full_ms;
    event.full_bytes = link->full_bytes;
    pccl_event_queue_post(core->events, &event);
}

void pccl_core_submit(pccl_core *core, pccl_op *op, pccl_group *spare)
{
    const pccl_op_request *request = &op->request;
    pccl_list_append(&core->ops, &op->in_ops);
    pccl_table_insert(&core->ops_by_id, &op->by_id, pccl_hash_u64(0, request->op));
    pccl_table_insert(&core->ops_by_key, &op->by_key, pccl_op_key_hash(&request->key));
    __atomic_fetch_add(&core->ops_open, 1, __ATOMIC_RELAXED);

    pccl_group *group = group_find_or_add(core, request->key.group, spare);
    if (request->key.epoch > group->newest_epoch) {
        group->newest_epoch = request->key.epoch;
        group_forget_announcements(core, group, request->key.epoch - 1);
    }
    if (group_has_frozen(group, request->key.epoch))
        pccl_op_stop(op);
    if (request->shape.world_size == 1 && !op->is_stopped) {
        pccl_op_run_alone(op);
        op_note_done(core, op);
    }
    op_attach_all(core, op);
}

void pccl_core_freeze(pccl_core *core, uint32_t number, uint64_t epoch, pccl_group *spare)
{
    pccl_group *group = group_find_or_add(core, number, spare);
    if (!group_has_frozen(group, epoch)) {
        group->is_frozen = 1;
        group->frozen_epoch = epoch;
        group_forget_announcements(core, group, epoch);
    }
    for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        if (op->request.key.group == number && op->request.key.epoch <= epoch) {
            op_silence(core, op);
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
        for (pccl_list *node = core->links.next; node != &core->links; node = node->next)
            pccl_announcements_forget_op(
                &core->announcements, PCCL_CONTAINER_OF(node, pccl_link, in_links), &last);
        if (last.sequence == 0)
            break;
    }
}

void pccl_core_freeze_op(pccl_core *core, uint64_t id)
{
    pccl_op *op = op_find_by_id(core, id);
    if (op == NULL) {
        pccl_event_queue_release(core->events, PCCL_EVENTS_PER_FREEZE);
        return;
    }
    op_silence(core, op);
    pccl_event event = op_event(op, PCCL_EVENT_OP_FROZEN);
    pccl_event_queue_post(core->events, &event);
}

/* A link between two ranks of an op of two is visited twice, for its source and its target: what has been moved lies in
 * neither of the old buffers any more, which the new ones do not overlap. */
static void op_detach(pccl_core *core, pccl_op *op, void *send, void *recv)
{
    int can_be_done = op->is_done || !op->is_stopped;
    if (can_be_done && (send != NULL || recv != NULL)) {
        pccl_op_move move = pccl_op_move_to(op, send, recv);
        op_visit_conns(op, &move);
        return;
    }
    op_halt(core, op);
    op_visit_conns(op, NULL);
    pccl_op_drop_buffers(op);
}

void pccl_core_detach(pccl_core *core, uint64_t id, void *send, void *recv)
{
    pccl_op *op = op_find_by_id(core, id);
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_OP_DETACHED;
    event.id = id;
    event.system_error = ENOENT;
    if (op != NULL) {
        op_detach(core, op, send, recv);
        event.group = op->request.key.group;
        event.system_error = op->request.send == NULL && op->request.recv == NULL ? ECANCELED : 0;
    }
    pccl_event_queue_post(core->events, &event);
}

static void op_end(pccl_core *core, pccl_op *op, int verdict)
{
    op_let_go(core, op);
    if (op->agreement != NULL)
        pccl_agreement_end(op->agreement);
    if (verdict == PCCL_ABORT || !op->is_done)
        pccl_op_restore(op);
    pccl_event event = op_event(op, PCCL_EVENT_OP_ENDED);
    event.system_error = verdict != PCCL_ABORT && !op->is_done ? EPROTO : 0;
    pccl_table_remove(&core->ops_by_id, &op->by_id);
    pccl_table_remove(&core->ops_by_key, &op->by_key);
    pccl_list_remove(&op->in_ops);
    pccl_list_remove(&op->in_ran);
    PCCL_ASSERT(op->call == NULL);
    PCCL_ASSERT(op->events_promised > 0);
    unsigned unused_promises = op->events_promised;
    pccl_op_destroy(op);
    __atomic_fetch_sub(&core->ops_open, 1, __ATOMIC_RELAXED);
    if (verdict != PCCL_COMMIT_BY_ALL) {
        unused_promises--;
        pccl_event_queue_post(core->events, &event);
    }
    pccl_event_queue_release(core->events, unused_promises);
}

void pccl_core_end(pccl_core *core, uint64_t id, int verdict)
{
    pccl_op *op = op_find_by_id(core, id);
    if (op != NULL)
        op_end(core, op, verdict);
}

/* Frames */

static void core_discard(pccl_conn *conn, const pccl_frame *frame)
{
    if (frame->payload_bytes > 0)
        pccl_conn_expect_nothing_of_use(conn, frame->payload_bytes);
}

/* Of an op that is not open here. */
static const char *core_on_early_announcement(pccl_core *core, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_group *group = group_find(core, frame->key.group);
    uint64_t epoch = frame->key.epoch;
    if (group != NULL && (group_has_frozen(group, epoch) || epoch < group->newest_epoch)) {
        core_discard(conn, frame);
        return NULL;
    }
    return pccl_announcements_keep(&core->announcements, conn, frame);
}

/* Of an op that is open here. One segment goes where it belongs as it comes; several are kept until all are here. */
static const char *core_on_eager(pccl_core *core, pccl_conn *conn, pccl_op_peer *source, const pccl_frame *frame)
{
    uint32_t first_bytes = pccl_op_first_bytes(source, 0);
    if (frame->payload_bytes <= first_bytes || pccl_op_first_bytes(source, 1) == 0) {
        pccl_op_inbound inbound;
        const char *broken_rule = pccl_op_accept(source, frame, &inbound);
        if (broken_rule == NULL)
            pccl_conn_expect_segment(conn, source->op, &inbound);
        return broken_rule;
    }
    const char *broken_rule = pccl_op_check_eager(source, frame->payload_bytes);
    if (broken_rule == NULL)
        broken_rule = pccl_announcements_keep(&core->announcements, conn, frame);
    if (broken_rule != NULL)
        return broken_rule;
    source->is_payload_kept = 1;
    pccl_announcement *kept = pccl_announcements_find(&core->announcements, conn->link, &frame->key);
    pccl_announcements_drop_ready(&core->announcements, kept);
    return NULL;
}

/* READY comes from a target of the op, EAGER from a source, which with the direct algorithm is a target too. */
static const char *core_on_announcement(pccl_core *core, pccl_conn *conn, const pccl_frame *frame)
{
    int is_eager = frame->type == PCCL_FRAME_EAGER;
    const char *broken_rule = is_eager ? pccl_link_on_eager(conn->link, frame->payload_bytes) : NULL;
    if (broken_rule != NULL)
        return broken_rule;
    conn->rx_eager_bytes = is_eager ? frame->payload_bytes : 0;
    pccl_op *op;
    pccl_op_peer *peer = op_find_peer(core, &frame->key, conn->link, is_eager, &op);
    if (peer != NULL)
        op = peer->op;
    if (op == NULL)
        return core_on_early_announcement(core, conn, frame);
    if (op->is_stopped) {
        op_contradict(op, conn->link, &frame->shape);
        core_discard(conn, frame);
        return NULL;
    }
    if (!pccl_op_shape_equal(&op->request.shape, &frame->shape)) {
        op_note_mismatch(core, op, conn->link, &frame->shape);
        core_discard(conn, frame);
        return NULL;
    }
    if (peer == NULL)
        return is_eager ? "a segment from the wrong peer" : "an op announced by the wrong peer";
    if (peer->is_target && peer->is_heard)
        return "the same op announced twice";
    if (is_eager) {
        broken_rule = core_on_eager(core, conn, peer, frame);
        if (broken_rule != NULL)
            return broken_rule;
    }
    if (peer->is_target)
        op_note_heard(core, peer);
    return NULL;
}

static const char *core_on_segment(pccl_core *core, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_op *elsewhere;
    pccl_op_inbound inbound;
    pccl_op_peer *source = op_find_peer(core, &frame->key, conn->link, 1, &elsewhere);
    if (source == NULL && elsewhere != NULL)
        return "a segment from the wrong peer";
    if (source == NULL || source->op->is_stopped) {
        core_discard(conn, frame);
        return NULL;
    }
    const char *broken_rule = pccl_op_accept(source, frame, &inbound);
    if (broken_rule != NULL)
        return broken_rule;
    if (frame->payload_bytes > 0)
        pccl_conn_expect_segment(conn, source->op, &inbound);
    else
        op_note_arrived(core, source->op, &inbound);
    return NULL;
}

static const char *core_on_done(pccl_conn_host *host, pccl_conn *conn, const pccl_op_key *key)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    pccl_table_node *node = pccl_table_first(&core->ops_by_key, pccl_op_key_hash(key));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_key);
        if (op->agreement == NULL || !pccl_op_key_equal(&op->request.key, key))
            continue;
        pccl_party *party = pccl_agreement_find(op->agreement, conn->link);
        if (party == NULL)
            continue;
        if (op->is_stopped)
            return NULL;
        if (party->is_heard)
            return "the same op done twice";
        pccl_agreement_hear(party);
        op_look_if_agreed(core, op);
        return NULL;
    }
    return NULL; /* it has ended here */
}

static const char *core_on_header(pccl_conn_host *host, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    switch (frame->type) {
    case PCCL_FRAME_READY:
    case PCCL_FRAME_EAGER:
        return core_on_announcement(core, conn, frame);
    case PCCL_FRAME_SEGMENT:
        return core_on_segment(core, conn, frame);
    case PCCL_FRAME_CREDIT:
        return pccl_link_on_credit(conn->link, frame->eager_bytes);
    case PCCL_FRAME_LOST:
        return pccl_link_on_lost(conn, frame);
    case PCCL_FRAME_DONE:
    case PCCL_FRAME_HELLO:
    case PCCL_FRAME_ACK:
        break;
    }
    return "unknown frame type";
}

static void core_on_arrived(pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound)
{
    op_note_arrived(PCCL_CONTAINER_OF(host, pccl_core, host), op, inbound);
}

static void core_on_sent(pccl_conn_host *host, pccl_op *op)
{
    if (!op->is_stopped)
        op_note_done(PCCL_CONTAINER_OF(host, pccl_core, host), op);
}

static void core_on_kept(pccl_conn_host *host, pccl_announcement *kept)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    pccl_op *elsewhere;
    pccl_op_peer *source = op_find_peer(core, &kept->key, kept->link, 1, &elsewhere);
    kept->conn = NULL;
    if (source != NULL && source->is_payload_kept)
        op_take_kept(core, source, kept);
}

static void peer_retract_eager(pccl_op_peer *source)
{
    if (source->is_target && source->is_heard)
        pccl_op_unheard(source);
}

static void core_on_retract(pccl_conn_host *host, pccl_conn *conn)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    if (conn->rx_op != NULL) {
        pccl_op_peer *source = pccl_op_find_source(conn->rx_op, conn->link->id);
        pccl_op_retract(source, &conn->rx_inbound);
        if (conn->rx_is_eager)
            peer_retract_eager(source);
    } else if (conn->rx_kept != NULL) {
        pccl_op *elsewhere;
        pccl_op_peer *source = op_find_peer(core, &conn->rx_kept->key, conn->link, 1, &elsewhere);
        if (source != NULL && source->is_payload_kept) {
            source->is_payload_kept = 0;
            peer_retract_eager(source);
        }
        pccl_announcements_retract(&core->announcements, conn->rx_kept);
    }
    if (conn->rx_eager_bytes > 0)
        pccl_link_retract_eager(conn->link, conn->rx_eager_bytes);
}

/* The loop's two halves */

static int core_send(pccl_core *core)
{
    if (core->host.fault.is_set)
        return 0;
    pccl_list *last = core->host.pending_links.previous;
    int is_more = 0;
    while (!pccl_list_is_empty(&core->host.pending_links)) {
        pccl_list *node = core->host.pending_links.next;
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_pending);
        pccl_list_remove(node);
        if (pccl_link_send(link, SEND_BYTES_MAX)) {
            pccl_link_note_pending(link);
            is_more = 1;
        }
        if (node == last)
            break;
    }
    pccl_uplink_send(&core->host.uplink, &core->links);
    return is_more;
}

const pccl_host_fault *pccl_core_fault(const pccl_core *core)
{
    return core->host.fault.is_set ? &core->host.fault : NULL;
}

void pccl_core_on_poll(pccl_core *core, const pccl_poll_event *event)
{
    pccl_conn *conn = event->entry->owner;
    pccl_link *link = conn->link;
    if (conn->is_lost || link->is_failed || core->host.fault.is_set)
        return;
    if (event->ready & PCCL_POLL_OUT && pccl_conn_flush(conn))
        pccl_link_offer(conn);
    if (event->ready & ~conn->starved & PCCL_POLL_IN && !conn->is_lost)
        pccl_conn_receive(conn);
    core_send(core);
    if (!conn->is_lost && !link->is_failed && (pccl_conn_is_drained(conn) || conn->starved != 0))
        pccl_conn_watch(conn);
}

int pccl_core_settle(pccl_core *core)
{
    int is_more = core_send(core);
    while (!pccl_list_is_empty(&core->ran_ops))
        op_end(core, PCCL_CONTAINER_OF(core->ran_ops.next, pccl_op, in_ran), PCCL_COMMIT_BY_ALL);
    pccl_list *next;
    for (pccl_list *node = core->host.lost_conns.next; node != &core->host.lost_conns; node = next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_lost);
        next = node->next;
        if (!conn->link->is_failed)
            conn_bury(core, conn);
    }
    while (!pccl_list_is_empty(&core->host.failed_links))
        link_bury(core, PCCL_CONTAINER_OF(core->host.failed_links.next, pccl_link, in_failed));
    return is_more;
}

static int timeout_to(int64_t at_ms, int64_t now_ms) { return at_ms <= now_ms ? 0 : (int)(at_ms - now_ms); }

/* -1: nothing is due. */
static int core_next_ms(pccl_core *core, int64_t now_ms)
{
    int is_waiting = pccl_uplink_is_waiting(&core->host.uplink);
    if (!core->host.wants_tick)
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
    if (pccl_list_is_empty(&core->host.starved_conns))
        return timeout_ms;
    int retry_ms = timeout_to(pccl_host_retry_ms(&core->host), now_ms);
    return timeout_ms < 0 || retry_ms < timeout_ms ? retry_ms : timeout_ms;
}

void pccl_core_set_link_timeout(pccl_core *core, uint32_t timeout_ms)
{
    __atomic_store_n(&core->link_timeout_ms, timeout_ms, __ATOMIC_RELAXED);
}

void pccl_core_tick(pccl_core *core, int64_t now_ms)
{
    pccl_host_retry(&core->host, now_ms);
    if (core->tick_at_ms < 0 || now_ms < core->tick_at_ms)
        return;
    int has_more = 0;
    pccl_link *full = NULL;
    unsigned full_count = 0;
    uint32_t timeout_ms = __atomic_load_n(&core->link_timeout_ms, __ATOMIC_RELAXED);
    /* Who was stopped meanwhile cannot tell what got through. */
    int was_away = now_ms - core->ticked_ms > (int64_t)pccl_max_size(timeout_ms / 2, 5 * TICK_MS);
    for (pccl_list *node = core->links.next; node != &core->links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (link->is_failed)
            continue;
        has_more |= pccl_link_tick(link, now_ms, core->stall_ms);
        if (pccl_link_look(link, now_ms)) {
            pccl_event event;
            memset(&event, 0, sizeof event);
            event.kind = PCCL_EVENT_LINK_LIMITED;
            event.id = event.link = link->id;
            link_post(core, link, &event);
        }
        if (timeout_ms > 0)
            has_more |= pccl_link_watch(link, now_ms, timeout_ms, was_away);
        if (link->is_full) {
            full = link;
            full_count++;
        }
    }
    pccl_uplink_tick(&core->host.uplink, &core->links);
    /* Several share what they have, an uplink as a rule, and none shows what it could carry. */
    if (full_count > 1 || now_ms - core->ticked_ms > 3 * TICK_MS)
        full = NULL;
    for (pccl_list *node = core->links.next; node != &core->links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        pccl_link_count_full(link, link == full, core->ticked_ms);
    }
    core->ticked_ms = now_ms;
    core->host.wants_tick = (uint8_t)has_more;
    core->tick_at_ms = -1;
}

void pccl_core_destroy(pccl_core *core)
{
    while (!pccl_list_is_empty(&core->ops))
        op_end(core, PCCL_CONTAINER_OF(core->ops.next, pccl_op, in_ops), 0);
    while (!pccl_list_is_empty(&core->links))
        link_remove(core, PCCL_CONTAINER_OF(core->links.next, pccl_link, in_links));
    for (size_t i = 0; i <= core->groups.mask; i++) {
        pccl_table_node *next;
        for (pccl_table_node *node = core->groups.buckets[i]; node != NULL; node = next) {
            next = node->next;
            free(PCCL_CONTAINER_OF(node, pccl_group, by_number));
        }
    }
    pccl_announcements_free(&core->announcements);
    pccl_table_free(&core->groups);
    pccl_table_free(&core->links_by_id);
    pccl_table_free(&core->ops_by_id);
    pccl_table_free(&core->ops_by_key);
    free(core->host.staging);
    free(core);
}
