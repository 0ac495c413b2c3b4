/* op.h: one ring all-reduce on one rank: its buffers, what has come, what can be sent. No I/O.
 *
 * Theory of operation (ring_plan.h has the vocabulary). A segment's state is a few bits; the op's sendable
 * segments wait in a FIFO threaded through the segments themselves, so nothing is allocated once the op
 * exists. All segments of the rank's own chunk are sendable from the start; another one is when it has
 * arrived and has a further hop to make.
 *
 *     partial in   own elements (op) payload -> recv. The payload is handed over piece by piece as it comes
 *                  off the socket, so that it is reduced while in cache. The owner averages, if so asked.
 *     final in     the payload is received straight into recv.
 *     out          hop 0 goes out of send, all others out of recv.
 *
 * A final segment is only accepted once this rank's partial of it is wholly sent: with honest peers nothing
 * else can happen, and so no range is overwritten while it waits to be sent.
 *
 * In place (send == recv) the original of a segment is copied to `backup` before the segment is first
 * overwritten; an abort copies the saved segments back.
 *
 * Quantized, a segment travels as pccl_kernel_quantize makes it and has a slot in `wire` for that form.
 * Payload is received into the slot and sent from it; a partial is decoded and reduced into recv, then
 * encoded into the same slot; a final is decoded into recv and passed on as it came. The owner too keeps
 * what its own encoding decodes to: everyone decodes the same bytes. */
#ifndef PCCL_OP_H
#define PCCL_OP_H

#include "frame.h"
#include "list.h"
#include "pccl_native.h"
#include "pool.h"
#include "ring_plan.h"
#include "table.h"

typedef struct {
    uint32_t next; /* in the FIFO of sendable segments */
    uint8_t state; /* enum op_segment_state in op.c */
} pccl_op_segment;

typedef struct pccl_op {
    pccl_op_request request;
    pccl_ring_plan plan; /* unused with one rank */
    uint32_t element_bytes;
    pccl_pool *pool;
    uint8_t *backup;
    uint8_t *wire;
    size_t backup_bytes;
    size_t wire_bytes;
    size_t wire_slot_bytes;
    uint64_t tx_bytes;
    uint64_t rx_bytes;
    uint64_t segments_left; /* not yet final here */
    uint32_t sendable_first;
    uint32_t sendable_last;
    uint8_t is_done; /* all of recv is final */
    uint8_t is_stopped; /* frozen or mismatched: nothing may be received, sent or done any more */

    /* The core's and the link's: */
    uint8_t is_peer_ready; /* rank + 1 has submitted the same op */
    uint8_t is_mismatched;
    unsigned events_promised;
    pccl_table_node by_id;
    pccl_table_node by_key;
    pccl_list in_ops;
    pccl_list in_ready; /* of link_prev: to be announced to it */
    pccl_list in_active; /* of link_next: has segments for it */
    struct pccl_link *link_prev; /* NULL: unknown or lost */
    struct pccl_link *link_next;

    pccl_op_segment segments[];
} pccl_op;

/* A segment on its way in. */
typedef struct {
    pccl_ring_range range;
    uint32_t index;
    uint32_t payload_bytes;
    uint8_t *store; /* where the payload goes; NULL: to pccl_op_reduce */
    uint8_t is_final;
} pccl_op_inbound;

/* 0 or PCCL_E_INVALID. */
int pccl_op_request_check(const pccl_op_request *request);

/* 0 with *op set, PCCL_E_INVALID or PCCL_E_MEMORY. */
int pccl_op_create(const pccl_op_request *request, pccl_pool *pool, pccl_op **op);

/* Touches neither send nor recv. */
void pccl_op_destroy(pccl_op *op);

/* With one rank the result is the input. */
void pccl_op_run_alone(pccl_op *op);

/* No more segments in or out. Those that are half-way are the connections' to let go. */
void pccl_op_stop(pccl_op *op);

/* Puts back what was overwritten in place. */
void pccl_op_restore(pccl_op *op);

int pccl_op_has_sendable(const pccl_op *op);

/* Takes the first sendable segment: fills a frame for it, returns its payload. Then pccl_op_sent(index),
 * once all of the payload is out. */
const uint8_t *pccl_op_take_sendable(pccl_op *op, pccl_frame *frame, uint32_t *index);
void pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes);

/* A SEGMENT frame from rank - 1: NULL with `inbound` set, or the rule that it breaks. */
const char *pccl_op_accept(pccl_op *op, const pccl_frame *frame, pccl_op_inbound *inbound);

/* `elements` more of an inbound partial, the first of which is number `first` in the segment. */
void pccl_op_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements);

/* All of the payload is there. May make the op done and add to what is sendable. */
void pccl_op_arrived(pccl_op *op, const pccl_op_inbound *inbound);

#endif
