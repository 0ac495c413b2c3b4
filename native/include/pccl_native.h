/* pccl_native.h: the public interface of the pccl data plane.
 *
 * The engine runs collectives over stream sockets that are connected already. It has no notion of Python, of membership
 * or of addresses: its owner hands it connected file descriptors grouped into links, submits operations on them, and
 * decides how each of them ends.
 *
 * Life of an op
 *   submit -> (PCCL_EVENT_OP_DONE | PCCL_EVENT_OP_MISMATCH | nothing, while peers are missing)
 *          -> PCCL_EVENT_OP_COMPLETED, if it is committed by mutual completion
 *          -> end(commit or abort) -> PCCL_EVENT_OP_ENDED
 *
 *   1. DONE is no verdict. It says that all result bytes are in `recv`, and, where there is a link to each rank
 *      (rank_links), that all ranks have submitted the op.
 *   2. COMPLETED, for ops with mutual completion (awaits_completion), says that all ranks are done: they tell each
 *      other.
 *   3. The owner must `end` every op that it has submitted, whatever state it is in. From OP_ENDED on the engine
 *      neither reads nor writes the op's buffers.
 *   4. After an abort `send` holds what it held at submit, also where `send == recv`; a separate `recv` is unspecified.
 *   5. An op whose every rank has reported DONE may be committed without waiting for anything (PCCL_COMMIT_BY_ALL): all
 *      bytes that this rank had to send have then been received.
 *
 * Memory beyond the caller's buffers
 *   - An op takes scratch of at most op_scratch_bytes_max (16 MiB), or of 2W - 1 segments where that is more, which is
 *     in worlds of 16 ranks and more, if in any. RING without quantization takes none, nor does DIRECT without it
 *     between two ranks. Otherwise DIRECT takes (W - 2)/W of an op's `count * dtype` bytes. Quantized, of the bytes on
 *     the wire, DIRECT takes up to (2W - 1)/W and RING all, within that bound. REDUCE_SCATTER takes (W - 2)/W with
 *     either algorithm; REDUCE as much with DIRECT and (W - 1)/W with RING, and 1/W beyond the bound but at the root.
 *   - In place an op also keeps a copy of its buffer, for an abort to put back.
 *   - ALL_TO_ALL, GATHER and SCATTER take nothing with DIRECT. With RING each rank keeps all that passes through it on
 *     its way to others: of an ALL_TO_ALL about (W - 2)/2 times `count`, of the others up to (W - 2)/W of it.
 *   - Scratch that ops have given back stays for the next ones, but everything held, in use or idle, stays within
 *     pool_bytes_max (64 MiB, what four ops at once need) and the largest copy taken lately, unless ops in use need
 *     more by themselves.
 *   - Besides there are about 50 KiB for each connection, more where it is encrypted; at most 2 MiB per link of small
 *     ops that other ranks have begun earlier; 16 bytes per segment; and the system's socket buffers.
 *
 * Threads: every function may be called from any thread, but create and destroy must not race with others. No call
 * blocks on the network, but for pccl_fast_path_run and _wait; calls are queued to the engine thread in order.
 *
 * Errors: functions that can fail return 0 or a negative PCCL_E_ value. Nothing aborts the process except a violated
 * invariant of the engine itself.
 *
 * This file is also what the Python binding parses: outside preprocessor lines keep to plain declarations, enums and
 * structs. */
#ifndef PCCL_NATIVE_H
#define PCCL_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The number of this interface, which rises with every change of it. The binding compares it with the number that it
 * was built for, so that a stale extension is refused at import. */
enum { PCCL_NATIVE_ABI = 32 };

enum pccl_dtype {
    PCCL_UINT8 = 0,
    PCCL_INT8 = 1,
    PCCL_UINT16 = 2,
    PCCL_INT16 = 3,
    PCCL_UINT32 = 4,
    PCCL_INT32 = 5,
    PCCL_UINT64 = 6,
    PCCL_INT64 = 7,
    PCCL_FLOAT16 = 8,
    PCCL_BFLOAT16 = 9,
    PCCL_FLOAT32 = 10,
    PCCL_FLOAT64 = 11,
    PCCL_DTYPE_COUNT = 12
};

enum pccl_reduce_op {
    PCCL_SUM = 0,
    PCCL_AVG = 1,
    PCCL_PROD = 2,
    PCCL_MAX = 3,
    PCCL_MIN = 4,
    PCCL_REDUCE_OP_COUNT = 5,
};

enum pccl_quantization {
    PCCL_QUANT_NONE = 0,
    PCCL_QUANT_MIN_MAX = 1,
    PCCL_QUANT_ZERO_POINT_SCALE = 2,
    PCCL_QUANT_CAST = 3,
    PCCL_QUANT_LLOYD_MAX = 4, /* float32, codes of 2 bits */
    PCCL_QUANT_SIGN = 5, /* float32, codes of 1 bit */
    PCCL_QUANT_COUNT = 6
};

/* Types of less than a byte, which a quantized element may have besides those of enum pccl_dtype. */
enum pccl_code_type {
    PCCL_CODE_UINT4 = 64,
    PCCL_CODE_INT4 = 65,
    PCCL_CODE_UINT2 = 66,
    PCCL_CODE_UINT1 = 67,
    PCCL_CODE_END = 68
};

enum pccl_rounding { PCCL_ROUND_NEAREST = 0, PCCL_ROUND_STOCHASTIC = 1, PCCL_ROUNDING_COUNT = 2 };

