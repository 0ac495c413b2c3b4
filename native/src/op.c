#include "op.h"

#include "crc32c.h"
#include "direct_plan.h"
#include "op_algorithm.h"
#include "quant.h"

#include <stdlib.h>
#include <string.h>

enum { SLOT_ALIGNMENT_BYTES = 16 };

uint32_t pccl_op_payload_bytes(const pccl_op *op, uint32_t elements)
{
    if (pccl_op_is_quantized(op))
        return (uint32_t)pccl_quantized_bytes(&op->request.shape, elements);
    return elements * op->element_bytes;
}

/* Where one rank has all elements they are one chunk. */
static uint32_t shape_chunks(const pccl_op_shape *shape)
{
    return pccl_op_shape_has_root(shape) ? 1 : shape->world_size;
}

/* Whether a ring may leave a rank with all that it gets, and its neighbour heard, while others have not begun. */
static int shape_may_end_early(const pccl_op_shape *shape)
{
    return pccl_op_shape_has_root(shape) || shape->count < shape->world_size || shape->last_slice > 0;
}

/* Of a shape whose world is right. */
static int shape_fits_collective(const pccl_op_shape *shape)
{
    if (shape->collective == PCCL_ALL_REDUCE)
        return shape->root == 0;
    if (shape->collective == PCCL_REDUCE_SCATTER)
        return shape->root == 0 && shape->quantization == PCCL_QUANT_NONE;
    if (shape->reduce_op != 0 || shape->quantization != PCCL_QUANT_NONE)
        return 0;
    switch (shape->collective) {
    case PCCL_ALL_GATHER: return shape->root == 0 && shape->count % shape->world_size == 0;
    case PCCL_BROADCAST: return shape->root < shape->world_size;
    case PCCL_SEND: return shape->root < shape->world_size && shape->world_size == 2;
    case PCCL_BARRIER: return shape->root == 0 && shape->count == 0;
    default: return 0;
    }
}

/* Elements of a rank's buffers that the op reads and writes. */
static void op_measure_buffers(const pccl_op_request *request, uint64_t *send, uint64_t *recv)
{
    const pccl_op_shape *shape = &request->shape;
    *send = *recv = shape->count;
    if (shape->collective == PCCL_ALL_GATHER)
        *send = shape->count / shape->world_size;
    else if (shape->collective == PCCL_REDUCE_SCATTER)
        *recv = shape->count / shape->world_size + (request->rank < shape->count % shape->world_size);
    else if (pccl_op_shape_has_root(shape))
        *(request->rank == shape->root ? recv : send) = 0;
}

/* Of buffers that the op may read and write both. */
static int op_buffers_are_apart(const pccl_op_request *request, size_t send_bytes, size_t recv_bytes)
{
    uintptr_t send = (uintptr_t)request->send;
    uintptr_t recv = (uintptr_t)request->recv;
    if (send_bytes == 0 || recv_bytes == 0)
        return 1;
    if (request->shape.collective == PCCL_ALL_GATHER && send == recv + request->rank * send_bytes)
        return 1;
    if (request->shape.collective == PCCL_ALL_REDUCE && send == recv)
        return 1;
    return send < recv ? recv - send >= send_bytes : send - recv >= recv_bytes;
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
    if (!shape_fits_collective(shape))
        return PCCL_E_INVALID;
    uint64_t send;
    uint64_t recv;
    op_measure_buffers(request, &send, &recv);
    if ((send > 0 && request->send == NULL) || (recv > 0 && request->recv == NULL) ||
        !op_buffers_are_apart(request, (size_t)send * element_bytes, (size_t)recv * element_bytes))
        return PCCL_E_INVALID;
    return 0;
}

static int op_take(pccl_op *op, uint64_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block)
{
    if (bytes > SIZE_MAX / 2)
        return PCCL_E_INVALID;
    return pccl_pool_take(op->pool, (size_t)bytes, purpose, block) == 0 ? 0 : PCCL_E_MEMORY;
}

