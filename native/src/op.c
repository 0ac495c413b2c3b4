#include "op.h"

#include "dtype.h"
#include "quant.h"

#include <stdlib.h>
#include <string.h>

enum op_segment_state {
    SEGMENT_PARTIAL_IN = 1, /* accepted, perhaps still on its way */
    SEGMENT_PARTIAL_SENT = 2,
    SEGMENT_FINAL_IN = 4,
    SEGMENT_SAVED = 8 /* its original is in backup */
};

enum { WIRE_SLOT_ALIGNMENT_BYTES = 16 };

#define NO_SEGMENT UINT32_MAX

static int op_is_quantized(const pccl_op *op) { return op->request.shape.quantization != PCCL_QUANT_NONE; }

static int op_is_in_place(const pccl_op *op) { return op->request.send == op->request.recv; }

static const uint8_t *op_send_at(const pccl_op *op, pccl_ring_range range)
{
    return (const uint8_t *)op->request.send + range.first * op->element_bytes;
}

static uint8_t *op_recv_at(const pccl_op *op, pccl_ring_range range)
{
    return (uint8_t *)op->request.recv + range.first * op->element_bytes;
}

static uint8_t *op_wire_at(const pccl_op *op, uint32_t index)
{
    return op->wire + index * op->wire_slot_bytes;
}

static uint32_t op_payload_bytes(const pccl_op *op, uint32_t elements)
{
    if (op_is_quantized(op))
        return (uint32_t)pccl_quantized_bytes(&op->request.shape, elements);
    return elements * op->element_bytes;
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
    if (shape->segment_bytes < element_bytes || shape->count > SIZE_MAX / 4 / element_bytes)
        return PCCL_E_INVALID;
    if (request->reserved != 0 || request->key.reserved != 0)
        return PCCL_E_INVALID;
    if (shape->count > 0) {
        uintptr_t send = (uintptr_t)request->send;
        uintptr_t recv = (uintptr_t)request->recv;
        size_t bytes = (size_t)shape->count * element_bytes;
        if (send == 0 || recv == 0)
            return PCCL_E_INVALID;
        if (send != recv && (send < recv ? recv - send : send - recv) < bytes)
            return PCCL_E_INVALID;
    }
    return 0;
}

static void op_push_sendable(pccl_op *op, uint32_t index)
{
    op->segments[index].next = NO_SEGMENT;
    if (op->sendable_first == NO_SEGMENT)
        op->sendable_first = index;
    else
        op->segments[op->sendable_last].next = index;
    op->sendable_last = index;
}

/* Scratch of the sizes that the plan says; 0 or PCCL_E_... */
static int op_take_scratch(pccl_op *op, uint64_t segments)
{
    const pccl_op_shape *shape = &op->request.shape;
    if (op_is_quantized(op) && segments > 0) {
        uint32_t longest = pccl_ring_longest_segment(&op->plan);
        size_t payload_bytes = pccl_quantized_bytes(shape, longest);
        if (payload_bytes > UINT32_MAX)
            return PCCL_E_INVALID;
        op->wire_slot_bytes = (size_t)pccl_div_up_u64(payload_bytes, WIRE_SLOT_ALIGNMENT_BYTES) *
                              WIRE_SLOT_ALIGNMENT_BYTES;
        if (segments > SIZE_MAX / 2 / op->wire_slot_bytes)
            return PCCL_E_INVALID;
        op->wire_bytes = (size_t)segments * op->wire_slot_bytes;
        op->wire = pccl_pool_take(op->pool, op->wire_bytes);
        if (op->wire == NULL)
            return PCCL_E_MEMORY;
    }
    if (op_is_in_place(op) && segments > 0) {
        op->backup_bytes = (size_t)shape->count * op->element_bytes;
        op->backup = pccl_pool_take(op->pool, op->backup_bytes);
        if (op->backup == NULL)
            return PCCL_E_MEMORY;
    }
    return 0;
}

