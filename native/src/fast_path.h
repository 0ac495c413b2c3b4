/* fast_path.h: small ops that their callers start and wait for by themselves.
 *
 * Whoever polls an engine's events, the *owner*, decides when ops start and what becomes of them. A thread that wants
 * an op asks the owner, who submits it, learns that all ranks are done, and wakes the thread: for a small op these
 * switches between threads cost more than the op. But most of the time the owner has nothing to decide: an op may start
 * at once, and when all ranks are done it is committed. The owner says so beforehand by opening the fast path. Any
 * thread may then run an op on it, which submits the op and waits for its completion; the owner learns of it at
 * leisure, from one event (OP_FAST_COMPLETED).
 *
 * The problem is the moment at which the owner does have something to decide. Closing the fast path is therefore a cut
 * through the ops:
 *
 *   1. After it nothing is submitted on the fast path, because submitting and closing hold the same mutex.
 *   2. Each op that was submitted before is either completed or handed over, never both, because each of the two takes
 *      the call away from the op (pccl_op.call) under the mutex, and the other then finds none.
 *        - Completed: its caller knows that all ranks are done, and its OP_FAST_COMPLETED is among the events.
 *        - Handed over: OP_HANDED_OVER is among the events, followed by OP_DONE if this rank is done. From there on it
 *          is as if the owner had submitted the op: the owner receives its OP_COMPLETED and has to end it, and the
 *          caller waits for the owner.
 *   3. All events of the ops before the cut are in the queue when closing returns, because they are posted under the
 *      mutex. So an owner who closes the fast path and then polls, before it does anything that bears on ops, sees the
 *      engine as it would be without a fast path.
 *   4. An op that becomes a mismatch, or takes longer than its caller waits here, is handed over at that point: what
 *      follows is for the owner to decide.
 *
 * A fast path lives as long as anybody refers to it; when its engine is destroyed it is closed for ever. The mutex is
 * held for moments only, by callers, owner and engine thread. It protects everything in this file, and the `call` of
 * each op that came on the fast path. */
#ifndef PCCL_FAST_PATH_H
#define PCCL_FAST_PATH_H

#include "event_queue.h"
#include "list.h"
#include "op.h"
#include "pccl_native.h"

#include <pthread.h>

/* The caller of an op that has neither been completed nor handed over. */
typedef struct pccl_fast_path_call {
    pccl_list in_calls;
    pccl_op *op;
    pccl_fast_path_result result;
    int64_t launched_ns;
    uint8_t is_done;
    uint8_t is_completed;
    pthread_cond_t changed;
} pccl_fast_path_call;

/* Submits an op for this call to the engine behind the fast path. 0 or an error. */
typedef int pccl_fast_path_submit(void *engine, const pccl_op_request *request, pccl_fast_path_call *call);

/* Returns a closed fast path with one reference, or NULL with errno set. */
pccl_fast_path *pccl_fast_path_create(void *engine, pccl_fast_path_submit *submit, pccl_event_queue *events);
void pccl_fast_path_retain(pccl_fast_path *path);

/* Closes the fast path for ever: its engine is about to go. */
void pccl_fast_path_shut(pccl_fast_path *path);

/* For the engine thread, about ops that came on the fast path. */

/* This rank is done. Returns zero if the op has been handed over, so that OP_DONE has to be posted. */
int pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *done);

/* All ranks are done: wakes the caller. Returns zero if the op has been handed over, so that OP_COMPLETED has to be
 * posted. */
int pccl_fast_path_complete(pccl_fast_path *path, pccl_op *op);

/* An event of the op has to be posted that only the owner can deal with: hands the op over, unless it has been. */
void pccl_fast_path_hand_over(pccl_fast_path *path, pccl_op *op);

#endif