static int op_take_backup(pccl_op *op)
{
    if (op->segments_left == 0 || !pccl_op_is_in_place(op))
        return 0;
    int status = op_take(op, pccl_tiling_elements(&op->tiling) * op->element_bytes, PCCL_POOL_COPY, &op->backup_block);
    op->backup = op->backup_block.at;
    return status;
}

static int op_measure_slots(pccl_op *op)
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
    return op_take(op, slots * op->slot_bytes, PCCL_POOL_WORK, &op->scratch);
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

static void op_init_peer(pccl_op *op, uint32_t at, uint32_t rank, uint64_t link_id)
{
    pccl_op_peer *peer = &op->peers[at];
    peer->op = op;
    peer->rank = rank;
    peer->link_id = link_id;
    pccl_list_init(&peer->in_ready);
    pccl_list_init(&peer->in_active);
}

static int op_take_peers(pccl_op *op)
{
    const pccl_op_request *request = &op->request;
    uint32_t world = request->shape.world_size;
    int is_direct = request->shape.algorithm == PCCL_DIRECT;
    op->hears_all = !is_direct && request->rank_links != NULL && shape_may_end_early(&request->shape);
    int has_all = is_direct || op->hears_all;
    uint32_t count = has_all ? world - 1 : 2;
    op->peers = calloc(count, sizeof *op->peers);
    if (op->peers == NULL)
        return PCCL_E_MEMORY;
    op->peers_count = count;
    if (has_all) {
        for (uint32_t i = 0; i < count; i++) {
            uint32_t rank = pccl_direct_served(world, request->rank, i);
            op_init_peer(op, i, rank, request->rank_links[rank]);
            op->peers[i].is_source = op->peers[i].is_target = 1;
        }
    } else {
        op_init_peer(op, 0, (request->rank + world - 1) % world, request->link_prev);
        op_init_peer(op, 1, (request->rank + 1) % world, request->link_next);
        op->peers[0].is_source = op->peers[1].is_target = 1;
    }
    op->peers_unheard = has_all ? count : 1;
    return 0;
}

static const pccl_op_algorithm *op_algorithm(const pccl_op_shape *shape)
{
    if (shape->collective != PCCL_ALL_REDUCE && shape->collective != PCCL_REDUCE_SCATTER)
        return &pccl_op_spread_algorithm;
    return shape->algorithm == PCCL_DIRECT ? &pccl_op_direct_algorithm : &pccl_op_ring_algorithm;
}

int pccl_op_create(const pccl_op_request *request, pccl_pool *pool, uint64_t scratch_bytes_max, pccl_op **result)
{
    const pccl_op_shape *shape = &request->shape;
    pccl_tiling tiling;
    uint64_t segments = 0;
    int status = pccl_op_request_check(request);
    if (status != 0)
        return status;
    memset(&tiling, 0, sizeof tiling);
    uint32_t element_bytes = pccl_dtype_bytes(shape->dtype);
    if (shape->world_size > 1) {
        pccl_tiling_init(&tiling, shape->count, shape->segment_bytes / element_bytes, shape_chunks(shape), shape->slice,
            shape->last_slice + 1u);
        segments = pccl_tiling_segments(&tiling);
        if (segments >= UINT32_MAX || segments > SIZE_MAX / 2 / sizeof(pccl_op_segment))
            return PCCL_E_INVALID;
    }
    pccl_op *op = calloc(1, sizeof *op + (size_t)segments * sizeof(pccl_op_segment));
    if (op == NULL)
        return PCCL_E_MEMORY;
    op->request = *request;
    op->tiling = tiling;
    op->element_bytes = element_bytes;
    op->pool = pool;
    op->scratch_bytes_max = scratch_bytes_max;
    op->segments_left = segments;
    if (pccl_op_is_half(op) && shape->world_size > 1) {
        op->segments_left = pccl_tiling_chunk_segments(&tiling, request->rank);
        op->recv_first = pccl_tiling_chunk_first(&tiling, request->rank);
    }
    op->sendable_first = op->sendable_last = PCCL_NO_SEGMENT;
    pccl_list_init(&op->in_ops);
    pccl_list_init(&op->in_ran);
    if (shape->world_size > 1) {
        op->algorithm = op_algorithm(shape);
        status = op_take_peers(op);
        if (status == 0)
            status = op_measure_slots(op);
        if (status == 0)
            status = op_take_backup(op);
        if (status == 0)
            status = op->algorithm->open(op);
        if (status != 0) {
            pccl_op_destroy(op);
            return status;
        }
    }
    op->request.rank_links = NULL;
    *result = op;
    return 0;
}

