#include "exchange_plan.h"

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
