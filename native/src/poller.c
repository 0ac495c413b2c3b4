#include "poller.h"

#include "base.h"
#include "os.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/epoll.h>
#endif

enum { EVENTS_PER_WAIT_MAX = 64, BUSY_NS_MAX = 50000 };

/* A busy-poll that finds an event raises the credit by one; one that does not costs more, because other work may have
 * needed the CPU. Without credit only one wait in BUSY_RETRY tries. */
enum { BUSY_CREDIT_MAX = 8, BUSY_COST = 3, BUSY_RETRY = 64 };

struct pccl_poller {
    int epoll_fd; /* -1: poll(2) */
    size_t count;
    size_t capacity;
    const char *failed_call; /* NULL: none */
    int system_error; /* of that */
    long cpus; /* of this machine, since each rank may be bound to one of them */
    unsigned busy_credit;
    unsigned busy_skipped; /* waits without credit */
    size_t next_slot; /* where the next scan starts: a small events_max must not starve high slots */
    struct pollfd *fds;
    pccl_poll_entry **entries;
};

pccl_poller *pccl_poller_open(int force_poll)
{
    pccl_poller *poller = calloc(1, sizeof *poller);
    if (poller == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    poller->epoll_fd = -1;
    poller->cpus = sysconf(_SC_NPROCESSORS_ONLN);
    poller->busy_credit = BUSY_CREDIT_MAX;
#if defined(__linux__)
    if (!force_poll) {
        poller->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        if (poller->epoll_fd < 0) {
            int saved = errno;
            free(poller);
            errno = saved;
            return NULL;
        }
    }
#else
    (void)force_poll;
#endif
    return poller;
}

void pccl_poller_close(pccl_poller *poller)
{
    if (poller == NULL)
        return;
    if (poller->epoll_fd >= 0)
        close(poller->epoll_fd);
    free(poller->fds);
    free(poller->entries);
    free(poller);
}

void pccl_poller_forget_after_fork(pccl_poller *poller)
{
    if (poller->epoll_fd >= 0)
        close(poller->epoll_fd);
    poller->epoll_fd = -1;
}

static void poller_fail(pccl_poller *poller, const char *call)
{
    if (poller->failed_call != NULL)
        return;
    poller->system_error = errno;
    poller->failed_call = call;
}

const char *pccl_poller_failed_call(const pccl_poller *poller, int *system_error)
{
    *system_error = poller->system_error;
    return poller->failed_call;
}

/* poll(2) */

static short poll_mask(unsigned interest)
{
    return (short)((interest & PCCL_POLL_IN ? POLLIN : 0) | (interest & PCCL_POLL_OUT ? POLLOUT : 0));
}

static int poll_add(pccl_poller *poller, pccl_poll_entry *entry)
{
    if (poller->count == poller->capacity) {
        size_t capacity = poller->capacity == 0 ? 16 : poller->capacity * 2;
        struct pollfd *fds = realloc(poller->fds, capacity * sizeof *fds);
        if (fds != NULL)
            poller->fds = fds;
        pccl_poll_entry **entries = realloc(poller->entries, capacity * sizeof *entries);
        if (entries != NULL)
            poller->entries = entries;
        if (fds == NULL || entries == NULL) {
            errno = ENOMEM;
            return -1;
        }
        poller->capacity = capacity;
    }
    entry->slot = poller->count++;
    poller->entries[entry->slot] = entry;
    poller->fds[entry->slot].fd = entry->fd;
    poller->fds[entry->slot].events = poll_mask(entry->interest);
    poller->fds[entry->slot].revents = 0;
    return 0;
}

static void poll_remove(pccl_poller *poller, pccl_poll_entry *entry)
{
    size_t last = --poller->count;
    PCCL_ASSERT(poller->entries[entry->slot] == entry);
    poller->fds[entry->slot] = poller->fds[last];
    poller->entries[entry->slot] = poller->entries[last];
    poller->entries[entry->slot]->slot = entry->slot;
}

static int poll_wait(pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms)
{
    int pending = poll(poller->fds, (nfds_t)poller->count, timeout_ms);
    if (pending < 0 && (errno == ENOMEM || errno == EAGAIN)) {
        struct timespec moment = {0, 10 * 1000000};
        (void)nanosleep(&moment, NULL); /* the system may have more then */
    } else if (pending < 0 && errno != EINTR) {
        poller_fail(poller, "poll");
    }
    if (pending <= 0)
        return 0;
    int n = 0;
    size_t slot = poller->next_slot < poller->count ? poller->next_slot : 0;
    for (size_t i = 0; i < poller->count && n < events_max && n < pending; i++) {
        short revents = poller->fds[slot].revents;
        if (revents != 0) {
            events[n].entry = poller->entries[slot];
            events[n].ready = (revents & (POLLIN | POLLERR | POLLHUP | POLLNVAL) ? PCCL_POLL_IN : 0u) |
                              (revents & POLLOUT ? PCCL_POLL_OUT : 0u);
            n++;
        }
        slot = slot + 1 < poller->count ? slot + 1 : 0;
    }
    poller->next_slot = slot;
    return n;
}

/* epoll */

#if defined(__linux__)

static uint32_t epoll_mask(unsigned interest)
{
    return (interest & PCCL_POLL_IN ? (uint32_t)EPOLLIN : 0) | (interest & PCCL_POLL_OUT ? (uint32_t)EPOLLOUT : 0);
}

static int epoll_control(pccl_poller *poller, int operation, pccl_poll_entry *entry)
{
    struct epoll_event event;
    event.events = epoll_mask(entry->interest);
    event.data.ptr = entry;
    return epoll_ctl(poller->epoll_fd, operation, entry->fd, &event);
}

static int epoll_collect(pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms)
{
    struct epoll_event got[EVENTS_PER_WAIT_MAX];
    if (events_max > EVENTS_PER_WAIT_MAX)
        events_max = EVENTS_PER_WAIT_MAX;
    int n = epoll_wait(poller->epoll_fd, got, events_max, timeout_ms);
    if (n < 0) {
        if (errno != EINTR)
            poller_fail(poller, "epoll_wait");
        return 0;
    }
    for (int i = 0; i < n; i++) {
        events[i].entry = got[i].data.ptr;
        events[i].ready = (got[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP) ? PCCL_POLL_IN : 0u) |
                          (got[i].events & EPOLLOUT ? PCCL_POLL_OUT : 0u);
    }
    return n;
}

#endif

int pccl_poller_add(pccl_poller *poller, pccl_poll_entry *entry, int fd, unsigned interest)
{
    entry->fd = fd;
    entry->interest = interest;
#if defined(__linux__)
    if (poller->epoll_fd >= 0)
        return epoll_control(poller, EPOLL_CTL_ADD, entry);
#endif
    return poll_add(poller, entry);
}

void pccl_poller_change(pccl_poller *poller, pccl_poll_entry *entry, unsigned interest)
{
    if (entry->interest == interest)
        return;
    entry->interest = interest;
#if defined(__linux__)
    if (poller->epoll_fd >= 0) {
        if (epoll_control(poller, EPOLL_CTL_MOD, entry) != 0)
            poller_fail(poller, "epoll_ctl");
        return;
    }
#endif
    poller->fds[entry->slot].events = poll_mask(interest);
}

void pccl_poller_remove(pccl_poller *poller, pccl_poll_entry *entry)
{
#if defined(__linux__)
    if (poller->epoll_fd >= 0) {
        if (epoll_control(poller, EPOLL_CTL_DEL, entry) != 0)
            poller_fail(poller, "epoll_ctl");
        return;
    }
#endif
    poll_remove(poller, entry);
}

int pccl_poller_wait(pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms)
{
#if defined(__linux__)
    if (poller->epoll_fd >= 0)
        return epoll_collect(poller, events, events_max, timeout_ms);
#endif
    return poll_wait(poller, events, events_max, timeout_ms);
}

int pccl_poller_wait_busily(
    pccl_poller *poller, pccl_poll_event *events, int events_max, int timeout_ms, unsigned local_peers)
{
    int has_cpu = (long)local_peers < poller->cpus;
    if (timeout_ms == 0 || !has_cpu || (poller->busy_credit == 0 && ++poller->busy_skipped < BUSY_RETRY))
        return pccl_poller_wait(poller, events, events_max, timeout_ms);
    poller->busy_skipped = 0;
    int64_t end_ns = pccl_now_ns() + BUSY_NS_MAX;
    do {
        int count = pccl_poller_wait(poller, events, events_max, 0);
        if (count > 0) {
            poller->busy_credit += poller->busy_credit < BUSY_CREDIT_MAX;
            return count;
        }
    } while (pccl_now_ns() < end_ns);
    poller->busy_credit -= pccl_min_u32(poller->busy_credit, BUSY_COST);
    return pccl_poller_wait(poller, events, events_max, timeout_ms);
}
