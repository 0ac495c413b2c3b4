/* announcements.h: what is known of ops that were not submitted here yet: READY frames, and EAGER frames with
 * their payload; and such payload of several segments until all of it is here, since a connection can put but one
 * where it belongs.
 *
 * They are kept per link and key until the op is submitted or known never to be, the link goes, or their epoch is over. How many a
 * link may leave is bounded, and so is payload (link.h), which is let go when it is given up here.
 *
 * In a ring, READY comes from the op's target and EAGER from its source, which with two ranks are one peer; a
 * direct EAGER says what READY does too. */
#ifndef PCCL_ANNOUNCEMENTS_H
#define PCCL_ANNOUNCEMENTS_H

#include "conn.h"
#include "link.h"
#include "pccl_native.h"
#include "table.h"

enum { PCCL_ANNOUNCEMENTS_PER_LINK_MAX = 65536 };

typedef struct {
    pccl_table by_key;
} pccl_announcements;

typedef struct pccl_announcement {
    pccl_table_node by_key;
    pccl_list in_link;
    pccl_link *link;
    pccl_op_key key;
    pccl_op_shape shape;
    uint8_t is_ready; /* the peer waits for payload */
    uint8_t *payload; /* of an EAGER frame, or NULL */
    uint32_t payload_bytes;
    pccl_conn *conn; /* where the payload is still being received, or NULL */
} pccl_announcement;

void pccl_announcements_init(pccl_announcements *announcements);
void pccl_announcements_free(pccl_announcements *announcements); /* all links must have been forgotten */

/* A READY or EAGER frame, the latter's payload accounted for by the link and expected by the connection: NULL,
 * the rule that the frame breaks, or pccl_out_of_memory. */
const char *pccl_announcements_keep(
    pccl_announcements *announcements, pccl_conn *conn, const pccl_frame *frame);

pccl_announcement *pccl_announcements_find(
    const pccl_announcements *announcements, const pccl_link *link, const pccl_op_key *key);

/* Gives up the payload alone, and what has become empty altogether. */
void pccl_announcements_drop_payload(pccl_announcements *announcements, pccl_announcement *kept);
/* What the EAGER frame said, which is still being received: it comes again, or never. */
void pccl_announcements_retract(pccl_announcements *announcements, pccl_announcement *kept);

void pccl_announcements_drop_ready(pccl_announcements *announcements, pccl_announcement *kept);

void pccl_announcements_forget_link(pccl_announcements *announcements, pccl_link *link);

/* What is kept of one op, which will not be submitted. */
void pccl_announcements_forget_op(pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key);

/* Those of the group with epochs up to this one. */
void pccl_announcements_forget_epochs(
    pccl_announcements *announcements, pccl_link *link, uint32_t group, uint64_t epoch);

/* For tables of what others name. */
uint64_t pccl_op_key_hash(const pccl_op_key *key);

#endif