/* The ways that an op's elements travel. RING moves the fewest bytes, over the links of a ring only, in 2(W - 1) steps
 * of one latency each. DIRECT needs links between all ranks and two steps: every rank sends each other rank its share
 * of that one's chunk, and gets the reduced chunk back. A small all-reduce takes one step: every rank sends all of its
 * elements to each other one. Quantized, RING rounds a value W times, DIRECT twice. */
enum pccl_algorithm { PCCL_RING = 0, PCCL_DIRECT = 1, PCCL_ALGORITHM_COUNT = 2 };

enum pccl_status {
    PCCL_OK = 0,
    PCCL_E_INVALID = -1, /* an argument is out of range */
    PCCL_E_MEMORY = -2,
    PCCL_E_SYSTEM = -3, /* a system call failed; the text names it */
    PCCL_E_ENCRYPTION = -4 /* OpenSSL is not there or fails, or this is not what was encrypted */
};

/* The collectives. `count` is the number of elements of the larger of an op's buffers, which are:
 *
 *                        send                        recv
 *     ALL_REDUCE         count                       count; may be `send`
 *     ALL_GATHER         count / W: the rank's       count; `send` may be the rank's part of it
 *     BROADCAST          count, the root's           count, all others'; where their `send` is the same, an abort
 *                                                    puts back what it held
 *     SEND               as BROADCAST, between two ranks
 *     BARRIER            0                           0
 *     REDUCE_SCATTER     count                       the rank's chunk of it: count / W, in the first count % W ranks
 *                                                    one more
 *     ALL_TO_ALL         the rank's parts for all    those of all ranks for this one; the larger of both has count
 *                        ranks
 *     GATHER             count / W: the rank's       count, the root's; its `send` may be its part of it
 *     SCATTER            count, the root's           count / W: the rank's; the root's may be its part of `send`
 *     REDUCE             count                       count, the root's; may be `send`
 *
 * Parts lie in the order of ranks. Those of an ALL_TO_ALL have count / W elements each, or as many as its request says;
 * the number that a rank gives another has to be that which the other takes from it, or they mismatch.
 *
 * Only ALL_REDUCE can be quantized, and only it, REDUCE_SCATTER and REDUCE have a reduce_op; the others' is 0. */
enum pccl_collective {
    PCCL_ALL_REDUCE = 0,
    PCCL_ALL_GATHER = 1,
    PCCL_BROADCAST = 2,
    PCCL_SEND = 3,
    PCCL_BARRIER = 4,
    PCCL_REDUCE_SCATTER = 5,
    PCCL_ALL_TO_ALL = 6,
    PCCL_GATHER = 7,
    PCCL_SCATTER = 8,
    PCCL_REDUCE = 9,
    PCCL_COLLECTIVE_COUNT = 10
};

/* The description of an op, on which all its ranks must agree. It travels with the op, and a neighbour whose own
 * description differs makes the op a mismatch on both sides. With the direct algorithm all ranks are neighbours. */
typedef struct {
    uint64_t count; /* elements */
    uint8_t dtype; /* enum pccl_dtype */
    uint8_t reduce_op; /* enum pccl_reduce_op */
    uint8_t quantization; /* enum pccl_quantization */
    /* An integer type of 8 or 16 bits, an enum pccl_code_type (4 bits), or what CAST casts to; 0 without
     * quantization. */
    uint8_t quantized_dtype;
    uint32_t quantization_block; /* elements that share a scale; 0 without quantization and for CAST */
    uint32_t segment_bytes; /* largest payload of one frame, before quantization */
    uint32_t world_size;
    uint8_t algorithm; /* enum pccl_algorithm */
    /* A slice of an op is every n-th segment of it, and an op by itself: one of n engines of each rank can have it,
     * and the result does not depend on n. Slices are numbered from 0 to last_slice, at most PCCL_SLICES_MAX - 1;
     * both 0: the op is whole. */
    uint8_t slice;
    uint8_t last_slice;
    uint8_t collective; /* enum pccl_collective */
    /* The rank whose elements all get (BROADCAST, SEND, SCATTER), or that gets those of all (GATHER, REDUCE); else 0.
     * In the descriptions of a mismatch an ALL_TO_ALL has here the lower half of the number of elements that the rank
     * behind the link gets, and in `count` the number of those that it gives. */
    uint32_t root;
    /* The next two mean nothing here, except that ops which differ in them do not go together: the caller's own count
     * of steps plus 1, at most PCCL_STEP_MAX, and a number for the dimensions of its array; 0: not given. */
    uint64_t step;
    uint64_t dimensions;
} pccl_op_shape;

enum { PCCL_SLICES_MAX = 16 };

#define PCCL_STEP_MAX (UINT64_C(1) << 63)

/* Names one op on the wire. `epoch` grows whenever the group's ring changes. */
typedef struct {
    uint64_t epoch;
    uint64_t tag;
    uint64_t sequence;
    uint32_t group;
    uint32_t reserved; /* 0 */
} pccl_op_key;

