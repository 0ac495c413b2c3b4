/* op_ring.c: the ring (plans.h). Segments come from rank - 1 and go to rank + 1.
 *
 *     partial in   own elements (op) payload -> recv
 *     out          hop 0 goes out of send, all others out of recv
 *
 * The checksum of what goes out of recv is known by then: a final goes on as it came, and what was reduced was
 * checksummed while it was in cache.
 *
 * Sendable segments wait in a FIFO threaded through the segments themselves. All segments of the chunk that
 * starts here are ready from the beginning; another one is when it has arrived and has a further hop to make. A
 * partial that is ready is sendable once the window (plans.h) has room for it.
 *
 * A reduce-scatter keeps what it owns: partials of other chunks that pass through are accumulated in slots instead, and
 * finals, where there are any, tell no more than that they are. A reduce goes as a reduce-scatter, but for finals: they
 * have payload up to the root. A rank that is not the root finishes its chunk in `result`, and keeps finals that pass
 * through in the slots of their partials, which every rank has used by then.
 *
 * Quantized, payload is received into the segment's slot and sent from it; a partial is decoded and reduced
 * into recv, then encoded into the same slot; a final is decoded into recv and passed on as it came. */
#include "op_algorithm.h"

#include "op_originals.h"
#include "quant.h"
#include "plans.h"

static pccl_ring_hops ring_hops(const pccl_op *op, uint32_t chunk)
{
    return pccl_ring_hops_of(op->request.shape.world_size, op->request.rank, chunk);
}

/* A partial is ready, or the window may have opened for it: each happens once, and the later one pushes. */
static int ring_push_partial(pccl_op *op, uint32_t chunk, uint32_t segment)
{
    uint32_t window = op->ring.window;
    uint64_t index = pccl_tiling_index(&op->tiling, chunk, segment);
    if ((op->segments[index].state & PCCL_SEGMENT_PARTIAL_READY) == 0)
        return 0;
    if (segment >= window && !pccl_op_is_final(op, index - window))
        return 0;
    pccl_op_push_sendable(op, (uint32_t)index);
    return 1;
}

/* Chunks that pass through a rank, which has no place for them: those whose partials come and go on, and in a reduce
 * also the one that starts here, whose finals do. */
static uint32_t ring_passing(const pccl_op *op)
{
    uint32_t world = op->request.shape.world_size;
    switch (op->request.shape.collective) {
    case PCCL_REDUCE_SCATTER: return world - 2;
    case PCCL_REDUCE: return world - 1;
    default: return 0;
    }
}

static uint32_t ring_distance(const pccl_op *op, uint32_t from, uint32_t to)
{
    uint32_t world = op->request.shape.world_size;
    return (to + world - from) % world;
}

/* Nonzero if the finals of a chunk have payload when they come to a rank. */
static int ring_final_has_payload(const pccl_op *op, uint32_t chunk, uint32_t rank)
{
    const pccl_op_shape *shape = &op->request.shape;
    if (shape->collective == PCCL_REDUCE)
        return ring_distance(op, chunk, rank) <= ring_distance(op, chunk, shape->root);
    return shape->collective == PCCL_ALL_REDUCE;
}

/* Nonzero if the finals of a chunk come to a rank at all. */
static int ring_hears_finals(const pccl_op *op, uint32_t chunk, uint32_t rank)
{
    return op->ring.is_signalled || ring_final_has_payload(op, chunk, rank);
}

static uint32_t ring_next(const pccl_op *op) { return (op->request.rank + 1) % op->request.shape.world_size; }

/* Only the owner of a chunk has nothing partial to send of it. */
static int ring_is_owner(const pccl_ring_hops *hops) { return hops->send_partial == PCCL_NO_HOP; }

/* Returns where partials are accumulated, and finals are received. */
static uint8_t *ring_sum_at(const pccl_op *op, uint32_t index, pccl_range range)
{
    if (!pccl_op_is_half(op))
        return pccl_op_recv_at(op, range);
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    pccl_ring_hops hops = ring_hops(op, chunk);
    if (ring_is_owner(&hops))
        return pccl_op_recv_at(op, range);
    uint32_t before = op->request.shape.world_size - 1 - ring_passing(op); /* chunks that need no slot */
    PCCL_ASSERT(hops.send_partial >= before);
    uint64_t passing = hops.send_partial - before;
    return pccl_op_slot_at(op, passing * op->ring.slots + segment % op->ring.slots);
}

