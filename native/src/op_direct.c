/* op_direct.c: shares to their owners, results back (plans.h). Every other rank is source and target;
 * peers are in the order in which they are served.
 *
 *     share in     the first: folded with the own share as it comes, if that is next, or straight into recv.
 *                  all others: stored in a waiting slot, and folded once the ones before them are. Not as
 *                  they come, for what recv has accumulated could not be told apart from half of a share
 *                  that has to come again (pccl_op_retract).
 *     final in     straight into recv
 *     out          shares go out of send, finals out of recv
 *
 * To each target first the shares of its chunk go out that the window has room for, which others wait for,
 * then the finals of the own chunk in the order in which they became final.
 *
 * recv accumulates, so the own share of an op in place is taken from `backup`.
 *
 * A reduce-scatter keeps what it owns; finals, where there are any, tell no more than that they are. A reduce sends
 * finals to the root, and to others as a reduce-scatter; a rank that is not the root finishes its chunk in `result`.
 *
 * Quantized, shares are encoded into the slots that later receive the finals. A share comes as a whole, into a
 * waiting slot; with two ranks into the slot of the own segment. There the result is encoded when all are
 * folded. */
#include "op_algorithm.h"

#include "crc32c.h"
#include "plans.h"
#include "op_originals.h"
#include "quant.h"

#include <stdlib.h>

enum direct_share_state {
    SHARE_IN = 1, /* accepted, perhaps still on its way */
    SHARE_WAITING = 2 /* all of it is in its slot */
};

static uint32_t direct_world(const pccl_op *op) { return op->request.shape.world_size; }

static uint32_t direct_owner(const pccl_op *op) { return op->request.rank; }

static uint32_t direct_own_segments(const pccl_op *op)
{
    return (uint32_t)pccl_tiling_chunk_segments(&op->tiling, op->request.rank);
}

/* Returns the number of a segment within the own chunk. */
static uint32_t direct_segment(const pccl_op *op, uint32_t index)
{
    return index - (uint32_t)pccl_tiling_index(&op->tiling, op->request.rank, 0);
}

static uint8_t *direct_share(pccl_op *op, uint32_t segment, uint32_t rank)
{
    return &op->direct.shares[(size_t)segment * direct_world(op) + rank];
}

static uint32_t direct_waiting_slots(const pccl_op *op)
{
    return pccl_direct_waiting_slots(direct_world(op), pccl_op_is_quantized(op));
}

static uint8_t *direct_waiting(const pccl_op *op, uint32_t segment, uint32_t rank)
{
    uint32_t slot = pccl_direct_waiting_slot(op->request.rank, rank, pccl_op_is_quantized(op));
    uint64_t in_window = segment % op->direct.window;
    return pccl_op_slot_at(op, in_window * direct_waiting_slots(op) + slot);
}

static int direct_open(pccl_op *op)
{
    pccl_op_direct *direct = &op->direct;
    uint32_t own = direct_own_segments(op);
    uint32_t world = direct_world(op);
    uint64_t slots = direct_waiting_slots(op) + (pccl_op_is_quantized(op) ? world : 0);
    direct->window = pccl_op_window(op, slots);
    direct->is_signalled = direct->window < pccl_tiling_chunk_segments(&op->tiling, 0);
    uint32_t wire_slots = pccl_op_is_quantized(op) ? direct->window : 0;
    int status = pccl_op_take_slots(op, wire_slots, (uint64_t)direct->window * direct_waiting_slots(op));
    if (status != 0 || own == 0)
        return status;
    if (own > SIZE_MAX / 2 / world)
        return PCCL_E_INVALID;
    direct->turns = malloc(own * sizeof *direct->turns);
    direct->finals = malloc(own * sizeof *direct->finals);
    direct->shares = calloc(own, world);
    if (direct->turns == NULL || direct->finals == NULL || direct->shares == NULL)
        return PCCL_E_MEMORY;
    for (uint32_t i = 0; i < own; i++)
        direct->turns[i] = pccl_direct_first_turn(op->request.rank);
    return 0;
}

static void direct_close(pccl_op *op)
{
    free(op->direct.turns);
    free(op->direct.finals);
    free(op->direct.shares);
}

