/* op_exchange.c: parts from ranks to ranks (plans.h), where every rank is linked with every other: all-to-all,
 * gather and scatter.
 *
 *     in     straight into recv, the chunk of its source
 *     out    straight out of send, the chunk of its target
 *     own    copied from send to recv
 *
 * What goes out and what comes in are divided each in its own way: `tiling` and `exchange.in`. A segment's index means
 * one thing here and another there, and its state has bits for both: PCCL_SEGMENT_PARTIAL_SENT is of what goes out, all
 * others of what comes in.
 *
 * Every other rank is source and target, though there may be nothing to send: so each hears of the op from all, and
 * what ranks disagree on is found. The description that a rank sends to another tells the length of the part for that
 * one, which is compared with what that one expects (pccl_op_shape_to, pccl_op_shape_from).
 *
 * The rank's own part is copied a segment at a time, whenever one is sent or has come, so that the copy takes place
 * while the network works; the rest of it with the last that is sent or the last that comes, whichever is first. */
#include "op_exchange.h"

#include "plans.h"

#include <string.h>

static uint32_t exchange_own_segments(const pccl_op *op)
{
    return (uint32_t)pccl_tiling_chunk_segments(op->in_tiling, op->request.rank);
}

static uint32_t exchange_segments_for(const pccl_op_peer *target)
{
    return (uint32_t)pccl_tiling_chunk_segments(&target->op->tiling, target->rank);
}

const uint8_t *pccl_exchange_send_at(const pccl_op *op, uint32_t rank, pccl_range range)
{
    if (op->exchange.send_parts == NULL)
        return pccl_op_send_at(op, range);
    uint64_t first = range.first - pccl_tiling_chunk_first(&op->tiling, rank);
    return (const uint8_t *)op->exchange.send_parts[rank] + first * op->element_bytes;
}

uint8_t *pccl_exchange_recv_at(const pccl_op *op, uint32_t rank, pccl_range range)
{
    if (op->exchange.recv_parts == NULL)
        return pccl_op_recv_at(op, range);
    uint64_t first = range.first - pccl_tiling_chunk_first(op->in_tiling, rank);
    return (uint8_t *)op->exchange.recv_parts[rank] + first * op->element_bytes;
}

static void exchange_copy_own(pccl_op *op, uint32_t segments)
{
    uint32_t rank = op->request.rank;
    uint32_t own = exchange_own_segments(op);
    for (; segments > 0 && op->exchange.own_copied < own; segments--) {
        uint32_t segment = op->exchange.own_copied++;
        pccl_range from = pccl_tiling_range(&op->tiling, rank, segment);
        pccl_range to = pccl_tiling_range(op->in_tiling, rank, segment);
        PCCL_ASSERT(from.count == to.count);
        const uint8_t *own = pccl_exchange_send_at(op, rank, from);
        uint8_t *recv = pccl_exchange_recv_at(op, rank, to);
        if (own != recv)
            memcpy(recv, own, (size_t)to.count * op->element_bytes);
        pccl_op_note_final(op, (uint32_t)pccl_tiling_index(op->in_tiling, rank, segment));
    }
}

void pccl_exchange_begin(pccl_op *op)
{
    uint32_t own = exchange_own_segments(op);
    op->exchange.out_left = pccl_tiling_segments(&op->tiling) - own;
    op->exchange.in_left = pccl_tiling_segments(op->in_tiling) - own;
    if (op->exchange.out_left == 0 && op->exchange.in_left == 0)
        exchange_copy_own(op, own);
}

void pccl_exchange_note_out(pccl_op *op) { exchange_copy_own(op, --op->exchange.out_left == 0 ? UINT32_MAX : 1); }

void pccl_exchange_note_in(pccl_op *op) { exchange_copy_own(op, --op->exchange.in_left == 0 ? UINT32_MAX : 1); }

static int exchange_open(pccl_op *op)
{
    pccl_exchange_begin(op);
    return 0;
}

static void exchange_close(pccl_op *op) { (void)op; }

static void exchange_stop(pccl_op *op)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        op->peers[i].shares_taken = exchange_segments_for(&op->peers[i]);
}

static uint32_t exchange_sends(const pccl_op *op, uint32_t chunk) { return chunk != op->request.rank; }

static int exchange_has_sendable(const pccl_op_peer *target)
{
    return target->shares_taken < exchange_segments_for(target);
}

static uint32_t exchange_first_chunk(const pccl_op_peer *target) { return target->rank; }

static uint32_t exchange_first_at_once(const pccl_op_peer *target)
{
    return target->op->tiling.slices == 1 ? exchange_segments_for(target) : 0;
}

static void exchange_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    *chunk = source->rank;
    *hop = 0;
}

static const uint8_t *exchange_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    frame->chunk = op->request.rank;
    frame->segment = target->shares_taken++;
    frame->hop = 0;
    *index = (uint32_t)pccl_tiling_index(&op->tiling, target->rank, frame->segment);
    pccl_range range = pccl_tiling_range(&op->tiling, target->rank, frame->segment);
    frame->payload_bytes = range.count * op->element_bytes;
    pccl_exchange_note_out(op);
    return pccl_exchange_send_at(op, target->rank, range);
}

int pccl_exchange_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop)
{
    (void)op, (void)chunk, (void)hop;
    return 0;
}

static const char *exchange_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    uint8_t *state = &source->op->segments[inbound->index].state;
    if (frame->chunk != source->rank || frame->hop != 0)
        return "a hop that does not end here";
    if (*state & PCCL_SEGMENT_FINAL_IN)
        return "the same segment twice";
    *state |= PCCL_SEGMENT_FINAL_IN;
    inbound->is_final = 1;
    inbound->store = pccl_exchange_recv_at(source->op, source->rank, inbound->range);
    return NULL;
}

void pccl_exchange_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements)
{
    (void)op, (void)inbound, (void)first, (void)reduction, (void)elements;
    PCCL_ASSERT(!"all that comes is stored");
}

static void exchange_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    op->segments[inbound->index].state &= (uint8_t)~PCCL_SEGMENT_FINAL_IN;
}

static int exchange_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    pccl_op_note_final(op, inbound->index);
    pccl_exchange_note_in(op);
    return 0;
}

const pccl_op_algorithm pccl_op_exchange_algorithm = {
    .open = exchange_open,
    .close = exchange_close,
    .stop = exchange_stop,
    .sends = exchange_sends,
    .has_sendable = exchange_has_sendable,
    .take_sendable = exchange_take_sendable,
    .first_chunk = exchange_first_chunk,
    .first_at_once = exchange_first_at_once,
    .first_hop = exchange_first_hop,
    .is_bare = pccl_exchange_is_bare,
    .accept = exchange_accept,
    .reduce = pccl_exchange_reduce,
    .retract = exchange_retract,
    .arrived = exchange_arrived,
};