static int ring_open(pccl_op *op)
{
    uint32_t rank = op->request.rank;
    uint32_t world = op->request.shape.world_size;
    uint32_t slots = pccl_op_is_quantized(op) ? world : ring_passing(op);
    uint32_t first = pccl_ring_first_chunk(world, rank);
    uint64_t own = pccl_tiling_chunk_segments(&op->tiling, first);
    uint32_t all = (uint32_t)pccl_tiling_chunk_segments(&op->tiling, 0);
    op->ring.slots = slots > 0 ? all : 0;
    op->ring.window = pccl_op_window(op, slots);
    if (op->ring.window < all) {
        op->ring.window = pccl_op_window(op, (uint64_t)slots * PCCL_RING_WINDOWS);
        op->ring.slots = op->ring.window * PCCL_RING_WINDOWS;
    }
    op->ring.is_signalled = op->ring.window < all;
    for (uint32_t i = 0; i < own; i++) {
        op->segments[pccl_tiling_index(&op->tiling, first, i)].state |= PCCL_SEGMENT_PARTIAL_READY;
        ring_push_partial(op, first, i);
    }
    if (pccl_op_is_half(op))
        return pccl_op_take_slots(op, 0, (uint64_t)slots * op->ring.slots);
    return pccl_op_take_slots(op, pccl_op_is_quantized(op) ? op->ring.slots : 0, 0);
}

static void ring_close(pccl_op *op) { (void)op; }

static void ring_stop(pccl_op *op) { op->sendable_first = op->sendable_last = PCCL_NO_SEGMENT; }

static uint32_t ring_sends(const pccl_op *op, uint32_t chunk)
{
    pccl_ring_hops hops = ring_hops(op, chunk);
    uint32_t sends_partial = hops.send_partial != PCCL_NO_HOP;
    uint32_t sends_final = hops.send_final != PCCL_NO_HOP && ring_final_has_payload(op, chunk, ring_next(op));
    return sends_partial + sends_final;
}

static int ring_has_sendable(const pccl_op_peer *target)
{
    return target->op->sendable_first != PCCL_NO_SEGMENT && pccl_op_is_next(target);
}

static uint32_t ring_first_chunk(const pccl_op_peer *target)
{
    const pccl_op_request *request = &target->op->request;
    if (target->op->hears_all) /* an announcement has to be taken for what it is, with whatever else is known */
        return PCCL_NO_CHUNK;
    return pccl_ring_first_chunk(request->shape.world_size, request->rank);
}

static uint32_t ring_first_at_once(const pccl_op_peer *target)
{
    (void)target;
    return 0;
}

static void ring_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    *chunk = pccl_ring_first_chunk(source->op->request.shape.world_size, source->rank);
    *hop = 0;
}

static const uint8_t *ring_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    *index = pccl_op_pop_sendable(op);
    pccl_tiling_locate(&op->tiling, *index, &frame->chunk, &frame->segment);
    pccl_ring_hops hops = ring_hops(op, frame->chunk);
    pccl_range range = pccl_tiling_range(&op->tiling, frame->chunk, frame->segment);
    int is_final = hops.send_partial == PCCL_NO_HOP || op->segments[*index].state & PCCL_SEGMENT_FINAL_IN;
    frame->hop = is_final ? hops.send_final : hops.send_partial;
    PCCL_ASSERT(frame->hop != PCCL_NO_HOP);
    if (is_final && !ring_final_has_payload(op, frame->chunk, ring_next(op)))
        return NULL;
    frame->payload_bytes = pccl_op_payload_bytes(op, range.count);

    if (pccl_op_is_quantized(op)) {
        if (frame->hop == 0) {
            pccl_op_encode(op, *index, range, pccl_op_send_at(op, range));
            pccl_op_save(op, *index, range);
        }
        return pccl_op_wire_at(op, *index);
    }
    if (frame->hop == 0) {
        pccl_op_save_for(frame, op, *index, range);
        return pccl_op_send_at(op, range);
    }
    if (op->segments[*index].state & PCCL_SEGMENT_CHECKED) {
        frame->payload_crc = op->segments[*index].crc;
        frame->has_payload_crc = 1;
    }
    return ring_sum_at(op, *index, range);
}

static int ring_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop)
{
    return hop + 1 >= op->request.shape.world_size && !ring_final_has_payload(op, chunk, op->request.rank);
}

