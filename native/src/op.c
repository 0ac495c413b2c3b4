#include "op.h"

#include "op_algorithm.h"
#include "op_originals.h"
#include "op_request.h"
#include "plans.h"
#include "quant.h"

#include <stdlib.h>
#include <string.h>

/* Elements that come from one rank are one chunk, and so is what every rank folds by itself. */
static uint32_t shape_chunks(const pccl_op_shape *shape)
{
    return pccl_op_shape_has_root(shape) || pccl_oneshot_is(shape) ? 1 : shape->world_size;
}

/* Nonzero if a rank of a ring may have all that it gets, and have heard its neighbour, while others have not begun. */
static int shape_may_end_early(const pccl_op_shape *shape)
{
    return pccl_op_shape_has_root(shape) || pccl_exchange_is(shape->collective) || shape->count < shape->world_size ||
           shape->last_slice > 0;
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
    if (pccl_exchange_is(shape->collective))
        return shape->algorithm == PCCL_DIRECT ? &pccl_op_exchange_algorithm : &pccl_op_relay_algorithm;
    if (!pccl_op_shape_reduces(shape))
        return &pccl_op_spread_algorithm;
    if (pccl_oneshot_is(shape))
        return &pccl_op_oneshot_algorithm;
    return shape->algorithm == PCCL_DIRECT ? &pccl_op_direct_algorithm : &pccl_op_ring_algorithm;
}

/* A rank of a reduce that is not the root has no recv. 0 or a status. */
static int op_take_result(pccl_op *op)
{
    if (op->request.shape.collective != PCCL_REDUCE || !pccl_op_is_half(op))
        return 0;
    uint64_t bytes = pccl_tiling_chunk_elements(&op->tiling, op->request.rank) * op->element_bytes;
    int status = bytes == 0 ? 0 : pccl_op_take_memory(op, bytes, PCCL_POOL_COPY, &op->result_block);
    op->result = op->result_block.at;
    return status;
}

/* Divides what goes out and what comes in. 0 or a status; `parts` is to be freed in any case. */
static int request_divide(const pccl_op_request *request, pccl_tiling *out, pccl_tiling *in, pccl_tiling_part **parts)
{
    const pccl_op_shape *shape = &request->shape;
    uint32_t segment_elements = shape->segment_bytes / pccl_dtype_bytes(shape->dtype);
    uint32_t slices = shape->last_slice + 1u;
    if (!pccl_exchange_is(shape->collective)) {
        pccl_tiling_init(out, shape->count, segment_elements, shape_chunks(shape), shape->slice, slices);
        return 0;
    }
    size_t world = shape->world_size;
    uint64_t *lengths = malloc(2 * world * sizeof *lengths);
    *parts = malloc(2 * (world + 1) * sizeof **parts);
    if (lengths == NULL || *parts == NULL) {
        free(lengths);
        return PCCL_E_MEMORY;
    }
    pccl_exchange_lengths(request, lengths, lengths + world);
    pccl_tiling_init_parts(out, lengths, *parts, segment_elements, shape->world_size, shape->slice, slices);
    pccl_tiling_init_parts(
        in, lengths + world, *parts + world + 1, segment_elements, shape->world_size, shape->slice, slices);
    free(lengths);
    return 0;
}

/* 0 or a status. */
static int op_take_parts(pccl_op *op)
{
    size_t bytes = op->request.shape.world_size * sizeof(void *);
    if (op->request.send_parts != NULL) {
        op->exchange.send_parts = malloc(bytes);
        if (op->exchange.send_parts == NULL)
            return PCCL_E_MEMORY;
        memcpy(op->exchange.send_parts, op->request.send_parts, bytes);
    }
    if (op->request.recv_parts != NULL) {
        op->exchange.recv_parts = malloc(bytes);
        if (op->exchange.recv_parts == NULL)
            return PCCL_E_MEMORY;
        memcpy(op->exchange.recv_parts, op->request.recv_parts, bytes);
    }
    return 0;
}