static void direct_stop(pccl_op *op)
{
    op->direct.finals_count = 0;
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_op_peer *peer = &op->peers[i];
        peer->shares_taken = (uint32_t)pccl_tiling_chunk_segments(&op->tiling, peer->rank);
    }
}

static uint32_t direct_sends(const pccl_op *op, uint32_t chunk)
{
    if (chunk != op->request.rank)
        return 1;
    uint32_t count = 0;
    for (uint32_t i = 0; i < op->peers_count; i++)
        count += (uint32_t)pccl_op_gets_all(op, op->peers[i].rank);
    return count;
}

/* Nonzero if a rank is told what has become final elsewhere, be it without payload. */
static int direct_hears_finals(const pccl_op *op, uint32_t rank)
{
    return op->direct.is_signalled || pccl_op_gets_all(op, rank);
}

static int direct_has_share(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    uint32_t next = target->shares_taken;
    uint32_t window = op->direct.window;
    if (next == pccl_tiling_chunk_segments(&op->tiling, target->rank))
        return 0;
    return next < window || pccl_op_is_final(op, pccl_tiling_index(&op->tiling, target->rank, next - window));
}

static int direct_has_sendable(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    return direct_has_share(target) ||
           (target->finals_taken < op->direct.finals_count && direct_hears_finals(op, target->rank));
}

static uint32_t direct_first_chunk(const pccl_op_peer *target) { return target->rank; }

static uint32_t direct_first_at_once(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    int is_one_piece = op->tiling.slices == 1;
    if (pccl_op_is_quantized(op))
        is_one_piece = op->slot_bytes == pccl_op_payload_bytes(op, op->tiling.segment_elements);
    return is_one_piece ? op->direct.window : 0;
}

static void direct_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    *chunk = source->op->request.rank;
    *hop = source->rank;
}

static const uint8_t *direct_take_share(pccl_op *op, uint32_t index, pccl_range range, pccl_frame *frame)
{
    if (!pccl_op_is_quantized(op)) {
        pccl_op_save_for(frame, op, index, range);
        return pccl_op_send_at(op, range);
    }
    pccl_op_encode(op, index, range, pccl_op_send_at(op, range));
    pccl_op_save(op, index, range);
    return pccl_op_wire_at(op, index);
}

/* Checksummed for the first target only. */
static const uint8_t *direct_take_final(pccl_op *op, uint32_t index, pccl_range range, pccl_frame *frame)
{
    pccl_op_segment *segment = &op->segments[index];
    const uint8_t *payload = pccl_op_is_quantized(op) ? pccl_op_wire_at(op, index) : pccl_op_recv_at(op, range);
    if (frame->has_payload_crc)
        return payload;
    if ((segment->state & PCCL_SEGMENT_CHECKED) == 0)
        segment->crc = pccl_crc32c(0, payload, frame->payload_bytes);
    segment->state |= PCCL_SEGMENT_CHECKED;
    frame->payload_crc = segment->crc;
    frame->has_payload_crc = 1;
    return payload;
}

static const uint8_t *direct_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    int is_share = direct_has_share(target);
    if (is_share) {
        frame->chunk = target->rank;
        frame->segment = target->shares_taken++;
        frame->hop = op->request.rank;
    } else {
        PCCL_ASSERT(target->finals_taken < op->direct.finals_count);
        frame->chunk = op->request.rank;
        frame->segment = op->direct.finals[target->finals_taken++];
        frame->hop = direct_world(op);
    }
    *index = (uint32_t)pccl_tiling_index(&op->tiling, frame->chunk, frame->segment);
    if (!is_share && !pccl_op_gets_all(op, target->rank))
        return NULL;
    pccl_range range = pccl_tiling_range(&op->tiling, frame->chunk, frame->segment);
    frame->payload_bytes = pccl_op_payload_bytes(op, range.count);
    return is_share ? direct_take_share(op, *index, range, frame) : direct_take_final(op, *index, range, frame);
}

static int direct_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop)
{
    (void)chunk;
    return hop == direct_world(op) && !pccl_op_gets_all(op, op->request.rank);
}

