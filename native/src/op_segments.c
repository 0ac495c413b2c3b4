/* op_segments.c: the segments of an op as they go out and come in, whatever its algorithm; op.h has the contracts. */
#include "op_algorithm.h"
#include "op_originals.h"
#include "op_slots.h"

#include <string.h>

void pccl_op_push_sendable(pccl_op *op, uint32_t index)
{
    op->segments[index].next = PCCL_NO_SEGMENT;
    if (op->sendable_first == PCCL_NO_SEGMENT)
        op->sendable_first = index;
    else
        op->segments[op->sendable_last].next = index;
    op->sendable_last = index;
}

uint32_t pccl_op_pop_sendable(pccl_op *op)
{
    uint32_t index = op->sendable_first;
    PCCL_ASSERT(index != PCCL_NO_SEGMENT);
    op->sendable_first = op->segments[index].next;
    return index;
}

void pccl_op_note_final(pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(op->segments_left > 0 && !pccl_op_is_final(op, index));
    op->segments[index].state |= PCCL_SEGMENT_FINAL;
    op->segments_left--;
}

void pccl_op_note_final_elsewhere(pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(pccl_op_is_half(op) && !pccl_op_is_final(op, index));
    op->segments[index].state |= PCCL_SEGMENT_FINAL;
}

int pccl_op_has_sendable(const pccl_op_peer *target)
{
    return target->is_target && target->op->algorithm->has_sendable(target);
}

const uint8_t *pccl_op_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    memset(frame, 0, sizeof *frame);
    frame->type = PCCL_FRAME_SEGMENT;
    frame->key = target->op->request.key;
    return target->op->algorithm->take_sendable(target, frame, index);
}

static uint32_t op_segment_bytes(const pccl_op *op, const pccl_tiling *tiling, uint32_t chunk, uint32_t segment)
{
    if (segment >= pccl_tiling_chunk_segments(tiling, chunk))
        return 0;
    return pccl_op_payload_bytes(op, pccl_tiling_range(tiling, chunk, segment).count);
}

uint32_t pccl_op_eager_bytes(const pccl_op_peer *target, uint32_t one_bytes_max, uint32_t several_bytes_max)
{
    const pccl_op *op = target->op;
    if (!target->is_target || op->is_stopped)
        return 0;
    uint32_t chunk = op->algorithm->first_chunk(target);
    uint64_t segments = chunk == PCCL_NO_CHUNK ? 0 : pccl_tiling_chunk_segments(&op->tiling, chunk);
    if (segments == 0)
        return 0;
    if (segments == 1) {
        uint32_t bytes = op_segment_bytes(op, &op->tiling, chunk, 0);
        return bytes <= one_bytes_max ? bytes : 0;
    }
    uint32_t at_once = op->algorithm->first_at_once(target);
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < at_once; i++) {
        uint32_t more_bytes = op_segment_bytes(op, &op->tiling, chunk, i);
        if (more_bytes > several_bytes_max - bytes)
            break;
        bytes += more_bytes;
    }
    return bytes;
}

const uint8_t *pccl_op_take_eager(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    const uint8_t *payload = pccl_op_take_sendable(target, frame, index);
    PCCL_ASSERT(frame->segment == 0);
    frame->type = PCCL_FRAME_EAGER;
    frame->shape = pccl_op_shape_to(target->op, target->rank);
    while (frame->payload_bytes < target->eager_bytes) {
        pccl_frame next;
        uint32_t next_index;
        const uint8_t *next_payload = pccl_op_take_sendable(target, &next, &next_index);
        PCCL_ASSERT(next.chunk == frame->chunk && next_payload == payload + frame->payload_bytes);
        frame->payload_bytes += next.payload_bytes;
        frame->has_payload_crc = 0;
    }
    PCCL_ASSERT(frame->payload_bytes == target->eager_bytes);
    return payload;
}

uint32_t pccl_op_first_bytes(const pccl_op_peer *source, uint32_t segment)
{
    uint32_t chunk;
    uint32_t hop;
    source->op->algorithm->first_hop(source, &chunk, &hop);
    const pccl_tiling *tiling = source->op->in_tiling;
    return chunk < tiling->world_size ? op_segment_bytes(source->op, tiling, chunk, segment) : 0;
}

const char *pccl_op_check_eager(const pccl_op_peer *source, uint32_t payload_bytes)
{
    uint64_t bytes = 0;
    for (uint32_t segment = 0; bytes < payload_bytes; segment++) {
        uint32_t more_bytes = pccl_op_first_bytes(source, segment);
        if (more_bytes == 0)
            return segment == 0 ? "no such segment" : "wrong payload size";
        bytes += more_bytes;
    }
    return bytes == payload_bytes ? NULL : "wrong payload size";
}

/* All segments that were in the frame. */
static void op_note_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    uint32_t chunk;
    uint32_t segment;
    uint32_t bytes = 0;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    do {
        op->segments[index++].state |= PCCL_SEGMENT_PARTIAL_SENT;
        bytes += op_segment_bytes(op, &op->tiling, chunk, segment++);
    } while (bytes < payload_bytes);
}

int pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    if (index != PCCL_NO_SEGMENT)
        op_note_sent(op, index, payload_bytes);
    op->tx_bytes += payload_bytes;
    return pccl_op_is_complete(op) && !op->is_done;
}

const char *pccl_op_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    pccl_frame segment = *frame;
    PCCL_ASSERT(source->is_source && !op->is_stopped);
    if (frame->type == PCCL_FRAME_EAGER) {
        op->algorithm->first_hop(source, &segment.chunk, &segment.hop);
    }
    memset(inbound, 0, sizeof *inbound);
    if (op->algorithm->is_self_checking)
        return op->algorithm->accept(source, &segment, inbound);
    if (segment.destination != 0 || segment.part_elements != 0)
        return "reserved bytes in use";
    if (segment.chunk >= op->in_tiling->world_size ||
        segment.segment >= pccl_tiling_chunk_segments(op->in_tiling, segment.chunk))
        return "no such segment";
    inbound->index = (uint32_t)pccl_tiling_index(op->in_tiling, segment.chunk, segment.segment);
    inbound->range = pccl_tiling_range(op->in_tiling, segment.chunk, segment.segment);
    inbound->payload_bytes = segment.payload_bytes;
    inbound->from = source->rank;
    int is_bare = op->algorithm->is_bare(op, segment.chunk, segment.hop);
    if (inbound->payload_bytes != (is_bare ? 0 : pccl_op_payload_bytes(op, inbound->range.count)))
        return "wrong payload size";
    return op->algorithm->accept(source, &segment, inbound);
}

void pccl_op_reduce(pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements,
    uint32_t *payload_crc)
{
    PCCL_ASSERT(first + elements <= inbound->range.count && !op->is_stopped);
    while (elements > 0) {
        pccl_reduction reduction;
        memset(&reduction, 0, sizeof reduction);
        size_t n = pccl_op_take_own(op, inbound, first, elements, &reduction);
        reduction.payload = payload;
        reduction.payload_crc = payload_crc;
        op->algorithm->reduce(op, inbound, first, &reduction, n);
        first += n;
        payload += n * op->element_bytes;
        elements -= n;
    }
}

void pccl_op_retract(pccl_op_peer *source, const pccl_op_inbound *inbound)
{
    source->op->algorithm->retract(source->op, inbound);
}

int pccl_op_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    PCCL_ASSERT(!op->is_stopped);
    op->rx_bytes += inbound->payload_bytes;
    return op->algorithm->arrived(op, inbound);
}