typedef struct {
    uint64_t op; /* the caller's number, unique among ops not yet ended */
    pccl_op_key key;
    pccl_op_shape shape;
    uint32_t rank;
    uint32_t rounding; /* enum pccl_rounding, of what this rank quantizes; ranks need not agree */
    uint64_t rounding_seed; /* of stochastic rounding; mixed with key and rank */
    /* Error feedback, of float32 only; ranks need not agree. A rank quantizes each element once: its share, with RING its
     * partial sum, or the result of its own chunk. It adds `residual` first, and sets `residual_next` to
     * feedback_decay times the error that it makes, or 0 where that is not a normal number. Both have `count` elements.
     * After an abort residual_next is unspecified. */
    const float *residual; /* NULL: zeros */
    float *residual_next; /* must not overlap anything; NULL: no feedback */
    double feedback_decay; /* 0 to 1 */
    uint64_t link_prev; /* RING: the link to rank - 1 and to rank + 1; the same one with two ranks */
    uint64_t link_next;
    const uint64_t *rank_links; /* the link to each rank, all different, own rank's ignored; copied. NULL: RING only */
    uint32_t awaits_completion; /* 1: mutual completion, which takes rank_links or two ranks; the same on all ranks */
    uint32_t is_overlapped; /* 1: no thread waits for it yet: its time is neither in in_ops_us nor in op_wait_us */
    /* ALL_TO_ALL: how many elements this rank gives to each, and gets from each; copied. Both NULL: count / W. */
    const uint64_t *send_counts;
    const uint64_t *recv_counts;
    /* ALL_TO_ALL and the root of SCATTER: where the parts for each rank are, instead of one after the other in send,
     * which then is the first of them that is not NULL; those of length 0 may be NULL. Copied. NULL: in send. */
    const void *const *send_parts;
    /* ALL_TO_ALL and the root of GATHER: where the parts of each rank go, instead of one after the other to recv, which
     * then is the first of them that is not NULL; as send_parts. */
    void *const *recv_parts;
    const void *send;
    void *recv; /* may be `send` where enum pccl_collective says so; must not overlap it otherwise */
} pccl_op_request;

/* What events report, and in which fields beside `kind`.
 *
 *     OP_DONE            id: op; tx_bytes, rx_bytes: its payload bytes, also those not sent yet; with ALL_TO_ALL,
 *                        GATHER and SCATTER in a RING tx_bytes leaves out what only passes through
 *     OP_MISMATCH        id: op; mine, theirs: the two descriptions; link: by which that was heard; sequence: the rank
 *                        that differs, or this one's own if that is the one behind the link
 *     OP_ENDED           id: op; tx_bytes, rx_bytes
 *     GROUP_FROZEN       id: epoch; group
 *     LINK_LOST          id: link; system_error or 0; detail
 *     CONNECTION_LOST    the same, of a link that goes on with its other connections; is_udp
 *     LINK_LIMITED       id: link; limit: enum pccl_limit. More connections would let it send faster, or one over UDP:
 *                        those that it has were held back, and not by the network; round_trip_us_min. At most once of
 *                        each limit for each connection that was added
 *     OP_COMPLETED       id: op. All ranks are done
 *     OP_FROZEN          id: op
 *     LINK_METRICS       id: link; tx_bytes, rx_bytes: its payload so far, on all its connections; full_ms, full_bytes:
 *                        how long it was the limit, and what got across in that time, with frames' headers. It was the
 *                        limit where for half a second, at every tick, all its connections had more than TCP might
 *                        send yet, and those of no other link of this engine; 0 where the system does not tell.
 *                        The following fields are 0 there, too, and as of the last tick. busy_ms: time for which its
 *                        busiest connection had unacknowledged data; sender_ms, receiver_ms: the part of it for which
 *                        the send buffer or the receive window was the limit; stuck_ms: time since the last
 *                        acknowledgement while data is unacknowledged, on the connection that does best; delivered,
 *                        resent: TCP segments of all connections; unacked_bytes: of all of them now; round_trip_us: the
 *                        longest of their round trips now; round_trip_us_min: the shortest seen. unheard_ops,
 *                        inbound_ops, undone_ops: number of the oldest open ops that wait for the rank at the other end
 *                        to submit them, for payload that comes through it, and for its DONE
 *     OP_HANDED_OVER     id: op; sequence. The fast path has handed it over: as if it had been submitted, from here on
 *     OP_FAST_COMPLETED  id: op; sequence; tx_bytes, rx_bytes. Completed on the fast path: the op has ended
 *     OP_DETACHED        id: op; system_error: ENOENT: there is no such op
 *     OP_REFUSED         id: op; detail. Only of several engines: one had no memory for its slice, and the op has ended
 *     ENGINE_FAILED      detail; system_error. This machine is to blame and no peer: it has no memory, or other code
 *                        has closed the engine's descriptors. The engine does nothing any more but to be destroyed,
 *                        which restores what ops had, but those that had completed on the fast path. Once; the
 *                        descriptor to wait on may be gone, too: see pccl_engine_has_failed
 *
 * To spare the owner a wakeup, OP_DONE with mutual completion and OP_FAST_COMPLETED wait for the next event that
 * something depends on, the latter at most until there are many. */
enum pccl_event_kind {
    PCCL_EVENT_OP_DONE = 1,
    PCCL_EVENT_OP_MISMATCH = 2,
    PCCL_EVENT_OP_ENDED = 3,
    PCCL_EVENT_GROUP_FROZEN = 4,
    PCCL_EVENT_LINK_LOST = 5,
    PCCL_EVENT_CONNECTION_LOST = 6,
    PCCL_EVENT_LINK_LIMITED = 7,
    PCCL_EVENT_OP_COMPLETED = 8,
    PCCL_EVENT_OP_FROZEN = 9,
    PCCL_EVENT_LINK_METRICS = 10,
    PCCL_EVENT_OP_HANDED_OVER = 11,
    PCCL_EVENT_OP_FAST_COMPLETED = 12,
    PCCL_EVENT_OP_DETACHED = 13,
    PCCL_EVENT_ENGINE_FAILED = 14,
    PCCL_EVENT_OP_REFUSED = 15,
};

