/* fast_path.h: small ops that their callers start and wait for by themselves.
 *
 * The thread that polls an engine's events, the *owner*, decides when ops start and what becomes of them. A thread that
 * wants an op asks the owner, which submits it, learns that all ranks are done, and wakes the thread: for a small op
 * these switches between threads cost more than the op. But most of the time the owner has nothing to decide: an op may
 * start at once, and when all ranks are done it is committed. The owner says so beforehand by opening the fast path.
 * Any thread may then run an op on it, which submits the op and waits for its completion; the owner learns of it at
 * leisure, from one event (OP_FAST_COMPLETED).
 *
 * The problem is the moment at which the owner does have something to decide. Closing the fast path is therefore a cut
 * through the ops:
 *
 *   1. After it nothing is submitted on the fast path, because submitting and closing hold the same mutex. Memory is
 *      taken before, without it; an op whose fast path has been closed by then is discarded.
 *   2. Each op that was submitted before is either completed or handed over, never both, because each of the two takes
 *      the call away from the op (pccl_op.call) under the mutex, and the other then finds none.
 *        - Completed: its caller knows that all ranks are done, and its OP_FAST_COMPLETED is among the events.
 *        - Handed over: OP_HANDED_OVER is among the events, followed by OP_DONE if this rank is done. From there on it
 *          is as if the owner had submitted the op: the owner receives its OP_COMPLETED and has to end it, and the
 *          caller waits for the owner.
 *   3. All events of the ops before the cut are in the queue when closing returns, because they are posted under the
 *      mutex. So an owner that closes the fast path and then polls, before it does anything that bears on ops, sees the
 *      engine as it would be without a fast path.
 *   4. An op that becomes a mismatch, or takes longer than its caller waits here, is handed over at that point: what
 *      follows is for the owner to decide.
 *
 * A caller that waits does the engine's work, if no other thread does (driver.h): it then finds out by itself what
 * becomes of its op. Rules 1 to 4 do not depend on which thread drives the engine.
 *
 * A caller may also start an op and go on. A later wait works as if it had begun with the op. If
 * no thread waits when it is completed, the owner is woken and ends it for the caller, so its end is never lost.
 * The owner is woken a moment later if a caller drives then, which most often has started this op, too, and is about
 * to wait for it: to wake the owner costs more than the op. What is not over after some time is handed over by the
 * engine's driver, since the caller may be anywhere.
 *
 * A fast path lives as long as anybody refers to it; when its engine is destroyed it is closed for ever. The mutex is
 * held for moments only, by callers, owner and engine thread. It protects everything in this file, and the `call` of
 * each op that came on the fast path. A thread that only reads the engine's state holds another one, `looking`,
 * so that ops do not wait for that. */
#ifndef PCCL_FAST_PATH_H
#define PCCL_FAST_PATH_H

#include "event_queue.h"
#include "list.h"
#include "op.h"
#include "pccl_native.h"

#include <pthread.h>

/* The caller of an op that has neither been completed nor handed over. */
struct pccl_fast_path_call {
    pccl_list in_calls;
    pccl_op *op;
    pccl_fast_path_result result;
    int64_t launched_ns;
    uint8_t is_done;
    uint8_t is_completed;
    uint8_t is_over; /* atomic: completed or handed over */
    uint8_t may_drive; /* the engine, if it can have it */
    uint8_t drives; /* it has it, from the submit on */
    uint8_t is_started; /* by pccl_fast_path_start; these are for such a call */
    uint8_t is_forgotten;
    uint8_t is_unheard; /* completed while a caller drove, without a waiting thread */
    unsigned wakes; /* of the owner, before that */
    uint32_t waiting; /* callers */
    int64_t end_ns; /* when it is handed over */
    pthread_cond_t changed;
};

/* Makes what is to be submitted, or frees it. 0 or an error. */
typedef int pccl_fast_path_prepare(void *engine, const pccl_op_request *request, void **prepared);
typedef void pccl_fast_path_discard(void *engine, void *prepared);

/* Submits it for this call to the engine behind the fast path, as this use of its tag. */
typedef void pccl_fast_path_submit(void *engine, void *prepared, uint64_t sequence, pccl_fast_path_call *call);

/* Nonzero if the caller drives the engine from now on. */
typedef int pccl_fast_path_take(void *engine);

/* Drives the engine until the call is over, or the clock shows end_ns; 0: only as far as it goes without waiting. The
 * caller drives it, which therefore outlives that. */
typedef void pccl_fast_path_drive(void *engine, const pccl_fast_path_call *call, int64_t end_ns);

/* What a fast path needs of its engine. */
typedef struct {
    pccl_fast_path_prepare *prepare;
    pccl_fast_path_discard *discard;
    pccl_fast_path_submit *submit;
    pccl_fast_path_take *take;
    pccl_fast_path_drive *drive;
} pccl_fast_path_engine;

/* Returns a closed fast path with one reference, or NULL with errno set. */
pccl_fast_path *pccl_fast_path_create(void *engine, const pccl_fast_path_engine *calls, pccl_event_queue *events);
void pccl_fast_path_retain(pccl_fast_path *path);

/* Closes the fast path for ever: its engine is about to go. */
void pccl_fast_path_shut(pccl_fast_path *path);

/* Keeps the engine alive until pccl_fast_path_release_engine, for a moment. NULL if it is no more: there is nothing to
 * release. */
void *pccl_fast_path_hold_engine(pccl_fast_path *path);
void pccl_fast_path_release_engine(pccl_fast_path *path);

/* Nonzero if the op was completed or handed over. Any thread. */
int pccl_fast_path_call_is_over(const pccl_fast_path_call *call);

/* For the engine's driver, about ops that came on the fast path. */

/* Hands started calls over whose time has passed, and wakes the owner for those without a waiting thread. Returns in
 * how many milliseconds that has to be looked at again; -1: there is none. */
int pccl_fast_path_expire(pccl_fast_path *path);

/* This rank is done. Returns zero if the op has been handed over, so that OP_DONE has to be posted. */
int pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *done);

/* All ranks are done: wakes the caller. Returns zero if the op has been handed over, so that OP_COMPLETED has to be
 * posted. */
int pccl_fast_path_complete(pccl_fast_path *path, pccl_op *op);

/* An event of the op has to be posted that only the owner can deal with: hands the op over, unless it has been. */
void pccl_fast_path_hand_over(pccl_fast_path *path, pccl_op *op);

#endif
