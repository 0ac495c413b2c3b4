#include "op_request.h"

#include "plans.h"
#include "frame.h"
#include "quant.h"
#include "tiling.h"

/* The shape's world_size has been checked. */
static int shape_fits_collective(const pccl_op_shape *shape)
{
    if (shape->collective == PCCL_ALL_REDUCE)
        return shape->root == 0;
    if (shape->collective == PCCL_REDUCE_SCATTER)
        return shape->root == 0 && shape->quantization == PCCL_QUANT_NONE;
    if (shape->collective == PCCL_REDUCE)
        return shape->root < shape->world_size && shape->quantization == PCCL_QUANT_NONE;
    if (shape->reduce_op != 0 || shape->quantization != PCCL_QUANT_NONE)
        return 0;
    switch (shape->collective) {
    case PCCL_ALL_GATHER: return shape->root == 0 && shape->count % shape->world_size == 0;
    case PCCL_BROADCAST: return shape->root < shape->world_size;
    case PCCL_SEND: return shape->root < shape->world_size && shape->world_size == 2;
    case PCCL_BARRIER: return shape->root == 0 && shape->count == 0;
    case PCCL_ALL_TO_ALL: return shape->root == 0;
    case PCCL_GATHER:
    case PCCL_SCATTER: return shape->root < shape->world_size && shape->count % shape->world_size == 0;
    default: return 0;
    }
}

/* Sets the sum of the parts' lengths. Nonzero if none of them, nor the sum, is more than the op's count. */
static int counts_add_up(const pccl_op_shape *shape, const uint64_t *counts, uint64_t *sum)
{
    *sum = 0;
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        if (counts[rank] > shape->count - *sum)
            return 0;
        *sum += counts[rank];
    }
    return 1;
}

/* An all-to-all has the lengths of all its parts or of none, and what a rank keeps it also gets. */
static int counts_are_right(const pccl_op_request *request)
{
    const pccl_op_shape *shape = &request->shape;
    const uint64_t *send = request->send_counts;
    const uint64_t *recv = request->recv_counts;
    uint64_t sent;
    uint64_t received;
    if (send == NULL && recv == NULL)
        return shape->collective != PCCL_ALL_TO_ALL || shape->count % shape->world_size == 0;
    return shape->collective == PCCL_ALL_TO_ALL && send != NULL && recv != NULL &&
           send[request->rank] == recv[request->rank] && counts_add_up(shape, send, &sent) &&
           counts_add_up(shape, recv, &received) && pccl_max_u64(sent, received) == shape->count;
}

static int feedback_is_right(const pccl_op_request *request)
{
    const pccl_op_shape *shape = &request->shape;
    if (request->residual_next == NULL)
        return request->residual == NULL;
    return shape->quantization != PCCL_QUANT_NONE && shape->dtype == PCCL_FLOAT32 && request->feedback_decay >= 0 &&
           request->feedback_decay <= 1;
}

void pccl_op_request_buffers(const pccl_op_request *request, uint64_t *send, uint64_t *recv)
{
    const pccl_op_shape *shape = &request->shape;
    uint64_t part = shape->count / shape->world_size;
    int is_root = request->rank == shape->root;
    *send = *recv = shape->count;
    switch (shape->collective) {
    case PCCL_ALL_GATHER: *send = part; break;
    case PCCL_REDUCE_SCATTER: *recv = part + (request->rank < shape->count % shape->world_size); break;
    case PCCL_BROADCAST:
    case PCCL_SEND: *(is_root ? recv : send) = 0; break;
    case PCCL_REDUCE: *recv = is_root ? shape->count : 0; break;
    case PCCL_GATHER:
        *send = part;
        *recv = is_root ? shape->count : 0;
        break;
    case PCCL_SCATTER:
        *send = is_root ? shape->count : 0;
        *recv = part;
        break;
    case PCCL_ALL_TO_ALL:
        if (request->send_counts != NULL) {
            (void)counts_add_up(shape, request->send_counts, send);
            (void)counts_add_up(shape, request->recv_counts, recv);
        }
        break;
    default: break;
    }
}

static int are_apart(uintptr_t a, size_t a_bytes, uintptr_t b, size_t b_bytes)
{
    return a < b ? b - a >= a_bytes : a - b >= b_bytes;
}

typedef struct {
    uintptr_t at;
    size_t bytes;
} memory_range;

/* The i-th place where one side of an op is: all of it, or where parts are named the one of a rank. */
static memory_range place_of(const pccl_op_request *request, const void *const *parts, const uint64_t *counts,
    const void *whole, size_t whole_bytes, uint32_t i)
{
    const pccl_op_shape *shape = &request->shape;
    memory_range place = {(uintptr_t)whole, whole_bytes};
    if (parts == NULL)
        return place;
    place.at = (uintptr_t)parts[i];
    place.bytes = (size_t)(counts != NULL ? counts[i] : shape->count / shape->world_size);
    place.bytes *= pccl_dtype_bytes(shape->dtype);
    return place;
}

