/* op_relay.c: an exchange (plans.h) around a ring: every segment goes from rank to rank until it is where it
 * belongs.
 *
 *     in        for this rank: straight into recv; for another one: into memory that the op takes for it
 *     out       first what passes through, in the order in which it came, then the rank's own, out of send
 *     own       copied, as in op_exchange.c
 *
 * What passes through is kept until the next rank has acknowledged it, since it may have to be sent again. Own parts go
 * out to the farthest rank first, so that what has the longest way has it behind it when the rest arrives.
 *
 * Flow control. A rank holds a bounded number of bytes for others. What its predecessor sends it to be passed on may
 * exceed what a PASSED frame has reported as sent on by PCCL_RELAY_WINDOW_BYTES, and by one more frame. Payload for the
 * rank itself needs no window, because it is stored where it belongs.
 *
 *   1. Ranks that wait for each other's window around the ring would wait for ever. So there are two classes of frames,
 *      each with a window and a queue of its own: a frame is of class 1 once it has gone from the last rank to rank 0,
 *      and of class 0 before. Frames of class 1 wait for the window of ranks up to the last but one, which take those
 *      for themselves in any case; so these move on, in the end all of them. Frames of class 0 wait for others of class
 *      0 up to the last rank, and there for class 1. This is what routers call a dateline.
 *   2. A rank reports when a quarter of the window has been sent on since the last report. Less than that remains
 *      unreported, so a rank that is out of window waits for something that is still to be sent on.
 *   3. Each segment may come once. All that have passed are remembered until the op ends: a few dozen bytes for each,
 *      whose payload has the length that follows from the length of its part.
 *
 * No rank knows the lengths of the parts that two others exchange, and neighbours alone hear each other's descriptions.
 * So each frame tells the length of its part, which the rank that takes it compares with what it expects; and of an
 * all-to-all an empty part travels as a frame without payload. An all-to-all is therefore done only when all other
 * ranks have been heard of. */
#include "op_exchange.h"

#include "table.h"

#include <stdlib.h>
#include <string.h>

typedef struct pccl_relayed {
    struct pccl_relayed *next; /* of those that wait to go out */
    pccl_list in_kept;
    pccl_frame frame; /* as it goes out */
    uint8_t payload[];
} relayed;

/* A segment that has come and has no state in op->segments. */
typedef struct {
    pccl_table_node node;
    uint32_t chunk;
    uint32_t destination;
    uint32_t segment;
} seen_segment;

static uint32_t relay_world(const pccl_op *op) { return op->request.shape.world_size; }

/* The rank to which own parts go out now; 0 when all are out. */
static uint32_t relay_destination(const pccl_op *op)
{
    return (op->request.rank + op->relay.distance) % relay_world(op);
}

/* Nonzero if a part travels though it is empty. */
static int relay_sends_empty(const pccl_op *op) { return op->request.shape.collective == PCCL_ALL_TO_ALL; }

/* Returns the class that a frame with elements of this rank has where the other rank receives it. */
static int relay_class(uint32_t chunk, uint32_t receiver) { return chunk > receiver; }

static uint64_t relay_charge(uint32_t payload_bytes) { return (uint64_t)payload_bytes + PCCL_RELAY_OVERHEAD_BYTES; }

/* Returns how many frames a part takes. */
static uint32_t relay_frames(const pccl_op *op, const pccl_tiling *tiling, uint32_t chunk)
{
    uint32_t segments = (uint32_t)pccl_tiling_chunk_segments(tiling, chunk);
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
    pccl_list_init(&op->relay.kept);
    pccl_table_init(&op->relay.seen);
    pccl_exchange_begin(op);
    return 0;
}

static void relay_close(pccl_op *op)
{
    pccl_table *seen = &op->relay.seen;
    if (seen->buckets == NULL) /* not opened */
        return;
    while (!pccl_list_is_empty(&op->relay.kept)) {
        relayed *kept = PCCL_CONTAINER_OF(op->relay.kept.next, relayed, in_kept);
        pccl_list_remove(&kept->in_kept);
        free(kept);
    }
    for (size_t i = 0; i <= seen->mask; i++) {
        pccl_table_node *next;
        for (pccl_table_node *node = seen->buckets[i]; node != NULL; node = next) {
            next = node->next;
            free(PCCL_CONTAINER_OF(node, seen_segment, node));
        }
    }
    pccl_table_free(seen);
}

static void relay_stop(pccl_op *op)
{
    for (int class = 0; class < 2; class++)
        op->relay.lanes[class].first = op->relay.lanes[class].last = NULL;
    op->relay.distance = 0;
}

