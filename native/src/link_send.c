#include "link_send.h"

#include "completion.h"
#include "op_exchange.h"

#include <string.h>

static void link_add_credit(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_CREDIT;
    frame.eager_bytes = pccl_link_take_credit(link);
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
}

/* Sends the DONEs that wait, up to what a frame holds. */
static void link_add_dones(pccl_link *link, pccl_conn *conn)
{
    pccl_op_key keys[PCCL_DONE_KEYS_MAX];
    uint32_t room = pccl_conn_done_room(conn);
    uint32_t count = 0;
    while (count < room && !pccl_list_is_empty(&link->dones))
        keys[count++] = pccl_completion_take_done(link);
    pccl_conn_add_done(conn, keys, count);
}

static void link_add_announcement(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->ready_ops.next, pccl_op_peer, in_ready);
    pccl_list_remove(&peer->in_ready);
    int is_report = peer->announcement == PCCL_ANNOUNCE_PASSED;
    int is_eager = peer->announcement == PCCL_ANNOUNCE_EAGER;
    PCCL_ASSERT(peer->announcement != PCCL_ANNOUNCE_NOTHING);
    peer->announcement = PCCL_ANNOUNCE_NOTHING;
    if (is_eager) {
        uint32_t index;
        frame.has_payload_crc = conn->wire->is_authentic;
        const uint8_t *payload = pccl_op_take_eager(peer, &frame, &index);
        pccl_link_note_eager_sent(link, frame.payload_bytes);
        pccl_conn_add(conn, &frame, payload, peer->op, index);
        if (peer->is_heard && pccl_op_has_sendable(peer))
            pccl_list_append(&link->active_ops, &peer->in_active);
        return;
    }
    if (is_report) {
        pccl_relay_report(peer->op, &frame);
        pccl_conn_add(conn, &frame, NULL, peer->op, 0);
        return;
    }
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_READY;
    frame.key = peer->op->request.key;
    frame.shape = pccl_op_shape_to(peer->op, peer->rank);
    pccl_conn_add(conn, &frame, NULL, peer->op, 0);
}

/* Sends the next unacknowledged frame of a lost connection again, unless it is of no use any more. */
static void link_add_again(pccl_link *link, pccl_conn *conn)
{
    pccl_conn *lost = PCCL_CONTAINER_OF(link->resends.next, pccl_conn, in_resend);
    pccl_conn_unacked unacked = pccl_conn_take_unacked(lost);
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = (enum pccl_frame_type)unacked.type;
    frame.payload_bytes = unacked.payload_bytes;
    if (unacked.op != NULL) {
        frame.chunk = unacked.of.segment.chunk;
        frame.segment = unacked.of.segment.segment;
        frame.hop = unacked.of.segment.hop;
        frame.destination = unacked.of.segment.destination;
        frame.part_elements = unacked.of.segment.part_elements;
        frame.key = unacked.op->request.key;
        frame.shape = pccl_op_shape_to(unacked.op, pccl_op_rank_behind(unacked.op, link->id));
    }
    switch (frame.type) {
    case PCCL_FRAME_EAGER:
        if (unacked.op == NULL) {
            pccl_link_note_eager_lost(link, unacked.payload_bytes);
            break;
        }
        /* fall through */
    case PCCL_FRAME_READY:
    case PCCL_FRAME_SEGMENT:
        if (unacked.op != NULL)
            pccl_conn_add(conn, &frame, unacked.of.segment.payload, unacked.op, unacked.of.segment.index);
        break;
    case PCCL_FRAME_DONE: pccl_conn_add_done(conn, &unacked.of.key, 1); break;
    case PCCL_FRAME_CREDIT: link->eager.is_credit_due = 1; break;
    case PCCL_FRAME_PASSED:
        if (unacked.op != NULL) {
            pccl_relay_report(unacked.op, &frame);
            pccl_conn_add(conn, &frame, NULL, unacked.op, 0);
        }
        break;
    case PCCL_FRAME_LOST: /* on its way again already */ break;
    case PCCL_FRAME_HELLO:
    case PCCL_FRAME_ACK: PCCL_ASSERT(!"these have no record"); break;
    }
}

static void link_add_lost_frame(pccl_link *link, pccl_conn *conn)
{
    pccl_conn *lost = PCCL_CONTAINER_OF(link->lost_frames.next, pccl_conn, in_lost_frames);
    pccl_list_remove(&lost->in_lost_frames);
    pccl_conn_add_lost(conn, lost);
}

/* Something of the op has been sent on that passes through. */
static void op_report_passed(pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_op_peer *source = &op->peers[i];
        if (source->link == NULL || pccl_list_is_member(&source->in_ready) || !pccl_relay_has_to_report(source))
            continue;
        source->announcement = PCCL_ANNOUNCE_PASSED;
        pccl_list_append(&source->link->ready_ops, &source->in_ready);
        pccl_link_note_pending(source->link);
    }
}

static void link_add_segment(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    uint32_t index;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->active_ops.next, pccl_op_peer, in_active);
    pccl_list_remove(&peer->in_active);
    frame.has_payload_crc = conn->wire->is_authentic;
    const uint8_t *payload = pccl_op_take_sendable(peer, &frame, &index);
    pccl_conn_add(conn, &frame, payload, peer->op, index);
    op_report_passed(peer->op);
    if (link->has_turn) {
        conn->under_way_bytes += frame.payload_bytes;
        conn->unsent_bytes += frame.payload_bytes;
        link->under_way_bytes += frame.payload_bytes;
        pccl_pacer_note_sent(&link->host->egress.pacer, frame.payload_bytes);
    }
    if (pccl_op_has_sendable(peer))
        pccl_list_append(&link->active_ops, &peer->in_active);
}

