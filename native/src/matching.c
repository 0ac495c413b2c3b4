#include "matching.h"

#include "completion.h"
#include "op_exchange.h"
#include "unexpected.h"
#include "fast_path.h"

#include <string.h>

enum {
    EAGER_AHEAD_BYTES_MAX = 768 << 10, /* to all peers of an op: what an uplink of 250 Mbit/s carries in 25 ms */
    EAGER_SEVERAL_BYTES_MAX = 256 << 10 /* to one of them */
};

static void peer_activate(pccl_op_peer *peer)
{
    if (peer->op->is_stopped || !peer->is_heard || peer->link == NULL || peer->link->is_failed)
        return;
    if (peer->announcement == PCCL_ANNOUNCE_EAGER) /* its segment has to be the first */
        return;
    if (!pccl_op_has_sendable(peer) || pccl_list_is_member(&peer->in_active))
        return;
    pccl_list_append(&peer->link->active_ops, &peer->in_active);
    pccl_link_note_pending(peer->link);
}

int pccl_match_is_as_expected(const pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs)
{
    pccl_op_shape expected = pccl_op_shape_from(op, pccl_op_rank_behind(op, link->id));
    return pccl_op_shape_equal(&expected, theirs);
}

/* A ring announces ops to their sources only; a target that describes the op in another way has to hear of
 * that too. */
void pccl_match_contradict(pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs)
{
    pccl_op_peer *target = pccl_op_find_target(op, link->id);
    if (!op->is_mismatched || pccl_match_is_as_expected(op, link, theirs))
        return;
    if (target == NULL || target->is_contradicted || target->link == NULL || pccl_op_find_source(op, link->id) != NULL)
        return;
    PCCL_ASSERT(target->announcement == PCCL_ANNOUNCE_NOTHING);
    target->is_contradicted = 1;
    target->announcement = PCCL_ANNOUNCE_READY;
    pccl_list_append(&target->link->ready_ops, &target->in_ready);
    pccl_link_note_pending(target->link);
}

void pccl_match_note_mismatch_of(
    pccl_open_ops *ops, pccl_op *op, const pccl_link *link, uint32_t rank, const pccl_op_shape *theirs)
{
    PCCL_ASSERT(!op->is_stopped);
    pccl_event event = pccl_op_event(op, PCCL_EVENT_OP_MISMATCH);
    event.link = link->id;
    event.sequence = rank == pccl_op_rank_behind(op, link->id) ? op->request.rank : rank;
    event.mine = pccl_op_shape_from(op, rank);
    event.theirs = *theirs;
    if (op->fast_path != NULL)
        pccl_fast_path_hand_over(op->fast_path, op);
    pccl_open_ops_halt(ops, op);
    op->is_mismatched = 1;
    pccl_match_contradict(op, link, theirs);
    pccl_open_ops_post(ops, op, &event);
}

void pccl_match_note_mismatch(pccl_open_ops *ops, pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs)
{
    pccl_match_note_mismatch_of(ops, op, link, pccl_op_rank_behind(op, link->id), theirs);
}

static void op_note_awaited(const pccl_op *op)
{
    if (op->record != NULL)
        pccl_record_awaits(op->record, pccl_op_awaits(op, op->record->first_rx_ns != 0));
}

const char *pccl_match_note_passed(pccl_op_peer *target, const pccl_frame *frame)
{
    const char *broken_rule = pccl_relay_on_report(target, frame);
    if (broken_rule == NULL)
        peer_activate(target);
    return broken_rule;
}

/* A target has said that it has submitted the same op. An op without elements is done by that, so that it is
 * checked like any other. */
void pccl_match_note_heard(pccl_open_ops *ops, pccl_op_peer *target)
{
    pccl_op_heard(target);
    pccl_record_heard(target->op->record, ops->recorder.now_ns, target->rank);
    op_note_awaited(target->op);
    if (pccl_op_is_complete(target->op) && !target->op->is_done)
        pccl_open_ops_note_done(ops, target->op);
    peer_activate(target);
}

void pccl_match_note_arrived(pccl_open_ops *ops, pccl_op *op, const pccl_op_inbound *inbound)
{
    int has_more = pccl_op_arrived(op, inbound);
    int is_first = op->record != NULL && op->record->first_rx_ns == 0;
    pccl_record_received(op->record, ops->recorder.now_ns, inbound->from);
    if (is_first)
        op_note_awaited(op);
    if (pccl_op_is_complete(op) && !op->is_done)
        pccl_open_ops_note_done(ops, op);
    for (uint32_t i = 0; has_more && i < op->peers_count; i++)
        peer_activate(&op->peers[i]);
}

static const char *op_take_first(
    pccl_open_ops *ops, pccl_op_peer *source, uint32_t segment, const uint8_t *payload, uint32_t bytes)
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
    pccl_match_note_arrived(ops, source->op, &inbound);
    return NULL;
}

