/* ring_plan.h: who sends which segment (tiling.h) to whom when, around a ring. No I/O, no state.
 *
 * This is the ring all-reduce of the literature: a reduce-scatter around the ring, then an all-gather. W ranks form a
 * ring; rank r sends to r + 1 and receives from r - 1 (mod W). A segment of chunk c starts at rank s = c + 1 and makes
 * 2(W - 1) hops, hop h from rank s + h:
 *
 *     hop 0 .. W-2       partial: the receiver adds its own elements and sends the sum on.
 *                        The receiver of hop W-2, rank c, now has the total: it owns the chunk.
 *     hop W-1 .. 2W-3    final: the receiver keeps the bytes and sends them on, but for the last.
 *
 * So a rank receives a segment at most twice, once partial and once final, and sends it at most twice:
 *
 *                        receives partial   sends partial   receives final   sends final
 *     origin  r = s              -                0               W-1         W  (W > 2)
 *     between                  d - 1              d            W + d - 1      W + d (but the last)
 *     owner   r = c             W-2               -                -          W-1
 *
 * with d = (r - s) mod W.
 *
 * A reduce-scatter ends with the partials: each owner keeps its chunk. Its finals are without payload, and there are
 * none where they would open no window.
 *
 * Where segments of a chunk take turns in fewer slots, a window of n bounds how many are under way: a rank sends
 * partial s of a chunk only once final s - n is in, all of it; the first n go at once. Finals go round in the same
 * order of ranks, and the last to receive them, rank c - 1, is also the last to send partials. So a partial s that
 * reaches the owner says that every rank has final s - n. A final s - n that comes back to the origin therefore says
 * that every rank has final s - 2n, and has sent it on to one that has it. What the origin then sends, partial s,
 * finds the slot of segment s - 2n free wherever it comes: PCCL_RING_WINDOWS windows of slots are needed. No
 * rank waits for ever: what segment s waits for depends on lower ones only. */
#ifndef PCCL_RING_PLAN_H
#define PCCL_RING_PLAN_H

#include "base.h"

#define PCCL_NO_HOP UINT32_MAX

enum { PCCL_RING_WINDOWS = 2 };

/* The hops on which a rank receives and sends a chunk's segments, or PCCL_NO_HOP. */
typedef struct {
    uint32_t receive_partial;
    uint32_t send_partial;
    uint32_t receive_final;
    uint32_t send_final;
} pccl_ring_hops;

/* Returns the rank at which a chunk starts, and the chunk that starts at a rank. */
uint32_t pccl_ring_start(uint32_t world_size, uint32_t chunk);
uint32_t pccl_ring_first_chunk(uint32_t world_size, uint32_t rank);

pccl_ring_hops pccl_ring_hops_of(uint32_t world_size, uint32_t rank, uint32_t chunk);

#endif
