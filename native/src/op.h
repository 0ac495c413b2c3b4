/* op.h: one collective on one rank: its buffers, what has come, what can be sent. No I/O.
 *
 * Theory of operation (tiling.h has the vocabulary). The source, target and order of all sends are the algorithm's:
 * op_ring.c, op_direct.c and op_oneshot.c, which reduce, and op_spread.c, op_exchange.c and op_relay.c, which move.
 * The first two know a segment in two forms. A partial one does not hold all ranks' elements yet: it is reduced as it
 * comes off the socket, while it is in cache. A final one is received straight into recv. Each chunk has one rank that
 * finishes it, and averages if so asked.
 *
 * Files. op.c creates and ends ops, takes segments in and out, and has the scratch memory. op_request.h checks
 * requests, op_originals.h keeps what an abort restores, and op_algorithm.h is the interface between these and the
 * algorithms. Nothing is allocated once the op exists.
 *
 * Buffers. A rank's own elements that belong into a separate recv are copied there when they are first sent, while they
 * are in cache. In an all-reduce a final segment is only accepted once this rank's partial of it is wholly sent: with
 * honest peers nothing else can happen, and so no range is overwritten while it waits to be sent.
 *
 * Quantization. A quantized segment travels as pccl_kernel_quantize makes it and has a slot in the op's scratch for
 * that form. The rank that finishes a segment also takes what its own encoding decodes to, so that all ranks have
 * decoded the same bytes.
 *
 * Scratch is bounded. An op whose segments have no slots each has them take turns: segment s of a chunk uses that of
 * s - n, where n is a window that is the same on all ranks, because it follows from the shape and the bound.
 * plans.h says why a rank that has to wait needs no message: finals that come in open the window.
 *
 * Peers are the ranks that the op exchanges frames with. One that we send to has to be heard before: its READY says
 * that it has submitted the same op. Until then it may get an eager frame (MPI's eager protocol): all that it gets on
 * the first hop if that is one segment, or, on another machine, the first segments of several, which have to lie one
 * after the other, so that there is something on its way while announcements are (link.h has the limits).
 *
 * An op is done when all of recv is final and all its targets have been heard, so that nothing about it comes
 * later. Then all ranks have submitted it: their elements are in the result, or all were heard. Around a ring neither
 * need be, if elements come from one rank or are too few for all, or for all to be in a slice: there every rank
 * announces the op to every other one, too, where there are the links for that. */
#ifndef PCCL_OP_H
#define PCCL_OP_H

#include "frame.h"
#include "list.h"
#include "pccl_native.h"
#include "pool.h"
#include "table.h"
#include "tiling.h"

struct pccl_completion;
struct pccl_link;
struct pccl_op;
struct pccl_op_algorithm;

typedef struct {
    uint32_t next; /* in the FIFO of sendable segments */
    uint32_t saved; /* elements of its original, from the first, that are in backup */
    uint32_t crc; /* ring: of what goes out of recv; else of what is PCCL_SEGMENT_CHECKED */
    uint8_t state; /* enum pccl_op_segment_state in op_algorithm.h */
} pccl_op_segment;

#define PCCL_NO_SEGMENT UINT32_MAX

typedef struct {
    uint32_t window; /* segments of a chunk: plans.h */
    uint32_t slots; /* that each chunk has; 0: it needs none */
    uint8_t is_signalled; /* finals open the window for all ranks */
} pccl_op_ring;

/* The state of the rank's own chunk, with its n segments. */
typedef struct {
    uint32_t *turns; /* n: whose share is to be folded next */
    uint32_t *finals; /* n: segments in the order in which they became final */
    uint32_t finals_count;
    uint8_t *shares; /* n x world_size: enum direct_share_state in op_direct.c */
    uint32_t window; /* segments of a chunk: plans.h */
    uint8_t is_signalled; /* finals open the window for all ranks */
} pccl_op_direct;

/* What comes in, where that is divided in another way than what goes out. */
typedef struct {
    pccl_tiling in;
    pccl_tiling_part *parts; /* of both tilings */
    uint64_t out_left; /* segments that have not been taken to be sent */
    uint64_t in_left; /* segments that have not come */
    uint32_t own_copied; /* segments of the rank's part for itself */
    const void **send_parts; /* as requested; NULL: they are in send */
    void **recv_parts; /* the same of recv */
} pccl_op_exchange;

struct pccl_relayed;

enum { PCCL_RELAY_WINDOW_BYTES = PCCL_SIZE(8 << 20, 1024), PCCL_RELAY_OVERHEAD_BYTES = 256 };

/* What passes through of one class. Bytes are counted from the op's beginning, with PCCL_RELAY_OVERHEAD_BYTES for each
 * frame. */
typedef struct {
    struct pccl_relayed *first; /* of what waits to go out */
    struct pccl_relayed *last;
    uint64_t received_bytes;
    uint64_t released_bytes; /* of them: sent on */
    uint64_t reported_bytes; /* of these, to the rank before */
    uint64_t sent_bytes; /* to the next rank, for others */
    uint64_t passed_bytes; /* of them, that it has reported */
} pccl_relay_lane;

