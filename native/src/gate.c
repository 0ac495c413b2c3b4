#include "gate.h"

#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct pccl_gate {
    pthread_mutex_t mutex;
    unsigned references; /* atomic */
    uint64_t number; /* of this opening; 0: closed */
    uint64_t last_number;
    void *engine; /* NULL: no more */
    pccl_gate_submit *submit;
    pccl_event_queue *events;
    pccl_list calls;
};

pccl_gate *pccl_gate_create(void *engine, pccl_gate_submit *submit, pccl_event_queue *events)
{
    pccl_gate *gate = calloc(1, sizeof *gate);
    if (gate == NULL)
        return NULL;
    int rc = pthread_mutex_init(&gate->mutex, NULL);
    if (rc != 0) {
        free(gate);
        errno = rc;
        return NULL;
    }
    gate->references = 1;
    gate->engine = engine;
    gate->submit = submit;
    gate->events = events;
    pccl_list_init(&gate->calls);
    return gate;
}

void pccl_gate_retain(pccl_gate *gate) { __atomic_fetch_add(&gate->references, 1, __ATOMIC_RELAXED); }

void pccl_gate_release(pccl_gate *gate)
{
    if (gate == NULL || __atomic_sub_fetch(&gate->references, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    PCCL_ASSERT(pccl_list_is_empty(&gate->calls));
    pthread_mutex_destroy(&gate->mutex);
    free(gate);
}

/* With the mutex. */
static void call_post(const pccl_gate *gate, const pccl_gate_call *call, enum pccl_event_kind kind)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = kind;
    event.group = call->op->request.key.group;
    event.id = call->op->request.op;
    event.sequence = call->op->request.key.sequence;
    event.tx_bytes = call->result.tx_bytes;
    event.rx_bytes = call->result.rx_bytes;
    PCCL_ASSERT(call->op->events_promised > 0);
    call->op->events_promised--;
    if (kind == PCCL_EVENT_OP_RAN)
        pccl_event_queue_post_quietly(gate->events, &event);
    else
        pccl_event_queue_post(gate->events, &event);
}

/* With the mutex. */
static void call_end(pccl_gate_call *call)
{
    call->op->call = NULL;
    call->op = NULL;
    pccl_list_remove(&call->in_calls);
    pthread_cond_signal(&call->changed);
}

/* With the mutex. */
static void call_show(const pccl_gate *gate, pccl_gate_call *call)
{
    call_post(gate, call, PCCL_EVENT_OP_STARTED);
    if (call->is_done)
        call_post(gate, call, PCCL_EVENT_OP_DONE);
    call_end(call);
}

/* With the mutex. */
static int gate_close(pccl_gate *gate)
{
    int was_open = gate->number != 0;
    gate->number = 0;
    while (!pccl_list_is_empty(&gate->calls))
        call_show(gate, PCCL_CONTAINER_OF(gate->calls.next, pccl_gate_call, in_calls));
    return was_open;
}

uint64_t pccl_gate_open(pccl_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    gate_close(gate);
    if (gate->engine != NULL)
        gate->number = ++gate->last_number;
    uint64_t number = gate->number;
    pthread_mutex_unlock(&gate->mutex);
    return number;
}

int pccl_gate_close(pccl_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    int was_open = gate_close(gate);
    pthread_mutex_unlock(&gate->mutex);
    return was_open;
}

void pccl_gate_shut(pccl_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    gate_close(gate);
    gate->engine = NULL;
    pthread_mutex_unlock(&gate->mutex);
}

/* With the mutex. Waits for its end here, which comes after wait_ms at the latest. */
static void call_wait(pccl_gate *gate, pccl_gate_call *call, uint32_t wait_ms)
{
    int64_t end_ns = pccl_now_ns() + (int64_t)wait_ms * 1000000;
    while (call->op != NULL)
        if (pccl_cond_wait(&call->changed, &gate->mutex, end_ns) != 0 && call->op != NULL)
            call_show(gate, call);
}

int pccl_gate_run(
    pccl_gate *gate, uint64_t number, const pccl_op_request *request, uint64_t *sequence, uint32_t wait_ms,
    pccl_gate_result *result)
{
    pccl_gate_call call;
    pccl_op_request numbered = *request;
    if (!request->agrees)
        return PCCL_E_INVALID;
    memset(&call, 0, sizeof call);
    pccl_list_init(&call.in_calls);
    if (pccl_cond_init(&call.changed) != 0)
        return PCCL_E_MEMORY;
    int outcome = PCCL_GATE_CLOSED;
    pthread_mutex_lock(&gate->mutex);
    if (number != 0 && gate->number == number) {
        numbered.key.sequence = *sequence;
        outcome = gate->submit(gate->engine, &numbered, &call);
        if (outcome == 0) {
            ++*sequence;
            pccl_list_append(&gate->calls, &call.in_calls);
            call_wait(gate, &call, wait_ms);
            outcome = call.is_told ? PCCL_GATE_TOLD : PCCL_GATE_SHOWN;
            *result = call.result;
        }
    }
    pthread_mutex_unlock(&gate->mutex);
    pthread_cond_destroy(&call.changed);
    return outcome;
}

int pccl_gate_note_done(pccl_gate *gate, pccl_op *op, const pccl_event *done)
{
    pthread_mutex_lock(&gate->mutex);
    pccl_gate_call *call = op->call;
    if (call != NULL) {
        call->is_done = 1;
        call->result.tx_bytes = done->tx_bytes;
        call->result.rx_bytes = done->rx_bytes;
    }
    pthread_mutex_unlock(&gate->mutex);
    return call != NULL;
}

int pccl_gate_tell(pccl_gate *gate, pccl_op *op)
{
    pthread_mutex_lock(&gate->mutex);
    pccl_gate_call *call = op->call;
    if (call != NULL) {
        PCCL_ASSERT(call->is_done);
        call_post(gate, call, PCCL_EVENT_OP_RAN);
        call->is_told = 1;
        call_end(call);
    }
    pthread_mutex_unlock(&gate->mutex);
    return call != NULL;
}

void pccl_gate_show(pccl_gate *gate, pccl_op *op)
{
    pthread_mutex_lock(&gate->mutex);
    if (op->call != NULL)
        call_show(gate, op->call);
    pthread_mutex_unlock(&gate->mutex);
}
