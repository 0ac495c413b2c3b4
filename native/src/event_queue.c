#include "event_queue.h"

#include "base.h"
#include "os.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

enum { QUIET_MAX = PCCL_SIZE(64, 4) }; /* after these many quiet events one wakes the owner */

struct pccl_event_queue {
    pthread_mutex_t mutex;
    pccl_wake wake;
    size_t promised;
    size_t count;
    size_t first;
    size_t capacity; /* >= promised + count */
    int is_signaled;
    int system_error; /* of waking; 0: none */
    pccl_event *ring;
};

pccl_event_queue *pccl_event_queue_create(void)
{
    pccl_event_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL)
        return NULL;
    if (pccl_wake_open(&queue->wake) != 0) {
        int saved = errno;
        free(queue);
        errno = saved;
        return NULL;
    }
    int rc = pthread_mutex_init(&queue->mutex, NULL);
    if (rc != 0) {
        pccl_wake_close(&queue->wake);
        free(queue);
        errno = rc;
        return NULL;
    }
    return queue;
}

void pccl_event_queue_destroy(pccl_event_queue *queue)
{
    if (queue == NULL)
        return;
    pccl_wake_close(&queue->wake);
    pthread_mutex_destroy(&queue->mutex);
    free(queue->ring);
    free(queue);
}

static int queue_grow(pccl_event_queue *queue, size_t needed)
{
    size_t capacity = pccl_max_size(needed, pccl_max_size(64, queue->capacity * 2));
    pccl_event *ring = calloc(capacity, sizeof *ring);
    if (ring == NULL)
        return PCCL_E_MEMORY;
    for (size_t i = 0; i < queue->count; i++)
        ring[i] = queue->ring[(queue->first + i) % queue->capacity];
    free(queue->ring);
    queue->ring = ring;
    queue->first = 0;
    queue->capacity = capacity;
    return 0;
}

int pccl_event_queue_promise(pccl_event_queue *queue, unsigned count)
{
    int status = 0;
    pthread_mutex_lock(&queue->mutex);
    size_t needed = queue->promised + queue->count + count;
    if (needed > queue->capacity)
        status = queue_grow(queue, needed);
    if (status == 0)
        queue->promised += count;
    pthread_mutex_unlock(&queue->mutex);
    return status;
}

void pccl_event_queue_release(pccl_event_queue *queue, unsigned count)
{
    if (count == 0)
        return;
    pthread_mutex_lock(&queue->mutex);
    PCCL_ASSERT(queue->promised >= count);
    queue->promised -= count;
    pthread_mutex_unlock(&queue->mutex);
}

static void queue_add(pccl_event_queue *queue, const pccl_event *event)
{
    PCCL_ASSERT(queue->promised > 0);
    queue->promised--;
    queue->ring[(queue->first + queue->count++) % queue->capacity] = *event;
}

static void queue_signal(pccl_event_queue *queue)
{
    int error = queue->is_signaled ? 0 : pccl_wake_signal(&queue->wake);
    if (error != 0 && queue->system_error == 0)
        queue->system_error = error;
    queue->is_signaled = 1;
}

void pccl_event_queue_post(pccl_event_queue *queue, const pccl_event *event)
{
    pthread_mutex_lock(&queue->mutex);
    queue_add(queue, event);
    queue_signal(queue);
    pthread_mutex_unlock(&queue->mutex);
}

void pccl_event_queue_post_quietly(pccl_event_queue *queue, const pccl_event *event)
{
    pthread_mutex_lock(&queue->mutex);
    queue_add(queue, event);
    if (queue->count >= QUIET_MAX)
        queue_signal(queue);
    pthread_mutex_unlock(&queue->mutex);
}

void pccl_event_queue_wake(pccl_event_queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    if (queue->count > 0)
        queue_signal(queue);
    pthread_mutex_unlock(&queue->mutex);
}

void pccl_event_queue_interrupt(pccl_event_queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    queue_signal(queue);
    pthread_mutex_unlock(&queue->mutex);
}

int pccl_event_queue_error(pccl_event_queue *queue)
{
    pthread_mutex_lock(&queue->mutex);
    int error = queue->system_error;
    pthread_mutex_unlock(&queue->mutex);
    return error;
}

int pccl_event_queue_fd(const pccl_event_queue *queue) { return queue->wake.read_fd; }

int pccl_event_queue_poll(pccl_event_queue *queue, pccl_event *events, int events_max)
{
    int n = 0;
    pthread_mutex_lock(&queue->mutex);
    for (; n < events_max && queue->count > 0; n++) {
        events[n] = queue->ring[queue->first];
        queue->first = (queue->first + 1) % queue->capacity;
        queue->count--;
    }
    if (queue->is_signaled && queue->count == 0) {
        (void)pccl_wake_clear(&queue->wake);
        queue->is_signaled = 0;
    }
    pthread_mutex_unlock(&queue->mutex);
    return n;
}

void pccl_event_queue_forget_after_fork(pccl_event_queue *queue) { pccl_wake_close(&queue->wake); }
