#include "fast_path.h"

#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct pccl_fast_path {
    pthread_mutex_t mutex;
    unsigned references; /* atomic */
    uint64_t number; /* of this opening; 0: closed */
    uint64_t last_number;
    void *engine; /* NULL: no more */
    pccl_fast_path_submit *submit;
    pccl_event_queue *events;
    pccl_list calls;
};

pccl_fast_path *pccl_fast_path_create(void *engine, pccl_fast_path_submit *submit, pccl_event_queue *events)
{
    pccl_fast_path *path = calloc(1, sizeof *path);
    if (path == NULL)
        return NULL;
    int rc = pthread_mutex_init(&path->mutex, NULL);
    if (rc != 0) {
        free(path);
        errno = rc;
        return NULL;
    }
    path->references = 1;
    path->engine = engine;
    path->submit = submit;
    path->events = events;
    pccl_list_init(&path->calls);
    return path;
}

void pccl_fast_path_retain(pccl_fast_path *path) { __atomic_fetch_add(&path->references, 1, __ATOMIC_RELAXED); }

void pccl_fast_path_release(pccl_fast_path *path)
{
    if (path == NULL || __atomic_sub_fetch(&path->references, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    PCCL_ASSERT(pccl_list_is_empty(&path->calls));
    pthread_mutex_destroy(&path->mutex);
    free(path);
}

/* With the mutex. */
static void call_post(const pccl_fast_path *path, const pccl_fast_path_call *call, enum pccl_event_kind kind)
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
    if (kind == PCCL_EVENT_OP_FAST_COMPLETED)
        pccl_event_queue_post_quietly(path->events, &event);
    else
        pccl_event_queue_post(path->events, &event);
}

/* With the mutex. */
static void call_end(pccl_fast_path_call *call)
{
    call->op->call = NULL;
    call->op = NULL;
    pccl_list_remove(&call->in_calls);
    pthread_cond_signal(&call->changed);
}

/* With the mutex. */
static void call_hand_over(const pccl_fast_path *path, pccl_fast_path_call *call)
{
    call_post(path, call, PCCL_EVENT_OP_HANDED_OVER);
    if (call->is_done)
        call_post(path, call, PCCL_EVENT_OP_DONE);
    call_end(call);
}

/* With the mutex. */
static int fast_path_close(pccl_fast_path *path)
{
    int was_open = path->number != 0;
    path->number = 0;
    while (!pccl_list_is_empty(&path->calls))
        call_hand_over(path, PCCL_CONTAINER_OF(path->calls.next, pccl_fast_path_call, in_calls));
    return was_open;
}

uint64_t pccl_fast_path_open(pccl_fast_path *path)
{
    pthread_mutex_lock(&path->mutex);
    fast_path_close(path);
    if (path->engine != NULL)
        path->number = ++path->last_number;
    uint64_t number = path->number;
    pthread_mutex_unlock(&path->mutex);
    return number;
}

int pccl_fast_path_close(pccl_fast_path *path)
{
    pthread_mutex_lock(&path->mutex);
    int was_open = fast_path_close(path);
    pthread_mutex_unlock(&path->mutex);
    return was_open;
}

void pccl_fast_path_shut(pccl_fast_path *path)
{
    pthread_mutex_lock(&path->mutex);
    fast_path_close(path);
    path->engine = NULL;
    pthread_mutex_unlock(&path->mutex);
}

/* With the mutex. Waits for its end here, which comes after wait_ms at the latest. */
static void call_wait(pccl_fast_path *path, pccl_fast_path_call *call, uint32_t wait_ms)
{
    int64_t end_ns = call->launched_ns + (int64_t)wait_ms * 1000000;
    while (call->op != NULL)
        if (pccl_cond_wait(&call->changed, &path->mutex, end_ns) != 0 && call->op != NULL)
            call_hand_over(path, call);
}

int pccl_fast_path_run(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_result *result)
{
    pccl_fast_path_call call;
    pccl_op_request numbered = *request;
    if (!request->awaits_completion)
        return PCCL_E_INVALID;
    memset(&call, 0, sizeof call);
    pccl_list_init(&call.in_calls);
    if (pccl_cond_init(&call.changed) != 0)
        return PCCL_E_MEMORY;
    int outcome = PCCL_FAST_PATH_CLOSED;
    pthread_mutex_lock(&path->mutex);
    if (number != 0 && path->number == number) {
        numbered.key.sequence = *sequence;
        outcome = path->submit(path->engine, &numbered, &call);
        if (outcome == 0) {
            ++*sequence;
            pccl_list_append(&path->calls, &call.in_calls);
            call_wait(path, &call, wait_ms);
            outcome = call.is_completed ? PCCL_FAST_PATH_COMPLETED : PCCL_FAST_PATH_HANDED_OVER;
            *result = call.result;
        }
    }
    pthread_mutex_unlock(&path->mutex);
    pthread_cond_destroy(&call.changed);
    return outcome;
}

int pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *done)
{
    pthread_mutex_lock(&path->mutex);
    pccl_fast_path_call *call = op->call;
    if (call != NULL) {
        call->is_done = 1;
        call->result.tx_bytes = done->tx_bytes;
        call->result.rx_bytes = done->rx_bytes;
    }
    pthread_mutex_unlock(&path->mutex);
    return call != NULL;
}

int pccl_fast_path_complete(pccl_fast_path *path, pccl_op *op)
{
    pthread_mutex_lock(&path->mutex);
    pccl_fast_path_call *call = op->call;
    if (call != NULL) {
        PCCL_ASSERT(call->is_done);
        call_post(path, call, PCCL_EVENT_OP_FAST_COMPLETED);
        call->is_completed = 1;
        call_end(call);
    }
    pthread_mutex_unlock(&path->mutex);
    return call != NULL;
}

void pccl_fast_path_hand_over(pccl_fast_path *path, pccl_op *op)
{
    pthread_mutex_lock(&path->mutex);
    if (op->call != NULL)
        call_hand_over(path, op->call);
    pthread_mutex_unlock(&path->mutex);
}
