#include "ring_plan.h"

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
