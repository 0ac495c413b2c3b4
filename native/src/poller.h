/* poller.h: waits until descriptors are ready: epoll on Linux, poll(2) elsewhere or when asked for.
 *
 * Both are used level-triggered: what is not read today is reported again tomorrow, so that a user may stop
 * anywhere. Two traps of epoll are avoided here. An entry is removed before its descriptor is closed, as
 * epoll watches open files and a forked child may hold another copy. And an event that was already collected
 * may point to an entry removed since: entries must not be freed while a batch of events is being worked
 * through.
 *
 * Errors and hang-ups count as readable: reading is what tells their reason. */
#ifndef PCCL_POLLER_H
#define PCCL_POLLER_H

#include <stddef.h>

enum { PCCL_POLL_IN = 1, PCCL_POLL_OUT = 2 };

typedef struct {
    int fd;
    unsigned interest;
    size_t slot; /* the poll backend's */
    void *owner;
} pccl_poll_entry;

typedef struct {
    pccl_poll_entry *entry;
    unsigned ready;
} pccl_poll_event;

typedef struct pccl_poller pccl_poller;

pccl_poller *pccl_poller_open(int force_poll); /* NULL with errno set */
void pccl_poller_close(pccl_poller *poller);

/* Closes, in a forked child, its copy of the poller's own descriptor, nothing else. */
void pccl_poller_forget_after_fork(pccl_poller *poller);

/* 0, or -1 with errno set. */
int pccl_poller_add(pccl_poller *poller, pccl_poll_entry *entry, int fd, unsigned interest);

/* Returns the first system call, and its errno, that has failed as none does unless other code has closed
 * descriptors; NULL: none. After one it is not known any more what is watched. */
const char *pccl_poller_failed_call(const pccl_poller *poller, int *system_error);

void pccl_poller_change(pccl_poller *poller, pccl_poll_entry *entry, unsigned interest);
void pccl_poller_remove(pccl_poller *poller, pccl_poll_entry *entry);

/* timeout_ms -1 waits for ever. Returns how many events there are; 0 also after an interruption. */
int pccl_poller_wait(pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms);

/* The same, but busy-polls before it sleeps, as long as that usually finds an event: to sleep and to be woken takes
 * longer than a small op. Never does so where `local_peers`, other processes of this machine that may have to run
 * before there is an event, and the caller outnumber the CPUs. */
int pccl_poller_wait_busily(
    pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms, unsigned local_peers);

#endif
