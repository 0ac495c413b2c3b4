/* engines.c: several engines as one; pccl_native.h has the contract.
 *
 * Each engine has its share of each link's connections, and all of its own state: no lock is taken for a segment. An op
 * is cut into slices, one for each of some engines, by the rule of pccl_op_shape.slice, so results are the same bits
 * whatever the number of engines. The first slice goes to the engine that the op's key chooses, and so does an op that
 * is whole. With one engine, calls and events pass through.
 *
 * The events of an op are joined when they are polled: it is done, completed, frozen, detached, or has ended, when all
 * its slices are or have. A verdict goes to all of them. */
#include "pccl_native.h"

#include "base.h"
#include "list.h"
#include "table.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An op in some of several engines. */
typedef struct {
    pccl_table_node by_id;
    uint64_t id;
    uint32_t engines; /* bits of those that have a slice */
    uint32_t done_left; /* slices that are to report it; the same of the next four */
    uint32_t completed_left;
    uint32_t frozen_left;
    uint32_t ended_left;
    uint32_t detached_left; /* 0: it is not being detached */
    uint8_t is_unknown; /* an engine did not have it when it was detached */
    uint8_t is_mismatched; /* reported once */
    uint8_t is_refused; /* an engine had no memory for its slice */
    uint8_t is_over; /* no verdict is to come */
    uint64_t tx_bytes; /* of slices that are done */
    uint64_t rx_bytes;
    uint64_t ended_tx_bytes; /* of those that have ended */
    uint64_t ended_rx_bytes;
} sliced_op;

struct pccl_engines {
    uint32_t count;
    pccl_engine *of[PCCL_SLICES_MAX];
    pthread_mutex_t mutex; /* for what follows */
    pccl_table ops; /* none with one engine */
    uint64_t frozen[PCCL_SLICES_MAX]; /* how many freezes each engine has reported */
    uint8_t is_out_of_memory;
};

pccl_engines *pccl_engines_create(const pccl_engine_options *options, uint32_t count, char *error, size_t error_bytes)
{
    pccl_engine_options shared;
    if (options != NULL)
        shared = *options;
    else
        pccl_engine_options_default(&shared);
    pccl_engines *engines = count == 0 || count > PCCL_SLICES_MAX ? NULL : calloc(1, sizeof *engines);
    if (engines == NULL || pthread_mutex_init(&engines->mutex, NULL) != 0) {
        free(engines);
        snprintf(error, error_bytes, "no memory for %u engines", count);
        return NULL;
    }
    pccl_table_init(&engines->ops);
    shared.pool_bytes_max /= count;
    shared.op_scratch_bytes_max /= count;
    shared.records = (shared.records + count - 1) / count;
    for (; engines->count < count; engines->count++) {
        engines->of[engines->count] = pccl_engine_create(&shared, error, error_bytes);
        if (engines->of[engines->count] == NULL) {
            pccl_engines_destroy(engines);
            return NULL;
        }
    }
    return engines;
}

static void engines_free(pccl_engines *engines)
{
    for (size_t i = 0; i <= engines->ops.mask; i++)
        while (engines->ops.buckets[i] != NULL) {
            sliced_op *op = PCCL_CONTAINER_OF(engines->ops.buckets[i], sliced_op, by_id);
            pccl_table_remove(&engines->ops, &op->by_id);
            free(op);
        }
    pccl_table_free(&engines->ops);
    pthread_mutex_destroy(&engines->mutex);
    free(engines);
}

void pccl_engines_destroy(pccl_engines *engines)
{
    if (engines == NULL)
        return;
    for (uint32_t i = 0; i < engines->count; i++)
        pccl_engine_destroy(engines->of[i]);
    engines_free(engines);
}

void pccl_engines_forget_after_fork(pccl_engines *engines)
{
    for (uint32_t i = 0; i < engines->count; i++)
        pccl_engine_forget_after_fork(engines->of[i]);
}

int pccl_engines_event_fd(const pccl_engines *engines, uint32_t at)
{
    return at < engines->count ? pccl_engine_event_fd(engines->of[at]) : -1;
}

