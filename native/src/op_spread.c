/* op_spread.c: collectives that only move bytes (plans.h): all-gather, broadcast, send, and the barrier, which
 * moves none.
 *
 *     in     straight into recv
 *     out    the rank's own segments out of send, others out of recv as they came
 *
 * Peers are those of the same algorithm's all-reduce, source and target alike, though segments may go one way only or
 * not at all: so each is announced to, and what ranks disagree on is found, whatever they think where elements come
 * from.
 *
 * The rank's own segments are sendable from the start. The first time one goes out it is also copied to where it
 * belongs in recv, and checksummed while it is in cache; only then it is final here. So the op may be done by
 * something going out. In a ring the sendable segments wait in the FIFO; direct, each target has a count of the own
 * ones that it was sent. */
#include "op_algorithm.h"

#include "crc32c.h"
#include "op_originals.h"
#include "plans.h"

#include <string.h>

static int spread_is_direct(const pccl_op *op) { return op->request.shape.algorithm == PCCL_DIRECT; }

static pccl_spread_hops spread_hops(const pccl_op *op, uint32_t chunk)
{
    return pccl_spread_hops_of(&op->request.shape, op->request.rank, chunk);
}

/* The chunk that begins here, or PCCL_NO_CHUNK. */
static uint32_t spread_own_chunk(const pccl_op *op)
{
    if (!pccl_op_shape_has_root(&op->request.shape))
        return op->request.rank;
    return op->request.rank == op->request.shape.root ? 0 : PCCL_NO_CHUNK;
}

static uint32_t spread_own_segments(const pccl_op *op)
{
    uint32_t own = spread_own_chunk(op);
    return own == PCCL_NO_CHUNK ? 0 : (uint32_t)pccl_tiling_chunk_segments(&op->tiling, own);
}

/* Elements of the own chunk, in send, where it is all there is. */
static const uint8_t *spread_own_at(const pccl_op *op, pccl_range range)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint64_t first = range.first;
    if (!pccl_op_shape_has_root(shape))
        first -= op->request.rank * (shape->count / shape->world_size);
    return (const uint8_t *)op->request.send + first * op->element_bytes;
}

/* The root has no recv. */
static int spread_is_own_final(const pccl_op *op)
{
    const pccl_op_shape *shape = &op->request.shape;
    if (pccl_op_shape_has_root(shape))
        return 1;
    size_t part_bytes = (size_t)(shape->count / shape->world_size) * op->element_bytes;
    return (const uint8_t *)op->request.recv + op->request.rank * part_bytes == op->request.send;
}

static int spread_open(pccl_op *op)
{
    uint32_t chunk = spread_own_chunk(op);
    uint32_t own = spread_own_segments(op);
    int is_final = spread_is_own_final(op);
    for (uint32_t i = 0; i < own; i++) {
        uint32_t index = (uint32_t)pccl_tiling_index(&op->tiling, chunk, i);
        if (is_final)
            pccl_op_note_final(op, index);
        if (!spread_is_direct(op))
            pccl_op_push_sendable(op, index);
    }
    return 0;
}

static void spread_close(pccl_op *op) { (void)op; }

static void spread_stop(pccl_op *op)
{
    op->sendable_first = op->sendable_last = PCCL_NO_SEGMENT;
    for (uint32_t i = 0; i < op->peers_count; i++)
        op->peers[i].shares_taken = spread_own_segments(op);
}

static uint32_t spread_sends(const pccl_op *op, uint32_t chunk)
{
    if (spread_hops(op, chunk).send == PCCL_NO_HOP)
        return 0;
    return spread_is_direct(op) ? op->peers_count : 1;
}

static int spread_has_sendable(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    if (spread_is_direct(op))
        return target->shares_taken < spread_own_segments(op);
    return op->sendable_first != PCCL_NO_SEGMENT && pccl_op_is_next(target);
}

static uint32_t spread_first_chunk(const pccl_op_peer *target)
{
    return target->op->hears_all ? PCCL_NO_CHUNK : spread_own_chunk(target->op);
}

static uint32_t spread_first_at_once(const pccl_op_peer *target)
{
    (void)target;
    return 0;
}

static void spread_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    *chunk = pccl_op_shape_has_root(&source->op->request.shape) ? 0 : source->rank;
    *hop = 0;
}

