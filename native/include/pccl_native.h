/* pccl_native.h: the public face of the pccl data plane.
 *
 * The engine reduces buffers over already connected stream sockets. It knows nothing of Python, of
 * membership or of addresses: a caller hands it connected file descriptors grouped into links, submits
 * operations on a ring of links, and decides how each of them ends.
 *
 * Life of an op
 *   submit -> (PCCL_EVENT_OP_DONE | PCCL_EVENT_OP_MISMATCH | nothing, while peers are missing)
 *          -> PCCL_EVENT_OP_COMPLETED, if it is committed by mutual completion
 *          -> end(commit or abort) -> PCCL_EVENT_OP_ENDED
 * DONE says that all result bytes are in `recv`, and, where there is a link to each rank (rank_links), that all ranks
 * have submitted the op; it is no verdict. The caller must `end` every op it has
 * submitted, in whatever state. From OP_ENDED on the engine neither reads nor writes the op's buffers.
 * Ended by abort, `send` holds what it held at submit, also where `send == recv`; a separate `recv` is
 * unspecified. An op whose every rank has reported DONE may be committed without waiting for anything: all bytes
 * that this rank had to send have then been received (PCCL_COMMIT_BY_ALL). With mutual completion (awaits_completion)
 * the ranks tell each other when they are done; COMPLETED says that all ranks are.
 *
 * Memory beyond the caller's buffers. An op takes scratch of at most op_scratch_bytes_max (16 MiB), or of
 * 2W - 1 segments where that is more: in worlds of 16 ranks and more, if in any. None for RING without
 * quantization, nor for DIRECT without it between two ranks. Of an op's `count * dtype` bytes, DIRECT takes
 * (W - 2)/W; quantized, of its bytes on the wire, DIRECT takes up to (2W - 1)/W and RING all, within that bound.
 * REDUCE_SCATTER takes (W - 2)/W, whichever way. In place an op also keeps a copy of its buffer, for an abort to put
 * back. What ops have given back is kept for the
 * next ones, but everything held, in use or idle, stays within pool_bytes_max (64 MiB, what four ops at once need)
 * and the largest copy taken lately, unless ops in use need more by themselves. Besides there are what connections
 * need (about 50 KiB each, more where they are encrypted), at most 2 MiB per link of small ops that other ranks have
 * begun earlier, 16 bytes per segment, and the system's socket buffers.
 *
 * Threads: every function may be called from any thread, but create and destroy must not race with
 * others. No call blocks on the network; calls are queued to the engine thread in order.
 *
 * Errors: functions that can fail return 0 or a negative PCCL_E_ value. Nothing aborts the process except
 * a violated invariant of the engine itself.
 *
 * This file is also what the Python binding parses: outside preprocessor lines keep to plain declarations,
 * enums and structs.
 */
#ifndef PCCL_NATIVE_H
#define PCCL_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Compared by the binding with the number it was built for: a stale extension is refused at import. */
enum { PCCL_NATIVE_ABI = 23 };

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
    PCCL_QUANT_COUNT = 4
};

/* What a quantized element may be besides an enum pccl_dtype: half a byte. */
enum pccl_code_type { PCCL_CODE_UINT4 = 64, PCCL_CODE_INT4 = 65 };

enum pccl_rounding { PCCL_ROUND_NEAREST = 0, PCCL_ROUND_STOCHASTIC = 1, PCCL_ROUNDING_COUNT = 2 };

/* How an op's elements travel. RING moves the fewest bytes over the chosen links only, in 2(W - 1) steps of one
 * latency each; DIRECT needs links between all ranks and two steps: every rank sends each other rank its share
 * of that one's chunk, and gets the reduced chunk back. Quantized, RING rounds a value W times, DIRECT twice. */
enum pccl_algorithm { PCCL_RING = 0, PCCL_DIRECT = 1, PCCL_ALGORITHM_COUNT = 2 };

enum pccl_status {
    PCCL_OK = 0,
    PCCL_E_INVALID = -1, /* an argument is out of range */
    PCCL_E_MEMORY = -2,
    PCCL_E_SYSTEM = -3, /* a system call failed; the text names it */
    PCCL_E_ENCRYPTION = -4 /* OpenSSL is not there or fails, or this is not what was encrypted */
};

/* What an op does with its elements. `count` is that of the larger of its buffers, which are:
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
 *
 * All but ALL_REDUCE know no quantization, and all but that and REDUCE_SCATTER no reduce_op (0). */