/* What holds back the connections of a link, or is going to: growth.h. */
enum pccl_limit { PCCL_LIMIT_NONE, PCCL_LIMIT_RECOVERY, PCCL_LIMIT_WINDOWS, PCCL_LIMIT_START, PCCL_LIMIT_LOSS };

typedef struct {
    uint32_t kind; /* enum pccl_event_kind */
    uint32_t group;
    uint64_t id;
    uint64_t sequence;
    uint64_t link;
    uint64_t tx_bytes;
    uint64_t rx_bytes;
    uint64_t full_ms;
    uint64_t full_bytes;
    uint64_t busy_ms;
    uint64_t sender_ms;
    uint64_t receiver_ms;
    uint64_t stuck_ms;
    uint64_t delivered;
    uint64_t resent;
    uint64_t unacked_bytes;
    uint64_t round_trip_us;
    uint64_t round_trip_us_min;
    uint64_t unheard_ops;
    uint64_t inbound_ops;
    uint64_t undone_ops;
    int32_t system_error; /* errno of the failed call, 0 where the other side closed or broke the protocol */
    int32_t limit;
    uint32_t engine; /* of several, which has reported it: of an event about a link */
    uint32_t is_udp; /* of a connection, or of one that carries the link's data */
    pccl_op_shape mine;
    pccl_op_shape theirs;
    char detail[96]; /* NUL-terminated */
} pccl_event;

typedef struct {
    uint64_t pool_bytes_max; /* scratch held, in use or idle: see above */
    uint64_t op_scratch_bytes_max; /* of one op; the same on all ranks, which fail each other's links otherwise */
    uint32_t force_poll; /* 1: poll(2) even where epoll exists */
    uint32_t eager_bytes_max; /* what one rank may get of an op before it is known to be ready; 0: nothing */
    uint32_t stall_ms; /* a connection that moves nothing for so long, while others of its link do, is given up */
    uint32_t pace_bytes_per_s; /* all links together send segments at about this rate; 0: as they can (egress.h) */
    uint32_t records; /* ops that the flight recorder remembers; 0: none */
    uint32_t reserved; /* 0 */
} pccl_engine_options;

typedef struct {
    uint64_t tx_payload_bytes;
    uint64_t rx_payload_bytes;
    uint64_t tx_wire_bytes; /* frames with their headers */
    uint64_t rx_wire_bytes;
    uint64_t pool_bytes; /* scratch now held idle */
    uint64_t scratch_bytes; /* scratch now used by ops */
    uint64_t scratch_bytes_max; /* the most that ops have used at any time */
    uint64_t ops_open;
    uint64_t connections;
    uint64_t in_ops_us; /* for how long ops of all ranks were in flight, however many at once; without slices */
    uint64_t in_slices_us; /* the same of slices */
    uint64_t late_ms; /* by which the engine thread has come too late: it got no CPU, or was stopped */
    uint64_t op_wait_us; /* for how long the oldest op has been in flight */
} pccl_engine_stats;

typedef struct pccl_engine pccl_engine;

void pccl_engine_options_default(pccl_engine_options *options);

/* Starts the engine thread. NULL on failure, with the reason in `error`. */
pccl_engine *pccl_engine_create(const pccl_engine_options *options, char *error, size_t error_bytes);

/* Stops the thread, closes every socket, and aborts (and restores) every op not yet ended. What has completed on the
 * fast path has ended. */
void pccl_engine_destroy(pccl_engine *engine);

/* Closes, in a forked child, the child's copies of all descriptors, so that the parent's death is still seen by its
 * peers. The child's copy of the engine has no thread: nothing else may be called with it. */
void pccl_engine_forget_after_fork(pccl_engine *engine);

/* Returns a descriptor that is readable while events wait to be polled. */
int pccl_engine_event_fd(const pccl_engine *engine);

/* Nonzero once ENGINE_FAILED is among the events, or was. */
int pccl_engine_has_failed(const pccl_engine *engine);

/* Copies up to `events_max` waiting events in the order they happened; returns how many. */
int pccl_engine_poll_events(pccl_engine *engine, pccl_event *events, int events_max);

/* The keys of one connection, one for each direction: `tx` here is `rx` at the other end. They must never serve another
 * connection. */
typedef struct {
    uint8_t tx[32];
    uint8_t rx[32];
} pccl_link_keys;

/* Adds a connected stream socket to a link, which its first connection makes, and takes ownership of the socket, also
 * on failure. Link numbers are the caller's and are never used twice. With keys, all that is sent on it is encrypted
 * with AES-256-GCM, and the connection is lost if anything comes that the other end has not encrypted; with NULL bytes
 * travel as they are. */
int pccl_engine_link_add(pccl_engine *engine, uint64_t link, int fd, const pccl_link_keys *keys);

/* Memory that carries the bytes of one connection between two processes of one host. The one that makes it passes the
 * offer to the other one, which opens the memory with it. */
typedef struct pccl_memory pccl_memory;
enum { PCCL_MEMORY_OFFER_BYTES = 32 };

/* Return 0; or PCCL_E_MEMORY, or PCCL_E_SYSTEM with errno set. Opening fails unless both processes belong to one user
 * and see each other. */
