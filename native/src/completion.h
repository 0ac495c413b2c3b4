/* completion.h: which ranks are done with an op, for ops that are committed by mutual completion.
 *
 * The problem: every rank has to commit an op or every rank has to abort it, and to ask a coordinator, as two-phase
 * commit does, costs a small op more than the op itself. So ranks tell each other: one that is done with such an op
 * sends a DONE frame to every other one. A rank that is done and has received DONE from all others knows that all are
 * done; for it the op is complete, and may be committed. This is safe for four reasons.
 *
 *   1. DONE is final. A rank that has sent it does not abort the op by itself, and its result does not change.
 *   2. A complete rank's buffers are its own again: it has every other rank's DONE, so no rank lacks anything that it
 *      would have to send.
 *   3. DONE need not be buffered. It never comes before its op is submitted here, since a done rank knows that every
 *      other one has submitted the op (op.h); and what comes for an op that has ended here is dropped.
 *   4. A rank that is done and lacks a DONE cannot know whether another one is complete. So it must not abort
 *      by itself. That is for its owner, which asks the owners of the other ranks first.
 *
 * Two things are made cheap. All ops that a rank is done with by the time that a link's connection takes frames go into
 * one frame, up to PCCL_DONE_KEYS_MAX: none waits for others to come along, and the receiver deals with each by itself,
 * in any order. And an op may end as soon as it is complete: its completion outlives it until its DONEs have left.
 * Those that are lost with a connection are among its unacknowledged frames (conn.h). */
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
    pccl_list in_dones; /* of the link, which comes once, before the rank is done or after: DONE is to be sent */
    uint8_t is_heard; /* its DONE has come */
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

/* Makes the completion of a request that pccl_op_request_check has passed. NULL without memory. */
pccl_completion *pccl_completion_create(const pccl_op_request *request);

/* The op has ended: frees the completion, at once or when its last DONE has left. */
void pccl_completion_end(pccl_completion *completion);

/* The op may use this link from now on, or not any more. */
void pccl_completion_attach(pccl_completion *completion, struct pccl_link *link);
void pccl_completion_detach(pccl_completion *completion, const struct pccl_link *link);

/* This rank is done: queues a DONE for every other one. */
void pccl_completion_send_done(pccl_completion *completion);

/* Returns the rank behind the link, or NULL. */
pccl_participant *pccl_completion_find(pccl_completion *completion, const struct pccl_link *link);

/* The participant's DONE has come. */
void pccl_completion_note_done(pccl_participant *participant);

/* Nonzero if all ranks are done. */
int pccl_completion_is_reached(const pccl_completion *completion);

/* Takes the first DONE out of the link's queue, which is not empty; may free its completion. */
pccl_op_key pccl_completion_take_done(struct pccl_link *link);

#endif