void pccl_op_destroy(pccl_op *op)
{
    if (op->algorithm != NULL)
        op->algorithm->close(op);
    pccl_pool_give(op->pool, &op->backup_block);
    pccl_pool_give(op->pool, &op->scratch);
    free(op->peers);
    free(op);
}

void pccl_op_run_alone(pccl_op *op)
{
    uint64_t send;
    uint64_t recv;
    PCCL_ASSERT(op->request.shape.world_size == 1);
    op_measure_buffers(&op->request, &send, &recv);
    if (op->request.send != op->request.recv && recv > 0)
        memcpy(op->request.recv, op->request.send, (size_t)recv * op->element_bytes);
    op->is_done = 1;
}

void pccl_op_stop(pccl_op *op)
{
    op->is_stopped = 1;
    if (op->algorithm != NULL)
        op->algorithm->stop(op);
}

/* Originals */

static uint8_t *op_backup_at(const pccl_op *op, pccl_range range, size_t first)
{
    return op->backup + (range.place + first) * op->element_bytes;
}

const uint8_t *pccl_op_own_at(const pccl_op *op, uint32_t index, pccl_range range)
{
    PCCL_ASSERT(op->backup == NULL || op->segments[index].saved == range.count);
    return op->backup != NULL ? op_backup_at(op, range, 0) : pccl_op_send_at(op, range);
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

static int range_lies_in(pccl_range range, uint64_t first, uint64_t elements)
{
    return range.first >= first && range.first < first + elements;
}

/* Of one segment: what was kept of the original goes back, what has come of it goes along. */
static void op_move_segment(pccl_op *op, uint64_t index, const pccl_op_move *move, uint64_t send_first,
    uint64_t send_elements, uint64_t recv_elements)
{
    uint32_t chunk;
    uint32_t segment;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    pccl_range range = pccl_tiling_range(&op->tiling, chunk, segment);
    size_t bytes = (size_t)range.count * op->element_bytes;
    size_t saved = op->segments[index].saved;
    if (range_lies_in(range, op->recv_first, recv_elements)) {
        size_t at = (size_t)(range.first - op->recv_first) * op->element_bytes;
        memcpy(move->new_recv + at, move->recv + at, bytes);
        if (op->backup != NULL)
            memcpy(pccl_op_recv_at(op, range), op_backup_at(op, range, 0), saved * op->element_bytes);
    }
    if (range_lies_in(range, send_first, send_elements) && (move->send != move->recv || recv_elements == 0)) {
        size_t at = (size_t)(range.first - send_first) * op->element_bytes;
        memcpy(move->new_send + at, move->send + at, bytes);
    }
}

pccl_op_move pccl_op_move_to(pccl_op *op, void *send, void *recv)
{
    pccl_op_request *request = &op->request;
    uint64_t send_elements;
    uint64_t recv_elements;
    op_measure_buffers(request, &send_elements, &recv_elements);
    pccl_op_move move;
    move.send = request->send;
    move.recv = request->recv;
    move.new_send = send;
    move.new_recv = recv;
    move.send_bytes = (size_t)send_elements * op->element_bytes;
    move.recv_bytes = (size_t)recv_elements * op->element_bytes;
    if (move.send == move.recv) /* a rank that has but one of them copies that */
        move.new_send = move.new_recv = recv != NULL ? recv : send;
    uint64_t send_first = request->shape.collective == PCCL_ALL_GATHER ? request->rank * send_elements : 0;
    uint64_t segments = op->algorithm != NULL ? pccl_tiling_segments(&op->tiling) : 0;
    for (uint64_t index = 0; index < segments; index++)
        op_move_segment(op, index, &move, send_first, send_elements, recv_elements);
    if (op->algorithm == NULL && move.recv_bytes > 0) /* it is done, and not in place as its copy goes */
        memcpy(move.new_recv, move.recv, move.recv_bytes);
    request->send = move.new_send;
    request->recv = move.new_recv;
    return move;
}

const uint8_t *pccl_op_moved(const pccl_op_move *move, const uint8_t *at)
{
    if (at >= move->recv && at < move->recv + move->recv_bytes)
        return move->new_recv + (at - move->recv);
    if (at >= move->send && at < move->send + move->send_bytes)
        return move->new_send + (at - move->send);
    return at;
}

void pccl_op_drop_buffers(pccl_op *op)
{
    PCCL_ASSERT(op->is_stopped);
    pccl_op_restore(op);
    op->request.send = NULL;
    op->request.recv = NULL;
}

uint64_t pccl_op_tx_bytes_planned(const pccl_op *op)
{
    uint64_t bytes = 0;
    if (op->algorithm == NULL)
        return 0;
    for (uint32_t chunk = 0; chunk < op->tiling.world_size; chunk++) {
        uint64_t segments = pccl_tiling_chunk_segments(&op->tiling, chunk);
        if (segments == 0)
            continue;
        /* All but the last are of one length. */
        uint64_t first = pccl_op_payload_bytes(op, pccl_tiling_range(&op->tiling, chunk, 0).count);
        uint64_t last = pccl_op_payload_bytes(op, pccl_tiling_range(&op->tiling, chunk, segments - 1).count);
        bytes += op->algorithm->sends(op, chunk) * ((segments - 1) * first + last);
    }
    return bytes;
}

/* Peers */

/* A ring of two has a source and a target behind the same link. */
static pccl_op_peer *op_find_peer(pccl_op *op, uint64_t link_id, int is_target)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        pccl_op_peer *peer = &op->peers[i];
        if (peer->link_id == link_id && (is_target ? peer->is_target : peer->is_source))
            return peer;
    }
    return NULL;
}