/* An exchange in a ring: op_relay.c. */
typedef struct {
    pccl_relay_lane lanes[2]; /* of each class */
    pccl_list kept; /* what passes through, until the next rank has it */
    pccl_table seen; /* all that has come without a state of its own */
    uint32_t distance; /* of the rank to which own parts go out next; 0: all are out */
    uint32_t segment; /* of that part, to go out next */
    pccl_op_shape theirs; /* as a rank describes the op in another way */
    uint32_t theirs_rank;
} pccl_op_relay;

enum pccl_op_announcement { PCCL_ANNOUNCE_NOTHING, PCCL_ANNOUNCE_READY, PCCL_ANNOUNCE_EAGER, PCCL_ANNOUNCE_PASSED };

typedef struct {
    struct pccl_op *op;
    uint64_t link_id;
    struct pccl_link *link; /* NULL: unknown or lost */
    uint32_t rank;
    uint8_t is_source; /* segments come from it, and so it gets our READY */
    uint8_t is_target; /* segments go to it, and so it sends us its own */
    uint8_t is_heard; /* of a target: it has submitted the same op */
    uint8_t announcement; /* enum pccl_op_announcement: what waits in in_ready */
    uint32_t eager_bytes; /* PCCL_ANNOUNCE_EAGER: of its payload */
    uint8_t is_contradicted; /* of a target that is no source: has heard of us all the same */
    uint8_t has_come; /* one-shot: its elements are accepted, perhaps still on their way */
    uint8_t is_payload_buffered; /* unexpected.h has payload of it that is not all here yet */
    pccl_list in_ready; /* of the link: something is to be announced to it */
    pccl_list in_active; /* of the link: has segments for it */
    uint32_t shares_taken; /* direct: of its chunk; spread, one-shot: of ours */
    uint32_t finals_taken; /* direct: of ours */
} pccl_op_peer;

typedef struct pccl_op {
    pccl_op_request request; /* without what is copied: links, counts and parts of each rank */
    const struct pccl_op_algorithm *algorithm; /* NULL with one rank */
    pccl_tiling tiling; /* the same; of what goes out */
    const pccl_tiling *in_tiling; /* of what comes in: the same one, but for an exchange */
    pccl_op_peer *peers; /* ring: rank - 1, rank + 1; direct, or hears_all: rank + 1, rank + 2 ... */
    uint32_t peers_count;
    uint32_t peers_unheard;
    uint32_t element_bytes;
    pccl_pool *pool;
    uint8_t *result; /* recv, or where a rank of a reduce finishes its chunk that is not the root */
    pccl_pool_block result_block; /* that memory */
    uint8_t *backup;
    pccl_pool_block backup_block;
    uint64_t scratch_bytes_max;
    pccl_pool_block scratch; /* slots */
    size_t slot_bytes; /* for any segment as it travels */
    uint32_t wire_slots; /* quantized: slots of each chunk, which come first */
    uint64_t tx_bytes;
    uint64_t rx_bytes;
    uint64_t segments_left; /* of recv, not yet final here */
    uint64_t recv_first; /* element that recv begins with */
    pccl_op_ring ring;
    pccl_op_direct direct;
    uint32_t shares_left; /* one-shot: ranks whose elements have not come */
    pccl_op_exchange exchange;
    pccl_op_relay relay;
    uint32_t sendable_first; /* FIFO, of those algorithms that have one target */
    uint32_t sendable_last;
    uint8_t hears_all; /* ring: peers are those of the direct algorithm, though segments go to one of them */
    uint8_t is_done;
    uint8_t is_stopped; /* frozen or mismatched: nothing may be received, sent or done any more */
    uint8_t is_mismatched; /* and not frozen: the others are to hear of it */

    int64_t launched_ns; /* 0: not known */
    uint64_t caller; /* thread; 0: not known */

    /* The core's: */
    pccl_op_record *record; /* of the flight recorder; NULL: none */
    struct pccl_completion *completion; /* NULL: ranks do not tell each other when they are done */
    struct pccl_fast_path *fast_path; /* through which it came; NULL: none */
    struct pccl_fast_path_call *call; /* the fast path's */
    pccl_list in_ran; /* of the open ops: to be completed; later, completed on the fast path and to be ended */
    int64_t timed_ns; /* since when pccl_open_ops.times counts it; 0: it does not */
    uint8_t is_released; /* no connection knows of it any more */
    unsigned events_promised;
    pccl_table_node by_id;
    pccl_table_node by_key;
    pccl_list in_ops;

    pccl_op_segment segments[];
} pccl_op;

/* A segment on its way in. */
typedef struct {
    pccl_range range;
    uint32_t index;
    uint32_t payload_bytes;
    uint8_t *store; /* where the payload goes; NULL: to pccl_op_reduce */
    uint32_t from; /* rank */
    struct pccl_relayed *passing; /* ring: it is for another rank; NULL: it is for this one */
    uint8_t is_final;
    uint8_t is_waiting; /* direct, one-shot: stored until its turn comes */
} pccl_op_inbound;

