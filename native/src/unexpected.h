/* unexpected.h: the unexpected queue, as MPI calls it: what peers have announced of ops that were not submitted here
 * yet, READY frames and EAGER frames with their payload; and such payload of several segments until all of it is here,
 * since a connection can put but one where it belongs.
 *
 *   1. What is here is found by link and key, so no peer can speak for another.
 *   2. It stays until the op is submitted or known never to be (pccl_unexpected_forget_op), the link goes, or its epoch
 *      is over. Each of these happens in the end, so nothing stays for ever.
 *   3. How many ops one link may announce ahead is bounded (PCCL_UNEXPECTED_PER_LINK_MAX), and so is payload, by the
 *      eager window (link.h), whose bytes are let go when payload is given up here. A peer that exceeds either fails
 *      the link: it can never use up our memory.
 *   4. Descriptions are compared when the op is submitted, not here: only then is it known what they should be.
 *
 * In a ring, READY comes from the op's target and EAGER from its source, which with two ranks are one peer; a
 * direct EAGER says what READY does too. */
#ifndef PCCL_UNEXPECTED_H
#define PCCL_UNEXPECTED_H

#include "conn.h"
#include "link.h"
#include "pccl_native.h"
#include "table.h"

enum { PCCL_UNEXPECTED_PER_LINK_MAX = 65536 };

typedef struct {
    pccl_table by_key;
} pccl_unexpected_queue;

typedef struct pccl_unexpected_op {
    pccl_table_node by_key;
    pccl_list in_link;
    pccl_link *link;
    pccl_op_key key;
    pccl_op_shape shape;
    uint8_t is_ready; /* the peer waits for payload */
    uint8_t *payload; /* of an EAGER frame, or NULL */
    uint32_t payload_bytes;
    pccl_conn *conn; /* where the payload is still being received, or NULL */
} pccl_unexpected_op;

void pccl_unexpected_init(pccl_unexpected_queue *queue);
void pccl_unexpected_free(pccl_unexpected_queue *queue); /* all links must have been forgotten */

/* A READY or EAGER frame, the latter's payload accounted for by the link and expected by the connection: NULL,
 * the rule that the frame breaks, or pccl_out_of_memory. */
const char *pccl_unexpected_add(pccl_unexpected_queue *queue, pccl_conn *conn, const pccl_frame *frame);

pccl_unexpected_op *pccl_unexpected_find(
    const pccl_unexpected_queue *queue, const pccl_link *link, const pccl_op_key *key);

/* Gives up the payload alone, and what has become empty altogether. */
void pccl_unexpected_drop_payload(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);
/* What the EAGER frame said, which is still being received: it comes again, or never. */
void pccl_unexpected_retract(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);

void pccl_unexpected_drop_ready(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);

void pccl_unexpected_forget_link(pccl_unexpected_queue *queue, pccl_link *link);

/* What is buffered of one op, which will not be submitted. */
void pccl_unexpected_forget_op(pccl_unexpected_queue *queue, pccl_link *link, const pccl_op_key *key);

/* Those of the group with epochs up to this one. */
void pccl_unexpected_forget_epochs(pccl_unexpected_queue *queue, pccl_link *link, uint32_t group, uint64_t epoch);

/* For tables of what others name. */
uint64_t pccl_op_key_hash(const pccl_op_key *key);

#endif