static const char *ring_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    pccl_ring_hops hops = ring_hops(op, frame->chunk);
    if (!pccl_op_is_previous(source) || frame->hop == PCCL_NO_HOP ||
        (frame->hop != hops.receive_partial && frame->hop != hops.receive_final))
        return "a hop that does not end here";
    inbound->is_final = frame->hop == hops.receive_final;
    uint8_t *state = &op->segments[inbound->index].state;
    uint8_t bit = inbound->is_final ? PCCL_SEGMENT_FINAL_IN : PCCL_SEGMENT_PARTIAL_IN;
    if (*state & bit)
        return "the same segment twice";
    if (inbound->is_final && (*state & PCCL_SEGMENT_PARTIAL_SENT) == 0)
        return "a result before its parts";
    if (op->ring.slots > 0 && frame->segment >= op->ring.slots &&
        !pccl_op_is_final(op, inbound->index - op->ring.slots))
        return "a segment beyond the window";
    if (inbound->is_final && !ring_hears_finals(op, frame->chunk, op->request.rank))
        return "a result that is not asked for";
    *state |= bit;
    PCCL_ASSERT(!inbound->is_final || op->backup == NULL || op->segments[inbound->index].saved == inbound->range.count);

    if (pccl_op_is_quantized(op)) {
        inbound->store = pccl_op_wire_at(op, inbound->index);
    } else if (!inbound->is_final || inbound->payload_bytes > 0) {
        op->segments[inbound->index].crc = inbound->is_final ? frame->payload_crc : 0;
        *state &= (uint8_t)~PCCL_SEGMENT_CHECKED;
        if (inbound->is_final && frame->has_payload_crc)
            *state |= PCCL_SEGMENT_CHECKED;
        inbound->store = inbound->is_final ? ring_sum_at(op, inbound->index, inbound->range) : NULL;
    }
    return NULL;
}

static void ring_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, inbound->index, &chunk, &segment);
    pccl_ring_hops hops = ring_hops(op, chunk);
    reduction->destination = ring_sum_at(op, inbound->index, inbound->range) + first * op->element_bytes;
    if (reduction->payload_crc != NULL) {
        reduction->sum_crc = &op->segments[inbound->index].crc;
        op->segments[inbound->index].state |= PCCL_SEGMENT_CHECKED;
    }
    reduction->ranks = shape->reduce_op == PCCL_AVG && ring_is_owner(&hops) ? shape->world_size : 0;
    pccl_reduce(shape->dtype, shape->reduce_op, reduction, elements);
}

static void ring_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    uint8_t bit = inbound->is_final ? PCCL_SEGMENT_FINAL_IN : PCCL_SEGMENT_PARTIAL_IN;
    op->segments[inbound->index].state &= (uint8_t)~bit;
}

static void ring_decode(pccl_op *op, const pccl_op_inbound *inbound, int is_owner)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint8_t *recv = pccl_op_recv_at(op, inbound->range);
    pccl_op_save(op, inbound->index, inbound->range);
    if (!inbound->is_final) {
        pccl_quant_dequantize_reduce(shape, recv, pccl_op_send_at(op, inbound->range),
            pccl_op_wire_at(op, inbound->index), inbound->range.count);
        if (is_owner && shape->reduce_op == PCCL_AVG)
            pccl_kernel_average(shape->dtype, recv, inbound->range.count, shape->world_size);
        pccl_op_encode(op, inbound->index, inbound->range, recv);
    }
    if (inbound->is_final || is_owner)
        pccl_op_decode(op, inbound->index, inbound->range);
}

static int ring_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, inbound->index, &chunk, &segment);
    pccl_ring_hops hops = ring_hops(op, chunk);
    int is_owner = ring_is_owner(&hops);
    if (pccl_op_is_quantized(op))
        ring_decode(op, inbound, is_owner);
    if (!inbound->is_final && !is_owner) {
        op->segments[inbound->index].state |= PCCL_SEGMENT_PARTIAL_READY;
        return ring_push_partial(op, chunk, segment);
    }
    int has_more = hops.send_final != PCCL_NO_HOP && ring_hears_finals(op, chunk, ring_next(op));
    if (has_more)
        pccl_op_push_sendable(op, inbound->index);
    if (pccl_op_is_half(op) && !is_owner)
        pccl_op_note_final_elsewhere(op, inbound->index);
    else
        pccl_op_note_final(op, inbound->index);
    uint64_t opened = (uint64_t)segment + op->ring.window;
    if (opened < pccl_tiling_chunk_segments(&op->tiling, chunk))
        has_more |= ring_push_partial(op, chunk, (uint32_t)opened);
    return has_more;
}

const pccl_op_algorithm pccl_op_ring_algorithm = {
    .open = ring_open,
    .close = ring_close,
    .stop = ring_stop,
    .sends = ring_sends,
    .has_sendable = ring_has_sendable,
    .take_sendable = ring_take_sendable,
    .first_chunk = ring_first_chunk,
    .first_at_once = ring_first_at_once,
    .first_hop = ring_first_hop,
    .is_bare = ring_is_bare,
    .accept = ring_accept,
    .reduce = ring_reduce,
    .retract = ring_retract,
    .arrived = ring_arrived,
};
