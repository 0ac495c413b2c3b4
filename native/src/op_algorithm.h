/* op_algorithm.h: what an algorithm (op_ring.c, op_direct.c, op_oneshot.c, op_spread.c, op_exchange.c, op_relay.c) does
 * for op.c, and what it may ask of it. op.h says what the functions are for. */
#ifndef PCCL_OP_ALGORITHM_H
#define PCCL_OP_ALGORITHM_H

#include "op.h"
#include "reduce.h"

enum pccl_op_segment_state {
    PCCL_SEGMENT_PARTIAL_IN = 1, /* accepted, perhaps still on its way */
    PCCL_SEGMENT_PARTIAL_SENT = 2,
    PCCL_SEGMENT_FINAL_IN = 4, /* the same */
    PCCL_SEGMENT_PARTIAL_READY = 8, /* ring: may be sent on once the window allows */
    PCCL_SEGMENT_FINAL = 16, /* all of it is here, as it will stay */
    PCCL_SEGMENT_CHECKED = 32, /* ring, spread, finals of direct: the checksum is known */
    PCCL_SEGMENT_PLACED = 64 /* spread: this rank's own has gone out once */
};

#define PCCL_NO_CHUNK UINT32_MAX

typedef struct pccl_op_algorithm {
    /* Takes slots; peers, tiling, slot_bytes and backup are there. 0 or a status; what was taken by then is for
     * `close`. */
    int (*open)(pccl_op *op);
    void (*close)(pccl_op *op);
    void (*stop)(pccl_op *op);

    /* Returns how often a chunk goes out, in whatever form. */
    uint32_t (*sends)(const pccl_op *op, uint32_t chunk);

    int (*has_sendable)(const pccl_op_peer *target);
    const uint8_t *(*take_sendable)(pccl_op_peer *target, pccl_frame *frame, uint32_t *index);

    /* Returns the chunk of `tiling` that goes to the target on the first hop, or PCCL_NO_CHUNK. Where it has one
     * segment, that is the first to be taken. */
    uint32_t (*first_chunk)(const pccl_op_peer *target);

    /* Returns how many of its segments may go together, where it has several: they are taken first, and lie one
     * after the other. */
    uint32_t (*first_at_once)(const pccl_op_peer *target);

    /* Sets the chunk and hop of a frame from the source on the first hop. */
    void (*first_hop)(const pccl_op_peer *source, uint32_t *chunk, uint32_t *hop);

    /* Nonzero if a frame of this chunk that comes on this hop has no payload: it only says that a segment is final. */
    int (*is_bare)(const pccl_op *op, uint32_t chunk, uint32_t hop);

    /* pccl_op_accept has filled in index, range, payload_bytes and from, unless the algorithm is_self_checking: then it
     * has checked nothing, and the algorithm may return pccl_out_of_memory or pccl_op_disagreement, too. */
    uint8_t is_self_checking;
    const char *(*accept)(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound);
    /* The reduction lacks what follows from the algorithm: the destination, its checksum, what is divided. */
    void (*reduce)(
        pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements);
    void (*retract)(pccl_op *op, const pccl_op_inbound *inbound);
    int (*arrived)(pccl_op *op, const pccl_op_inbound *inbound);
} pccl_op_algorithm;

extern const pccl_op_algorithm pccl_op_ring_algorithm;
extern const pccl_op_algorithm pccl_op_direct_algorithm;
extern const pccl_op_algorithm pccl_op_oneshot_algorithm;
extern const pccl_op_algorithm pccl_op_spread_algorithm;
extern const pccl_op_algorithm pccl_op_exchange_algorithm;
extern const pccl_op_algorithm pccl_op_relay_algorithm;

static inline int pccl_op_is_quantized(const pccl_op *op) { return op->request.shape.quantization != PCCL_QUANT_NONE; }

