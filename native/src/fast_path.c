#include "fast_path.h"

#include "dtype.h"
#include "os.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { NS_PER_MS = 1000000, SMALL_BYTES = 64 << 10, HEARD_MS_MAX = 1 };

struct pccl_fast_path {
    pthread_mutex_t mutex;
    pthread_mutex_t looking;
    void *looked_at; /* the engine, while it can be looked at; with `looking` */
    unsigned references; /* atomic */
    uint64_t number; /* of this opening; 0: closed */
    uint64_t last_number;
    void *engine; /* NULL: no more */
    pccl_fast_path_engine call;
    pccl_event_queue *events;
    pccl_list calls;
    unsigned started; /* of them; atomic */
    int64_t expiry_ns; /* none of these is to be handed over before */
    unsigned preparing; /* callers, without the mutex */
    pthread_cond_t prepared; /* none is any more */
    unsigned driving; /* callers */
    unsigned unheard; /* completed calls not yet reported; atomic */
    unsigned wakes; /* how often the owner was woken for them */
    int64_t unheard_ns; /* since when there are any */
};

pccl_fast_path *pccl_fast_path_create(void *engine, const pccl_fast_path_engine *calls, pccl_event_queue *events)
{
    pccl_fast_path *path = calloc(1, sizeof *path);
    if (path == NULL)
        return NULL;
    int rc = pthread_mutex_init(&path->mutex, NULL);
    if (rc == 0 && (rc = pthread_mutex_init(&path->looking, NULL)) != 0)
        pthread_mutex_destroy(&path->mutex);
    if (rc == 0 && (rc = pccl_cond_init(&path->prepared)) != 0) {
        pthread_mutex_destroy(&path->looking);
        pthread_mutex_destroy(&path->mutex);
    }
    if (rc != 0) {
        free(path);
        errno = rc;
        return NULL;
    }
    path->references = 1;
    path->expiry_ns = INT64_MAX;
    path->engine = path->looked_at = engine;
    path->call = *calls;
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
    pthread_cond_destroy(&path->prepared);
    pthread_mutex_destroy(&path->looking);
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
    int is_heard = !call->is_started || call->waiting > 0;
    if (kind == PCCL_EVENT_OP_FAST_COMPLETED && (is_heard || path->driving > 0))
        pccl_event_queue_post_quietly(path->events, &event);
    else
        pccl_event_queue_post(path->events, &event);
}

/* With the mutex. The driver may be the thread that will ask for it. */
static void call_note_unheard(pccl_fast_path *path, pccl_fast_path_call *call)
{
    if (!call->is_started || call->waiting > 0 || path->driving == 0)
        return;
    call->is_unheard = 1;
    call->wakes = path->wakes;
    if (path->unheard == 0)
        path->unheard_ns = pccl_now_ns();
    __atomic_fetch_add(&path->unheard, 1, __ATOMIC_RELAXED);
}

/* With the mutex. */
static void call_note_heard(pccl_fast_path *path, pccl_fast_path_call *call)
{
    if (call->is_unheard && call->wakes == path->wakes)
        __atomic_fetch_sub(&path->unheard, 1, __ATOMIC_RELAXED);
    call->is_unheard = 0;
}

static void call_free(pccl_fast_path_call *call)
{
    pthread_cond_destroy(&call->changed);
    free(call);
}

/* With the mutex. May free the call. */
static void call_end(pccl_fast_path *path, pccl_fast_path_call *call)
{
    call->op->call = NULL;
    call->op = NULL;
    pccl_list_remove(&call->in_calls);
    if (call->is_started)
        __atomic_fetch_sub(&path->started, 1, __ATOMIC_RELAXED);
    __atomic_store_n(&call->is_over, 1, __ATOMIC_RELEASE);
    if (call->is_forgotten)
        call_free(call);
    else
        pthread_cond_signal(&call->changed);
}

int pccl_fast_path_call_is_over(const pccl_fast_path_call *call)
{
    return __atomic_load_n(&call->is_over, __ATOMIC_ACQUIRE);
}

