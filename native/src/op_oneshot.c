/* op_oneshot.c: small all-reduces of the direct algorithm (plans.h): every rank gets the elements of all others and
 * folds them by itself.
 *
 *     in     each other rank's elements into a slot; when all are there, they are folded into recv
 *     out    out of send; in place out of `backup`, because the fold may come before all of them are sent
 *
 * There is one chunk of one segment. Peers are in the order in which they are served. */
#include "op_algorithm.h"

#include "crc32c.h"
#include "op_originals.h"
#include "plans.h"

static int oneshot_open(pccl_op *op)
{
    op->shares_left = op->peers_count;
    return pccl_op_take_slots(op, 0, op->peers_count);
}

static void oneshot_close(pccl_op *op) { (void)op; }

static void oneshot_stop(pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        op->peers[i].shares_taken = 1;
}

static uint32_t oneshot_sends(const pccl_op *op, uint32_t chunk)
{
    (void)chunk;
    return op->peers_count;
}

static int oneshot_has_sendable(const pccl_op_peer *target) { return target->shares_taken == 0; }

static uint32_t oneshot_first_chunk(const pccl_op_peer *target)
{
    (void)target;
    return 0;
}

static uint32_t oneshot_first_at_once(const pccl_op_peer *target)
{
    (void)target;
    return 0;
}

static void oneshot_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    *chunk = 0;
    *hop = source->rank;
}

/* Checksummed for the first target only. */
static const uint8_t *oneshot_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    pccl_op_segment *segment = &op->segments[0];
    pccl_range range = pccl_tiling_range(&op->tiling, 0, 0);
    PCCL_ASSERT(target->shares_taken == 0);
    target->shares_taken = 1;
    *index = 0;
    frame->hop = op->request.rank;
    frame->payload_bytes = pccl_op_payload_bytes(op, range.count);
    pccl_op_save(op, 0, range);
    const uint8_t *payload = pccl_op_own_at(op, 0, range);
    if (frame->has_payload_crc)
        return payload;
    if ((segment->state & PCCL_SEGMENT_CHECKED) == 0)
        segment->crc = pccl_crc32c(0, payload, frame->payload_bytes);
    segment->state |= PCCL_SEGMENT_CHECKED;
    frame->payload_crc = segment->crc;
    frame->has_payload_crc = 1;
    return payload;
}

static int oneshot_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop)
{
    (void)op, (void)chunk, (void)hop;
    return 0;
}

static uint8_t *oneshot_slot(const pccl_op *op, uint32_t rank)
{
    return pccl_op_slot_at(op, rank - (rank > op->request.rank));
}

static const char *oneshot_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    if (frame->hop != source->rank)
        return "a hop that does not end here";
    if (source->has_come)
        return "the same segment twice";
    source->has_come = 1;
    inbound->is_waiting = 1;
    inbound->store = oneshot_slot(source->op, source->rank);
    return NULL;
}

static void oneshot_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements)
{
    (void)op, (void)inbound, (void)first, (void)reduction, (void)elements;
    PCCL_ASSERT(!"all that comes is stored");
}

static void oneshot_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].rank == inbound->from)
            op->peers[i].has_come = 0;
}

static const uint8_t *oneshot_elements(const pccl_op *op, uint32_t rank, pccl_range range)
{
    return rank == op->request.rank ? pccl_op_own_at(op, 0, range) : oneshot_slot(op, rank);
}

static int oneshot_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    const pccl_op_shape *shape = &op->request.shape;
    pccl_range range = inbound->range;
    if (--op->shares_left > 0)
        return 0;
    pccl_op_save(op, 0, range);
    uint8_t *recv = pccl_op_recv_at(op, range);
    const uint8_t *folded = oneshot_elements(op, 0, range);
    for (uint32_t rank = 1; rank < shape->world_size; rank++) {
        const uint8_t *next = oneshot_elements(op, rank, range);
        pccl_kernel_reduce(shape->dtype, shape->reduce_op, recv, folded, next, range.count);
        folded = recv;
    }
    if (shape->reduce_op == PCCL_AVG)
        pccl_kernel_average(shape->dtype, recv, range.count, shape->world_size);
    pccl_op_note_final(op, 0);
    return 0;
}

const pccl_op_algorithm pccl_op_oneshot_algorithm = {
    .open = oneshot_open,
    .close = oneshot_close,
    .stop = oneshot_stop,
    .sends = oneshot_sends,
    .has_sendable = oneshot_has_sendable,
    .take_sendable = oneshot_take_sendable,
    .first_chunk = oneshot_first_chunk,
    .first_at_once = oneshot_first_at_once,
    .first_hop = oneshot_first_hop,
    .is_bare = oneshot_is_bare,
    .accept = oneshot_accept,
    .reduce = oneshot_reduce,
    .retract = oneshot_retract,
    .arrived = oneshot_arrived,
};