/* Nonzero if the op overwrites what an abort has to put back. */
static inline int pccl_op_is_in_place(const pccl_op *op)
{
    const pccl_op_request *request = &op->request;
    if (request->send != request->recv)
        return 0;
    switch (request->shape.collective) {
    case PCCL_ALL_REDUCE: return 1;
    case PCCL_REDUCE: return request->rank == request->shape.root;
    case PCCL_BROADCAST:
    case PCCL_SEND: return request->rank != request->shape.root;
    default: return 0;
    }
}

/* Nonzero if a rank gets the results of all chunks of an op that reduces. */
static inline int pccl_op_gets_all(const pccl_op *op, uint32_t rank)
{
    const pccl_op_shape *shape = &op->request.shape;
    return shape->collective == PCCL_ALL_REDUCE || (shape->collective == PCCL_REDUCE && rank == shape->root);
}

/* Nonzero if the op reduces, and has no place for results but that of the chunk which this rank finishes. */
static inline int pccl_op_is_half(const pccl_op *op)
{
    const pccl_op_shape *shape = &op->request.shape;
    return shape->collective == PCCL_REDUCE_SCATTER ||
           (shape->collective == PCCL_REDUCE && op->request.rank != shape->root);
}

static inline int pccl_op_is_next(const pccl_op_peer *peer)
{
    const pccl_op_request *request = &peer->op->request;
    return peer->rank == (request->rank + 1) % request->shape.world_size;
}

static inline int pccl_op_is_previous(const pccl_op_peer *peer)
{
    const pccl_op_request *request = &peer->op->request;
    return (peer->rank + 1) % request->shape.world_size == request->rank;
}

static inline const uint8_t *pccl_op_send_at(const pccl_op *op, pccl_range range)
{
    return (const uint8_t *)op->request.send + range.first * op->element_bytes;
}

static inline uint8_t *pccl_op_recv_at(const pccl_op *op, pccl_range range)
{
    return op->result + (range.first - op->recv_first) * op->element_bytes;
}

static inline int pccl_op_is_final(const pccl_op *op, uint64_t index)
{
    return op->segments[index].state & PCCL_SEGMENT_FINAL;
}

/* The FIFO of sendable segments, for algorithms that have one target. */
void pccl_op_push_sendable(pccl_op *op, uint32_t index);
uint32_t pccl_op_pop_sendable(pccl_op *op);

/* One more segment is final here. */
void pccl_op_note_final(pccl_op *op, uint32_t index);

/* A segment is final that recv has no place for. */
void pccl_op_note_final_elsewhere(pccl_op *op, uint32_t index);

/* Slots, in an op's scratch, hold segments that have no place in the caller's buffers: quantized ones as they travel,
 * and shares that wait for their turn. op.h says how they are bounded and taken in turns. */

/* Takes a block from the op's pool. 0 or a status. */
int pccl_op_take_memory(pccl_op *op, uint64_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block);

/* Sets slot_bytes. 0, or PCCL_E_INVALID for segments that are too large. */
int pccl_op_measure_slots(pccl_op *op);

/* Returns how many segments of the longest chunk can have `slots` slots each within the bound on scratch: all of them,
 * or at least one. */
uint32_t pccl_op_window(const pccl_op *op, uint64_t slots);

/* Takes `wire_slots` slots for each chunk, and `others` more. 0 or a status. */
int pccl_op_take_slots(pccl_op *op, uint32_t wire_slots, uint64_t others);

/* The wire slot of a segment: where it is, quantized, while it travels. */
uint8_t *pccl_op_wire_at(const pccl_op *op, uint32_t index);

/* One of the other slots. */
uint8_t *pccl_op_slot_at(const pccl_op *op, uint64_t number);

/* The bytes of `elements` elements as they travel. */
uint32_t pccl_op_payload_bytes(const pccl_op *op, uint32_t elements);

/* Quantizes elements into the segment's wire slot, and back into recv. */
void pccl_op_encode(pccl_op *op, uint32_t index, pccl_range range, const uint8_t *elements);
void pccl_op_decode(pccl_op *op, uint32_t index, pccl_range range);

#endif