pccl_fast_path *pccl_engines_fast_path(pccl_engines *engines, uint32_t at)
{
    return at < engines->count ? pccl_engine_fast_path(engines->of[at]) : NULL;
}

uint32_t pccl_first_engine(uint64_t tag, uint64_t sequence, uint32_t count)
{
    uint64_t spread = (tag + sequence) * UINT64_C(0x9E3779B97F4A7C15); /* 2^64 over the golden ratio */
    return (uint32_t)((spread >> 32) * count >> 32);
}

/* With the mutex: ops */

static sliced_op *op_find(const pccl_engines *engines, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&engines->ops, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node))
        if (PCCL_CONTAINER_OF(node, sliced_op, by_id)->id == id)
            return PCCL_CONTAINER_OF(node, sliced_op, by_id);
    return NULL;
}

static sliced_op *op_add(pccl_engines *engines, uint64_t id, uint32_t slices)
{
    sliced_op *op = calloc(1, sizeof *op);
    if (op == NULL)
        return NULL;
    op->id = id;
    op->done_left = op->completed_left = op->frozen_left = op->ended_left = slices;
    pccl_table_insert(&engines->ops, &op->by_id, pccl_hash_u64(0, id));
    return op;
}

static void op_remove(pccl_engines *engines, sliced_op *op)
{
    pccl_table_remove(&engines->ops, &op->by_id);
    free(op);
}

/* Nothing more is to come of it but perhaps that it is detached. */
static void op_note_over(pccl_engines *engines, sliced_op *op)
{
    op->is_over = 1;
    if (op->detached_left == 0)
        op_remove(engines, op);
}

static int op_is_in(const sliced_op *op, uint32_t at) { return (op->engines >> at & 1) != 0; }

/* Commands */

/* Aborts the slices that were taken before an engine had no memory for one. */
static void op_refuse(pccl_engines *engines, sliced_op *op, uint32_t taken)
{
    op->is_refused = 1;
    op->ended_left = taken;
    for (uint32_t i = 0; i < engines->count; i++)
        if (op_is_in(op, i))
            (void)pccl_engine_end(engines->of[i], op->id, PCCL_ABORT);
}

static int engines_submit(pccl_engines *engines, const pccl_op_request *request, uint32_t slices)
{
    sliced_op *op = op_add(engines, request->op, slices);
    if (op == NULL)
        return PCCL_E_MEMORY;
    uint32_t first = pccl_first_engine(request->key.tag, request->key.sequence, engines->count);
    pccl_op_request slice = *request;
    slice.shape.last_slice = (uint8_t)(slices - 1);
    for (uint32_t i = 0; i < slices; i++) {
        uint32_t at = (first + i) % engines->count;
        slice.shape.slice = (uint8_t)i;
        int status = pccl_engine_submit(engines->of[at], &slice);
        if (status != 0 && i == 0) {
            op_remove(engines, op);
            return status;
        }
        if (status != 0) {
            op_refuse(engines, op, i);
            break;
        }
        op->engines |= UINT32_C(1) << at;
    }
    return 0;
}

int pccl_engines_submit(pccl_engines *engines, const pccl_op_request *request, uint32_t slices)
{
    if (slices == 0 || slices > engines->count)
        return PCCL_E_INVALID;
    if (engines->count == 1)
        return pccl_engine_submit(engines->of[0], request);
    pthread_mutex_lock(&engines->mutex);
    int status = engines_submit(engines, request, slices);
    pthread_mutex_unlock(&engines->mutex);
    return status;
}

static int engines_end(pccl_engines *engines, uint64_t id, int verdict)
{
    int status = 0;
    sliced_op *op = op_find(engines, id);
    if (op == NULL || op->is_over || op->is_refused)
        return 0;
    for (uint32_t i = 0; i < engines->count; i++)
        if (op_is_in(op, i) && pccl_engine_end(engines->of[i], id, verdict) != 0)
            status = PCCL_E_MEMORY;
    if (verdict == PCCL_COMMIT_BY_ALL)
        op_note_over(engines, op);
    return status;
}

