/* direct_plan.h: who sends which segment (tiling.h) to whom, and in which order shares are folded, where
 * every rank is linked with every other. No I/O, no state.
 *
 * With W ranks, rank c owns chunk c, and a segment of it makes two kinds of hops:
 *
 *     hop 0 .. W-1   share: rank `hop` sends its elements to the owner, which folds all ranks' shares.
 *     hop W          final: the owner sends the result to every other rank.
 *
 * Shares arrive in any order but are folded in the order of ranks, the owner's own at its place, so that a
 * result depends on the inputs alone:
 *
 *     owner 0        ((own + 1) + 2) + 3        turns 1, 2, 3
 *     owner 2        ((0 + 1) + own) + 3        turns 0, 1, 3
 *
 * The own share needs no turn: it is folded along with the one before it. A share whose turn has not come
 * waits in a slot; the one with the first turn never has to, unless it is quantized.
 *
 * The window n bounds how many segments of a chunk need slots at the same time. Share s of a chunk goes out
 * once final s - n of it is in, all of it; the first n go out at once. Therefore
 *
 *   - the slots of segment s - n are free where share s is made: final s - n has been used, and it was made of
 *     share s - n, which need never be sent again;
 *   - the waiting slot of a rank's share s - n is free when its share s arrives: all were folded before there
 *     was a final;
 *   - the slot of final s - n at the owner is free once the shares s of all other ranks are in, which is when
 *     final s goes there: each of them has final s - n, which need never be sent again. (A single share says
 *     nothing of the others. That is why a quantized one may not come to where its final goes, but with two
 *     ranks, where there are no others.)
 *
 * None of this depends on the order in which frames arrive, and no rank waits for ever: what share s waits for
 * depends on shares of lower numbers only. The cost is that n segments have to last a round trip.
 *
 * A rank serves the others starting from its successor, so that not all of them send to rank 0 first. */
#ifndef PCCL_DIRECT_PLAN_H
#define PCCL_DIRECT_PLAN_H

#include "base.h"

/* Returns the rank whose share is folded first, and after that of `rank`; W: all are folded. */
uint32_t pccl_direct_first_turn(uint32_t owner);
uint32_t pccl_direct_next_turn(uint32_t owner, uint32_t rank);

/* Returns how many slots the shares of one segment may need while they wait, and which of them is for the share of
 * `rank`, whose turn is not the first unless it is quantized. */
uint32_t pccl_direct_waiting_slots(uint32_t world_size, int is_quantized);
uint32_t pccl_direct_waiting_slot(uint32_t owner, uint32_t rank, int is_quantized);

/* Returns the i-th of the W - 1 ranks that this one serves. */
uint32_t pccl_direct_served(uint32_t world_size, uint32_t rank, uint32_t i);

#endif