/* Returns 0 with *op set, PCCL_E_INVALID or PCCL_E_MEMORY. All ranks must be given the same scratch_bytes_max. */
int pccl_op_create(const pccl_op_request *request, pccl_pool *pool, uint64_t scratch_bytes_max, pccl_op **op);

/* Frees the op. Touches neither send nor recv. */
void pccl_op_destroy(pccl_op *op);

/* Does an op of one rank, whose result is its input. */
void pccl_op_run_alone(pccl_op *op);

/* Lets no more segments in or out. Those that are half-way are for the connections to give up. */
void pccl_op_stop(pccl_op *op);

/* Puts back what was overwritten in place. */
void pccl_op_restore(pccl_op *op);

/* Puts back what was overwritten in place, and leaves the op without buffers. It has been stopped, and no connection
 * knows of it. */
void pccl_op_drop_buffers(pccl_op *op);

/* Returns the op's source or target behind a link, or NULL. */
pccl_op_peer *pccl_op_find_source(pccl_op *op, uint64_t link_id);
pccl_op_peer *pccl_op_find_target(pccl_op *op, uint64_t link_id);

/* Returns the rank that the op exchanges frames with over a link; its own if there is none. */
uint32_t pccl_op_rank_behind(const pccl_op *op, uint64_t link_id);

/* Returns the description of the op that a rank hears from this one, and that which this one expects from that rank.
 * They are the request's, but for an all-to-all: its count is that of the part which the describing rank gives to
 * the other, and its root the lower half of the count of the part which it takes from the other. */
pccl_op_shape pccl_op_shape_to(const pccl_op *op, uint32_t rank);
pccl_op_shape pccl_op_shape_from(const pccl_op *op, uint32_t rank);

/* Returns the payload bytes that the op sends in all, if none has to be sent twice. */
uint64_t pccl_op_tx_bytes_planned(const pccl_op *op);

/* The target has submitted the same op. */
void pccl_op_heard(pccl_op_peer *target);

/* Returns a rank that may not have submitted the op yet, as far as is known here, or the op's own. A source that is no
 * target says so by what it sends: `has_received`. */
uint32_t pccl_op_awaits(const pccl_op *op, int has_received);

/* Nonzero if nothing is missing that DONE waits for. */
int pccl_op_is_complete(const pccl_op *op);

int pccl_op_has_sendable(const pccl_op_peer *target);

/* Takes the first sendable segment: fills a frame for it, returns its payload. `has_payload_crc` of the frame comes set
 * where the checksum is never checked, and is then not computed. Then pccl_op_sent(index), which may be
 * PCCL_NO_SEGMENT, once all of the payload is out: nonzero if the op may be done with that. */
const uint8_t *pccl_op_take_sendable(pccl_op_peer *target, pccl_frame *frame, uint32_t *index);
int pccl_op_sent(pccl_op *op, uint32_t index, uint32_t payload_bytes);

/* Taken first of all, what is the target's on the first hop may travel as an EAGER frame: its one segment, or of
 * several the first ones. Returns its payload bytes, at most these; 0 if nothing may. */
uint32_t pccl_op_eager_bytes(const pccl_op_peer *target, uint32_t one_bytes_max, uint32_t several_bytes_max);
const uint8_t *pccl_op_take_eager(pccl_op_peer *target, pccl_frame *frame, uint32_t *index);

/* Returns the payload bytes of a segment that comes from the source on the first hop; 0 if there is no such segment. */
uint32_t pccl_op_first_bytes(const pccl_op_peer *source, uint32_t segment);

/* The payload of an EAGER frame from the source has to be whole segments, from the first on: NULL, or the rule that it
 * breaks. */
const char *pccl_op_check_eager(const pccl_op_peer *source, uint32_t payload_bytes);

/* A SEGMENT or EAGER frame from a source, the latter for each of its segments: NULL with `inbound` set, the rule that
 * it breaks, pccl_out_of_memory, or pccl_op_disagreement, if relay.theirs is how rank relay.theirs_rank has described
 * the op. */
const char *pccl_op_accept(pccl_op_peer *source, const pccl_frame *frame, pccl_op_inbound *inbound);

/* Reduces `elements` more of an inbound partial, the first of which is number `first` in the segment. Their checksum
 * goes on in `payload_crc`, unless it is NULL. */
void pccl_op_reduce(pccl_op *op, const pccl_op_inbound *inbound, size_t first, const uint8_t *payload, size_t elements,
    uint32_t *payload_crc);

/* The rest of the payload will not come, or it is damaged: the segment may come again from its beginning. What
 * of it was reduced does no harm: reducing takes the own elements from where they still are. */
void pccl_op_retract(pccl_op_peer *source, const pccl_op_inbound *inbound);

/* Takes back pccl_op_heard: the target's announcement was in a frame that is retracted. */
void pccl_op_unheard(pccl_op_peer *target);

/* All of the payload is there. Nonzero if that has added to what is sendable. */
int pccl_op_arrived(pccl_op *op, const pccl_op_inbound *inbound);

#endif
