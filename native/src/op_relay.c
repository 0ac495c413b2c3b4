/* op_relay.c: an exchange (exchange_plan.h) around a ring: every segment goes from rank to rank until it is where it
 * belongs.
 *
 *     in        for this rank: straight into recv; for another one: into memory that the op takes for it
 *     out       first what passes through, in the order in which it came, then the rank's own, out of send
 *     own       copied, as in op_exchange.c
 *
 * What passes through is kept until the op ends, since a neighbour may have to be sent it again. Own parts go out to
 * the farthest rank first, so that what has the longest way has it behind it when the rest arrives.
 *
 * No rank knows the lengths of the parts that two others exchange, and neighbours alone hear each other's descriptions.
 * So each frame tells the length of its part, which the rank that takes it compares with what it expects; and of an
 * all-to-all an empty part travels as a frame without payload. An all-to-all is therefore done only when all other
 * ranks have been heard of. */
#include "op_exchange.h"

#include <stdlib.h>

typedef struct pccl_relayed {
    struct pccl_relayed *next; /* of those that wait to go out */
    struct pccl_relayed *next_kept; /* of all */
    pccl_frame frame; /* as it goes out */
    uint8_t payload[];
} relayed;

static uint32_t relay_world(const pccl_op *op) { return op->request.shape.world_size; }

/* The rank to which own parts go out now; 0 when all are out. */
static uint32_t relay_destination(const pccl_op *op)
{
    return (op->request.rank + op->relay.distance) % relay_world(op);
}

/* Nonzero if a part travels though it is empty. */
static int relay_sends_empty(const pccl_op *op) { return op->request.shape.collective == PCCL_ALL_TO_ALL; }

/* Returns how many frames a part takes. */
static uint32_t relay_frames(const pccl_op *op, const pccl_tiling *tiling, uint32_t rank)
{
    uint32_t segments = (uint32_t)pccl_tiling_chunk_segments(tiling, rank);
    int is_first_slice = op->request.shape.slice == 0;
    return segments == 0 && is_first_slice && relay_sends_empty(op) ? 1 : segments;
}

/* Goes on to the next own part that is to be sent, if nothing is left of this one. */
static void relay_skip_sent(pccl_op *op)
{
    while (op->relay.distance > 0 && op->relay.segment >= relay_frames(op, &op->tiling, relay_destination(op))) {
        op->relay.distance--;
        op->relay.segment = 0;
    }
}

static int relay_open(pccl_op *op)
{
    op->relay.distance = relay_world(op) - 1;
    relay_skip_sent(op);
    for (uint32_t rank = 0; rank < relay_world(op); rank++) {
        uint32_t segments = (uint32_t)pccl_tiling_chunk_segments(op->in_tiling, rank);
        if (rank != op->request.rank)
            op->segments_left += relay_frames(op, op->in_tiling, rank) - segments;
    }
    pccl_exchange_begin(op);
    return 0;
}

static void relay_close(pccl_op *op)
{
    while (op->relay.kept != NULL) {
        relayed *kept = op->relay.kept;
        op->relay.kept = kept->next_kept;
        free(kept);
    }
}

static void relay_stop(pccl_op *op)
{
    op->relay.first = op->relay.last = NULL;
    op->relay.distance = 0;
}

static uint32_t relay_sends(const pccl_op *op, uint32_t chunk) { return chunk != op->request.rank; }

static int relay_has_sendable(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    return pccl_op_is_next(target) && (op->relay.first != NULL || op->relay.distance > 0);
}

static uint32_t relay_first_chunk(const pccl_op_peer *target)
{
    (void)target;
    return PCCL_NO_CHUNK;
}

static uint32_t relay_first_at_once(const pccl_op_peer *target)
{
    (void)target;
    return 0;
}

static void relay_first_hop(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop)
{
    (void)source;
    *chunk = PCCL_NO_CHUNK;
    *hop = 0;
}

static const uint8_t *relay_take_passing(pccl_op *op, pccl_frame *frame, uint32_t *index)
{
    relayed *passing = op->relay.first;
    op->relay.first = passing->next;
    if (op->relay.first == NULL)
        op->relay.last = NULL;
    *frame = passing->frame;
    *index = PCCL_NO_SEGMENT;
    return frame->payload_bytes > 0 ? passing->payload : NULL;
}

