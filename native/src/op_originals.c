#include "op_originals.h"

#include "crc32c.h"
#include "op_algorithm.h"
#include "op_request.h"

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
    if (frame->has_payload_crc) {
        pccl_op_save(op, index, range);
        return;
    }
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

void pccl_op_drop_buffers(pccl_op *op)
{
    PCCL_ASSERT(op->is_stopped);
    pccl_op_restore(op);
    op->request.send = NULL;
    op->request.recv = NULL;
}