/* Nonzero if the link's segments wait for turns. A wire that takes over has a pace of its own. */
static int link_is_limited(const pccl_link *link)
{
    return !link->is_failed && link->first_choice == NULL &&
           pccl_egress_is_limiting(&link->host->egress, link->is_local, link->round_trip_us);
}

static int link_may_send_segments(const pccl_link *link)
{
    if (pccl_list_is_empty(&link->active_ops))
        return 0;
    return link->has_turn ? pccl_pacer_allows(&link->host->egress.pacer) : !link_is_limited(link);
}

static int link_has_work(const pccl_link *link)
{
    return link->eager.is_credit_due || !pccl_list_is_empty(&link->lost_frames) ||
           !pccl_list_is_empty(&link->resends) || !pccl_list_is_empty(&link->dones) ||
           !pccl_list_is_empty(&link->ready_ops) || link_may_send_segments(link);
}

/* Fills a connection with segments. Several connections share what there is, since each has a window of its own. */
static void link_fill(pccl_link *link, pccl_conn *conn)
{
    enum { BATCH_BYTES_MAX = 256 << 10, BATCH_BYTES_MIN = 32 << 10 };
    unsigned carriers = link->first_choice != NULL ? 1 : link->live_count;
    size_t batch_bytes_max = pccl_max_size(BATCH_BYTES_MIN, BATCH_BYTES_MAX / carriers);
    while (link_has_work(link) && pccl_conn_has_room(conn, batch_bytes_max)) {
        if (!pccl_list_is_empty(&link->lost_frames))
            link_add_lost_frame(link, conn);
        else if (link->eager.is_credit_due)
            link_add_credit(link, conn);
        else if (!pccl_list_is_empty(&link->resends))
            link_add_again(link, conn);
        else if (!pccl_list_is_empty(&link->dones))
            link_add_dones(link, conn);
        else if (!pccl_list_is_empty(&link->ready_ops))
            link_add_announcement(link, conn);
        else
            link_add_segment(link, conn);
    }
}

static void link_flush(pccl_link *link, pccl_conn *conn)
{
    if (pccl_conn_flush(conn))
        pccl_conn_offer(conn);
    else if (!conn->is_lost && !link->is_failed)
        pccl_conn_watch(conn);
}

static void link_talk(pccl_link *link)
{
    pccl_conn *conn = PCCL_CONTAINER_OF(link->talk_conns.next, pccl_conn, in_talk);
    pccl_list_remove(&conn->in_talk);
    if (!pccl_conn_is_drained(conn) || (!conn->is_hello_due && !conn->is_ack_due))
        return;
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    if (conn->is_hello_due) {
        frame.type = PCCL_FRAME_HELLO;
        frame.connection = conn->number;
        conn->is_hello_due = 0;
    } else {
        frame.type = PCCL_FRAME_ACK;
        frame.received_bytes = conn->rx_bytes;
    }
    pccl_list_remove(&conn->in_free);
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
    link_flush(link, conn);
}

static int link_waits_for_turns(const pccl_link *link)
{
    return !link->is_failed && !pccl_list_is_empty(&link->active_ops) && !pccl_list_is_empty(&link->free_conns);
}

/* Returns the free connection that has least under way, leaving out those on which the system has not even sent what it
 * was given. */
static pccl_conn *link_next_conn(const pccl_link *link)
{
    enum { UNSENT_BYTES_MAX = 64 << 10 };
    pccl_conn *next = NULL;
    for (const pccl_list *node = link->free_conns.next; node != &link->free_conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_free);
        if (conn->unsent_bytes >= UNSENT_BYTES_MAX)
            continue;
        if (next == NULL || conn->under_way_bytes < next->under_way_bytes)
            next = conn;
    }
    return next;
}

enum pccl_link_turn pccl_link_turn(const pccl_link *link)
{
    if (!link_waits_for_turns(link))
        return PCCL_TURN_NEVER;
    return link_next_conn(link) != NULL ? PCCL_TURN_NOW : PCCL_TURN_LATER;
}

void pccl_link_take_turn(pccl_link *link)
{
    PCCL_ASSERT(pccl_link_turn(link) == PCCL_TURN_NOW);
    pccl_conn *conn = link_next_conn(link);
    pccl_list_remove(&conn->in_free);
    link->has_turn = 1;
    link_fill(link, conn);
    link->has_turn = 0;
    link_flush(link, conn);
}

int pccl_link_send(pccl_link *link, size_t bytes_max)
{
    while (!link->is_failed && !pccl_list_is_empty(&link->talk_conns))
        link_talk(link);
    size_t sent_bytes = 0;
    while (!link->is_failed && link_has_work(link) && !pccl_list_is_empty(&link->free_conns)) {
        if (sent_bytes >= bytes_max)
            return 1;
        pccl_conn *conn = PCCL_CONTAINER_OF(link->free_conns.next, pccl_conn, in_free);
        pccl_list_remove(&conn->in_free);
        link_fill(link, conn);
        sent_bytes += conn->tx_batch_bytes;
        link_flush(link, conn);
    }
    if (link_waits_for_turns(link) && link_is_limited(link) && !pccl_list_is_member(&link->in_waiting))
        pccl_list_append(&link->host->egress.waiting, &link->in_waiting);
    return 0;
}