static uint32_t relay_sends(const pccl_op *op, uint32_t chunk) { return chunk != op->request.rank; }

/* Nonzero if the next rank lets this one send it a frame from rank `chunk` for rank `destination`. */
static int relay_has_window(const pccl_op *op, uint32_t chunk, uint32_t destination)
{
    uint32_t next = (op->request.rank + 1) % relay_world(op);
    const pccl_relay_lane *lane = &op->relay.lanes[relay_class(chunk, next)];
    return destination == next || lane->sent_bytes - lane->passed_bytes < PCCL_RELAY_WINDOW_BYTES;
}

/* Returns the lane with something to be passed on now, or NULL. */
static pccl_relay_lane *relay_passing_lane(const pccl_op *op)
{
    for (int class = 1; class >= 0; class--) {
        const pccl_relay_lane *lane = &op->relay.lanes[class];
        if (lane->first != NULL && relay_has_window(op, lane->first->frame.chunk, lane->first->frame.destination))
            return (pccl_relay_lane *)(uintptr_t)lane;
    }
    return NULL;
}

static int relay_has_sendable(const pccl_op_peer *target)
{
    const pccl_op *op = target->op;
    if (!pccl_op_is_next(target))
        return 0;
    return relay_passing_lane(op) != NULL ||
           (op->relay.distance > 0 && relay_has_window(op, op->request.rank, relay_destination(op)));
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

static void relay_note_sent(pccl_op *op, const pccl_frame *frame)
{
    uint32_t next = (op->request.rank + 1) % relay_world(op);
    if (frame->destination != next)
        op->relay.lanes[relay_class(frame->chunk, next)].sent_bytes += relay_charge(frame->payload_bytes);
}

static void relay_forget(relayed *kept)
{
    pccl_list_remove(&kept->in_kept);
    free(kept);
}

static const uint8_t *relay_take_passing(pccl_op *op, pccl_relay_lane *lane, pccl_frame *frame, uint32_t *index)
{
    relayed *passing = lane->first;
    lane->first = passing->next;
    if (lane->first == NULL)
        lane->last = NULL;
    *frame = passing->frame;
    *index = PCCL_NO_SEGMENT;
    lane->released_bytes += relay_charge(frame->payload_bytes);
    relay_note_sent(op, frame);
    if (frame->payload_bytes > 0)
        return passing->payload;
    relay_forget(passing);
    return NULL;
}

int pccl_relay_passes(const pccl_op *op, uint32_t chunk)
{
    return op->algorithm == &pccl_op_relay_algorithm && chunk != op->request.rank;
}

void pccl_relay_acknowledged(const uint8_t *payload)
{
    relay_forget((relayed *)(uintptr_t)(payload - offsetof(relayed, payload)));
}

int pccl_relay_has_to_report(const pccl_op_peer *source)
{
    const pccl_op *op = source->op;
    if (op->algorithm != &pccl_op_relay_algorithm || op->is_stopped || !pccl_op_is_previous(source))
        return 0;
    for (int class = 0; class < 2; class++) {
        const pccl_relay_lane *lane = &op->relay.lanes[class];
        if (lane->released_bytes - lane->reported_bytes >= PCCL_RELAY_WINDOW_BYTES / 4)
            return 1;
    }
    return 0;
}

void pccl_relay_report(pccl_op *op, pccl_frame *frame)
{
    memset(frame, 0, sizeof *frame);
    frame->type = PCCL_FRAME_PASSED;
    frame->key = op->request.key;
    for (int class = 0; class < 2; class++) {
        pccl_relay_lane *lane = &op->relay.lanes[class];
        frame->passed_bytes[class] = lane->reported_bytes = lane->released_bytes;
    }
}

const char *pccl_relay_on_report(pccl_op_peer *target, const pccl_frame *frame)
{
    pccl_op *op = target->op;
    if (op->algorithm != &pccl_op_relay_algorithm || !pccl_op_is_next(target))
        return "a report from the wrong peer";
    for (int class = 0; class < 2; class++) {
        pccl_relay_lane *lane = &op->relay.lanes[class];
        if (frame->passed_bytes[class] > lane->sent_bytes)
            return "more passed on than was sent";
        /* Frames of one link may arrive in any order. */
        lane->passed_bytes = pccl_max_u64(lane->passed_bytes, frame->passed_bytes[class]);
    }
    return NULL;
}

static const uint8_t *relay_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index)
{
    pccl_op *op = target->op;
    pccl_relay_lane *lane = relay_passing_lane(op);
    if (lane != NULL)
        return relay_take_passing(op, lane, frame, index);
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
    relay_note_sent(op, frame);
    relay_skip_sent(op);
    return payload;
}