/* With the mutex. */
static void call_hand_over(pccl_fast_path *path, pccl_fast_path_call *call)
{
    call_post(path, call, PCCL_EVENT_OP_HANDED_OVER);
    if (call->is_done)
        call_post(path, call, PCCL_EVENT_OP_DONE);
    call_end(path, call);
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
    while (path->preparing > 0)
        (void)pccl_cond_wait(&path->prepared, &path->mutex, pccl_now_ns() + INT64_C(1000) * NS_PER_MS);
    pthread_mutex_unlock(&path->mutex);
    pthread_mutex_lock(&path->looking);
    path->looked_at = NULL;
    pthread_mutex_unlock(&path->looking);
}

void *pccl_fast_path_hold_engine(pccl_fast_path *path)
{
    pthread_mutex_lock(&path->looking);
    void *engine = path->looked_at;
    if (engine == NULL)
        pthread_mutex_unlock(&path->looking);
    return engine;
}

void pccl_fast_path_release_engine(pccl_fast_path *path) { pthread_mutex_unlock(&path->looking); }

/* With the mutex, which it leaves and takes again. */
static void call_drive(pccl_fast_path *path, const pccl_fast_path_call *call, int64_t end_ns)
{
    void *engine = path->engine;
    path->driving++;
    pthread_mutex_unlock(&path->mutex);
    path->call.drive(engine, call, end_ns);
    pthread_mutex_lock(&path->mutex);
    path->driving--;
}

/* With the mutex. Waits for its end, which comes in time: the call is handed over then. */
static void call_wait(pccl_fast_path *path, pccl_fast_path_call *call)
{
    if (call->drives)
        call_drive(path, call, call->end_ns);
    while (call->op != NULL)
        if (pccl_cond_wait(&call->changed, &path->mutex, call->end_ns) != 0 && call->op != NULL)
            call_hand_over(path, call);
}

static int call_outcome(const pccl_fast_path_call *call, pccl_fast_path_result *result)
{
    *result = call->result;
    return call->is_completed ? PCCL_FAST_PATH_COMPLETED : PCCL_FAST_PATH_HANDED_OVER;
}

static int call_init(pccl_fast_path_call *call)
{
    memset(call, 0, sizeof *call);
    pccl_list_init(&call->in_calls);
    return pccl_cond_init(&call->changed);
}

/* With the mutex, which it leaves and takes again: what takes memory is done without it. Returns 0,
 * PCCL_FAST_PATH_CLOSED or an error. */
static int call_prepare(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, void **prepared)
{
    if (number == 0 || path->number != number)
        return PCCL_FAST_PATH_CLOSED;
    void *engine = path->engine;
    path->preparing++;
    pthread_mutex_unlock(&path->mutex);
    int status = path->call.prepare(engine, request, prepared);
    pthread_mutex_lock(&path->mutex);
    if (status == 0 && path->number != number) { /* closed meanwhile */
        path->call.discard(engine, *prepared);
        status = PCCL_FAST_PATH_CLOSED;
    }
    if (--path->preparing == 0)
        pthread_cond_signal(&path->prepared);
    return status;
}

/* With the mutex, as call_prepare. Returns 0, PCCL_FAST_PATH_CLOSED or an error. */
static int call_submit(pccl_fast_path *path, pccl_fast_path_call *call, uint64_t number, const pccl_op_request *request,
    uint64_t *sequence, uint32_t wait_ms)
{
    void *prepared;
    int status = call_prepare(path, number, request, &prepared);
    if (status != 0)
        return status;
    path->call.submit(path->engine, prepared, (*sequence)++, call);
    call->end_ns = call->launched_ns + (int64_t)wait_ms * NS_PER_MS;
    pccl_list_append(&path->calls, &call->in_calls);
    if (call->is_started && call->end_ns < path->expiry_ns)
        path->expiry_ns = call->end_ns;
    return 0;
}

int pccl_fast_path_run(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_result *result)
{
    pccl_fast_path_call call;
    if (!request->awaits_completion)
        return PCCL_E_INVALID;
    if (call_init(&call) != 0)
        return PCCL_E_MEMORY;
    call.may_drive = wait_ms > 0;
    pthread_mutex_lock(&path->mutex);
    int outcome = call_submit(path, &call, number, request, sequence, wait_ms);
    if (outcome == 0) {
        call_wait(path, &call);
        outcome = call_outcome(&call, result);
    }
    pthread_mutex_unlock(&path->mutex);
    pthread_cond_destroy(&call.changed);
    return outcome;
}

