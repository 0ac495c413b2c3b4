#include "receiver.h"

#include "completion.h"
#include "unexpected.h"
#include "matching.h"

#include <string.h>

static void receiver_discard(pccl_conn *conn, const pccl_frame *frame)
{
    if (frame->payload_bytes > 0)
        pccl_conn_expect_nothing_of_use(conn, frame->payload_bytes);
}

/* The op is not open here. */
static const char *receiver_on_early_announcement(pccl_receiver *receiver, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_group *group = pccl_groups_find(receiver->groups, frame->key.group);
    uint64_t epoch = frame->key.epoch;
    int is_over = group != NULL && (pccl_group_has_frozen(group, epoch) || epoch < group->newest_epoch);
    if (is_over || pccl_unexpected_is_refused(&receiver->ops->unexpected, conn->link, &frame->key)) {
        receiver_discard(conn, frame);
        return NULL;
    }
    return pccl_unexpected_add(&receiver->ops->unexpected, conn, frame);
}

/* The op is open here. One segment goes where it belongs as it comes; several are buffered until all are
 * here. */
static const char *receiver_on_eager(
    pccl_receiver *receiver, pccl_conn *conn, pccl_op_peer *source, const pccl_frame *frame)
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
        broken_rule = pccl_unexpected_add(&receiver->ops->unexpected, conn, frame);
    if (broken_rule != NULL)
        return broken_rule;
    source->is_payload_buffered = 1;
    pccl_unexpected_op *buffered = pccl_unexpected_find(&receiver->ops->unexpected, conn->link, &frame->key);
    pccl_unexpected_drop_ready(&receiver->ops->unexpected, buffered);
    return NULL;
}

/* READY comes from a target of the op, EAGER from a source, which with the direct algorithm is a target too. */
static const char *receiver_on_announcement(pccl_receiver *receiver, pccl_conn *conn, const pccl_frame *frame)
{
    int is_eager = frame->type == PCCL_FRAME_EAGER;
    const char *broken_rule = is_eager ? pccl_link_on_eager(conn->link, frame->payload_bytes) : NULL;
    if (broken_rule != NULL)
        return broken_rule;
    conn->rx_eager_bytes = is_eager ? frame->payload_bytes : 0;
    pccl_op *op;
    pccl_op_peer *peer = pccl_open_ops_find_peer(receiver->ops, &frame->key, conn->link, is_eager, &op);
    if (peer != NULL)
        op = peer->op;
    if (op == NULL)
        return receiver_on_early_announcement(receiver, conn, frame);
    if (op->is_stopped) {
        pccl_match_contradict(op, conn->link, &frame->shape);
        receiver_discard(conn, frame);
        return NULL;
    }
    if (!pccl_match_is_as_expected(op, conn->link, &frame->shape)) {
        pccl_match_note_mismatch(receiver->ops, op, conn->link, &frame->shape);
        receiver_discard(conn, frame);
        return NULL;
    }
    if (peer == NULL)
        return is_eager ? "a segment from the wrong peer" : "an op announced by the wrong peer";
    if (peer->is_target && peer->is_heard)
        return "the same op announced twice";
    if (is_eager) {
        broken_rule = receiver_on_eager(receiver, conn, peer, frame);
        if (broken_rule != NULL)
            return broken_rule;
    }
    if (peer->is_target)
        pccl_match_note_heard(receiver->ops, peer);
    return NULL;
}

static const char *receiver_on_segment(pccl_receiver *receiver, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_op *elsewhere;
    pccl_op_inbound inbound;
    pccl_op_peer *source = pccl_open_ops_find_peer(receiver->ops, &frame->key, conn->link, 1, &elsewhere);
    if (source == NULL && elsewhere != NULL)
        return "a segment from the wrong peer";
    if (source == NULL || source->op->is_stopped) {
        receiver_discard(conn, frame);
        return NULL;
    }
    const char *broken_rule = pccl_op_accept(source, frame, &inbound);
    if (broken_rule == pccl_op_disagreement) {
        const pccl_op_relay *relay = &source->op->relay;
        pccl_op_shape theirs = relay->theirs;
        pccl_match_note_mismatch_of(receiver->ops, source->op, conn->link, relay->theirs_rank, &theirs);
        receiver_discard(conn, frame);
        return NULL;
    }
    if (broken_rule != NULL)
        return broken_rule;
    if (frame->payload_bytes > 0)
        pccl_conn_expect_segment(conn, source->op, &inbound);
    else
        pccl_match_note_arrived(receiver->ops, source->op, &inbound);
    return NULL;
}

static const char *receiver_on_passed(pccl_receiver *receiver, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_op *elsewhere;
    pccl_op_peer *target = pccl_open_ops_find_peer(receiver->ops, &frame->key, conn->link, 0, &elsewhere);
    if (target == NULL)
        return elsewhere != NULL ? "a report from the wrong peer" : NULL;
    return target->op->is_stopped ? NULL : pccl_match_note_passed(target, frame);
}