/* The same as op_buffers_are_apart where parts are named, each of which has to be there, too. */
static int parts_are_right(const pccl_op_request *request, size_t send_bytes, size_t recv_bytes)
{
    const pccl_op_shape *shape = &request->shape;
    const void *const *recv_parts = (const void *const *)request->recv_parts;
    int is_exchange = shape->collective == PCCL_ALL_TO_ALL;
    if (shape->world_size == 1)
        return 0;
    if (request->send_parts != NULL && (send_bytes == 0 || (!is_exchange && shape->collective != PCCL_SCATTER)))
        return 0;
    if (recv_parts != NULL && (recv_bytes == 0 || (!is_exchange && shape->collective != PCCL_GATHER)))
        return 0;
    uint32_t sends = request->send_parts != NULL ? shape->world_size : 1;
    uint32_t recvs = recv_parts != NULL ? shape->world_size : 1;
    for (uint32_t i = 0; i < sends; i++) {
        memory_range send = place_of(request, request->send_parts, request->send_counts, request->send, send_bytes, i);
        if (send.bytes > 0 && send.at == 0)
            return 0;
        for (uint32_t k = 0; k < recvs; k++) {
            memory_range recv = place_of(request, recv_parts, request->recv_counts, request->recv, recv_bytes, k);
            if (recv.bytes > 0 && recv.at == 0)
                return 0;
            int is_own = !is_exchange && (sends > 1 ? i : k) == request->rank && send.at == recv.at;
            if (send.bytes > 0 && recv.bytes > 0 && !is_own && !are_apart(send.at, send.bytes, recv.at, recv.bytes))
                return 0;
        }
    }
    return 1;
}

/* Nonzero if the buffers do not overlap where the op could not bear it. */
static int op_buffers_are_apart(const pccl_op_request *request, size_t send_bytes, size_t recv_bytes)
{
    uintptr_t send = (uintptr_t)request->send;
    uintptr_t recv = (uintptr_t)request->recv;
    if (request->send_parts != NULL || request->recv_parts != NULL)
        return parts_are_right(request, send_bytes, recv_bytes);
    if (send_bytes == 0 || recv_bytes == 0)
        return 1;
    uint8_t collective = request->shape.collective;
    if ((collective == PCCL_ALL_GATHER || collective == PCCL_GATHER) && send == recv + request->rank * send_bytes)
        return 1;
    if (collective == PCCL_SCATTER && recv == send + request->rank * recv_bytes)
        return 1;
    if ((collective == PCCL_ALL_REDUCE || collective == PCCL_REDUCE) && send == recv)
        return 1;
    return are_apart(send, send_bytes, recv, recv_bytes);
}

int pccl_op_request_check(const pccl_op_request *request)
{
    const pccl_op_shape *shape = &request->shape;
    uint32_t element_bytes = pccl_dtype_bytes(shape->dtype);
    if (element_bytes == 0 || shape->reduce_op >= PCCL_REDUCE_OP_COUNT)
        return PCCL_E_INVALID;
    if (shape->quantization == PCCL_QUANT_NONE ? shape->quantized_dtype != 0 || shape->quantization_block != 0
                                               : !pccl_quant_valid(shape))
        return PCCL_E_INVALID;
    if (shape->world_size == 0 || shape->world_size > PCCL_WORLD_MAX || request->rank >= shape->world_size)
        return PCCL_E_INVALID;
    if (shape->algorithm >= PCCL_ALGORITHM_COUNT)
        return PCCL_E_INVALID;
    if (shape->slice > shape->last_slice || shape->last_slice >= PCCL_SLICES_MAX || shape->step > PCCL_STEP_MAX)
        return PCCL_E_INVALID;
    if (shape->world_size == 1 && shape->last_slice > 0)
        return PCCL_E_INVALID;
    if (shape->algorithm == PCCL_DIRECT && shape->world_size > 1 && request->rank_links == NULL)
        return PCCL_E_INVALID;
    if (request->awaits_completion > 1 ||
        (request->awaits_completion && shape->world_size > 2 && request->rank_links == NULL))
        return PCCL_E_INVALID;
    if (shape->segment_bytes < element_bytes || shape->count > SIZE_MAX / 4 / element_bytes)
        return PCCL_E_INVALID;
    if (request->rounding >= PCCL_ROUNDING_COUNT || request->key.reserved != 0)
        return PCCL_E_INVALID;
    if (!shape_fits_collective(shape) || !counts_are_right(request) || !feedback_is_right(request))
        return PCCL_E_INVALID;
    uint64_t send;
    uint64_t recv;
    pccl_op_request_buffers(request, &send, &recv);
    if ((send > 0 && request->send == NULL) || (recv > 0 && request->recv == NULL) ||
        !op_buffers_are_apart(request, (size_t)send * element_bytes, (size_t)recv * element_bytes))
        return PCCL_E_INVALID;
    return 0;
}
