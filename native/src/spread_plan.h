/* spread_plan.h: who sends which segment (tiling.h) to whom where nothing is reduced. No I/O, no state.
 *
 * Each chunk is whole at one rank from the beginning, its origin: chunk c of an all-gather at rank c, the only chunk
 * of a broadcast at the root. With W ranks,
 *
 *     direct   hop 0                the origin sends to every other rank.
 *     ring     hop h = 0 .. W - 2   rank origin + h sends to the next, so that each passes on what it has got but
 *                                   for the last. */
#ifndef PCCL_SPREAD_PLAN_H
#define PCCL_SPREAD_PLAN_H

#include "base.h"
#include "pccl_native.h"

uint32_t pccl_spread_origin(const pccl_op_shape *shape, uint32_t chunk);

/* The hops on which a rank receives and sends a chunk's segments, or PCCL_NO_HOP. */
typedef struct {
    uint32_t receive;
    uint32_t send;
} pccl_spread_hops;

pccl_spread_hops pccl_spread_hops_of(const pccl_op_shape *shape, uint32_t rank, uint32_t chunk);

#endif