int pccl_memory_create(pccl_memory **made, uint8_t *offer);
int pccl_memory_open(const uint8_t *offer, pccl_memory **made);
void pccl_memory_free(pccl_memory *memory); /* may be NULL */

/* As pccl_engine_link_add, with memory that both ends have: bytes travel there, unencrypted, and the socket shows that
 * the other process lives. Takes ownership of the memory, also on failure. */
int pccl_engine_link_add_memory(pccl_engine *engine, uint64_t link, int fd, pccl_memory *memory);

/* As pccl_engine_link_add, with a connected datagram socket, as long as the link has stream sockets. Both ends add theirs
 * within a second, with the same secret, which no other connection has; `is_dialer` is nonzero at one of them. While
 * datagrams get through, the link's other connections carry nothing; where they do not, CONNECTION_LOST follows within
 * two seconds. Linux only: PCCL_E_SYSTEM elsewhere. */
enum { PCCL_UDP_SECRET_BYTES = 32 };
int pccl_engine_link_add_udp(
    pccl_engine *engine, uint64_t link, int fd, const uint8_t *secret, int is_dialer, const pccl_link_keys *keys);

/* Sets for how long a link may be silent: it is lost, with a LINK_LOST event, when bytes have been in flight on it for
 * that long, while none of its connections got one across or brought one in. 0, the default: for ever. */
void pccl_engine_set_link_timeout(pccl_engine *engine, uint32_t timeout_ms);

/* Closes all connections of a link, without a LINK_LOST event. Unknown links are ignored. */
int pccl_engine_link_close(pccl_engine *engine, uint64_t link);

/* Asks for one LINK_METRICS event. For an unknown link there is none. */
int pccl_engine_request_link_metrics(pccl_engine *engine, uint64_t link);

/* Starts an op. Returns 0, or the reason why there is none. The request is copied; the buffers stay the caller's. */
int pccl_engine_submit(pccl_engine *engine, const pccl_op_request *request);

/* Stops every op of the group with this epoch: none of them becomes DONE after GROUP_FROZEN has been reported,
 * and ops submitted later with this epoch are frozen at once. */
int pccl_engine_freeze(pccl_engine *engine, uint32_t group, uint64_t epoch);

/* Stops one op, which does not become DONE after OP_FROZEN has been reported. For an unknown op there is no event. */
int pccl_engine_freeze_op(pccl_engine *engine, uint64_t op);

/* Forgets what the unexpected queue holds of ops that will never be submitted here: the op with the key `last`, and the
 * uses of its tag before it, `count` in all. What is announced of them later is discarded, as of ops that were aborted
 * here: their keys must not be used again. */
int pccl_engine_forget_ops(pccl_engine *engine, const pccl_op_key *last, uint32_t count);

/* Stops an op and takes the caller's buffers away from it. From OP_DETACHED on, which waits for nothing but the engine
 * thread, they are neither read nor written, and `send` holds what it held at submit. What the op still had to send is
 * not sent. It has to be ended like any other. */
int pccl_engine_detach(pccl_engine *engine, uint64_t op);

/* PCCL_COMMIT_BY_ALL: every rank has reported DONE. Nothing touches the buffers any more, and there is no OP_ENDED to
 * wait for. */
enum pccl_verdict { PCCL_ABORT = 0, PCCL_COMMIT = 1, PCCL_COMMIT_BY_ALL = 2 };

int pccl_engine_end(pccl_engine *engine, uint64_t op, int verdict); /* enum pccl_verdict */

enum pccl_record_outcome { PCCL_RECORD_OPEN = 0, PCCL_RECORD_COMMITTED = 1, PCCL_RECORD_ABORTED = 2 };

/* An entry of the flight recorder: when an op, or a slice of it, did what. Times are nanoseconds of CLOCK_MONOTONIC, 0
 * for what has not happened. They are read once for each batch of events that the engine thread deals with, so two
 * that are nearer to each other than a batch takes may be the same. */
typedef struct {
    uint64_t op; /* the caller's number */
    pccl_op_key key;
    uint64_t caller; /* the thread that submitted it, by a number of the system that no other has for long */
    uint64_t count; /* elements */
    uint64_t tx_bytes; /* payload; known once it is completed or has ended */
    uint64_t rx_bytes;
    int64_t launched_ns; /* submitted by its caller */
    int64_t first_tx_ns; /* a frame of it, be it only the announcement, was given to the system: the first, the last */
    int64_t last_tx_ns;
    int64_t first_rx_ns; /* a segment of it had come: the first, the last */
    int64_t last_rx_ns;
    int64_t heard_ns; /* another rank was known to have submitted it: the last one */
    int64_t done_ns; /* this rank was done */
    int64_t completed_ns; /* all ranks were known to be done: only with mutual completion */
    int64_t ended_ns; /* the verdict was carried out */
    uint32_t world_size;
    uint32_t rank;
    uint32_t heard_from; /* the rank of heard_ns */
    uint32_t last_from; /* the rank of last_rx_ns */
    uint32_t awaits; /* a rank that may not have submitted it, as far as is known here; its own: there is none */
    uint8_t collective; /* these as in pccl_op_shape */
    uint8_t dtype;
    uint8_t reduce_op;
    uint8_t quantization;
    uint8_t algorithm;
    uint8_t slice;
    uint8_t last_slice;
    uint8_t outcome; /* enum pccl_record_outcome */
} pccl_op_record;

