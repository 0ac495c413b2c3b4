#include "direct_plan.h"

#include "pccl_native.h"

uint32_t pccl_direct_first_turn(uint32_t owner) { return owner == 0 ? 1 : 0; }

uint32_t pccl_direct_next_turn(uint32_t owner, uint32_t rank)
{
    PCCL_ASSERT(rank != owner);
    return rank + 1 == owner ? rank + 2 : rank + 1;
}

uint32_t pccl_direct_slots(uint32_t world_size) { return world_size - 2; }

uint32_t pccl_direct_slot(uint32_t owner, uint32_t rank)
{
    PCCL_ASSERT(rank != owner && rank != pccl_direct_first_turn(owner));
    return rank - (rank > owner) - 1;
}

uint32_t pccl_direct_served(uint32_t world_size, uint32_t rank, uint32_t i)
{
    PCCL_ASSERT(i + 1 < world_size);
    return (rank + 1 + i) % world_size;
}

/* Measured on loopback with 4 ranks, where only work counts: direct takes no longer than the ring up to 8 MiB,
 * and a fifth longer at 64 MiB, because shares that wait for their turn are read once more. On links with a
 * latency it saves 2(W - 2) of them, which is what counts for small ops; large ones had better keep to the
 * links that were chosen for the ring. Quantized, direct rounds twice in any world, and the bytes that wait
 * are few. */
uint32_t pccl_algorithm_default(uint64_t count, uint32_t dtype, uint32_t quantization, uint32_t world_size)
{
    enum { DIRECT_BYTES_MAX = 4 << 20 };
    uint32_t element_bytes = pccl_dtype_bytes(dtype);
    if (element_bytes == 0 || world_size < 2)
        return PCCL_RING;
    if (quantization != PCCL_QUANT_NONE || count <= DIRECT_BYTES_MAX / element_bytes)
        return PCCL_DIRECT;
    return PCCL_RING;
}