enum pccl_collective {
    PCCL_ALL_REDUCE = 0,
    PCCL_ALL_GATHER = 1,
    PCCL_BROADCAST = 2,
    PCCL_SEND = 3,
    PCCL_BARRIER = 4,
    PCCL_REDUCE_SCATTER = 5,
    PCCL_COLLECTIVE_COUNT = 6
};

/* What every rank of an op must agree on. It travels with the op, and a neighbour whose own differs makes
 * the op a mismatch on both sides. With the direct algorithm all ranks are neighbours. */
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
    uint32_t root; /* whose elements all get: BROADCAST and SEND; else 0 */
    /* The caller's own count of what it does, plus 1, at most PCCL_STEP_MAX; 0: it gives none. Of no meaning here, but
     * that ops of different steps do not go together. */
    uint64_t step;
    /* How the caller's array is shaped, as one number that differs where shapes do; 0: not given. Of no meaning here
     * either. */
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
    uint64_t link_prev; /* RING: the link to rank - 1 and to rank + 1; the same one with two ranks */
    uint64_t link_next;
    const uint64_t *rank_links; /* the link to each rank, all different, own rank's ignored; copied. May be
                                 * NULL for RING */
    uint32_t awaits_completion; /* 1: the ranks tell each other when they are done, which takes rank_links or a world of
                                 * two; the same on all ranks */
    uint32_t reserved; /* 0 */
    const void *send;
    void *recv; /* may be `send` where enum pccl_collective says so; must not overlap it otherwise */
} pccl_op_request;

enum pccl_event_kind {
    PCCL_EVENT_OP_DONE = 1, /* id: op; tx_bytes, rx_bytes: its payload bytes, also those not sent yet. With mutual
                             * completion it waits for the next event that something depends on */
    PCCL_EVENT_OP_MISMATCH = 2, /* id: op; mine, theirs: the two descriptions; link: whose */
    PCCL_EVENT_OP_ENDED = 3, /* id: op; tx_bytes, rx_bytes */
    PCCL_EVENT_GROUP_FROZEN = 4, /* id: epoch; group */
    PCCL_EVENT_LINK_LOST = 5, /* id: link; system_error or 0; detail */
    PCCL_EVENT_CONNECTION_LOST = 6, /* the same, of a link that goes on with its other connections */
    PCCL_EVENT_LINK_LIMITED = 7, /* id: link; more connections would let it send faster: all it has were held back
                                 * for some time by their windows, not by the network. At most once for each
                                 * connection that was added */
    PCCL_EVENT_OP_COMPLETED = 8, /* id: op; all ranks are done */
    PCCL_EVENT_OP_FROZEN = 9, /* id: op */
    PCCL_EVENT_LINK_METRICS = 10, /* id: link; tx_bytes, rx_bytes: its payload so far, of all its connections;
                                   * full_ms, full_bytes: how long it was the limit, and what got across meanwhile,
                                   * with frames' headers. It was the limit where for half a second, at every tick,
                                   * all its connections had more than TCP might send yet, and those of no other link
                                   * of this engine; 0 where the system does not tell */
    PCCL_EVENT_OP_HANDED_OVER = 11, /* id: op, sequence: handed over by the fast path; what follows is as if it had been
                                * submitted */
    PCCL_EVENT_OP_FAST_COMPLETED =
        12, /* id: op, sequence; tx_bytes, rx_bytes: of the fast path; it has ended, all ranks done. It
                            * waits for the next event that something depends on, or for many like it */
    PCCL_EVENT_OP_DETACHED = 13, /* id: op; system_error: ENOENT: there is no such op, ECANCELED: it has stopped */
    PCCL_EVENT_ENGINE_FAILED = 14 /* detail, system_error: this machine is to blame and no peer: it has no memory, or
                                   * somebody has closed the engine's descriptors. The engine does nothing any more
                                   * but to be destroyed, which restores what ops had. Once; the descriptor to wait on
                                   * may be gone, too: see pccl_engine_has_failed */
};

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
    int32_t system_error; /* errno of the failed call, 0 where the other side closed or broke the protocol */
    int32_t reserved;
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
} pccl_engine_stats;

typedef struct pccl_engine pccl_engine;

void pccl_engine_options_default(pccl_engine_options *options);

