/* gate.h: ops that their callers run by themselves.
 *
 * Whoever polls an engine's events, the *owner*, decides when ops start and what becomes of them. A thread that wants
 * an op asks the owner, who submits it, hears that all ranks are done, and tells the thread: of a small op these
 * switches between threads are the better part. But most of the time the owner has nothing to decide: an op may start
 * at once, and when the ranks have agreed it is committed. It can say so beforehand: it opens the gate. Any thread may
 * then run an op through it, which submits the op and waits for the ranks' agreement; the owner hears of it at leisure,
 * in one event (OP_RAN).
 *
 * Closing the gate is a cut. After it, nothing is submitted through the gate and nobody is told anything in the
 * owner's place. Each op that had been submitted through it is either
 *
 *     told     its caller knows that all ranks are done, and its OP_RAN is among the events, or
 *     shown    OP_STARTED is among the events, and OP_DONE if it is done; from there on it is as if the owner had
 *              submitted it, who hears of its agreement and has to end it. Its caller has to wait for the owner.
 *
 * So an owner who closes the gate and polls the events before it does whatever bears on ops, finds all as it would be
 * without a gate. What is shown by and by: a mismatch shows its op, and an op that takes longer than its caller waits
 * here is shown then.
 *
 * A gate lives as long as anybody refers to it; when its engine is destroyed it is closed for ever. Its mutex is held
 * for moments only, by callers, owner and engine thread; what it protects is all of this file's, and of each op that
 * came through it its `call`. */
#ifndef PCCL_GATE_H
#define PCCL_GATE_H

#include "event_queue.h"
#include "list.h"
#include "op.h"
#include "pccl_native.h"

#include <pthread.h>

/* Of an op that has neither been told nor shown. */
typedef struct pccl_gate_call {
    pccl_list in_calls;
    pccl_op *op;
    pccl_gate_result result;
    uint8_t is_done;
    uint8_t is_told;
    pthread_cond_t changed;
} pccl_gate_call;

/* Submits an op that belongs to this call, in the engine behind the gate. 0 or an error. */
typedef int pccl_gate_submit(void *engine, const pccl_op_request *request, pccl_gate_call *call);

/* With one reference. NULL with errno set. */
pccl_gate *pccl_gate_create(void *engine, pccl_gate_submit *submit, pccl_event_queue *events);
void pccl_gate_retain(pccl_gate *gate);

/* Its engine is no more. */
void pccl_gate_shut(pccl_gate *gate);

/* For the engine thread, of ops that came through the gate. */

/* Zero: it has been shown, so that DONE is to be posted. */
int pccl_gate_note_done(pccl_gate *gate, pccl_op *op, const pccl_event *done);

/* All ranks are done: tells the caller. Zero: it has been shown, so that AGREED is to be posted. */
int pccl_gate_tell(pccl_gate *gate, pccl_op *op);

/* Something is to be posted of it. */
void pccl_gate_show(pccl_gate *gate, pccl_op *op);

#endif