static void direct_accept_share(pccl_op *op, pccl_op_inbound *inbound, uint32_t segment)
{
    uint32_t first = pccl_direct_first_turn(op->request.rank);
    inbound->is_waiting = inbound->from != first;
    if (inbound->is_waiting) {
        inbound->store = direct_waiting(op, segment, inbound->from);
        return;
    }
    PCCL_ASSERT(op->direct.turns[segment] == inbound->from);
    op->segments[inbound->index].crc = 0;
    op->segments[inbound->index].state &= (uint8_t)~PCCL_SEGMENT_CHECKED;
    if (pccl_op_is_quantized(op)) {
        int has_slot = direct_waiting_slots(op) > 0;
        inbound->store = has_slot ? direct_waiting(op, segment, first) : pccl_op_wire_at(op, inbound->index);
        return;
    }
    /* Nothing to be folded with yet? */
    int is_alone = inbound->from == first && op->request.rank > 1;
    if (is_alone)
        pccl_op_save(op, inbound->index, inbound->range);
    inbound->store = is_alone ? pccl_op_recv_at(op, inbound->range) : NULL;
}

static const char *direct_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    if (frame->chunk == op->request.rank ? frame->hop != source->rank
                                         : frame->hop != direct_world(op) || frame->chunk != source->rank)
        return "a hop that does not end here";
    if (frame->chunk == op->request.rank) {
        uint8_t *share = direct_share(op, frame->segment, source->rank);
        uint32_t window = op->direct.window;
        if (*share & SHARE_IN)
            return "the same segment twice";
        if (frame->segment >= window && op->direct.turns[frame->segment - window] != direct_world(op))
            return "a segment beyond the window";
        *share |= SHARE_IN;
        direct_accept_share(op, inbound, frame->segment);
        return NULL;
    }
    uint8_t *state = &op->segments[inbound->index].state;
    if (*state & PCCL_SEGMENT_FINAL_IN)
        return "the same segment twice";
    if ((*state & PCCL_SEGMENT_PARTIAL_SENT) == 0)
        return "a result before its parts";
    if (!direct_hears_finals(op, op->request.rank))
        return "a result that is not asked for";
    *state |= PCCL_SEGMENT_FINAL_IN;
    PCCL_ASSERT(op->backup == NULL || op->segments[inbound->index].saved == inbound->range.count);
    inbound->is_final = 1;
    if (pccl_op_is_quantized(op))
        inbound->store = pccl_op_wire_at(op, inbound->index);
    else if (!pccl_op_is_half(op))
        inbound->store = pccl_op_recv_at(op, inbound->range);
    return NULL;
}

/* Does what follows the share of `from` for some of its elements: folds the own share, if that comes next, and averages
 * after the last. */
static void direct_fold_own(pccl_op *op, uint32_t from, uint8_t *recv, const uint8_t *own, size_t elements)
{
    const pccl_op_shape *shape = &op->request.shape;
    if (from + 1 == direct_owner(op))
        pccl_kernel_reduce(shape->dtype, shape->reduce_op, recv, recv, own, elements);
    if (shape->reduce_op == PCCL_AVG && pccl_direct_next_turn(direct_owner(op), from) == shape->world_size)
        pccl_kernel_average(shape->dtype, recv, elements, shape->world_size);
}

/* The share with the first turn, as it comes: there is something to fold it with at once. */
static void direct_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements)
{
    const pccl_op_shape *shape = &op->request.shape;
    PCCL_ASSERT(inbound->from == pccl_direct_first_turn(direct_owner(op)));
    PCCL_ASSERT(direct_owner(op) == 0 || inbound->from + 1 == direct_owner(op));
    reduction->destination = pccl_op_recv_at(op, inbound->range) + first * op->element_bytes;
    reduction->is_payload_first = direct_owner(op) != 0;
    if (shape->world_size == 2) { /* that is all */
        if (reduction->payload_crc != NULL) {
            reduction->sum_crc = &op->segments[inbound->index].crc;
            op->segments[inbound->index].state |= PCCL_SEGMENT_CHECKED;
        }
        reduction->ranks = shape->reduce_op == PCCL_AVG ? shape->world_size : 0;
    }
    pccl_reduce(shape->dtype, shape->reduce_op, reduction, elements);
}

