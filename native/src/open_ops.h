/* open_ops.h: the ops that are open in an engine: how they are found, stop, become done and end. matching.h says how
 * they find those of other ranks, and op.h what an op does with segments.
 *
 *   open      from submit to end
 *   halted    it moves no more, except for what is half sent; a mismatch is still announced
 *   silent    nothing is announced either: frozen
 *   released  no connection knows of it: nothing reads or writes its buffers
 *
 * An op with DONE frames between its ranks (completion.h) is released when all are, and stays open until
 * the caller ends it. One that came on the fast path (fast_path.h) and was not handed over ends by itself then. */
#ifndef PCCL_OPEN_OPS_H
#define PCCL_OPEN_OPS_H

#include "unexpected.h"
#include "event_queue.h"
#include "conn.h"
#include "link.h"
#include "op.h"
#include "recorder.h"
#include "table.h"

/* For how long ops of all ranks were in flight, however many at once: what this rank spends in ops. Slices are counted
 * apart, because each engine of a rank has one. Times are those of the recorder: no clock is read for this. */
typedef struct {
    uint64_t count;
    int64_t since_ns; /* when the first of those in flight began */
    int64_t total_ns; /* the time before that */
    int64_t account; /* read by any thread, as the next one: see open_ops.c */
    int64_t oldest_ns; /* when the oldest of them began */
} pccl_ops_time;

typedef struct {
    pccl_table by_id;
    pccl_table by_key;
    pccl_ops_time times[2]; /* of whole ops, of slices */
    pccl_list open; /* pccl_op.in_ops */
    pccl_list reached; /* pccl_op.in_ran: all ranks are done, this one last, and the others are to be told first */
    pccl_list ran; /* pccl_op.in_ran: completed on the fast path, to be ended */
    uint64_t count; /* read by any thread */
    pccl_unexpected_queue unexpected;
    pccl_event_queue *events;
    uint32_t eager_bytes_max;
    pccl_recorder recorder;
} pccl_open_ops;

/* 0, or PCCL_E_MEMORY: then there is nothing to free. `records`: the ops that the recorder keeps. */
int pccl_open_ops_init(pccl_open_ops *ops, pccl_event_queue *events, uint32_t eager_bytes_max, uint32_t records);
void pccl_open_ops_free(pccl_open_ops *ops); /* all have ended, and all links are gone */

void pccl_open_ops_add(pccl_open_ops *ops, pccl_op *op);
pccl_op *pccl_open_ops_find(const pccl_open_ops *ops, uint64_t id); /* NULL: none */

/* Several ranks of one op may live in one engine; the link tells them apart. The op's source or target behind
 * the link, or NULL with an op that has the key but not the link in `elsewhere`. */
pccl_op_peer *pccl_open_ops_find_peer(
    const pccl_open_ops *ops, const pccl_op_key *key, const pccl_link *link, int is_source, pccl_op **elsewhere);

/* An event about the op, and the posting of one that was promised. */
pccl_event pccl_op_event(const pccl_op *op, enum pccl_event_kind kind);
void pccl_open_ops_post(pccl_open_ops *ops, pccl_op *op, const pccl_event *event);

/* No op uses the link any more. */
void pccl_open_ops_lose_link(pccl_open_ops *ops, pccl_link *link);

/* Drops what is on its way to and from the op. Half-sent frames go on being sent, and so do announcements: a
 * mismatch is for both sides to know. */
void pccl_open_ops_halt(pccl_open_ops *ops, pccl_op *op);

/* Nothing more is said about the op either. */
void pccl_open_ops_silence(pccl_open_ops *ops, pccl_op *op);

/* All that this rank waits for is there. */
void pccl_open_ops_note_done(pccl_open_ops *ops, pccl_op *op);

/* If all ranks have said DONE: all that any rank had to send has been received. */
void pccl_open_ops_look_if_complete(pccl_open_ops *ops, pccl_op *op);

/* What this rank was done with last has been said to the others, as far as sockets take it: completes that. A caller
 * that is told before may end its process before the others are. */
void pccl_open_ops_complete_reached(pccl_open_ops *ops);

/* Stops the op, restores the caller's buffers, and leaves the op without any. */
void pccl_open_ops_detach(pccl_open_ops *ops, pccl_op *op);

/* Numbers of open ops that wait for the peer behind a link. */
typedef struct {
    uint64_t unheard; /* it has not submitted the op, as far as is known here */
    uint64_t inbound; /* payload is missing that comes from it, or by way of it */
    uint64_t undone; /* all is here, and it has not said DONE */
} pccl_ops_waits;

pccl_ops_waits pccl_open_ops_waits(const pccl_open_ops *ops, const pccl_link *link);

/* Returns that time by now. */
uint64_t pccl_ops_time_ns(const pccl_ops_time *time, int64_t now_ns);

/* Returns for how long the oldest op has been in flight. */
uint64_t pccl_ops_waiting_ns(const pccl_ops_time *time, int64_t now_ns);

void pccl_open_ops_end(pccl_open_ops *ops, pccl_op *op, int verdict);

#endif
