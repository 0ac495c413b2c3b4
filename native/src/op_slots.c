#include "op_slots.h"

#include "op_algorithm.h"
#include "quant.h"

enum { SLOT_ALIGNMENT_BYTES = 16 };

int pccl_op_take_memory(pccl_op *op, uint64_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block)
{
    if (bytes > SIZE_MAX / 2)
        return PCCL_E_INVALID;
    return pccl_pool_take(op->pool, (size_t)bytes, purpose, block) == 0 ? 0 : PCCL_E_MEMORY;
}

uint32_t pccl_op_payload_bytes(const pccl_op *op, uint32_t elements)
{
    if (pccl_op_is_quantized(op))
        return (uint32_t)pccl_quantized_bytes(&op->request.shape, elements);
    return elements * op->element_bytes;
}

int pccl_op_measure_slots(pccl_op *op)
{
    uint32_t longest = pccl_tiling_longest_segment(&op->tiling);
    uint64_t bytes = (uint64_t)longest * op->element_bytes;
    if (pccl_op_is_quantized(op))
        bytes = pccl_quantized_bytes(&op->request.shape, longest);
    if (bytes > UINT32_MAX)
        return PCCL_E_INVALID;
    op->slot_bytes = (size_t)(pccl_div_up_u64(bytes, SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES);
    return 0;
}

uint32_t pccl_op_window(const pccl_op *op, uint64_t slots)
{
    uint64_t all = pccl_tiling_chunk_segments(&op->tiling, 0);
    if (slots == 0 || all == 0)
        return (uint32_t)all;
    uint64_t fitting = op->scratch_bytes_max / op->slot_bytes / slots;
    return (uint32_t)pccl_max_u64(1, pccl_min_u64(fitting, all));
}

int pccl_op_take_slots(pccl_op *op, uint32_t wire_slots, uint64_t others)
{
    op->wire_slots = wire_slots;
    uint64_t slots = (uint64_t)op->wire_slots * op->tiling.world_size + others;
    if (slots == 0)
        return 0;
    if (slots > SIZE_MAX / 2 / op->slot_bytes)
        return PCCL_E_INVALID;
    return pccl_op_take_memory(op, slots * op->slot_bytes, PCCL_POOL_WORK, &op->scratch);
}

static uint8_t *op_slot(const pccl_op *op, uint64_t number)
{
    PCCL_ASSERT((number + 1) * op->slot_bytes <= op->scratch.bytes);
    return op->scratch.at + number * op->slot_bytes;
}

uint8_t *pccl_op_wire_at(const pccl_op *op, uint32_t index)
{
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    return op_slot(op, (uint64_t)chunk * op->wire_slots + segment % op->wire_slots);
}

uint8_t *pccl_op_slot_at(const pccl_op *op, uint64_t number)
{
    return op_slot(op, (uint64_t)op->tiling.world_size * op->wire_slots + number);
}

void pccl_op_encode(pccl_op *op, uint32_t index, pccl_range range, const uint8_t *elements)
{
    pccl_quant_quantize(&op->request, range.first, elements, range.count, pccl_op_wire_at(op, index));
}

void pccl_op_decode(pccl_op *op, uint32_t index, pccl_range range)
{
    pccl_kernel_dequantize(&op->request.shape, pccl_op_wire_at(op, index), range.count, pccl_op_recv_at(op, range));
}