/* Starts the engine thread. NULL on failure, with the reason in `error`. */
pccl_engine *pccl_engine_create(const pccl_engine_options *options, char *error, size_t error_bytes);

/* Stops the thread, closes every socket, aborts (and restores) every op not yet ended. */
void pccl_engine_destroy(pccl_engine *engine);

/* In a forked child, whose copy of the engine has no thread: closes the child's copies of all descriptors
 * so that the parent's death is still seen by its peers. Nothing else may be called there afterwards. */
void pccl_engine_forget_after_fork(pccl_engine *engine);

/* Readable while events wait to be polled. */
int pccl_engine_event_fd(const pccl_engine *engine);

/* Whether ENGINE_FAILED is among the events, or was. */
int pccl_engine_has_failed(const pccl_engine *engine);

/* Copies up to `events_max` waiting events in the order they happened; returns how many. */
int pccl_engine_poll_events(pccl_engine *engine, pccl_event *events, int events_max);

/* Of one connection and never used again: one key for each direction; what is `tx` here is `rx` at the other end. */
typedef struct {
    uint8_t tx[32];
    uint8_t rx[32];
} pccl_link_keys;

/* Adds a connected stream socket to a link (made by its first connection) and takes ownership of it, also on
 * failure. Link numbers are the caller's and are never used twice. With keys, all that is sent on it is encrypted
 * with AES-256-GCM, and the connection is lost if anything comes that the other end has not encrypted; NULL:
 * neither. */
int pccl_engine_link_add(pccl_engine *engine, uint64_t link, int fd, const pccl_link_keys *keys);

/* From now on a link is lost, with a LINK_LOST event, when bytes lie on it for so long without any of its connections
 * getting one across or bringing one in. 0, as it is at first: never. */
void pccl_engine_set_link_timeout(pccl_engine *engine, uint32_t timeout_ms);

/* Closes all connections of a link, without a LINK_LOST event. Unknown links are ignored. */
int pccl_engine_link_close(pccl_engine *engine, uint64_t link);

/* Asks for one LINK_METRICS. Of an unknown link there is none. */
int pccl_engine_request_link_metrics(pccl_engine *engine, uint64_t link);

int pccl_engine_submit(pccl_engine *engine, const pccl_op_request *request);

/* Stops every op of the group with this epoch: none of them becomes DONE after GROUP_FROZEN has been reported,
 * and ops submitted later with this epoch are frozen at once. */
int pccl_engine_freeze(pccl_engine *engine, uint32_t group, uint64_t epoch);

/* The same for one op, after OP_FROZEN. Of an op that is not there, there is none. */
int pccl_engine_freeze_op(pccl_engine *engine, uint64_t op);

/* Lets go of what others have announced of ops that are not submitted here and never will be: the last one, and so many
 * uses of its tag in all. */
int pccl_engine_forget_ops(pccl_engine *engine, const pccl_op_key *last, uint32_t count);

/* Takes the caller's buffers from an op that goes on. From OP_DETACHED on, which waits for nothing but the engine's
 * thread, they are neither read nor written, and `send` holds what it held at submit. The op then works on the given
 * memory, which it fills with what it needs: `send` and `recv` are as large as its own, and as far apart where these
 * are the same or overlap. An op that cannot be done any more, since it has been frozen before, stops altogether; so
 * does any op that is given NULL for both: what was still to be sent of it is not. It has to be ended like any
 * other. */
int pccl_engine_detach(pccl_engine *engine, uint64_t op, void *send, void *recv);

/* PCCL_COMMIT_BY_ALL: every rank has reported DONE. Nothing touches the buffers any more, and there is no
 * OP_ENDED to wait for. */
enum pccl_verdict { PCCL_ABORT = 0, PCCL_COMMIT = 1, PCCL_COMMIT_BY_ALL = 2 };

int pccl_engine_end(pccl_engine *engine, uint64_t op, int verdict); /* enum pccl_verdict */

void pccl_engine_get_stats(pccl_engine *engine, pccl_engine_stats *stats);

/* The engine's fast path, on which any thread may run an op by itself while it is open; fast_path.h says what that
 * means for who polls the events. At first it is closed. Each call gives a reference, to be released; it outlives its
 * engine, closed for ever. Of its functions all may race with each other and with those of the engine, its destruction,
 * too. */
typedef struct pccl_fast_path pccl_fast_path;