/* Copies the entries of ops that have not ended, or have ended after `since_ns`, in no order; at most records_max.
 * Returns how many. Ops that begin or end during the call may be missing. The recorder goes on after the engine has
 * failed. */
int pccl_engine_read_records(pccl_engine *engine, int64_t since_ns, pccl_op_record *records, int records_max);

void pccl_engine_get_stats(pccl_engine *engine, pccl_engine_stats *stats);

/* Several engines as one, at most PCCL_SLICES_MAX, which share the options' memory and records. A link's connections
 * are theirs by turns: connection `index` is that of engine `index` modulo their number, at both ends. The functions
 * are those of an engine; they may be called from any thread. Events of an op's slices are joined into one. */
typedef struct pccl_engines pccl_engines;
typedef struct pccl_fast_path pccl_fast_path;

pccl_engines *pccl_engines_create(const pccl_engine_options *options, uint32_t count, char *error, size_t error_bytes);
void pccl_engines_destroy(pccl_engines *engines);
void pccl_engines_forget_after_fork(pccl_engines *engines);

/* Returns the descriptor of engine `at`; -1: there is no such engine. Events wait while one of all is readable. */
int pccl_engines_event_fd(const pccl_engines *engines, uint32_t at);

/* As pccl_engine_fast_path, of engine `at`. An op takes that of pccl_first_engine. NULL: there is no such engine. */
pccl_fast_path *pccl_engines_fast_path(pccl_engines *engines, uint32_t at);

/* Returns the engine of an op's first slice. Every rank computes the same. */
uint32_t pccl_first_engine(uint64_t tag, uint64_t sequence, uint32_t count);

int pccl_engines_poll_events(pccl_engines *engines, pccl_event *events, int events_max);
int pccl_engines_link_add(pccl_engines *engines, uint64_t link, uint32_t index, int fd, const pccl_link_keys *keys);
int pccl_engines_link_add_memory(pccl_engines *engines, uint64_t link, uint32_t index, int fd, pccl_memory *memory);
int pccl_engines_link_add_udp(pccl_engines *engines, uint64_t link, uint32_t index, int fd, const uint8_t *secret,
    int is_dialer, const pccl_link_keys *keys);
void pccl_engines_set_link_timeout(pccl_engines *engines, uint32_t timeout_ms);
int pccl_engines_link_close(pccl_engines *engines, uint64_t link);

/* One event of each engine. */
int pccl_engines_request_link_metrics(pccl_engines *engines, uint64_t link);

/* Starts an op in `slices` slices, as pccl_slices_default says for all ranks alike. */
int pccl_engines_submit(pccl_engines *engines, const pccl_op_request *request, uint32_t slices);
int pccl_engines_freeze(pccl_engines *engines, uint32_t group, uint64_t epoch);
int pccl_engines_freeze_op(pccl_engines *engines, uint64_t op);
int pccl_engines_forget_ops(pccl_engines *engines, const pccl_op_key *last, uint32_t count);
int pccl_engines_detach(pccl_engines *engines, uint64_t op);
int pccl_engines_end(pccl_engines *engines, uint64_t op, int verdict);

/* The engine's fast path, on which any thread may run an op by itself while it is open; fast_path.h says what that
 * means for the thread that polls the events. At first it is closed. Each call of pccl_engine_fast_path gives a
 * reference, to be released; the fast path outlives its engine, closed for ever. All its functions may race with each
 * other and with those of the engine, including its destruction. */
pccl_fast_path *pccl_engine_fast_path(pccl_engine *engine);
void pccl_fast_path_release(pccl_fast_path *path);

/* Opens the fast path, after closing it where it is open. Returns the number of this opening, which is new, or 0 if the
 * engine is no more. */
uint64_t pccl_fast_path_open(pccl_fast_path *path);

/* Closes the fast path. Nonzero if it was open. An engine closes its fast path by itself when an epoch is frozen. */
int pccl_fast_path_close(pccl_fast_path *path);

typedef struct {
    uint64_t tx_bytes;
    uint64_t rx_bytes;
} pccl_fast_path_result;

enum pccl_fast_path_outcome {
    PCCL_FAST_PATH_COMPLETED = 0, /* all ranks are done, and the buffers are the caller's again */
    PCCL_FAST_PATH_HANDED_OVER = 1, /* it is under way, and from now on the owner's: see OP_HANDED_OVER */
    PCCL_FAST_PATH_CLOSED = 2 /* it has not been submitted: the fast path is closed, or was since this opening */
};

/* Submits an op with mutual completion and waits for that, at most so long. `*sequence` goes into its key, and is
 * counted up if the op was submitted. `number` is that of the opening. Returns an enum pccl_fast_path_outcome, or an
 * error as pccl_engine_submit does. */
int pccl_fast_path_run(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_result *result);

/* An op that was started on the fast path by a caller that waits for it later, or not at all. */
typedef struct pccl_fast_path_call pccl_fast_path_call;

/* As pccl_fast_path_run, but does not wait: 0 with the call, PCCL_FAST_PATH_CLOSED, or an error. If no thread waits for
 * the op when it is completed, OP_FAST_COMPLETED wakes the owner. It is handed over when wait_ms have passed. */
int pccl_fast_path_start(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_call **call);

/* Waits until the op is completed or handed over. Any thread, several at once. */
int pccl_fast_path_wait(pccl_fast_path *path, pccl_fast_path_call *call, pccl_fast_path_result *result);