static const uint8_t *relay_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    if (op->relay.first != NULL)
        return relay_take_passing(op, frame, index);
    uint32_t destination = relay_destination(op);
    frame->chunk = op->request.rank;
    frame->segment = op->relay.segment++;
    frame->hop = 0;
    frame->destination = destination;
    frame->part_elements = pccl_tiling_chunk_elements(&op->tiling, destination);
    const uint8_t *payload = NULL;
    *index = PCCL_NO_SEGMENT;
    if (frame->segment < pccl_tiling_chunk_segments(&op->tiling, destination)) {
        pccl_range range = pccl_tiling_range(&op->tiling, destination, frame->segment);
        frame->payload_bytes = range.count * op->element_bytes;
        payload = pccl_exchange_send_at(op, destination, range);
        pccl_exchange_note_out(op);
    }
    relay_skip_sent(op);
    return payload;
}

/* Keeps a frame that is for another rank, which then has one more hop behind it. */
static const char *relay_keep(pccl_op *op, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    relayed *kept = calloc(1, sizeof *kept + frame->payload_bytes);
    if (kept == NULL)
        return pccl_out_of_memory;
    kept->frame = *frame;
    kept->frame.hop++;
    kept->frame.has_payload_crc = frame->payload_bytes > 0;
    kept->next_kept = op->relay.kept;
    op->relay.kept = kept;
    inbound->store = kept->payload;
    inbound->passing = kept;
    return NULL;
}

static const char *relay_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_op *op = source->op;
    uint32_t world = relay_world(op);
    uint32_t rank = op->request.rank;
    if (!pccl_op_is_previous(source) || frame->type != PCCL_FRAME_SEGMENT || frame->chunk >= world ||
        frame->destination >= world || frame->hop >= world - 1 || (frame->chunk + frame->hop + 1) % world != rank)
        return "a hop that does not end here";
    inbound->from = frame->chunk;
    inbound->payload_bytes = frame->payload_bytes;
    uint32_t way = (frame->destination + world - frame->chunk) % world;
    if (way <= frame->hop)
        return "a hop beyond its destination";
    if (frame->payload_bytes > op->request.shape.segment_bytes)
        return "wrong payload size";
    if (frame->destination != rank)
        return relay_keep(op, frame, inbound);
    if (frame->part_elements != pccl_tiling_chunk_elements(op->in_tiling, frame->chunk)) {
        op->relay.theirs = pccl_op_shape_from(op, frame->chunk);
        op->relay.theirs.count = frame->part_elements;
        op->relay.theirs_rank = frame->chunk;
        return pccl_op_disagreement;
    }
    if (frame->segment >= relay_frames(op, op->in_tiling, frame->chunk))
        return "no such segment";
    inbound->is_final = 1;
    if (frame->part_elements == 0)
        return frame->payload_bytes == 0 ? NULL : "wrong payload size";
    inbound->index = (uint32_t)pccl_tiling_index(op->in_tiling, frame->chunk, frame->segment);
    inbound->range = pccl_tiling_range(op->in_tiling, frame->chunk, frame->segment);
    if (frame->payload_bytes != inbound->range.count * op->element_bytes)
        return "wrong payload size";
    uint8_t *state = &op->segments[inbound->index].state;
    if (*state & PCCL_SEGMENT_FINAL_IN)
        return "the same segment twice";
    *state |= PCCL_SEGMENT_FINAL_IN;
    inbound->store = pccl_exchange_recv_at(op, frame->chunk, inbound->range);
    return NULL;
}

static void relay_retract(pccl_op *op, const pccl_op_inbound *inbound)
{
    if (inbound->passing == NULL) {
        op->segments[inbound->index].state &= (uint8_t)~PCCL_SEGMENT_FINAL_IN;
        return;
    }
    relayed **at = &op->relay.kept;
    while (*at != inbound->passing)
        at = &(*at)->next_kept;
    *at = (*at)->next_kept;
    free(inbound->passing);
}

static int relay_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    relayed *passing = inbound->passing;
    if (passing != NULL) {
        if (op->relay.last != NULL)
            op->relay.last->next = passing;
        else
            op->relay.first = passing;
        op->relay.last = passing;
        return 1;
    }
    if (inbound->payload_bytes == 0) {
        PCCL_ASSERT(op->segments_left > 0);
        op->segments_left--;
    } else {
        pccl_op_note_final(op, inbound->index);
        pccl_exchange_note_in(op);
    }
    return 0;
}

const pccl_op_algorithm pccl_op_relay_algorithm = {
    .open = relay_open,
    .close = relay_close,
    .stop = relay_stop,
    .sends = relay_sends,
    .has_sendable = relay_has_sendable,
    .take_sendable = relay_take_sendable,
    .first_chunk = relay_first_chunk,
    .first_at_once = relay_first_at_once,
    .first_hop = relay_first_hop,
    .is_bare = pccl_exchange_is_bare,
    .accept = relay_accept,
    .is_self_checking = 1,
    .reduce = pccl_exchange_reduce,
    .retract = relay_retract,
    .arrived = relay_arrived,
};