int pccl_engines_end(pccl_engines *engines, uint64_t id, int verdict)
{
    if (engines->count == 1)
        return pccl_engine_end(engines->of[0], id, verdict);
    pthread_mutex_lock(&engines->mutex);
    int status = engines_end(engines, id, verdict);
    pthread_mutex_unlock(&engines->mutex);
    return status;
}

int pccl_engines_freeze(pccl_engines *engines, uint32_t group, uint64_t epoch)
{
    int status = 0;
    for (uint32_t i = 0; i < engines->count && status == 0; i++)
        status = pccl_engine_freeze(engines->of[i], group, epoch);
    return status;
}

int pccl_engines_freeze_op(pccl_engines *engines, uint64_t id)
{
    if (engines->count == 1)
        return pccl_engine_freeze_op(engines->of[0], id);
    pthread_mutex_lock(&engines->mutex);
    int status = 0;
    const sliced_op *op = op_find(engines, id);
    for (uint32_t i = 0; op != NULL && !op->is_over && i < engines->count && status == 0; i++)
        if (op_is_in(op, i))
            status = pccl_engine_freeze_op(engines->of[i], id);
    pthread_mutex_unlock(&engines->mutex);
    return status;
}

int pccl_engines_forget_ops(pccl_engines *engines, const pccl_op_key *last, uint32_t count)
{
    int status = 0;
    for (uint32_t i = 0; i < engines->count && status == 0; i++)
        status = pccl_engine_forget_ops(engines->of[i], last, count);
    return status;
}

/* One that no engine has asks the first, which says so. */
static int engines_detach(pccl_engines *engines, uint64_t id)
{
    sliced_op *op = op_find(engines, id);
    if (op == NULL || op->is_over)
        return pccl_engine_detach(engines->of[0], id);
    int status = 0;
    for (uint32_t i = 0; i < engines->count; i++) {
        if (!op_is_in(op, i))
            continue;
        int failed = pccl_engine_detach(engines->of[i], id);
        if (failed == 0)
            op->detached_left++;
        else
            status = failed;
    }
    return status;
}

int pccl_engines_detach(pccl_engines *engines, uint64_t id)
{
    if (engines->count == 1)
        return pccl_engine_detach(engines->of[0], id);
    pthread_mutex_lock(&engines->mutex);
    int status = engines_detach(engines, id);
    pthread_mutex_unlock(&engines->mutex);
    return status;
}

/* Links */

int pccl_engines_link_add(pccl_engines *engines, uint64_t link, uint32_t index, int fd, const pccl_link_keys *keys)
{
    return pccl_engine_link_add(engines->of[index % engines->count], link, fd, keys);
}

int pccl_engines_link_add_memory(pccl_engines *engines, uint64_t link, uint32_t index, int fd, pccl_memory *memory)
{
    return pccl_engine_link_add_memory(engines->of[index % engines->count], link, fd, memory);
}

int pccl_engines_link_add_udp(pccl_engines *engines, uint64_t link, uint32_t index, int fd, const uint8_t *secret,
    int is_dialer, const pccl_link_keys *keys)
{
    return pccl_engine_link_add_udp(engines->of[index % engines->count], link, fd, secret, is_dialer, keys);
}

void pccl_engines_set_link_timeout(pccl_engines *engines, uint32_t timeout_ms)
{
    for (uint32_t i = 0; i < engines->count; i++)
        pccl_engine_set_link_timeout(engines->of[i], timeout_ms);
}

int pccl_engines_link_close(pccl_engines *engines, uint64_t link)
{
    int status = 0;
    for (uint32_t i = 0; i < engines->count && status == 0; i++)
        status = pccl_engine_link_close(engines->of[i], link);
    return status;
}

int pccl_engines_request_link_metrics(pccl_engines *engines, uint64_t link)
{
    int status = 0;
    for (uint32_t i = 0; i < engines->count && status == 0; i++)
        status = pccl_engine_request_link_metrics(engines->of[i], link);
    return status;
}

/* Events. Each of these returns nonzero if the event, which it may change, is one of all engines. */

static int join_done(sliced_op *op, pccl_event *event)
{
    event->tx_bytes = op->tx_bytes += event->tx_bytes;
    event->rx_bytes = op->rx_bytes += event->rx_bytes;
    return --op->done_left == 0;
}