/* The caller is done with the call, and will not wait for it. */
void pccl_fast_path_forget(pccl_fast_path *path, pccl_fast_path_call *call);

/* What is known of the engine behind a fast path, for threads that do not own it: it may be destroyed at any time. */

/* As pccl_engine_get_stats. Zero, and nothing in `stats`, if the engine is no more. */
int pccl_fast_path_get_stats(pccl_fast_path *path, pccl_engine_stats *stats);

/* Makes the engine's descriptor readable once, although there may be no event; nothing if the engine is no more. */
void pccl_fast_path_wake_owner(pccl_fast_path *path);

/* As pccl_engine_read_records; none if the engine is no more. */
int pccl_fast_path_read_records(pccl_fast_path *path, int64_t since_ns, pccl_op_record *records, int records_max);

/* Returns in nanoseconds what the engine counts as in_ops_us, or, of slices, as in_slices_us, by now; 0 if it is no
 * more. */
uint64_t pccl_fast_path_in_ops_ns(pccl_fast_path *path, int of_slices);

/* Heartbeats over connected stream sockets, from a thread of their own, which reports peers that have fallen silent.
 * They have nothing to do with an engine; heartbeat.c says how they work. Functions may be called from any thread, but
 * create and destroy must not race with others; none waits for the network. */
typedef struct pccl_heartbeat pccl_heartbeat;

enum pccl_heartbeat_event_kind {
    PCCL_HEARTBEAT_SILENT = 1, /* nothing was heard for the timeout */
    PCCL_HEARTBEAT_CLOSED = 2 /* by the other side, by the system, or for breaking the rules */
};

/* The one event of a connection, which is closed by then. */
typedef struct {
    uint64_t connection;
    uint32_t kind; /* enum pccl_heartbeat_event_kind */
    uint32_t silent_ms; /* since something was heard last */
    int32_t system_error; /* errno of the failed call, or 0 */
    int32_t reserved;
} pccl_heartbeat_event;

/* Starts the thread. timeout_ms is at least 1. NULL on failure, with the reason in `error`. */
pccl_heartbeat *pccl_heartbeat_create(uint32_t timeout_ms, char *error, size_t error_bytes);

/* Stops the thread and closes every connection. */
void pccl_heartbeat_destroy(pccl_heartbeat *heartbeat);

/* See pccl_engine_forget_after_fork. */
void pccl_heartbeat_forget_after_fork(pccl_heartbeat *heartbeat);

/* Returns a descriptor that is readable while events wait to be polled. */
int pccl_heartbeat_event_fd(const pccl_heartbeat *heartbeat);

/* See pccl_engine_poll_events. */
int pccl_heartbeat_poll_events(pccl_heartbeat *heartbeat, pccl_heartbeat_event *events, int events_max);

/* Lists connections on which nothing was heard for `quiet_ms` up to the last turn of the thread, including those whose
 * event was not polled yet; at most connections_max. Returns how many it has listed. */
int pccl_heartbeat_quiet(pccl_heartbeat *heartbeat, uint32_t quiet_ms, uint64_t *connections, int connections_max);

/* Adds a connected stream socket, which counts as heard from now, and takes ownership of it, also on failure.
 * Connection numbers are the caller's and are never used twice. */
int pccl_heartbeat_add(pccl_heartbeat *heartbeat, uint64_t connection, int fd);

/* The progress of a loop in an interpreter. The loop counts its `turns`; a thread that needs nothing but the
 * interpreter, and looks every so often, counts `looks`. Zero at first; advanced by the functions below, from any
 * thread. */
typedef struct {
    uint64_t turns;
    uint64_t looks;
} pccl_progress;

void pccl_progress_turn(pccl_progress *progress);
void pccl_progress_look(pccl_progress *progress);

/* Makes heartbeats vouch for a loop: none is sent once it has stood still for hold_ms, or for still_ms in which the
 * looking thread has got in again and again (still_ms 0: only for hold_ms). `progress` must outlive the heartbeats. */
void pccl_heartbeat_vouch(
    pccl_heartbeat *heartbeat, const pccl_progress *progress, uint32_t hold_ms, uint32_t still_ms);

/* Closes a connection and forgets its event, if it has one. Unknown connections are ignored. */
void pccl_heartbeat_remove(pccl_heartbeat *heartbeat, uint64_t connection);

/* Encryption and authentication of a byte stream, for connections that no engine has. Both ends of a connection make
 * one from their keys and use it for the two directions. Not thread-safe per stream; records.h says how it works. */
typedef struct pccl_records pccl_records;

/* Returns 0 if there is encryption, or else PCCL_E_MEMORY or PCCL_E_ENCRYPTION with the reason in `error`: which
 * library was looked for, and why it is of no use. */
int pccl_encryption_available(char *error, size_t error_bytes);

/* 0, or PCCL_E_MEMORY or PCCL_E_ENCRYPTION. The keys are copied. */
int pccl_records_create(const pccl_link_keys *keys, pccl_records **made);
void pccl_records_free(pccl_records *records); /* may be NULL */

/* Encrypts the beginning of what is given, when nothing is left to be sent. Returns how many bytes of it, which must
 * not be given again, or 0 if OpenSSL fails. */
size_t pccl_records_encrypt(pccl_records *records, const void *plain, size_t bytes);

/* Returns what is to be sent next. To be followed by `sent` with how much of it was. */
const uint8_t *pccl_records_out(const pccl_records *records, size_t *bytes);
void pccl_records_sent(pccl_records *records, size_t bytes);

