#include "direct_plan.h"

#include "pccl_native.h"
#include "tiling.h"

uint32_t pccl_direct_first_turn(uint32_t owner) { return owner == 0 ? 1 : 0; }

uint32_t pccl_direct_next_turn(uint32_t owner, uint32_t rank)
{
    PCCL_ASSERT(rank != owner);
    return rank + 1 == owner ? rank + 2 : rank + 1;
}

uint32_t pccl_direct_waiting_slots(uint32_t world_size, int is_quantized)
{
    return is_quantized && world_size > 2 ? world_size - 1 : world_size - 2;
}

uint32_t pccl_direct_waiting_slot(uint32_t owner, uint32_t rank, int is_quantized)
{
    PCCL_ASSERT(rank != owner && (is_quantized || rank != pccl_direct_first_turn(owner)));
    return rank - (rank > owner) - !is_quantized;
}

uint32_t pccl_direct_served(uint32_t world_size, uint32_t rank, uint32_t i)
{
    PCCL_ASSERT(i + 1 < world_size);
    return (rank + 1 + i) % world_size;
}

/* Direct saves 2(W - 2) one-way latencies. But a ring has all of them filled once an op takes longer to send than
 * they last, and then wins: its links carry one stream each way instead of W - 1 that crowd each other, and no
 * share has to wait for its turn. With 4 ranks of 200 Mbit/s, 25 ms apart, 64 KiB take direct 0.14 s against 0.27 s,
 * 4 MiB 0.43 s against 0.37 s; on loopback, where only work counts, direct loses a tenth at 1 MiB and more above.
 * Quantized, direct rounds twice in any world, and the bytes that wait are few. */
uint32_t pccl_algorithm_default(uint64_t count, uint32_t dtype, uint32_t quantization, uint32_t world_size)
{
    uint32_t element_bytes = pccl_dtype_bytes(dtype);
    if (element_bytes == 0 || world_size < 2)
        return PCCL_RING;
    if (quantization != PCCL_QUANT_NONE || count / world_size <= PCCL_WHOLE_CHUNK_BYTES / element_bytes)
        return PCCL_DIRECT;
    return PCCL_RING;
}
