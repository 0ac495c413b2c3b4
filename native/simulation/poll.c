/* poll.c: the poller of the simulation, in the place of poller.c. Any part of what is ready may be reported, in any
 * order: the rest is reported again. */
#include "sim.h"

#include <stdlib.h>

struct pccl_poller {
    size_t count;
    size_t capacity;
    pccl_poll_entry **entries;
};

pccl_poller *pccl_poller_open(int force_poll)
{
    (void)force_poll;
    return calloc(1, sizeof(pccl_poller));
}

void pccl_poller_close(pccl_poller *poller)
{
    if (poller == NULL)
        return;
    free(poller->entries);
    free(poller);
}

void pccl_poller_forget_after_fork(pccl_poller *poller) { (void)poller; }

const char *pccl_poller_failed_call(const pccl_poller *poller, int *system_error)
{
    (void)poller;
    *system_error = 0;
    return NULL;
}

int pccl_poller_add(pccl_poller *poller, pccl_poll_entry *entry, int fd, unsigned interest)
{
    if (poller->count == poller->capacity) {
        poller->capacity = poller->capacity == 0 ? 16 : 2 * poller->capacity;
        poller->entries = realloc(poller->entries, poller->capacity * sizeof(pccl_poll_entry *));
        PCCL_ASSERT(poller->entries != NULL);
    }
    entry->fd = fd;
    entry->interest = interest;
    entry->slot = poller->count;
    poller->entries[poller->count++] = entry;
    return 0;
}

void pccl_poller_change(pccl_poller *poller, pccl_poll_entry *entry, unsigned interest)
{
    PCCL_ASSERT(poller->entries[entry->slot] == entry);
    entry->interest = interest;
}

void pccl_poller_remove(pccl_poller *poller, pccl_poll_entry *entry)
{
    PCCL_ASSERT(poller->entries[entry->slot] == entry);
    poller->entries[entry->slot] = poller->entries[--poller->count];
    poller->entries[entry->slot]->slot = entry->slot;
}

static unsigned ready_of(const pccl_poll_entry *entry)
{
    return entry->interest == 0 ? 0 : sim_ready_for(entry->fd) & entry->interest;
}

int sim_has_ready(const pccl_poller *poller)
{
    for (size_t i = 0; i < poller->count; i++)
        if (ready_of(poller->entries[i]) != 0)
            return 1;
    return 0;
}

int pccl_poller_wait(pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms)
{
    enum { LEFT_OUT_ONE_IN = 8 };
    sim_wait_for_poll(poller, timeout_ms);
    int count = 0;
    size_t first = poller->count > 0 ? sim_draw((uint32_t)poller->count) : 0;
    for (size_t i = 0; i < poller->count && count < events_max; i++) {
        pccl_poll_entry *entry = poller->entries[(first + i) % poller->count];
        unsigned ready = ready_of(entry);
        if (ready == 0 || sim_happens(LEFT_OUT_ONE_IN))
            continue;
        events[count].entry = entry;
        events[count++].ready = ready;
    }
    return count;
}

int pccl_poller_wait_busily(
    pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms, unsigned local_peers)
{
    (void)local_peers;
    return pccl_poller_wait(poller, events, events_max, timeout_ms);
}
