/* ring_plan.h: who sends which elements to whom when, as arithmetic. No I/O, no state.
 *
 * World W, ranks in a ring, rank r sends to r + 1 and receives from r - 1 (mod W). `count` elements are
 * divided into W chunks, the first count % W of them one element longer; chunks into segments of
 * segment_elements, the last one shorter. A segment of chunk c starts at rank c and makes 2(W - 1) hops, hop
 * h from rank c + h:
 *
 *     hop 0 .. W-2       partial: the receiver adds its own elements and sends the sum on.
 *                        The receiver of hop W-2, rank c - 1, now has the total: it owns the chunk.
 *     hop W-1 .. 2W-3    final: the receiver keeps the bytes and sends them on, but for the last.
 *
 * So a rank receives a segment at most twice, once partial and once final, and sends it at most twice:
 *
 *                        receives partial   sends partial   receives final   sends final
 *     origin  r = c              -                0               W-1         W  (W > 2)
 *     between                  d - 1              d            W + d - 1      W + d (but the last)
 *     owner   r = c - 1         W-2               -                -          W-1
 *
 * with d = (r - c) mod W. Segments are also numbered through, in the order of their elements: their
 * `index`. */
#ifndef PCCL_RING_PLAN_H
#define PCCL_RING_PLAN_H

#include "base.h"

enum { PCCL_WORLD_MAX = 1 << 20 };

#define PCCL_NO_HOP UINT32_MAX

typedef struct {
    uint64_t count;
    uint32_t world_size;
    uint32_t rank;
    uint32_t segment_elements;
    uint32_t long_chunks; /* how many chunks are one element longer */
    uint64_t chunk_elements; /* of a short one */
    uint64_t long_segments; /* in a long chunk */
    uint64_t short_segments;
} pccl_ring_plan;

/* What this rank does with a chunk's segments: hops, or PCCL_NO_HOP. */
typedef struct {
    uint32_t receive_partial;
    uint32_t send_partial;
    uint32_t receive_final;
    uint32_t send_final;
} pccl_ring_hops;

typedef struct {
    uint64_t first; /* element */
    uint32_t count; /* elements */
} pccl_ring_range;

void pccl_ring_plan_init(
    pccl_ring_plan *plan, uint64_t count, uint32_t segment_elements, uint32_t world_size, uint32_t rank);

uint64_t pccl_ring_segments(const pccl_ring_plan *plan); /* of all chunks */
uint64_t pccl_ring_chunk_segments(const pccl_ring_plan *plan, uint32_t chunk);
uint64_t pccl_ring_index(const pccl_ring_plan *plan, uint32_t chunk, uint64_t segment);
void pccl_ring_locate(const pccl_ring_plan *plan, uint64_t index, uint32_t *chunk, uint32_t *segment);
pccl_ring_range pccl_ring_segment_range(const pccl_ring_plan *plan, uint32_t chunk, uint64_t segment);
uint32_t pccl_ring_longest_segment(const pccl_ring_plan *plan); /* elements */
pccl_ring_hops pccl_ring_hops_of(const pccl_ring_plan *plan, uint32_t chunk);

#endif
