/* matching.h: how an op of this rank and the same one of its peers find each other, as sends and receives do in MPI.
 *
 * An op is announced to its sources (READY: send to me), and becomes active on the link to a target once that one has
 * announced the same op. A small op sends first and asks later (EAGER, MPI's eager protocol): its announcement to a
 * target carries payload. What comes before its op is submitted here waits in the unexpected queue (unexpected.h).
 *
 * Two descriptions of one op have to be the same; otherwise it becomes a mismatch, and everybody has to find out:
 *
 *   1. A mismatch with one peer does not keep the others from hearing of the op, because they could not tell it from an
 *      op that has not been submitted yet.
 *   2. A rank whose description differs is sent this rank's description even where it needs no announcement
 *      (pccl_match_contradict), because it would wait for ever. */
#ifndef PCCL_MATCHING_H
#define PCCL_MATCHING_H

#include "unexpected.h"
#include "links.h"
#include "open_ops.h"

/* Announces the op wherever there is a link for it, and takes up what peers have announced before. */
void pccl_match_attach_all(pccl_open_ops *ops, const pccl_links *links, pccl_op *op);

/* Does the same with one link. */
void pccl_match_attach(pccl_open_ops *ops, pccl_op *op, pccl_link *link);

/* A target has announced the same op. */
void pccl_match_note_heard(pccl_open_ops *ops, pccl_op_peer *target);

/* A target has reported what it has passed on: NULL, or the rule that it breaks. */
const char *pccl_match_note_passed(pccl_op_peer *target, const pccl_frame *frame);

/* All of a segment's payload is there. */
void pccl_match_note_arrived(pccl_open_ops *ops, pccl_op *op, const pccl_op_inbound *inbound);

/* All of an EAGER frame's payload that was buffered for the op is there. */
void pccl_match_take_buffered(pccl_open_ops *ops, pccl_op_peer *source, pccl_unexpected_op *buffered);

/* Nonzero if the peer behind the link describes the op as this rank expects. */
int pccl_match_is_as_expected(const pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs);

/* The peer behind the link describes the op in another way. */
void pccl_match_note_mismatch(pccl_open_ops *ops, pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs);

/* The same of another rank, from which it was heard by way of that peer. */
void pccl_match_note_mismatch_of(
    pccl_open_ops *ops, pccl_op *op, const pccl_link *link, uint32_t rank, const pccl_op_shape *theirs);

/* The peer behind the link describes in another way an op that has stopped: it has to hear of that, too. */
void pccl_match_contradict(pccl_op *op, const pccl_link *link, const pccl_op_shape *theirs);

#endif