int pccl_op_create(const pccl_op_request *request, pccl_pool *pool, uint64_t scratch_bytes_max, pccl_op **result)
{
    const pccl_op_shape *shape = &request->shape;
    pccl_tiling tiling;
    pccl_tiling in;
    pccl_tiling_part *parts = NULL;
    uint64_t segments = 0;
    int status = pccl_op_request_check(request);
    if (status != 0)
        return status;
    memset(&tiling, 0, sizeof tiling);
    memset(&in, 0, sizeof in);
    if (shape->world_size > 1) {
        status = request_divide(request, &tiling, &in, &parts);
        segments = status != 0 ? 0 : pccl_tiling_segments(&tiling);
        if (parts != NULL && status == 0)
            segments = pccl_max_u64(segments, pccl_tiling_segments(&in));
        if (segments >= UINT32_MAX || segments > SIZE_MAX / 2 / sizeof(pccl_op_segment))
            status = PCCL_E_INVALID;
    }
    pccl_op *op = status == 0 ? calloc(1, sizeof *op + (size_t)segments * sizeof(pccl_op_segment)) : NULL;
    if (op == NULL) {
        free(parts);
        return status != 0 ? status : PCCL_E_MEMORY;
    }
    op->request = *request;
    op->result = request->recv;
    op->tiling = tiling;
    op->in_tiling = &op->tiling;
    op->element_bytes = pccl_dtype_bytes(shape->dtype);
    op->pool = pool;
    op->scratch_bytes_max = scratch_bytes_max;
    op->segments_left = segments;
    if (parts != NULL) {
        op->exchange.in = in;
        op->exchange.parts = parts;
        op->in_tiling = &op->exchange.in;
        op->segments_left = pccl_tiling_segments(&in);
    }
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
            status = op_take_parts(op);
        if (status == 0)
            status = op_take_result(op);
        if (status == 0)
            status = pccl_op_measure_slots(op);
        if (status == 0)
            status = pccl_op_take_backup(op);
        if (status == 0)
            status = op->algorithm->open(op);
        if (status != 0) {
            pccl_op_destroy(op);
            return status;
        }
    }
    op->request.rank_links = NULL;
    op->request.send_counts = op->request.recv_counts = NULL;
    op->request.send_parts = NULL;
    op->request.recv_parts = NULL;
    *result = op;
    return 0;
}

void pccl_op_destroy(pccl_op *op)
{
    if (op->algorithm != NULL)
        op->algorithm->close(op);
    pccl_pool_give(op->pool, &op->result_block);
    pccl_pool_give(op->pool, &op->backup_block);
    pccl_pool_give(op->pool, &op->scratch);
    free(op->exchange.parts);
    free(op->exchange.send_parts);
    free(op->exchange.recv_parts);
    free(op->peers);
    free(op);
}

void pccl_op_run_alone(pccl_op *op)
{
    uint64_t send;
    uint64_t recv;
    PCCL_ASSERT(op->request.shape.world_size == 1);
    pccl_op_request_buffers(&op->request, &send, &recv);
    if (op->request.send != op->request.recv && recv > 0)
        memcpy(op->request.recv, op->request.send, (size_t)recv * op->element_bytes);
    if (op->request.residual_next != NULL)
        memset(op->request.residual_next, 0, (size_t)recv * op->element_bytes);
    op->is_done = 1;
}

