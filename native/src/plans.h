/* plans.h: the source, the target and the order of all segments (tiling.h), for each algorithm. No I/O, no state. */
#ifndef PCCL_PLANS_H
#define PCCL_PLANS_H

#include "base.h"
#include "pccl_native.h"

/* The ring: source, target and order of the segments (tiling.h) around a ring.
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

/* The direct algorithm: source and target of the segments (tiling.h), and the order in which shares are folded, where
 * every rank is linked with every other.
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
 *     nothing about the others. That is why a quantized one may not come to where its final goes, but with two
 *     ranks, where there are no others.)
 *
 * None of this depends on the order in which frames arrive, and no rank waits for ever: what share s waits for
 * depends on shares of lower numbers only. The cost is that n segments have to last a round trip.
 *
 * A rank serves the others starting from its successor, so that not all of them send to rank 0 first. */
/* Returns the rank whose share is folded first, and after that of `rank`; W: all are folded. */
uint32_t pccl_direct_first_turn(uint32_t owner);
uint32_t pccl_direct_next_turn(uint32_t owner, uint32_t rank);

/* Returns how many slots the shares of one segment may need while they wait, and which of them is for the share of
 * `rank`, whose turn is not the first unless it is quantized. */
uint32_t pccl_direct_waiting_slots(uint32_t world_size, int is_quantized);
uint32_t pccl_direct_waiting_slot(uint32_t owner, uint32_t rank, int is_quantized);

/* Returns the i-th of the W - 1 ranks that this one serves. */
uint32_t pccl_direct_served(uint32_t world_size, uint32_t rank, uint32_t i);

/* One-shot: what a small all-reduce of the direct algorithm does instead. Every rank sends all of its elements to every
 * other one (hop: the sender's rank), and folds those of all ranks in the order of ranks, by the same kernels as the
 * direct algorithm: so all ranks get the same bits. This costs (W - 1) N bytes of each rank instead of 2 (W - 1) / W N,
 * and no second latency. */
enum { PCCL_ONESHOT_BYTES_MAX = PCCL_SIZE(64 << 10, 192) }; /* of what a rank sends */

int pccl_oneshot_is(const pccl_op_shape *shape);

/* All-gather and broadcast: source and target of the segments (tiling.h).
 *
 * Each chunk is whole at one rank from the beginning, its origin: chunk c of an all-gather at rank c, the only chunk
 * of a broadcast at the root. With W ranks,
 *
 *     direct   hop 0                the origin sends to every other rank.
 *     ring     hop h = 0 .. W - 2   rank origin + h sends to the next, so that each passes on what it has got but
 *                                   for the last. */
uint32_t pccl_spread_origin(const pccl_op_shape *shape, uint32_t chunk);

/* The hops on which a rank receives and sends a chunk's segments, or PCCL_NO_HOP. */
typedef struct {
    uint32_t receive;
    uint32_t send;
} pccl_spread_hops;

pccl_spread_hops pccl_spread_hops_of(const pccl_op_shape *shape, uint32_t rank, uint32_t chunk);

/* All-to-all, gather and scatter: how many elements each pair of ranks exchanges where nothing is reduced and each rank
 * has others for each rank.
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
static inline int pccl_exchange_is(uint8_t collective)
{
    return collective == PCCL_ALL_TO_ALL || collective == PCCL_GATHER || collective == PCCL_SCATTER;
}

/* Sets the lengths of this rank's parts for each rank, and of those from each, in elements. */
void pccl_exchange_lengths(const pccl_op_request *request, uint64_t *out, uint64_t *in);

#endif
