/* op_originals.h: the elements that the caller gave, which an abort has to put back.
 *
 * In place (send == recv) the original of a segment is copied to `backup` before it is overwritten, and
 * pccl_op_segment.saved counts how much of it is there. A segment that is sent is saved at that time, and one that is
 * reduced into is saved as the reduction goes: each time the original has to come into the cache anyway.
 * pccl_op_restore (op.h) copies back what was saved. */
#ifndef PCCL_OP_ORIGINALS_H
#define PCCL_OP_ORIGINALS_H

#include "op.h"
#include "reduce.h"

/* Takes the backup, if the op works in place. 0 or a status. */
int pccl_op_take_backup(pccl_op *op);

/* Returns the rank's own elements of a segment, which is saved if it has to be. */
const uint8_t *pccl_op_own_at(const pccl_op *op, uint32_t index, pccl_range range);

/* Points the reduction to the rank's own elements of an inbound segment from number `first` on, and to where they are
 * to be saved. Returns how many of them lie together. */
size_t pccl_op_take_own(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, size_t elements, pccl_reduction *reduction);

/* Saves all of a segment's original, in place. */
void pccl_op_save(pccl_op *op, uint32_t index, pccl_range range);

/* The same for own elements that are to be sent as they are: sets the frame's checksum of them too, since that costs
 * little while they are in cache. */
void pccl_op_save_for(pccl_frame *frame, pccl_op *op, uint32_t index, pccl_range range);

#endif
