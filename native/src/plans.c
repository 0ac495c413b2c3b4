#include "plans.h"

#include "frame.h"
#include "pccl_native.h"
#include "tiling.h"

uint32_t pccl_ring_start(uint32_t world_size, uint32_t chunk) { return (chunk + 1) % world_size; }

uint32_t pccl_ring_first_chunk(uint32_t world_size, uint32_t rank) { return (rank + world_size - 1) % world_size; }

pccl_ring_hops pccl_ring_hops_of(uint32_t world_size, uint32_t rank, uint32_t chunk)
{
    uint32_t distance = (rank + world_size - pccl_ring_start(world_size, chunk)) % world_size;
    pccl_ring_hops hops = {PCCL_NO_HOP, PCCL_NO_HOP, PCCL_NO_HOP, PCCL_NO_HOP};
    PCCL_ASSERT(world_size >= 2 && rank < world_size && chunk < world_size);
    if (distance > 0)
        hops.receive_partial = distance - 1;
    if (distance < world_size - 1) {
        hops.send_partial = distance;
        hops.receive_final = world_size + distance - 1;
        if (distance + 2 < world_size)
            hops.send_final = world_size + distance;
    } else {
        hops.send_final = world_size - 1;
    }
    return hops;
}

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

int pccl_oneshot_is(const pccl_op_shape *shape)
{
    uint32_t element_bytes = pccl_dtype_bytes(shape->dtype);
    if (shape->collective != PCCL_ALL_REDUCE || shape->algorithm != PCCL_DIRECT || shape->world_size < 2 ||
        shape->quantization != PCCL_QUANT_NONE || shape->last_slice > 0)
        return 0;
    uint64_t fitting = PCCL_ONESHOT_BYTES_MAX / element_bytes / (shape->world_size - 1);
    return shape->count > 0 && shape->count <= pccl_min_u64(fitting, shape->segment_bytes / element_bytes);
}

uint32_t pccl_spread_origin(const pccl_op_shape *shape, uint32_t chunk)
{
    return pccl_op_shape_has_root(shape) ? shape->root : chunk;
}

pccl_spread_hops pccl_spread_hops_of(const pccl_op_shape *shape, uint32_t rank, uint32_t chunk)
{
    uint32_t world = shape->world_size;
    uint32_t distance = (rank + world - pccl_spread_origin(shape, chunk)) % world;
    pccl_spread_hops hops = {PCCL_NO_HOP, PCCL_NO_HOP};
    PCCL_ASSERT(world >= 2 && rank < world);
    if (shape->algorithm == PCCL_DIRECT) {
        *(distance == 0 ? &hops.send : &hops.receive) = 0;
        return hops;
    }
    if (distance > 0)
        hops.receive = distance - 1;
    if (distance + 1 < world)
        hops.send = distance;
    return hops;
}

void pccl_exchange_lengths(const pccl_op_request *request, uint64_t *out, uint64_t *in)
{
    const pccl_op_shape *shape = &request->shape;
    uint64_t part = shape->count / shape->world_size;
    int is_root = request->rank == shape->root;
    PCCL_ASSERT(pccl_exchange_is(shape->collective));
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        switch (shape->collective) {
        case PCCL_GATHER:
            out[rank] = rank == shape->root ? part : 0;
            in[rank] = is_root ? part : 0;
            break;
        case PCCL_SCATTER:
            out[rank] = is_root ? part : 0;
            in[rank] = rank == shape->root ? part : 0;
            break;
        default:
            out[rank] = request->send_counts != NULL ? request->send_counts[rank] : part;
            in[rank] = request->recv_counts != NULL ? request->recv_counts[rank] : part;
            break;
        }
    }
}