pccl_op_peer *pccl_op_find_source(pccl_op *op, uint64_t link_id) { return op_find_peer(op, link_id, 0); }

pccl_op_peer *pccl_op_find_target(pccl_op *op, uint64_t link_id) { return op_find_peer(op, link_id, 1); }

void pccl_op_heard(pccl_op_peer *target)
{
    PCCL_ASSERT(target->is_target && !target->is_heard && target->op->peers_unheard > 0);
    target->is_heard = 1;
    target->op->peers_unheard--;
}

void pccl_op_unheard(pccl_op_peer *target)
{
    PCCL_ASSERT(target->is_target && target->is_heard);
    target->is_heard = 0;
    target->op->peers_unheard++;
}

int pccl_op_is_complete(const pccl_op *op) { return op->segments_left == 0 && op->peers_unheard == 0; }

/* Segments */

void pccl_op_encode(pccl_op *op, uint32_t index, pccl_range range, const uint8_t *elements)
{
    pccl_quant_quantize(&op->request, range.first, elements, range.count, pccl_op_wire_at(op, index));
}

void pccl_op_decode(pccl_op *op, uint32_t index, pccl_range range)
{
    pccl_kernel_dequantize(&op->request.shape, pccl_op_wire_at(op, index), range.count, pccl_op_recv_at(op, range));
}