static const char *receiver_on_done(pccl_conn_host *host, pccl_conn *conn, const pccl_op_key *key)
{
    pccl_receiver *receiver = PCCL_CONTAINER_OF(host, pccl_receiver, host);
    pccl_table_node *node = pccl_table_first(&receiver->ops->by_key, pccl_op_key_hash(key));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_key);
        if (op->completion == NULL || !pccl_op_key_equal(&op->request.key, key))
            continue;
        pccl_participant *participant = pccl_completion_find(op->completion, conn->link);
        if (participant == NULL)
            continue;
        if (op->is_stopped && !op->is_done)
            return NULL;
        if (participant->is_heard)
            return "the same op done twice";
        pccl_completion_note_done(participant);
        pccl_open_ops_look_if_complete(receiver->ops, op);
        return NULL;
    }
    return NULL; /* it has ended here */
}

static const char *receiver_on_header(pccl_conn_host *host, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_receiver *receiver = PCCL_CONTAINER_OF(host, pccl_receiver, host);
    switch (frame->type) {
    case PCCL_FRAME_READY:
    case PCCL_FRAME_EAGER: return receiver_on_announcement(receiver, conn, frame);
    case PCCL_FRAME_SEGMENT: return receiver_on_segment(receiver, conn, frame);
    case PCCL_FRAME_CREDIT: return pccl_link_on_credit(conn->link, frame->eager_bytes);
    case PCCL_FRAME_LOST: return pccl_conn_on_lost(conn, frame);
    case PCCL_FRAME_PASSED: return receiver_on_passed(receiver, conn, frame);
    case PCCL_FRAME_DONE: /* comes to receiver_on_done, key by key */
    case PCCL_FRAME_HELLO:
    case PCCL_FRAME_ACK: break; /* stay with the connection */
    }
    return "unknown frame type";
}

static void receiver_on_arrived(pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound)
{
    pccl_match_note_arrived(PCCL_CONTAINER_OF(host, pccl_receiver, host)->ops, op, inbound);
}

static void receiver_on_sent(pccl_conn_host *host, pccl_op *op)
{
    if (!op->is_stopped)
        pccl_open_ops_note_done(PCCL_CONTAINER_OF(host, pccl_receiver, host)->ops, op);
}

static void receiver_on_buffered(pccl_conn_host *host, pccl_unexpected_op *buffered)
{
    pccl_receiver *receiver = PCCL_CONTAINER_OF(host, pccl_receiver, host);
    pccl_op *elsewhere;
    pccl_op_peer *source = pccl_open_ops_find_peer(receiver->ops, &buffered->key, buffered->link, 1, &elsewhere);
    buffered->conn = NULL;
    if (source != NULL && source->is_payload_buffered)
        pccl_match_take_buffered(receiver->ops, source, buffered);
}

static void peer_retract_eager(pccl_op_peer *source)
{
    if (!source->is_target || !source->is_heard)
        return;
    pccl_op_unheard(source);
    pccl_record_awaits(source->op->record, source->rank);
}

static void receiver_on_retract(pccl_conn_host *host, pccl_conn *conn)
{
    pccl_receiver *receiver = PCCL_CONTAINER_OF(host, pccl_receiver, host);
    if (conn->rx_op != NULL) {
        pccl_op_peer *source = pccl_op_find_source(conn->rx_op, conn->link->id);
        pccl_op_retract(source, &conn->rx_inbound);
        if (conn->rx_is_eager)
            peer_retract_eager(source);
    } else if (conn->rx_buffered != NULL) {
        pccl_op *elsewhere;
        pccl_op_peer *source =
            pccl_open_ops_find_peer(receiver->ops, &conn->rx_buffered->key, conn->link, 1, &elsewhere);
        if (source != NULL && source->is_payload_buffered) {
            source->is_payload_buffered = 0;
            peer_retract_eager(source);
        }
        pccl_unexpected_retract(&receiver->ops->unexpected, conn->rx_buffered);
    }
    if (conn->rx_eager_bytes > 0)
        pccl_link_retract_eager(conn->link, conn->rx_eager_bytes);
}

void pccl_receiver_init(pccl_receiver *receiver, pccl_open_ops *ops, const pccl_groups *groups)
{
    receiver->ops = ops;
    receiver->groups = groups;
    receiver->host.on_header = receiver_on_header;
    receiver->host.on_done = receiver_on_done;
    receiver->host.on_arrived = receiver_on_arrived;
    receiver->host.on_sent = receiver_on_sent;
    receiver->host.on_buffered = receiver_on_buffered;
    receiver->host.on_retract = receiver_on_retract;
}