int pccl_op_create(const pccl_op_request *request, pccl_pool *pool, pccl_op **result)
{
    const pccl_op_shape *shape = &request->shape;
    pccl_ring_plan plan;
    uint64_t segments = 0;
    int status = pccl_op_request_check(request);
    if (status != 0)
        return status;
    memset(&plan, 0, sizeof plan);
    uint32_t element_bytes = pccl_dtype_bytes(shape->dtype);
    if (shape->world_size > 1) {
        pccl_ring_plan_init(
            &plan, shape->count, shape->segment_bytes / element_bytes, shape->world_size, request->rank);
        segments = pccl_ring_segments(&plan);
        if (segments >= NO_SEGMENT || segments > SIZE_MAX / 2 / sizeof(pccl_op_segment))
            return PCCL_E_INVALID;
    }
    pccl_op *op = calloc(1, sizeof *op + (size_t)segments * sizeof(pccl_op_segment));
    if (op == NULL)
        return PCCL_E_MEMORY;
    op->request = *request;
    op->plan = plan;
    op->element_bytes = element_bytes;
    op->pool = pool;
    op->segments_left = segments;
    op->sendable_first = op->sendable_last = NO_SEGMENT;
    pccl_list_init(&op->in_ops);
    pccl_list_init(&op->in_ready);
    pccl_list_init(&op->in_active);
    status = op_take_scratch(op, segments);
    if (status != 0) {
        pccl_op_destroy(op);
        return status;
    }
    if (segments > 0) {
        uint64_t own = pccl_ring_chunk_segments(&plan, request->rank);
        for (uint64_t i = 0; i < own; i++)
            op_push_sendable(op, (uint32_t)pccl_ring_index(&plan, request->rank, i));
    }
    *result = op;
    return 0;
}

void pccl_op_destroy(pccl_op *op)
{
    pccl_pool_give(op->pool, op->backup, op->backup_bytes);
    pccl_pool_give(op->pool, op->wire, op->wire_bytes);
    free(op);
}

void pccl_op_run_alone(pccl_op *op)
{
    PCCL_ASSERT(op->request.shape.world_size == 1);
    if (!op_is_in_place(op) && op->request.shape.count > 0)
        memcpy(op->request.recv, op->request.send, (size_t)op->request.shape.count * op->element_bytes);
    op->is_done = 1;
}

void pccl_op_stop(pccl_op *op)
{
    op->is_stopped = 1;
    op->sendable_first = op->sendable_last = NO_SEGMENT;
}

static void op_save(pccl_op *op, uint32_t index, pccl_ring_range range)
{
    if (op->backup == NULL || op->segments[index].state & SEGMENT_SAVED)
        return;
    memcpy(op->backup + range.first * op->element_bytes, op_recv_at(op, range),
           (size_t)range.count * op->element_bytes);
    op->segments[index].state |= SEGMENT_SAVED;
}

void pccl_op_restore(pccl_op *op)
{
    if (op->backup == NULL)
        return;
    uint64_t segments = pccl_ring_segments(&op->plan);
    for (uint64_t index = 0; index < segments; index++) {
        if ((op->segments[index].state & SEGMENT_SAVED) == 0)
            continue;
        uint32_t chunk;
        uint32_t segment;
        pccl_ring_locate(&op->plan, index, &chunk, &segment);
        pccl_ring_range range = pccl_ring_segment_range(&op->plan, chunk, segment);
        memcpy(op_recv_at(op, range), op->backup + range.first * op->element_bytes,
               (size_t)range.count * op->element_bytes);
        op->segments[index].state &= (uint8_t)~SEGMENT_SAVED;
    }
}

int pccl_op_has_sendable(const pccl_op *op) { return op->sendable_first != NO_SEGMENT; }

const uint8_t *pccl_op_take_sendable(pccl_op *op, pccl_frame *frame, uint32_t *index)
{
    *index = op->sendable_first;
    PCCL_ASSERT(*index != NO_SEGMENT);
    op->sendable_first = op->segments[*index].next;

    memset(frame, 0, sizeof *frame);
    frame->type = PCCL_FRAME_SEGMENT;
    frame->key = op->request.key;
    pccl_ring_locate(&op->plan, *index, &frame->chunk, &frame->segment);
    pccl_ring_hops hops = pccl_ring_hops_of(&op->plan, frame->chunk);
    pccl_ring_range range = pccl_ring_segment_range(&op->plan, frame->chunk, frame->segment);
    int is_final = hops.send_partial == PCCL_NO_HOP || op->segments[*index].state & SEGMENT_FINAL_IN;
    frame->hop = is_final ? hops.send_final : hops.send_partial;
    frame->payload_bytes = op_payload_bytes(op, range.count);
    PCCL_ASSERT(frame->hop != PCCL_NO_HOP);

    if (op_is_quantized(op)) {
        uint8_t *wire = op_wire_at(op, *index);
        if (frame->hop == 0)
            pccl_kernel_quantize(&op->request.shape, op_send_at(op, range), range.count, wire);
        return wire;
    }
    return frame->hop == 0 ? op_send_at(op, range) : op_recv_at(op, range);
}

void pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    op->segments[index].state |= SEGMENT_PARTIAL_SENT;
    op->tx_bytes += payload_bytes;
}

const char *pccl_op_accept(pccl_op *op, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    if (frame->chunk >= op->plan.world_size ||
        frame->segment >= pccl_ring_chunk_segments(&op->plan, frame->chunk))
        return "no such segment";
    pccl_ring_hops hops = pccl_ring_hops_of(&op->plan, frame->chunk);
    if (frame->hop == PCCL_NO_HOP || (frame->hop != hops.receive_partial && frame->hop != hops.receive_final))
        return "a hop that does not end here";
    inbound->is_final = frame->hop == hops.receive_final;
    inbound->index = (uint32_t)pccl_ring_index(&op->plan, frame->chunk, frame->segment);
    inbound->range = pccl_ring_segment_range(&op->plan, frame->chunk, frame->segment);
    inbound->payload_bytes = frame->payload_bytes;
    if (frame->payload_bytes != op_payload_bytes(op, inbound->range.count))
        return "wrong payload size";
    uint8_t *state = &op->segments[inbound->index].state;
    uint8_t bit = inbound->is_final ? SEGMENT_FINAL_IN : SEGMENT_PARTIAL_IN;
    if (*state & bit)
        return "the same segment twice";
    if (inbound->is_final && (*state & SEGMENT_PARTIAL_SENT) == 0)
        return "a result before its parts";
    *state |= bit;

    if (op_is_quantized(op)) {
        inbound->store = op_wire_at(op, inbound->index);
    } else {
        op_save(op, inbound->index, inbound->range);
        inbound->store = inbound->is_final ? op_recv_at(op, inbound->range) : NULL;
    }
    return NULL;
}

/* Only the owner of a chunk has nothing partial to send of it. */
static int op_is_owner(const pccl_op *op, uint32_t chunk)
{
    return pccl_ring_hops_of(&op->plan, chunk).send_partial == PCCL_NO_HOP;
}

void pccl_op_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements)
{
    const pccl_op_shape *shape = &op->request.shape;
    size_t offset_bytes = first * op->element_bytes;
    uint8_t *destination = op_recv_at(op, inbound->range) + offset_bytes;
    PCCL_ASSERT(first + elements <= inbound->range.count && !op->is_stopped);
    const uint8_t *own = op_send_at(op, inbound->range) + offset_bytes;
    pccl_kernel_reduce(shape->dtype, shape->reduce_op, destination, own, payload, elements);
    if (shape->reduce_op == PCCL_AVG) {
        uint32_t chunk;
        uint32_t segment;
        pccl_ring_locate(&op->plan, inbound->index, &chunk, &segment);
        if (op_is_owner(op, chunk))
            pccl_kernel_average(shape->dtype, destination, elements, shape->world_size);
    }
}

static void op_decode(pccl_op *op, const pccl_op_inbound *inbound, int is_owner)
{
    const pccl_op_shape *shape = &op->request.shape;
    uint8_t *wire = op_wire_at(op, inbound->index);
    uint8_t *recv = op_recv_at(op, inbound->range);
    size_t count = inbound->range.count;
    op_save(op, inbound->index, inbound->range);
    if (!inbound->is_final) {
        pccl_quant_dequantize_reduce(shape, recv, op_send_at(op, inbound->range), wire, count);
        if (is_owner && shape->reduce_op == PCCL_AVG)
            pccl_kernel_average(shape->dtype, recv, count, shape->world_size);
        pccl_kernel_quantize(shape, recv, count, wire);
    }
    if (inbound->is_final || is_owner)
        pccl_kernel_dequantize(shape, wire, count, recv);
}

void pccl_op_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    PCCL_ASSERT(!op->is_stopped);
    uint32_t chunk;
    uint32_t segment;
    pccl_ring_locate(&op->plan, inbound->index, &chunk, &segment);
    pccl_ring_hops hops = pccl_ring_hops_of(&op->plan, chunk);
    int is_owner = op_is_owner(op, chunk);
    op->rx_bytes += inbound->payload_bytes;
    if (op_is_quantized(op))
        op_decode(op, inbound, is_owner);
    if (inbound->is_final || is_owner) {
        PCCL_ASSERT(op->segments_left > 0);
        if (--op->segments_left == 0)
            op->is_done = 1;
    }
    if ((inbound->is_final ? hops.send_final : is_owner ? hops.send_final : hops.send_partial) != PCCL_NO_HOP)
        op_push_sendable(op, inbound->index);
}