void pccl_op_push_sendable(pccl_op *op, uint32_t index)
{
    op->segments[index].next = PCCL_NO_SEGMENT;
    if (op->sendable_first == PCCL_NO_SEGMENT)
        op->sendable_first = index;
    else
        op->segments[op->sendable_last].next = index;
    op->sendable_last = index;
}

uint32_t pccl_op_pop_sendable(pccl_op *op)
{
    uint32_t index = op->sendable_first;
    PCCL_ASSERT(index != PCCL_NO_SEGMENT);
    op->sendable_first = op->segments[index].next;
    return index;
}

void pccl_op_note_final(pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(op->segments_left > 0 && !pccl_op_is_final(op, index));
    op->segments[index].state |= PCCL_SEGMENT_FINAL;
    op->segments_left--;
}

void pccl_op_note_final_elsewhere(pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(pccl_op_is_half(op) && !pccl_op_is_final(op, index));
    op->segments[index].state |= PCCL_SEGMENT_FINAL;
}

int pccl_op_has_sendable(const pccl_op_peer *target)
{
    return target->is_target && target->op->algorithm->has_sendable(target);
}

const uint8_t *pccl_op_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    memset(frame, 0, sizeof *frame);
    frame->type = PCCL_FRAME_SEGMENT;
    frame->key = target->op->request.key;
    return target->op->algorithm->take_sendable(target, frame, index);
}

static uint32_t op_segment_bytes(const pccl_op *op, uint32_t chunk, uint32_t segment)
{
    if (segment >= pccl_tiling_chunk_segments(&op->tiling, chunk))
        return 0;
    return pccl_op_payload_bytes(op, pccl_tiling_range(&op->tiling, chunk, segment).count);
}

uint32_t pccl_op_eager_bytes(const pccl_op_peer *target, uint32_t one_bytes_max, uint32_t several_bytes_max)
{
    const pccl_op *op = target->op;
    if (!target->is_target || op->is_stopped)
        return 0;
    uint32_t chunk = op->algorithm->first_chunk(target);
    uint64_t segments = chunk == PCCL_NO_CHUNK ? 0 : pccl_tiling_chunk_segments(&op->tiling, chunk);
    if (segments == 0)
        return 0;
    if (segments == 1) {
        uint32_t bytes = op_segment_bytes(op, chunk, 0);
        return bytes <= one_bytes_max ? bytes : 0;
    }
    uint32_t at_once = op->algorithm->first_at_once(target);
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < at_once; i++) {
        uint32_t more_bytes = op_segment_bytes(op, chunk, i);
        if (more_bytes > several_bytes_max - bytes)
            break;
        bytes += more_bytes;
    }
    return bytes;
}

const uint8_t *pccl_op_take_eager(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    const uint8_t *payload = pccl_op_take_sendable(target, frame, index);
    PCCL_ASSERT(frame->chunk == target->op->algorithm->first_chunk(target) && frame->segment == 0);
    frame->type = PCCL_FRAME_EAGER;
    frame->shape = target->op->request.shape;
    while (frame->payload_bytes < target->eager_bytes) {
        pccl_frame next;
        uint32_t next_index;
        const uint8_t *next_payload = pccl_op_take_sendable(target, &next, &next_index);
        PCCL_ASSERT(next.chunk == frame->chunk && next_payload == payload + frame->payload_bytes);
        frame->payload_bytes += next.payload_bytes;
        frame->has_payload_crc = 0;
    }
    PCCL_ASSERT(frame->payload_bytes == target->eager_bytes);
    return payload;
}

uint32_t pccl_op_first_bytes(const pccl_op_peer *source, uint32_t segment)
{
    uint32_t chunk;
    uint32_t hop;
    source->op->algorithm->first_hop(source, &chunk, &hop);
    return chunk < source->op->tiling.world_size ? op_segment_bytes(source->op, chunk, segment) : 0;
}