pccl_fast_path *pccl_engine_fast_path(pccl_engine *engine);
void pccl_fast_path_release(pccl_fast_path *path);

/* The number of this opening, which is new; 0 if the engine is no more. What is open is closed before. */
uint64_t pccl_fast_path_open(pccl_fast_path *path);

/* Nonzero if it was open. An engine closes its fast path when an epoch is to be frozen. */
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

/* Submits an op with mutual completion, with `*sequence` in its key, which it counts up, and waits for that, at most so
 * long. Returns an enum pccl_fast_path_outcome, or an error as pccl_engine_submit does. */
int pccl_fast_path_run(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_result *result);

/* Heartbeats over connected stream sockets, from a thread of their own, which tells which other sides have fallen
 * silent. It has nothing to do with an engine; heartbeat.c says how it works. Functions may be called from any thread,
 * but create and destroy must not race with others; none waits for the network. */
typedef struct pccl_heartbeat pccl_heartbeat;

enum pccl_heartbeat_event_kind {
    PCCL_HEARTBEAT_SILENT = 1, /* nothing was heard for the timeout */
    PCCL_HEARTBEAT_CLOSED = 2 /* by the other side, by the system, or for breaking the rules */
};

/* The last thing said of a connection, which is closed by then. */
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

/* As pccl_engine_forget_after_fork. */
void pccl_heartbeat_forget_after_fork(pccl_heartbeat *heartbeat);

/* Readable while events wait to be polled. */
int pccl_heartbeat_event_fd(const pccl_heartbeat *heartbeat);

/* As pccl_engine_poll_events. */
int pccl_heartbeat_poll_events(pccl_heartbeat *heartbeat, pccl_heartbeat_event *events, int events_max);

/* The connections, at most so many, of which nothing was heard for `quiet_ms` up to the last turn, those with an event
 * that was not polled yet included. Returns how many they are. */
int pccl_heartbeat_quiet(pccl_heartbeat *heartbeat, uint32_t quiet_ms, uint64_t *connections, int connections_max);

/* Adds a connected stream socket, which counts as heard from now, and takes ownership of it, also on failure.
 * Connection numbers are the caller's and are never used twice. */
int pccl_heartbeat_add(pccl_heartbeat *heartbeat, uint64_t connection, int fd);

/* How a loop in an interpreter gets on. `turns` is its own word; `looks` that of a thread which needs nothing but the
 * interpreter, and looks every so often. Zero at first; advanced by the functions below, from any thread. */
typedef struct {
    uint64_t turns;
    uint64_t looks;
} pccl_progress;

void pccl_progress_turn(pccl_progress *progress);
void pccl_progress_look(pccl_progress *progress);

/* From now on heartbeats vouch for a loop, and none is sent while it stands still: for hold_ms, or for still_ms in
 * which somebody has looked again and again (still_ms 0: only for hold_ms). `progress` outlives the heartbeats. */
void pccl_heartbeat_vouch(
    pccl_heartbeat *heartbeat, const pccl_progress *progress, uint32_t hold_ms, uint32_t still_ms);

/* Closes a connection and forgets what was to be told of it. Unknown ones are ignored. */
void pccl_heartbeat_remove(pccl_heartbeat *heartbeat, uint64_t connection);

/* Encryption and authentication of a byte stream, for connections that no engine has: what both sides make with their
 * keys, and use for the two directions of one connection. Not thread-safe per stream; records.h says how it works. */
typedef struct pccl_records pccl_records;

/* 0, or PCCL_E_MEMORY or PCCL_E_ENCRYPTION with what was looked for, and why it is of no use, in `error`. */
int pccl_encryption_available(char *error, size_t error_bytes);

/* 0, or PCCL_E_MEMORY or PCCL_E_ENCRYPTION. The keys are copied. */
int pccl_records_create(const pccl_link_keys *keys, pccl_records **made);
void pccl_records_free(pccl_records *records); /* may be NULL */

/* Encrypts the beginning of what is given, when nothing is left to be sent: how many bytes of it; 0 if OpenSSL fails.
 * They must not be given again. */
size_t pccl_records_encrypt(pccl_records *records, const void *plain, size_t bytes);

/* What is to be sent next, to be followed by `sent` with how much of it was. */
const uint8_t *pccl_records_out(const pccl_records *records, size_t *bytes);
void pccl_records_sent(pccl_records *records, size_t bytes);