int pccl_fast_path_start(pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t *sequence,
    uint32_t wait_ms, pccl_fast_path_call **started)
{
    if (!request->awaits_completion)
        return PCCL_E_INVALID;
    pccl_fast_path_call *call = malloc(sizeof *call);
    if (call == NULL || call_init(call) != 0) {
        free(call);
        return PCCL_E_MEMORY;
    }
    call->is_started = 1;
    call->may_drive = request->shape.count * pccl_dtype_bytes(request->shape.dtype) <= SMALL_BYTES;
    pthread_mutex_lock(&path->mutex);
    int outcome = call_submit(path, call, number, request, sequence, wait_ms);
    if (outcome == 0) {
        __atomic_fetch_add(&path->started, 1, __ATOMIC_RELAXED);
        if (call->drives)
            call_drive(path, call, 0);
    }
    pthread_mutex_unlock(&path->mutex);
    if (outcome != 0)
        call_free(call);
    else
        *started = call;
    return outcome;
}

int pccl_fast_path_wait(pccl_fast_path *path, pccl_fast_path_call *call, pccl_fast_path_result *result)
{
    pthread_mutex_lock(&path->mutex);
    call->waiting++;
    while (call->op != NULL) {
        if (path->call.take(path->engine))
            call_drive(path, call, call->end_ns);
        else
            (void)pccl_cond_wait(&call->changed, &path->mutex, call->end_ns);
        if (call->op != NULL && pccl_now_ns() >= call->end_ns)
            call_hand_over(path, call);
    }
    if (--call->waiting > 0)
        pthread_cond_signal(&call->changed);
    call_note_heard(path, call);
    int outcome = call_outcome(call, result);
    pthread_mutex_unlock(&path->mutex);
    return outcome;
}

void pccl_fast_path_forget(pccl_fast_path *path, pccl_fast_path_call *call)
{
    pthread_mutex_lock(&path->mutex);
    int is_over = call->op == NULL;
    call->is_forgotten = 1;
    pthread_mutex_unlock(&path->mutex); /* an unheard one has no waiting thread: the owner is woken for it in time */
    if (is_over)
        call_free(call);
}

/* With the mutex. Returns when that has to be looked at again. */
static int64_t fast_path_have_heard(pccl_fast_path *path, int64_t now_ns)
{
    int64_t end_ns = path->unheard_ns + (int64_t)HEARD_MS_MAX * NS_PER_MS;
    if (path->unheard == 0)
        return INT64_MAX;
    if (now_ns < end_ns)
        return end_ns;
    __atomic_store_n(&path->unheard, 0, __ATOMIC_RELAXED);
    path->wakes++;
    pccl_event_queue_wake(path->events);
    return INT64_MAX;
}

/* With the mutex. */
static void fast_path_hand_over_expired(pccl_fast_path *path, int64_t now_ns)
{
    path->expiry_ns = INT64_MAX;
    for (pccl_list *node = path->calls.next, *next; node != &path->calls; node = next) {
        pccl_fast_path_call *call = PCCL_CONTAINER_OF(node, pccl_fast_path_call, in_calls);
        next = node->next;
        if (!call->is_started)
            continue;
        if (call->end_ns <= now_ns)
            call_hand_over(path, call);
        else if (call->end_ns < path->expiry_ns)
            path->expiry_ns = call->end_ns;
    }
}

int pccl_fast_path_expire(pccl_fast_path *path)
{
    if (__atomic_load_n(&path->started, __ATOMIC_RELAXED) + __atomic_load_n(&path->unheard, __ATOMIC_RELAXED) == 0)
        return -1;
    int64_t now_ns = pccl_now_ns();
    pthread_mutex_lock(&path->mutex);
    int64_t next_ns = fast_path_have_heard(path, now_ns);
    if (path->expiry_ns <= now_ns)
        fast_path_hand_over_expired(path, now_ns);
    if (path->expiry_ns < next_ns)
        next_ns = path->expiry_ns;
    pthread_mutex_unlock(&path->mutex);
    return next_ns == INT64_MAX ? -1 : (int)((next_ns - now_ns) / NS_PER_MS) + 1;
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
        call_note_unheard(path, call);
        call_end(path, call);
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