/* Returns where to receive to. There is room once all that can be decrypted was. To be followed by `received`. */
uint8_t *pccl_records_in(pccl_records *records, size_t *room);
void pccl_records_received(pccl_records *records, size_t bytes);

/* Returns 1 with the contents of the next record, which stay there until the next `in`; 0 if more must be received
 * before that; or PCCL_E_ENCRYPTION if the other side has not encrypted this, or something is missing before it. */
int pccl_records_decrypt(pccl_records *records, const uint8_t **plain, size_t *bytes);

/* One side of a key exchange over Curve25519 (X25519, RFC 7748). Not thread-safe per exchange. */
typedef struct pccl_key_exchange pccl_key_exchange;

enum { PCCL_KEY_EXCHANGE_BYTES = 32 }; /* of a private key, a public key and a secret alike */

/* Returns 0 with the public key, or PCCL_E_MEMORY or PCCL_E_ENCRYPTION. With NULL for a private key a fresh one is
 * drawn. */
int pccl_key_exchange_create(const uint8_t *private_key, uint8_t *public_key, pccl_key_exchange **made);

/* Computes the secret that both sides share, and remembers it. Returns PCCL_E_ENCRYPTION, and zeros, if the other
 * side's public key makes none (all of its bits would be zero). */
int pccl_key_exchange_secret(pccl_key_exchange *exchange, const uint8_t *their_public_key, uint8_t *secret);
void pccl_key_exchange_free(pccl_key_exchange *exchange); /* wipes the private key and all secrets; may be NULL */

/* Returns the payload bytes per frame that suit an op of this size with either algorithm; `is_local`: all ranks are on
 * one host. Every rank computes the same. */
uint32_t pccl_segment_bytes_default(uint64_t count, uint32_t dtype, uint32_t world_size, uint32_t is_local);

/* Returns the number of slices into which an op is best divided where each rank has this number of engines. Every rank
 * computes the same. */
uint32_t pccl_slices_default(
    uint64_t count, uint32_t dtype, uint32_t segment_bytes, uint32_t world_size, uint32_t engines);

/* Returns the enum pccl_algorithm that suits an op of this size, where all ranks are linked with each other. Every rank
 * computes the same. */
uint32_t pccl_algorithm_default(uint64_t count, uint32_t dtype, uint32_t quantization, uint32_t world_size);

/* Returns the bytes of an element; 0 beyond the enum. */
uint32_t pccl_dtype_bytes(uint32_t dtype);

/* Kernels, exposed for tests and benchmarks. Scalar C is their specification. They compute in the caller's
 * floating-point environment, except for add_signs, which programs use. */

/* destination[i] = a[i] op b[i]; destination may be a. AVG adds. MAX and MIN propagate NaN. float16 and bfloat16
 * compute in float and round to nearest even; integers wrap. */
void pccl_kernel_reduce(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count);

/* values[i] /= world_size: true division for floats, floor division for integers. */
void pccl_kernel_average(uint32_t dtype, void *values, size_t count, uint32_t world_size);

/* Returns the bytes that `count` elements take on the wire under a shape's quantization. */
size_t pccl_quantized_bytes(const pccl_op_shape *shape, size_t count);
void pccl_kernel_quantize(const pccl_op_shape *shape, const void *source, size_t count, void *wire);

/* Quantizes with stochastic rounding. The bytes depend on the stream, a random number, and on the index of the first
 * element, but not on how a buffer is divided among calls, as long as no block is. */
void pccl_kernel_quantize_stochastic(
    const pccl_op_shape *shape, uint64_t stream, uint64_t first, const void *source, size_t count, void *wire);
void pccl_kernel_dequantize(const pccl_op_shape *shape, const void *wire, size_t count, void *destination);

/* The four numbers that random signs follow from, less the direction; signs.c says how. */
typedef struct {
    uint64_t seed;
    uint32_t tensor;
    uint32_t step;
} pccl_signs;

enum { PCCL_SIGNS_SUM_MAX = 1 << 24 };

/* values[i] += quantum * (sum over k of amounts[k] * (the sign of i in directions[k])). The quantum is a normal power
 * of two, the sum of the amounts' magnitudes at most PCCL_SIGNS_SUM_MAX, and count below 2^39. If each value and each
 * result is an integer of at most 2^24 in magnitude times the quantum, everything is exact, and adding the negative
 * amounts gives back the former bits, but that -0 may become 0. */
void pccl_kernel_add_signs(float *values, size_t count, float quantum, const pccl_signs *of, const uint32_t *directions,
    const int32_t *amounts, size_t direction_count);

/* Computes 128 signs at once, as bits. */
void pccl_kernel_sign_words(const pccl_signs *of, uint32_t direction, uint32_t block, uint32_t words[4]);

/* The floating-point environment of the calling thread as one number, whose meaning is this processor's: rounding mode,
 * treatment of subnormals, traps (fpenv.h). The engine computes in the default one. */
uint64_t pccl_fpenv_get(void);
void pccl_fpenv_set(uint64_t environment);
uint64_t pccl_fpenv_default(void);

/* Makes this signal's default action end the process, after everything else that is done at its end: so whoever waits
 * for the process learns that the signal has ended it. */
int pccl_end_by_signal(int number);

uint32_t pccl_native_abi(void);

#ifdef __cplusplus
}
#endif

#endif