const char *pccl_op_check_eager(const pccl_op_peer *source, uint32_t payload_bytes)
{
    uint64_t bytes = 0;
    for (uint32_t segment = 0; bytes < payload_bytes; segment++) {
        uint32_t more_bytes = pccl_op_first_bytes(source, segment);
        if (more_bytes == 0)
            return segment == 0 ? "no such segment" : "wrong payload size";
        bytes += more_bytes;
    }
    return bytes == payload_bytes ? NULL : "wrong payload size";
}

/* All segments that were in the frame. */
static void op_note_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    uint32_t chunk;
    uint32_t segment;
    uint32_t bytes = 0;
    pccl_tiling_locate(&op->tiling, index, &chunk, &segment);
    do {
        op->segments[index++].state |= PCCL_SEGMENT_PARTIAL_SENT;
        bytes += op_segment_bytes(op, chunk, segment++);
    } while (bytes < payload_bytes);
}

int pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    op_note_sent(op, index, payload_bytes);
    op->tx_bytes += payload_bytes;
    return pccl_op_is_complete(op) && !op->is_done;
}

const char *pccl_op_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    pccl_frame segment = *frame;
    PCCL_ASSERT(source->is_source && !op->is_stopped);
    if (frame->type == PCCL_FRAME_EAGER) {
        op->algorithm->first_hop(source, &segment.chunk, &segment.hop);
    }
    memset(inbound, 0, sizeof *inbound);
    if (segment.chunk >= op->tiling.world_size ||
        segment.segment >= pccl_tiling_chunk_segments(&op->tiling, segment.chunk))
        return "no such segment";
    inbound->index = (uint32_t)pccl_tiling_index(&op->tiling, segment.chunk, segment.segment);
    inbound->range = pccl_tiling_range(&op->tiling, segment.chunk, segment.segment);
    inbound->payload_bytes = segment.payload_bytes;
    inbound->from = source->rank;
    int is_bare = pccl_op_is_half(op) && op->algorithm->is_final_hop(op, segment.hop);
    if (inbound->payload_bytes != (is_bare ? 0 : pccl_op_payload_bytes(op, inbound->range.count)))
        return "wrong payload size";
    return op->algorithm->accept(source, &segment, inbound);
}

/* Where the own elements from number `first` on are, and where they are to be kept; how many of them. */
static size_t op_take_own(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, size_t elements, pccl_reduction *reduction)
{
    pccl_range range = inbound->range;
    uint32_t *saved = &op->segments[inbound->index].saved;
    reduction->own = pccl_op_send_at(op, range) + first * op->element_bytes;
    reduction->kept = NULL;
    if (op->backup == NULL)
        return elements;
    if (first < *saved) {
        reduction->own = op_backup_at(op, range, first);
        return pccl_min_size(elements, *saved - first);
    }
    PCCL_ASSERT(first == *saved);
    reduction->kept = op_backup_at(op, range, first);
    *saved += (uint32_t)elements;
    return elements;
}

void pccl_op_reduce(pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements,
    uint32_t *payload_crc)
{
    PCCL_ASSERT(first + elements <= inbound->range.count && !op->is_stopped);
    while (elements > 0) {
        pccl_reduction reduction;
        memset(&reduction, 0, sizeof reduction);
        size_t n = op_take_own(op, inbound, first, elements, &reduction);
        reduction.payload = payload;
        reduction.payload_crc = payload_crc;
        op->algorithm->reduce(op, inbound, first, &reduction, n);
        first += n;
        payload += n * op->element_bytes;
        elements -= n;
    }
}

void pccl_op_retract(pccl_op_peer *source, const pccl_op_inbound *inbound)
{
    source->op->algorithm->retract(source->op, inbound);
}

int pccl_op_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    PCCL_ASSERT(!op->is_stopped);
    op->rx_bytes += inbound->payload_bytes;
    return op->algorithm->arrived(op, inbound);
}