void pccl_op_stop(pccl_op *op)
{
    op->is_stopped = 1;
    if (op->algorithm != NULL)
        op->algorithm->stop(op);
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

/* A rank gives one tiling's chunk to another, and takes the other's from it. */
static pccl_op_shape op_shape_between(
    const pccl_op *op, const pccl_tiling *given, const pccl_tiling *taken, uint32_t rank)
{
    pccl_op_shape shape = op->request.shape;
    if (shape.collective == PCCL_ALL_TO_ALL && op->algorithm != NULL) {
        shape.count = pccl_tiling_chunk_elements(given, rank);
        shape.root = (uint32_t)pccl_tiling_chunk_elements(taken, rank);
    }
    return shape;
}

pccl_op_shape pccl_op_shape_to(const pccl_op *op, uint32_t rank)
{
    return op_shape_between(op, &op->tiling, op->in_tiling, rank);
}

pccl_op_shape pccl_op_shape_from(const pccl_op *op, uint32_t rank)
{
    return op_shape_between(op, op->in_tiling, &op->tiling, rank);
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

uint32_t pccl_op_rank_behind(const pccl_op *op, uint64_t link_id)
{
    for (uint32_t i = 0; i < op->peers_count; i++)
        if (op->peers[i].link_id == link_id)
            return op->peers[i].rank;
    return op->request.rank;
}

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

uint32_t pccl_op_awaits(const pccl_op *op, int has_received)
{
    for (uint32_t i = 0; i < op->peers_count; i++) {
        const pccl_op_peer *peer = &op->peers[i];
        if (peer->is_target ? !peer->is_heard : !has_received && op->segments_left > 0)
            return peer->rank;
    }
    return op->request.rank;
}

int pccl_op_is_complete(const pccl_op *op) { return op->segments_left == 0 && op->peers_unheard == 0; }

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
    uint8_t is_never_checked = frame->has_payload_crc;
    memset(frame, 0, sizeof *frame);
    frame->type = PCCL_FRAME_SEGMENT;
    frame->has_payload_crc = is_never_checked;
    frame->key = target->op->request.key;
    return target->op->algorithm->take_sendable(target, frame, index);
}

static uint32_t op_segment_bytes(const pccl_op *op, const pccl_tiling *tiling, uint32_t chunk, uint32_t segment)
{
    if (segment >= pccl_tiling_chunk_segments(tiling, chunk))
        return 0;
    return pccl_op_payload_bytes(op, pccl_tiling_range(tiling, chunk, segment).count);
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
        uint32_t bytes = op_segment_bytes(op, &op->tiling, chunk, 0);
        return bytes <= one_bytes_max ? bytes : 0;
    }
    uint32_t at_once = op->algorithm->first_at_once(target);
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < at_once; i++) {
        uint32_t more_bytes = op_segment_bytes(op, &op->tiling, chunk, i);
        if (more_bytes > several_bytes_max - bytes)
            break;
        bytes += more_bytes;
    }
    return bytes;
}

const uint8_t *pccl_op_take_eager(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    const uint8_t *payload = pccl_op_take_sendable(target, frame, index);
    PCCL_ASSERT(frame->segment == 0);
    frame->type = PCCL_FRAME_EAGER;
    frame->shape = pccl_op_shape_to(target->op, target->rank);
    while (frame->payload_bytes < target->eager_bytes) {
        pccl_frame next;
        uint32_t next_index;
        next.has_payload_crc = frame->has_payload_crc;
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
    const pccl_tiling *tiling = source->op->in_tiling;
    return chunk < tiling->world_size ? op_segment_bytes(source->op, tiling, chunk, segment) : 0;
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
        bytes += op_segment_bytes(op, &op->tiling, chunk, segment++);
    } while (bytes < payload_bytes);
}

int pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes)
{
    if (index != PCCL_NO_SEGMENT)
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
    if (op->algorithm->is_self_checking)
        return op->algorithm->accept(source, &segment, inbound);
    if (segment.destination != 0 || segment.part_elements != 0)
        return "reserved bytes in use";
    if (segment.chunk >= op->in_tiling->world_size ||
        segment.segment >= pccl_tiling_chunk_segments(op->in_tiling, segment.chunk))
        return "no such segment";
    inbound->index = (uint32_t)pccl_tiling_index(op->in_tiling, segment.chunk, segment.segment);
    inbound->range = pccl_tiling_range(op->in_tiling, segment.chunk, segment.segment);
    inbound->payload_bytes = segment.payload_bytes;
    inbound->from = source->rank;
    int is_bare = op->algorithm->is_bare(op, segment.chunk, segment.hop);
    if (inbound->payload_bytes != (is_bare ? 0 : pccl_op_payload_bytes(op, inbound->range.count)))
        return "wrong payload size";
    return op->algorithm->accept(source, &segment, inbound);
}

void pccl_op_reduce(pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements,
    uint32_t *payload_crc)
{
    PCCL_ASSERT(first + elements <= inbound->range.count && !op->is_stopped);
    while (elements > 0) {
        pccl_reduction reduction;
        memset(&reduction, 0, sizeof reduction);
        size_t n = pccl_op_take_own(op, inbound, first, elements, &reduction);
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
    uint8_t *wire = pccl_op_wire_at(op, index);
    if (op->request.residual_next != NULL)
        pccl_quant_quantize_fed_back(&op->request, range.first, elements, range.count, wire);
    else
        pccl_quant_quantize(&op->request, range.first, elements, range.count, wire);
}

void pccl_op_decode(pccl_op *op, uint32_t index, pccl_range range)
{
    pccl_kernel_dequantize(&op->request.shape, pccl_op_wire_at(op, index), range.count, pccl_op_recv_at(op, range));
}
