/* unexpected.h: the unexpected queue, as MPI calls it: what peers have sent of ops that are not submitted here yet.
 *
 * Ranks submit an op at different times, and the first ones announce it (READY), or send a small op's payload along
 * with the announcement (EAGER, MPI's eager protocol), before the last has it. Such frames wait here until their op
 * comes. So does an EAGER payload of several segments until all of it is here, since a connection can only put one
 * segment where it belongs. The danger is a peer that makes us buffer for ever, or without bound.
 *
 *   1. Entries are found by link and key, so no peer can speak for another.
 *   2. An entry stays until its op is submitted or known never to be (pccl_unexpected_refuse_op), its link goes, or its
 *      epoch is over. One of these happens in the end, so nothing stays for ever. What is announced of an op after it
 *      was aborted here, or is known never to be submitted, is discarded (pccl_unexpected_is_refused). Only the last
 *      few thousand such ops are remembered; an announcement that is later than that waits for the end of its epoch.
 *   3. The number of ops that a link may announce ahead is bounded (PCCL_UNEXPECTED_PER_LINK_MAX), and their payload by
 *      the eager window (link.h), whose bytes are released when payload is given up here. A peer that exceeds either
 *      fails its link, so it can never use up our memory.
 *   4. Descriptions of an op are compared when it is submitted, not here, because only then is it known what they
 *      should be. Until then a peer must only not contradict itself.
 *
 * In a ring, READY comes from the op's target and EAGER from its source, which with two ranks are one peer; a direct
 * EAGER says what READY does too. */
#ifndef PCCL_UNEXPECTED_H
#define PCCL_UNEXPECTED_H

#include "conn.h"
#include "link.h"
#include "pccl_native.h"
#include "table.h"

enum { PCCL_UNEXPECTED_PER_LINK_MAX = 65536, PCCL_REFUSED_MAX = 4096 };

typedef struct {
    pccl_table by_key;
    uint64_t refused[PCCL_REFUSED_MAX]; /* hashes of link and key, each where it falls; 0: none */
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

/* Adds a READY or EAGER frame. The link has accounted for the latter's payload, which the connection then receives into
 * the entry. Returns NULL, the rule that the frame breaks, or pccl_out_of_memory. */
const char *pccl_unexpected_add(pccl_unexpected_queue *queue, pccl_conn *conn, const pccl_frame *frame);

pccl_unexpected_op *pccl_unexpected_find(
    const pccl_unexpected_queue *queue, const pccl_link *link, const pccl_op_key *key);

/* Gives up an entry's payload, and the entry if there is no READY left in it. */
void pccl_unexpected_drop_payload(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);

/* Takes back an EAGER frame that is half received: it comes again, or never. */
void pccl_unexpected_retract(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);

/* Gives up an entry's READY, and the entry if there is no payload left in it. */
void pccl_unexpected_drop_ready(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered);

/* Forgets all that is buffered from the link. */
void pccl_unexpected_forget_link(pccl_unexpected_queue *queue, pccl_link *link);

/* Forgets what is buffered of one op from the link, which will not be submitted any more, and remembers that. */
void pccl_unexpected_refuse_op(pccl_unexpected_queue *queue, pccl_link *link, const pccl_op_key *key);

/* Nonzero if an announcement of the op from the link comes too late to be of use. */
int pccl_unexpected_is_refused(const pccl_unexpected_queue *queue, const pccl_link *link, const pccl_op_key *key);

/* Forgets what is buffered of the group's epochs up to this one. */
void pccl_unexpected_forget_epochs(pccl_unexpected_queue *queue, pccl_link *link, uint32_t group, uint64_t epoch);

/* Hashes a key that others choose, for tables (table.h). */
uint64_t pccl_op_key_hash(const pccl_op_key *key);

/* Groups: which epochs are over.
 *
 * A group's number and epochs come from the caller; a group is known from the first op or freeze that names it, and for
 * ever. An epoch is over when it is frozen, or when an op of a later one has been submitted: what peers announce of it
 * after that is of no use to anybody. */
typedef struct pccl_group {
    pccl_table_node by_number;
    uint32_t number;
    uint8_t is_frozen;
    uint64_t frozen_epoch;
    uint64_t newest_epoch;
} pccl_group;

typedef struct {
    pccl_table by_number;
} pccl_groups;

void pccl_groups_init(pccl_groups *groups);
void pccl_groups_free(pccl_groups *groups);

pccl_group *pccl_groups_find(const pccl_groups *groups, uint32_t number); /* NULL: none */

/* `spare`, all zeros, becomes the group or is freed. */
pccl_group *pccl_groups_find_or_add(pccl_groups *groups, uint32_t number, pccl_group *spare);

int pccl_group_has_frozen(const pccl_group *group, uint64_t epoch);

#endif