/* The first time that it goes out. */
static void spread_place_own(pccl_op *op, uint32_t index, pccl_range range, int is_checked)
{
    enum { PIECE_BYTES = 16 << 10 };
    pccl_op_segment *segment = &op->segments[index];
    const uint8_t *own = spread_own_at(op, range);
    uint8_t *recv = pccl_op_is_final(op, index) ? NULL : pccl_op_recv_at(op, range);
    size_t bytes = (size_t)range.count * op->element_bytes;
    segment->crc = 0;
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        size_t piece_bytes = pccl_min_size(PIECE_BYTES, bytes - at);
        if (is_checked)
            segment->crc = pccl_crc32c(segment->crc, own + at, piece_bytes);
        if (recv != NULL)
            memcpy(recv + at, own + at, piece_bytes);
    }
    segment->state |= PCCL_SEGMENT_PLACED | (is_checked ? PCCL_SEGMENT_CHECKED : 0);
    if (recv != NULL)
        pccl_op_note_final(op, index);
}

static const uint8_t *spread_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    if (spread_is_direct(op))
        *index = (uint32_t)pccl_tiling_index(&op->tiling, spread_own_chunk(op), target->shares_taken++);
    else
        *index = pccl_op_pop_sendable(op);
    pccl_tiling_locate(&op->tiling, *index, &frame->chunk, &frame->segment);
    pccl_range range = pccl_tiling_range(&op->tiling, frame->chunk, frame->segment);
    int is_own = frame->chunk == spread_own_chunk(op);
    frame->hop = spread_hops(op, frame->chunk).send;
    frame->payload_bytes = pccl_op_payload_bytes(op, range.count);
    PCCL_ASSERT(frame->hop != PCCL_NO_HOP);
    if (is_own && (op->segments[*index].state & PCCL_SEGMENT_PLACED) == 0)
        spread_place_own(op, *index, range, !frame->has_payload_crc);
    if (op->segments[*index].state & PCCL_SEGMENT_CHECKED) {
        frame->has_payload_crc = 1;
        frame->payload_crc = op->segments[*index].crc;
    }
    return is_own ? spread_own_at(op, range) : pccl_op_recv_at(op, range);
}

static int spread_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop)
{
    (void)op, (void)chunk, (void)hop;
    return 0;
}

static const char *spread_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    pccl_op_segment *segment = &op->segments[inbound->index];
    pccl_spread_hops hops = spread_hops(op, frame->chunk);
    if (hops.receive == PCCL_NO_HOP || frame->hop != hops.receive)
        return "a hop that does not end here";
    if (spread_is_direct(op) ? source->rank != pccl_spread_origin(&op->request.shape, frame->chunk)
                             : !pccl_op_is_previous(source))
        return "a hop that does not end here";
    if (segment->state & PCCL_SEGMENT_FINAL_IN)
        return "the same segment twice";
    segment->state |= PCCL_SEGMENT_FINAL_IN;
    if (frame->type == PCCL_FRAME_SEGMENT &&
        frame->has_payload_crc) { /* what an eager one says may be forgotten by now */
        segment->crc = frame->payload_crc;
        segment->state |= PCCL_SEGMENT_CHECKED;
    }
    pccl_op_save(op, inbound->index, inbound->range);
    inbound->is_final = 1;
    inbound->store = pccl_op_recv_at(op, inbound->range);
    return NULL;
}

static void spread_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements)
{
    (void)op, (void)inbound, (void)first, (void)reduction, (void)elements;
    PCCL_ASSERT(!"all that comes is stored");
}

static void spread_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    op->segments[inbound->index].state &= (uint8_t)~(PCCL_SEGMENT_FINAL_IN | PCCL_SEGMENT_CHECKED);
}

static int spread_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, inbound->index, &chunk, &segment);
    int has_more = spread_hops(op, chunk).send != PCCL_NO_HOP;
    if (has_more)
        pccl_op_push_sendable(op, inbound->index);
    pccl_op_note_final(op, inbound->index);
    return has_more;
}

const pccl_op_algorithm pccl_op_spread_algorithm = {
    .open = spread_open,
    .close = spread_close,
    .stop = spread_stop,
    .sends = spread_sends,
    .has_sendable = spread_has_sendable,
    .take_sendable = spread_take_sendable,
    .first_chunk = spread_first_chunk,
    .first_at_once = spread_first_at_once,
    .first_hop = spread_first_hop,
    .is_bare = spread_is_bare,
    .accept = spread_accept,
    .reduce = spread_reduce,
    .retract = spread_retract,
    .arrived = spread_arrived,
};
