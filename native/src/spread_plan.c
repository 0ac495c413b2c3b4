#include "spread_plan.h"

#include "frame.h"
#include "ring_plan.h"

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
