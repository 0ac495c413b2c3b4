/* agreement.h: which ranks have said DONE of an op, for ops that end without a word of anybody else.
 *
 * A rank that is done with such an op sends a DONE frame to every other one; whoever is done and has heard it of all
 * others knows that all are. Since a done rank knows that every other one has submitted the op (op.h), DONE never
 * comes before that, and what comes of an op that has ended here is dropped: nothing has to be kept.
 *
 * What a rank is done with by the time that a link's connection takes frames goes out in one, up to PCCL_DONE_KEYS_MAX
 * ops: nobody waits for others to come along, and a rank that hears of several hears of each by itself, in any order.
 *
 * An op may end as soon as all have been heard, so an agreement outlives its op until what it has to say has left.
 * What was sent of it and is lost with its connection is in that one's records (conn.h). */
#ifndef PCCL_AGREEMENT_H
#define PCCL_AGREEMENT_H

#include "frame.h"
#include "list.h"
#include "pccl_native.h"

struct pccl_link;

/* Another rank of the op. */
typedef struct {
    struct pccl_agreement *agreement;
    uint64_t link_id;
    struct pccl_link *link; /* NULL: unknown or lost */
    pccl_list in_dones; /* of the link: DONE is to be sent */
    uint8_t is_told; /* DONE has been there, or is */
    uint8_t is_heard;
} pccl_party;

typedef struct pccl_agreement {
    pccl_op_key key;
    uint32_t count;
    uint32_t unheard;
    uint32_t waiting; /* in their links' queues */
    uint8_t is_done; /* this rank is */
    uint8_t is_ended; /* its op is no more */
    pccl_party parties[];
} pccl_agreement;

/* NULL without memory. The request is one that pccl_op_request_check has passed. */
pccl_agreement *pccl_agreement_create(const pccl_op_request *request);

/* The op is no more. */
void pccl_agreement_end(pccl_agreement *agreement);

/* This link is one of those that the op may use. */
void pccl_agreement_attach(pccl_agreement *agreement, struct pccl_link *link);
void pccl_agreement_detach(pccl_agreement *agreement, const struct pccl_link *link);

/* This rank is done. */
void pccl_agreement_say(pccl_agreement *agreement);

/* NULL if no rank is behind the link. */
pccl_party *pccl_agreement_find(pccl_agreement *agreement, const struct pccl_link *link);
void pccl_agreement_hear(pccl_party *party);

/* All ranks are done. */
int pccl_agreement_is_reached(const pccl_agreement *agreement);

/* Takes the first DONE that waits for the link, of which there is one, and may free its agreement. */
pccl_op_key pccl_agreement_take(struct pccl_link *link);

#endif