/* Eager payload that was buffered for the op goes where it would have gone at once, segment by segment. */
void pccl_match_take_buffered(pccl_open_ops *ops, pccl_op_peer *source, pccl_unexpected_op *buffered)
{
    source->is_payload_buffered = 0;
    const char *broken_rule = pccl_op_check_eager(source, buffered->payload_bytes);
    uint32_t taken_bytes = 0;
    for (uint32_t i = 0; broken_rule == NULL && taken_bytes < buffered->payload_bytes && !source->op->is_stopped; i++) {
        uint32_t bytes = pccl_op_first_bytes(source, i);
        broken_rule = op_take_first(ops, source, i, buffered->payload + taken_bytes, bytes);
        taken_bytes += bytes;
    }
    if (broken_rule != NULL)
        pccl_link_fail(buffered->link, 0, "protocol error: %s", broken_rule);
    else
        pccl_unexpected_drop_payload(&ops->unexpected, buffered);
}

/* Puts an announcement of the op on its way where it is due. */
static void peer_announce(pccl_open_ops *ops, pccl_op_peer *peer)
{
    uint32_t several_bytes_max = 0;
    if (!peer->link->is_local)
        several_bytes_max = pccl_min_u32(
            pccl_min_u32(ops->eager_bytes_max, EAGER_SEVERAL_BYTES_MAX), EAGER_AHEAD_BYTES_MAX / peer->op->peers_count);
    peer->eager_bytes = pccl_op_eager_bytes(peer, ops->eager_bytes_max, several_bytes_max);
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

static void op_note_mismatch_buffered(pccl_open_ops *ops, pccl_op *op, pccl_unexpected_op *buffered)
{
    pccl_op_shape theirs = buffered->shape;
    const pccl_link *link = buffered->link;
    buffered->is_ready = 0;
    pccl_unexpected_drop_payload(&ops->unexpected, buffered);
    pccl_match_note_mismatch(ops, op, link, &theirs);
}

/* Takes up what the peer has announced before the op was submitted here. */
static void peer_meet(pccl_open_ops *ops, pccl_op_peer *peer)
{
    pccl_op *op = peer->op;
    if (peer->link == NULL || peer->link->is_failed)
        return;
    pccl_unexpected_op *buffered = pccl_unexpected_find(&ops->unexpected, peer->link, &op->request.key);
    if (buffered == NULL)
        return;
    if (op->is_stopped) {
        pccl_match_contradict(op, peer->link, &buffered->shape);
        buffered->is_ready = 0;
        pccl_unexpected_drop_payload(&ops->unexpected, buffered);
        return;
    }
    if (!pccl_match_is_as_expected(op, peer->link, &buffered->shape)) {
        op_note_mismatch_buffered(ops, op, buffered);
        return;
    }
    int is_payload_here = peer->is_source && buffered->payload != NULL && buffered->conn == NULL;
    peer->is_payload_buffered = peer->is_source && buffered->payload != NULL;
    if (peer->is_target && buffered->is_ready) {
        pccl_unexpected_drop_ready(&ops->unexpected, buffered); /* which may be the end of it */
        pccl_match_note_heard(ops, peer);
    }
    if (is_payload_here)
        pccl_match_take_buffered(ops, peer, buffered);
}

/* Ranks that it exchanges no frames with may have announced another op by its name. Later they are heard anyway. */
static void op_meet_others(pccl_open_ops *ops, pccl_op *op)
{
    for (uint32_t i = 0; op->completion != NULL && i < op->completion->count && !op->is_stopped; i++) {
        pccl_link *link = op->completion->participants[i].link;
        if (link == NULL || link->is_failed || link->unexpected_count == 0)
            continue;
        pccl_unexpected_op *buffered = pccl_unexpected_find(&ops->unexpected, link, &op->request.key);
        if (buffered == NULL || pccl_match_is_as_expected(op, link, &buffered->shape))
            continue;
        op_note_mismatch_buffered(ops, op, buffered);
    }
}

/* Announces the op on the link, if it uses it, and finds what was announced there. A mismatch with one peer
 * must not keep the others from hearing of the op. */
void pccl_match_attach(pccl_open_ops *ops, pccl_op *op, pccl_link *link)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link_id == link->id && !link->is_failed) {
            op->peers[i].link = link;
            peer_announce(ops, &op->peers[i]);
        }
    if (op->completion != NULL)
        pccl_completion_attach(op->completion, link);
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link == link)
            peer_meet(ops, &op->peers[i]);
}

void pccl_match_attach_all(pccl_open_ops *ops, const pccl_links *links, pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_link *link = pccl_links_find(links, op->peers[i].link_id);
        if (link == NULL || link->is_failed)
            continue;
        op->peers[i].link = link;
        peer_announce(ops, &op->peers[i]);
    }
    for (uint32_t i = 0; op->completion != NULL && i < op->completion->count; i++) {
        pccl_link *link = pccl_links_find(links, op->completion->participants[i].link_id);
        if (link != NULL)
            pccl_completion_attach(op->completion, link);
    }
    for (uint32_t i = 0; i < op->peers_count; i++)
        peer_meet(ops, &op->peers[i]);
    op_meet_others(ops, op);
}