/* Where to receive to, never without room once all that can be decrypted was, to be followed by `received`. */
uint8_t *pccl_records_in(pccl_records *records, size_t *room);
void pccl_records_received(pccl_records *records, size_t bytes);

/* 1 with what was in the next record, which stays there until the next `in`; 0: more must be received before that;
 * PCCL_E_ENCRYPTION: this was not encrypted by the other side, or something is missing before it. */
int pccl_records_decrypt(pccl_records *records, const uint8_t **plain, size_t *bytes);

/* One side of a key exchange over Curve25519 (X25519, RFC 7748). Not thread-safe per exchange. */
typedef struct pccl_key_exchange pccl_key_exchange;

enum { PCCL_KEY_EXCHANGE_BYTES = 32 }; /* of a private key, a public key and a secret alike */

/* 0 with the public key, or PCCL_E_MEMORY or PCCL_E_ENCRYPTION. Without a private key a fresh one is drawn. */
int pccl_key_exchange_create(const uint8_t *private_key, uint8_t *public_key, pccl_key_exchange **made);

/* The secret that both sides share, which is remembered. PCCL_E_ENCRYPTION, and zeros, if the other side's public key
 * makes none (all of its bits would be zero). */
int pccl_key_exchange_secret(pccl_key_exchange *exchange, const uint8_t *their_public_key, uint8_t *secret);
void pccl_key_exchange_free(pccl_key_exchange *exchange); /* wipes the private key and all secrets; may be NULL */

/* Payload bytes per frame that suit an op of this size with either algorithm; `is_local`: all ranks are on one host.
 * Every rank computes the same. */
uint32_t pccl_segment_bytes_default(uint64_t count, uint32_t dtype, uint32_t world_size, uint32_t is_local);

/* Into how many slices an op is best divided where each rank has so many engines; every rank computes the same. */
uint32_t pccl_slices_default(
    uint64_t count, uint32_t dtype, uint32_t segment_bytes, uint32_t world_size, uint32_t engines);

/* The enum pccl_algorithm that suits an op of this size, where all ranks are linked with each other; every
 * rank computes the same. */
uint32_t pccl_algorithm_default(uint64_t count, uint32_t dtype, uint32_t quantization, uint32_t world_size);

uint32_t pccl_dtype_bytes(uint32_t dtype);

/* Kernels, exposed for tests and benchmarks. Scalar C is their specification. They compute in the caller's
 * floating-point environment, but for add_signs, which programs use. */

/* destination[i] = a[i] op b[i]; destination may be a. AVG adds. MAX and MIN propagate NaN. float16 and bfloat16
 * compute in float and round to nearest even; integers wrap. */
void pccl_kernel_reduce(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count);

/* values[i] /= world_size: true division for floats, floor division for integers. */
void pccl_kernel_average(uint32_t dtype, void *values, size_t count, uint32_t world_size);

/* Bytes that `count` elements take on the wire under a shape's quantization. */
size_t pccl_quantized_bytes(const pccl_op_shape *shape, size_t count);
void pccl_kernel_quantize(const pccl_op_shape *shape, const void *source, size_t count, void *wire);

/* With stochastic rounding: the bytes depend on the stream, a random number, and on the index of the first
 * element, but not on how a buffer is divided among calls, as long as no block is. */
void pccl_kernel_quantize_stochastic(
    const pccl_op_shape *shape, uint64_t stream, uint64_t first, const void *source, size_t count, void *wire);
void pccl_kernel_dequantize(const pccl_op_shape *shape, const void *wire, size_t count, void *destination);

/* Whose random signs: signs.h says what they are. */
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

/* 128 signs at once, as bits. */
void pccl_kernel_sign_words(const pccl_signs *of, uint32_t direction, uint32_t block, uint32_t words[4]);

/* The floating-point environment of the calling thread: rounding mode, treatment of subnormals, traps; on this
 * processor, as one number (fpenv.h). The default is the one in which the engine computes. */
uint64_t pccl_fpenv_get(void);
void pccl_fpenv_set(uint64_t environment);
uint64_t pccl_fpenv_default(void);

/* At the end of the process, once all else has been done, this signal's default action ends it: whoever waits for the
 * process learns that it was told to end. */
int pccl_end_by_signal(int number);

uint32_t pccl_native_abi(void);

#ifdef __cplusplus
}
#endif

#endif