/* A whole share in its turn, not the first. */
static void direct_fold(pccl_op *op, uint32_t index, pccl_range range, uint32_t from, const uint8_t *payload)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint8_t *recv = pccl_op_recv_at(op, range);
    PCCL_ASSERT(from != pccl_direct_first_turn(direct_owner(op)));
    pccl_kernel_reduce(shape->dtype, shape->reduce_op, recv, recv, payload, range.count);
    direct_fold_own(op, from, recv, pccl_op_own_at(op, index, range), range.count);
}

/* A whole quantized share in its turn. */
static void direct_fold_quantized(pccl_op *op, uint32_t index, pccl_range range, uint32_t from, const uint8_t *payload)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint8_t *recv = pccl_op_recv_at(op, range);
    pccl_op_save(op, index, range);
    const uint8_t *own = pccl_op_own_at(op, index, range);
    if (from != pccl_direct_first_turn(direct_owner(op)))
        pccl_quant_dequantize_reduce(shape, recv, recv, payload, range.count);
    else if (direct_owner(op) == 0)
        pccl_quant_dequantize_reduce(shape, recv, own, payload, range.count);
    else
        pccl_kernel_dequantize(shape, payload, range.count, recv);
    direct_fold_own(op, from, recv, own, range.count);
}

static void direct_fold_whole(pccl_op *op, uint32_t index, pccl_range range, uint32_t from, const uint8_t *payload)
{
    if (pccl_op_is_quantized(op))
        direct_fold_quantized(op, index, range, from, payload);
    else
        direct_fold(op, index, range, from, payload);
}

/* All shares are in. */
static void direct_finish(pccl_op *op, uint32_t index, pccl_range range, uint32_t segment)
{
    if (pccl_op_is_quantized(op)) {
        pccl_op_encode(op, index, range, pccl_op_recv_at(op, range));
        pccl_op_decode(op, index, range);
    }
    op->direct.finals[op->direct.finals_count++] = segment;
    pccl_op_note_final(op, index);
}

static void direct_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    if (inbound->is_final)
        op->segments[inbound->index].state &= (uint8_t)~PCCL_SEGMENT_FINAL_IN;
    else
        *direct_share(op, direct_segment(op, inbound->index), inbound->from) &= (uint8_t)~SHARE_IN;
}

static int direct_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    if (inbound->is_final) {
        if (pccl_op_is_quantized(op)) {
            pccl_op_save(op, inbound->index, inbound->range);
            pccl_op_decode(op, inbound->index, inbound->range);
        }
        if (pccl_op_is_half(op))
            pccl_op_note_final_elsewhere(op, inbound->index);
        else
            pccl_op_note_final(op, inbound->index);
        return 1; /* perhaps a share */
    }
    uint32_t segment = direct_segment(op, inbound->index);
    uint32_t turn = op->direct.turns[segment];
    if (inbound->is_waiting) {
        *direct_share(op, segment, inbound->from) |= SHARE_WAITING;
    } else {
        if (pccl_op_is_quantized(op))
            direct_fold_whole(op, inbound->index, inbound->range, inbound->from, inbound->store);
        turn = pccl_direct_next_turn(direct_owner(op), turn);
    }
    while (turn < direct_world(op) && *direct_share(op, segment, turn) & SHARE_WAITING) {
        direct_fold_whole(op, inbound->index, inbound->range, turn, direct_waiting(op, segment, turn));
        turn = pccl_direct_next_turn(direct_owner(op), turn);
    }
    op->direct.turns[segment] = turn;
    if (turn != direct_world(op))
        return 0;
    direct_finish(op, inbound->index, inbound->range, segment);
    return 1;
}

const pccl_op_algorithm pccl_op_direct_algorithm = {
    .open = direct_open,
    .close = direct_close,
    .stop = direct_stop,
    .sends = direct_sends,
    .has_sendable = direct_has_sendable,
    .take_sendable = direct_take_sendable,
    .first_chunk = direct_first_chunk,
    .first_at_once = direct_first_at_once,
    .first_hop = direct_first_hop,
    .is_bare = direct_is_bare,
    .accept = direct_accept,
    .reduce = direct_reduce,
    .retract = direct_retract,
    .arrived = direct_arrived,
};
