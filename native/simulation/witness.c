/* witness.c: notes which ops become done, before anybody is told. It stands between the ops and what they report to:
 * the linker leads these calls here (--wrap). */
#include "sim.h"

#include "event_queue.h"
#include "fast_path.h"

#include <stdlib.h>

typedef struct {
    uint64_t op;
    int32_t thread;
} done_op;

static done_op *done;
static int done_count;
static int done_capacity;

static void note_done(uint64_t op)
{
    if (done_count == done_capacity) {
        done_capacity = done_capacity == 0 ? 64 : 2 * done_capacity;
        done = realloc(done, (size_t)done_capacity * sizeof *done);
        PCCL_ASSERT(done != NULL);
    }
    done[done_count].op = op;
    done[done_count++].thread = sim_current();
}

int pccl_sim_done(uint64_t *ops, int32_t *threads, int ops_max)
{
    int count = done_count < ops_max ? done_count : ops_max;
    for (int i = 0; i < count; i++) {
        ops[i] = done[done_count - count + i].op;
        threads[i] = done[done_count - count + i].thread;
    }
    done_count -= count;
    return count;
}

void __real_pccl_event_queue_post(pccl_event_queue *queue, const pccl_event *event);
void __real_pccl_event_queue_post_quietly(pccl_event_queue *queue, const pccl_event *event);
int __real_pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *event);
void __wrap_pccl_event_queue_post(pccl_event_queue *queue, const pccl_event *event);
void __wrap_pccl_event_queue_post_quietly(pccl_event_queue *queue, const pccl_event *event);
int __wrap_pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *event);

void __wrap_pccl_event_queue_post(pccl_event_queue *queue, const pccl_event *event)
{
    if (event->kind == PCCL_EVENT_OP_DONE)
        note_done(event->id);
    __real_pccl_event_queue_post(queue, event);
}

void __wrap_pccl_event_queue_post_quietly(pccl_event_queue *queue, const pccl_event *event)
{
    if (event->kind == PCCL_EVENT_OP_DONE)
        note_done(event->id);
    __real_pccl_event_queue_post_quietly(queue, event);
}

int __wrap_pccl_fast_path_note_done(pccl_fast_path *path, pccl_op *op, const pccl_event *event)
{
    note_done(event->id);
    return __real_pccl_fast_path_note_done(path, op, event);
}