static uint64_t seen_hash(const pccl_frame *frame)
{
    uint64_t words[] = {frame->chunk, frame->destination, frame->segment};
    return pccl_keyed_hash(words, PCCL_COUNT_OF(words));
}

static seen_segment *relay_find_seen(const pccl_op *op, const pccl_frame *frame)
{
    pccl_table_node *node = pccl_table_first(&op->relay.seen, seen_hash(frame));
    for (; node != NULL; node = pccl_table_next(node)) {
        seen_segment *seen = PCCL_CONTAINER_OF(node, seen_segment, node);
        if (seen->chunk == frame->chunk && seen->destination == frame->destination && seen->segment == frame->segment)
            return seen;
    }
    return NULL;
}

/* Notes that a segment has come; NULL, or the rule that it breaks. */
static const char *relay_note_seen(pccl_op *op, const pccl_frame *frame)
{
    if (relay_find_seen(op, frame) != NULL)
        return "the same segment twice";
    seen_segment *seen = malloc(sizeof *seen);
    if (seen == NULL)
        return pccl_out_of_memory;
    seen->chunk = frame->chunk;
    seen->destination = frame->destination;
    seen->segment = frame->segment;
    pccl_table_insert(&op->relay.seen, &seen->node, seen_hash(frame));
    return NULL;
}

/* Checks a frame by the length of its part, which two other ranks exchange: NULL, or the rule that it breaks. */
static const char *relay_check_passing(const pccl_op *op, const pccl_frame *frame)
{
    const pccl_tiling *own = &op->tiling;
    pccl_tiling part;
    if (frame->part_elements / own->segment_elements >= UINT32_MAX)
        return "no such part";
    pccl_tiling_init(&part, frame->part_elements, own->segment_elements, 1, own->slice, own->slices);
    if (frame->segment >= relay_frames(op, &part, 0))
        return "no such segment";
    uint32_t elements = frame->part_elements > 0 ? pccl_tiling_range(&part, 0, frame->segment).count : 0;
    return frame->payload_bytes == elements * op->element_bytes ? NULL : "wrong payload size";
}

/* Keeps a frame that is for another rank, which then has one more hop behind it. */
static const char *relay_keep(pccl_op *op, const pccl_frame *frame, pccl_op_inbound *inbound)
{
    pccl_relay_lane *lane = &op->relay.lanes[relay_class(frame->chunk, op->request.rank)];
    const char *broken_rule = relay_check_passing(op, frame);
    /* The last frame may be the one that exceeds the window, and overtake others. */
    uint64_t bytes_max = PCCL_RELAY_WINDOW_BYTES + relay_charge(op->request.shape.segment_bytes);
    uint64_t held_bytes = lane->received_bytes - lane->reported_bytes + relay_charge(frame->payload_bytes);
    if (broken_rule == NULL && held_bytes >= bytes_max)
        broken_rule = "more to be passed on than allowed";
    if (broken_rule != NULL)
        return broken_rule;
    relayed *kept = malloc(sizeof *kept + frame->payload_bytes);
    broken_rule = kept != NULL ? relay_note_seen(op, frame) : pccl_out_of_memory;
    if (broken_rule != NULL) {
        free(kept);
        return broken_rule;
    }
    kept->next = NULL;
    kept->frame = *frame;
    kept->frame.hop++;
    pccl_list_init(&kept->in_kept);
    pccl_list_append(&op->relay.kept, &kept->in_kept);
    lane->received_bytes += relay_charge(frame->payload_bytes);
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
        return frame->payload_bytes == 0 ? relay_note_seen(op, frame) : "wrong payload size";
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
    relayed *passing = inbound->passing;
    seen_segment *seen = relay_find_seen(op, &passing->frame);
    pccl_table_remove(&op->relay.seen, &seen->node);
    free(seen);
    op->relay.lanes[relay_class(passing->frame.chunk, op->request.rank)].received_bytes -=
        relay_charge(passing->frame.payload_bytes);
    relay_forget(passing);
}

static int relay_arrived(pccl_op *op, const pccl_op_inbound *inbound)
{
    relayed *passing = inbound->passing;
    if (passing != NULL) {
        pccl_relay_lane *lane = &op->relay.lanes[relay_class(passing->frame.chunk, op->request.rank)];
        if (lane->last != NULL)
            lane->last->next = passing;
        else
            lane->first = passing;
        lane->last = passing;
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
