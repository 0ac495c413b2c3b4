/* exchange_plan.h: how many elements each pair of ranks exchanges where nothing is reduced and each rank has others for
 * each rank. No I/O, no state.
 *
 *     all-to-all   rank r has a part for each rank, which may be of any length
 *     gather       rank r has a part for the root
 *     scatter      the root has a part for each rank
 *
 * A rank's parts for others lie in its send one after the other, those from others in its recv, both in the order of
 * ranks. Its part for itself is copied. With W ranks,
 *
 *     direct   hop 0       rank r sends its part for rank d to it
 *     ring     hop 0 ...   rank r + hop sends it to the next, until it has come to rank d
 *
 * In frames the chunk is the rank whose elements they are. */
#ifndef PCCL_EXCHANGE_PLAN_H
#define PCCL_EXCHANGE_PLAN_H

#include "base.h"
#include "pccl_native.h"

static inline int pccl_exchange_is(uint8_t collective)
{
    return collective == PCCL_ALL_TO_ALL || collective == PCCL_GATHER || collective == PCCL_SCATTER;
}

/* Sets the lengths of this rank's parts for each rank, and of those from each, in elements. */
void pccl_exchange_lengths(const pccl_op_request *request, uint64_t *out, uint64_t *in);

#endif
