/* fast_path.h: small ops that their callers start and wait for by themselves.
 *
 * Whoever polls an engine's events, the *owner*, decides when ops start and what becomes of them. A thread that wants
 * an op asks the owner, who submits it, hears that all ranks are done, and tells the thread: of a small op these
 * switches between threads are the better part. But most of the time the owner has nothing to decide: an op may start
 * at once, and when all ranks are done it is committed. It says so beforehand by opening the fast path. Any thread may
 * then run an op on it, which submits the op and waits for its completion; the owner hears of it at leisure, in one
 * event (OP_RAN).
 *
 * The problem is the moment at which the owner does have something to decide. Closing the fast path is a cut:
 *
 *   1. After it nothing is submitted on the fast path, since submitting and closing hold the same mutex.
 *   2. Each op that was submitted before is exactly one of
 *          completed     its caller knows that all ranks are done, and its OP_RAN is among the events, or
 *          handed over   OP_STARTED is among the events, and OP_DONE if it is done. From there on it is as if the owner
 *                        had submitted it, who hears of its completion and has to end it; its caller waits for the
 *                        owner
 *      since one of the two takes the call away (pccl_op.call), under the mutex, and the other then finds none.
 *   3. Events are posted under the mutex, so all of them are in the queue when closing returns. An owner who closes and
 *      then polls, before it does whatever bears on ops, finds all as it would be without a fast path.
 *   4. An op that becomes a mismatch, and one that takes longer than its caller waits here, is handed over then: what
 *      follows is for the owner to decide.
 *
 * A fast path lives as long as anybody refers to it; when its engine is destroyed it is closed for ever. The mutex is
 * held for moments only, by callers, owner and engine thread; what it protects is all of this file's, and of each op
 * that came on the fast path its `call`. */
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
    uint8_t is_done;
    uint8_t is_completed;
    pthread_cond_t changed;
} pccl_fast_path_call;

/* Submits an op that belongs to this call, in the engine behind the fast path. 0 or an error. */
typedef int pccl_fast_path_submit(void *engine, const pccl_op_request *request, pccl_fast_path_call *call);

/* With one reference. NULL with errno set. */
pccl_fast_path *pccl_fast_path_create(void *engine, pccl_fast_path_submit *submit, pccl_event_queue *events);
void pccl_fast_path_retain(pccl_fast_path *path);

/* Its engine is no more. */
void pccl_fast_path_shut(pccl_fast_path *path);

/* For the engine thread, of ops that came on the fast path. */

/* Zero: it has been handed over, so that DONE is to be posted. */
int pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *done);

/* All ranks are done: tells the caller. Zero: it has been handed over, so that COMPLETED is to be posted. */
int pccl_fast_path_complete(pccl_fast_path *path, pccl_op *op);

/* Something is to be posted of it: hands it over, unless it has been. */
void pccl_fast_path_hand_over(pccl_fast_path *path, pccl_op *op);

#endif