static int join_ended(pccl_engines *engines, sliced_op *op, pccl_event *event)
{
    event->tx_bytes = op->ended_tx_bytes += event->tx_bytes;
    event->rx_bytes = op->ended_rx_bytes += event->rx_bytes;
    if (--op->ended_left > 0)
        return 0;
    if (op->is_refused) {
        event->kind = PCCL_EVENT_OP_REFUSED;
        snprintf(event->detail, sizeof event->detail, "out of memory");
    }
    op_note_over(engines, op);
    return 1;
}

/* Each op is detached once. */
static int join_detached(pccl_engines *engines, sliced_op *op, pccl_event *event)
{
    op->is_unknown |= event->system_error == ENOENT;
    if (--op->detached_left > 0)
        return 0;
    if (op->is_unknown)
        event->system_error = ENOENT;
    if (op->is_over)
        op_remove(engines, op);
    return 1;
}

static int join_mismatch(sliced_op *op)
{
    int is_first = !op->is_mismatched && !op->is_refused;
    op->is_mismatched = 1;
    return is_first;
}

static int join_frozen(pccl_engines *engines, uint32_t at)
{
    uint64_t count = ++engines->frozen[at];
    for (uint32_t i = 0; i < engines->count; i++)
        if (engines->frozen[i] < count)
            return 0;
    return 1;
}

static void note_out_of_memory(pccl_engines *engines, pccl_event *event)
{
    engines->is_out_of_memory = 1;
    memset(event, 0, sizeof *event);
    event->kind = PCCL_EVENT_ENGINE_FAILED;
    event->system_error = ENOMEM;
    snprintf(event->detail, sizeof event->detail, "there is no memory to keep an op of several engines");
}

static int join_handed_over(pccl_engines *engines, uint32_t at, pccl_event *event)
{
    sliced_op *op = op_add(engines, event->id, 1);
    if (op == NULL)
        note_out_of_memory(engines, event);
    else
        op->engines = UINT32_C(1) << at;
    return 1;
}

static int engines_join(pccl_engines *engines, uint32_t at, pccl_event *event)
{
    event->engine = at;
    sliced_op *op = op_find(engines, event->id);
    switch (event->kind) {
    case PCCL_EVENT_OP_HANDED_OVER: return join_handed_over(engines, at, event);
    case PCCL_EVENT_GROUP_FROZEN: return join_frozen(engines, at);
    case PCCL_EVENT_OP_DONE: return op != NULL && join_done(op, event);
    case PCCL_EVENT_OP_COMPLETED: return op != NULL && !op->is_over && --op->completed_left == 0;
    case PCCL_EVENT_OP_FROZEN: return op != NULL && !op->is_over && --op->frozen_left == 0;
    case PCCL_EVENT_OP_DETACHED: return op == NULL || op->detached_left == 0 || join_detached(engines, op, event);
    case PCCL_EVENT_OP_ENDED: return op != NULL && join_ended(engines, op, event);
    case PCCL_EVENT_OP_MISMATCH: return op != NULL && join_mismatch(op);
    default: return 1;
    }
}

static int engines_poll(pccl_engines *engines, pccl_event *events, int events_max)
{
    int joined = 0;
    for (uint32_t at = 0; at < engines->count && !engines->is_out_of_memory; at++) {
        int polled = 1;
        while (polled > 0 && joined < events_max && !engines->is_out_of_memory) {
            polled = pccl_engine_poll_events(engines->of[at], events + joined, events_max - joined);
            int first = joined;
            for (int i = first; i < first + polled && !engines->is_out_of_memory; i++) {
                pccl_event event = events[i];
                if (engines_join(engines, at, &event))
                    events[joined++] = event;
            }
        }
    }
    return joined;
}

int pccl_engines_poll_events(pccl_engines *engines, pccl_event *events, int events_max)
{
    if (engines->count == 1)
        return pccl_engine_poll_events(engines->of[0], events, events_max);
    pthread_mutex_lock(&engines->mutex);
    int count = engines_poll(engines, events, events_max);
    pthread_mutex_unlock(&engines->mutex);
    return count;
}
