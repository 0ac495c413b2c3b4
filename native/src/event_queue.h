/* event_queue.h: the engine's events, until its owner collects them.
 *
 * The queue must not lose an event, and the engine thread has no caller to report a lack of memory to. So
 * a thread that starts something that will have an event promises it first, which allocates and can still fail; every
 * post redeems a promise, and one that will not be used is released. Any thread may call. */
#ifndef PCCL_EVENT_QUEUE_H
#define PCCL_EVENT_QUEUE_H

#include "pccl_native.h"

typedef struct pccl_event_queue pccl_event_queue;

pccl_event_queue *pccl_event_queue_create(void); /* NULL with errno set */
void pccl_event_queue_destroy(pccl_event_queue *queue);

int pccl_event_queue_promise(pccl_event_queue *queue, unsigned count); /* 0 or PCCL_E_MEMORY */
void pccl_event_queue_release(pccl_event_queue *queue, unsigned count);
void pccl_event_queue_post(pccl_event_queue *queue, const pccl_event *event);

/* Posts an event without waking the owner: it is found with the next one, or when there are many. */
void pccl_event_queue_post_quietly(pccl_event_queue *queue, const pccl_event *event);

/* Wakes the owner, if there is something to be polled. */
void pccl_event_queue_wake(pccl_event_queue *queue);

/* Makes the descriptor readable once, although there may be nothing. */
void pccl_event_queue_interrupt(pccl_event_queue *queue);

/* Returns 0, or an errno: the owner cannot be woken any more. */
int pccl_event_queue_error(pccl_event_queue *queue);

int pccl_event_queue_fd(const pccl_event_queue *queue); /* readable while events wait */
int pccl_event_queue_poll(pccl_event_queue *queue, pccl_event *events, int events_max);
void pccl_event_queue_forget_after_fork(pccl_event_queue *queue);

#endif
