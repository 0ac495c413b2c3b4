#include "op_originals.h"

#include "crc32c.h"
#include "op_algorithm.h"
#include "op_request.h"
#include "op_slots.h"

#include <string.h>

int pccl_op_take_backup(pccl_op *op)
{
    if (op->segments_left == 0 || !pccl_op_is_in_place(op))
        return 0;
    int status = pccl_op_take_memory(
        op, pccl_tiling_elements(&op->tiling) * op->element_bytes, PCCL_POOL_COPY, &op->backup_block);
    op->backup = op->backup_block.at;
    return status;
}

static uint8_t *op_backup_at(const pccl_op *op, pccl_range range, size_t first)
{
    return op->backup + (range.place + first) * op->element_bytes;
}

const uint8_t *pccl_op_own_at(const pccl_op *op, uint32_t index, pccl_range range)
{
    PCCL_ASSERT(op->backup == NULL || op->segments[index].saved == range.count);
    return op->backup != NULL ? op_backup_at(op, range, 0) : pccl_op_send_at(op, range);
}

size_t pccl_op_take_own(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, size_t elements, pccl_reduction *reduction)
{
    pccl_range range = inbound->range;
    uint32_t *saved = &op->segments[inbound->index].saved;
    reduction->own = pccl_op_send_at(op, range) + first * op->element_bytes;
    reduction->backup = NULL;
    if (op->backup == NULL)
        return elements;
    if (first < *saved) {
        reduction->own = op_backup_at(op, range, first);
        return pccl_min_size(elements, *saved - first);
    }
    PCCL_ASSERT(first == *saved);
    reduction->backup = op_backup_at(op, range, first);
    *saved += (uint32_t)elements;
    return elements;
}

void pccl_op_save(pccl_op *op, uint32_t index, pccl_range range)
{
    pccl_op_segment *segment = &op->segments[index];
    if (op->backup == NULL || segment->saved == range.count)
        return;
    memcpy(op_backup_at(op, range, segment->saved), pccl_op_recv_at(op, range) + segment->saved * op->element_bytes,
        (size_t)(range.count - segment->saved) * op->element_bytes);
    segment->saved = range.count;
}

void pccl_op_save_for(pccl_frame *frame, pccl_op *op, uint32_t index, pccl_range range)
{
    if (op->backup == NULL || op->segments[index].saved == range.count)
        return;
    PCCL_ASSERT(op->segments[index].saved == 0);
    frame->has_payload_crc = 1;
    frame->payload_crc = pccl_crc32c_copy(
        0, op_backup_at(op, range, 0), pccl_op_recv_at(op, range), (size_t)range.count * op->element_bytes);
    op->segments[index].saved = range.count;
}

void pccl_op_restore(pccl_op *op)
{
    if (op->backup == NULL)
        return;
    uint64_t segments = pccl_tiling_segments(&op->tiling);
    for (uint64_t index = 0; index < segments; index++) {
        size_t saved = op->segments[index].saved;
        if (saved == 0)
            continue;
        uint32_t chunk;
        uint32_t segment;
        pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
        pccl_range range = pccl_tiling_range(&op->tiling, chunk, segment);
        memcpy(pccl_op_recv_at(op, range), op_backup_at(op, range, 0), saved * op->element_bytes);
        op->segments[index].saved = 0;
    }
}

static int range_lies_in(pccl_range range, uint64_t first, uint64_t elements)
{
    return range.first >= first && range.first < first + elements;
}

/* Moves one segment: what was saved of the original goes back, and what has come of it goes along. */
static void op_move_segment(pccl_op *op, uint64_t index, const pccl_op_move *move, uint64_t send_first,
    uint64_t send_elements, uint64_t recv_elements)
{
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    pccl_range range = pccl_tiling_range(&op->tiling, chunk, segment);
    size_t bytes = (size_t)range.count * op->element_bytes;
    size_t saved = op->segments[index].saved;
    if (range_lies_in(range, op->recv_first, recv_elements)) {
        size_t at = (size_t)(range.first - op->recv_first) * op->element_bytes;
        memcpy(move->new_recv + at, move->recv + at, bytes);
        if (op->backup != NULL)
            memcpy(pccl_op_recv_at(op, range), op_backup_at(op, range, 0), saved * op->element_bytes);
    }
    if (range_lies_in(range, send_first, send_elements) && (move->send != move->recv || recv_elements == 0)) {
        size_t at = (size_t)(range.first - send_first) * op->element_bytes;
        memcpy(move->new_send + at, move->send + at, bytes);
    }
}

/* Copies the elements of one tiling's segments. */
static void op_copy_segments(const pccl_op *op, const pccl_tiling *tiling, const uint8_t *from, uint8_t *to)
{
    uint64_t segments = pccl_tiling_segments(tiling);
    for (uint64_t index = 0; index < segments; index++) {
        uint32_t chunk;
        uint32_t segment;
        pccl_tiling_locate(tiling, index, &chunk, &segment);
        pccl_range range = pccl_tiling_range(tiling, chunk, segment);
        size_t at = (size_t)range.first * op->element_bytes;
        memcpy(to + at, from + at, (size_t)range.count * op->element_bytes);
    }
}

pccl_op_move pccl_op_move_to(pccl_op *op, void *send, void *recv)
{
    pccl_op_request *request = &op->request;
    uint64_t send_elements;
    uint64_t recv_elements;
    pccl_op_request_buffers(request, &send_elements, &recv_elements);
    int is_exchange = op->in_tiling != &op->tiling;
    if (is_exchange) {
        send_elements = pccl_tiling_chunk_first(&op->tiling, op->tiling.world_size);
        recv_elements = pccl_tiling_chunk_first(op->in_tiling, op->in_tiling->world_size);
    }
    pccl_op_move move;
    move.send = request->send;
    move.recv = request->recv;
    move.new_send = send;
    move.new_recv = recv;
    move.send_bytes = (size_t)send_elements * op->element_bytes;
    move.recv_bytes = (size_t)recv_elements * op->element_bytes;
    if (move.send == move.recv) /* a rank that has but one of them copies that */
        move.new_send = move.new_recv = recv != NULL ? recv : send;
    uint64_t send_first = request->shape.collective == PCCL_ALL_GATHER ? request->rank * send_elements : 0;
    uint64_t segments = op->algorithm != NULL && !is_exchange ? pccl_tiling_segments(&op->tiling) : 0;
    if (is_exchange) {
        op_copy_segments(op, op->in_tiling, move.recv, move.new_recv);
        op_copy_segments(op, &op->tiling, move.send, move.new_send);
    }
    for (uint64_t index = 0; index < segments; index++)
        op_move_segment(op, index, &move, send_first, send_elements, recv_elements);
    if (op->algorithm == NULL && move.recv_bytes > 0) /* it is done, and not in place as its copy goes */
        memcpy(move.new_recv, move.recv, move.recv_bytes);
    request->send = move.new_send;
    request->recv = move.new_recv;
    if (op->result_block.at == NULL)
        op->result = move.new_recv;
    return move;
}

const uint8_t *pccl_op_moved(const pccl_op_move *move, const uint8_t *at)
{
    if (at >= move->recv && at < move->recv + move->recv_bytes)
        return move->new_recv + (at - move->recv);
    if (at >= move->send && at < move->send + move->send_bytes)
        return move->new_send + (at - move->send);
    return at;
}

void pccl_op_drop_buffers(pccl_op *op)
{
    PCCL_ASSERT(op->is_stopped);
    pccl_op_restore(op);
    op->request.send = NULL;
    op->request.recv = NULL;
}
