/* completion.h: which ranks have said DONE of an op, for ops that end without a word of anybody else: commit by mutual
 * completion, as against a coordinator's verdict in two-phase commit.
 *
 * A rank that is done with such an op sends a DONE frame to every other one; whoever is done and has heard it of all
 * others knows that all are, so the op is complete and may be committed. That is safe because
 *
 *   1. DONE is final: a rank that has said it does not abort the op by itself, and its result does not change.
 *   2. A rank that is complete has heard every other rank's DONE, so no rank lacks anything that it would have to send:
 *      nobody needs its buffers any more.
 *   3. DONE never comes before its op is submitted here, since a done rank knows that every other one has submitted the
 *      op (op.h); what comes of an op that has ended here is dropped. So nothing has to be buffered.
 *   4. A rank that is done and does not hear all others cannot know whether one of them is complete: it must not abort
 *      by itself. That is for the owner, who asks the others first.
 *
 * What a rank is done with by the time that a link's connection takes frames goes out in one, up to PCCL_DONE_KEYS_MAX
 * ops: nobody waits for others to come along, and a rank that hears of several hears of each by itself, in any order.
 *
 * An op may end as soon as all have been heard, so its completion outlives it until what it has to say has left. What
 * was sent of it and is lost with its connection is among that one's unacknowledged frames (conn.h). */
#ifndef PCCL_COMPLETION_H
#define PCCL_COMPLETION_H

#include "frame.h"
#include "list.h"
#include "pccl_native.h"

struct pccl_link;

/* Another rank of the op. */
typedef struct {
    struct pccl_completion *completion;
    uint64_t link_id;
    struct pccl_link *link; /* NULL: unknown or lost */
    pccl_list in_dones; /* of the link: DONE is to be sent */
    uint8_t is_queued; /* DONE has been there, or is */
    uint8_t is_heard;
} pccl_participant;

typedef struct pccl_completion {
    pccl_op_key key;
    uint32_t count;
    uint32_t unheard;
    uint32_t waiting; /* in their links' queues */
    uint8_t is_done; /* this rank is */
    uint8_t is_ended; /* its op is no more */
    pccl_participant participants[];
} pccl_completion;

/* NULL without memory. The request is one that pccl_op_request_check has passed. */
pccl_completion *pccl_completion_create(const pccl_op_request *request);

/* The op is no more. */
void pccl_completion_end(pccl_completion *completion);

/* This link is one of those that the op may use. */
void pccl_completion_attach(pccl_completion *completion, struct pccl_link *link);
void pccl_completion_detach(pccl_completion *completion, const struct pccl_link *link);

/* This rank is done. */
void pccl_completion_send_done(pccl_completion *completion);

/* NULL if no rank is behind the link. */
pccl_participant *pccl_completion_find(pccl_completion *completion, const struct pccl_link *link);
void pccl_completion_note_done(pccl_participant *participant);

/* All ranks are done. */
int pccl_completion_is_reached(const pccl_completion *completion);

/* Takes the first DONE that waits for the link, of which there is one, and may free its completion. */
pccl_op_key pccl_completion_take_done(struct pccl_link *link);

#endif
