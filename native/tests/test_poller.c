/* Busy-polling: when a wait polls before it sleeps. The system's poll(2) is replaced: it never waits. */
#include "check.h"
#include "poller.h"

#include <poll.h>
#include <unistd.h>

enum { CREDIT = 8, COST = 3, RETRY = 64 };

static int busy_polls, sleeps; /* calls that may not wait, and that may */
static int found_when_busy, found_when_asleep;

int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout_ms);
int __wrap_poll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
    int is_found = timeout_ms == 0 ? found_when_busy : found_when_asleep;
    *(timeout_ms == 0 ? &busy_polls : &sleeps) += 1;
    for (nfds_t i = 0; i < count; i++)
        fds[i].revents = is_found ? POLLIN : 0;
    return is_found ? (int)count : 0;
}

static pccl_poller *poller;
static pccl_poll_entry entry;

static void poller_open(void)
{
    poller = pccl_poller_open(1);
    if (poller == NULL || pccl_poller_add(poller, &entry, 0, PCCL_POLL_IN) != 0)
        _exit(1);
}

/* Returns whether one wait polled busily. */
static int wait_is_busy(int finds_busily, unsigned local_peers)
{
    pccl_poll_event event;
    busy_polls = sleeps = 0;
    found_when_busy = finds_busily;
    found_when_asleep = 1;
    int count = pccl_poller_wait_busily(poller, &event, 1, 1000, local_peers);
    CHECK(count == 1 && event.entry == &entry && event.ready == PCCL_POLL_IN);
    CHECK(sleeps == (busy_polls == 0 || !finds_busily));
    return busy_polls > 0;
}

static void use_up_credit(void)
{
    for (int credit = CREDIT; credit > 0; credit -= COST)
        CHECK(wait_is_busy(0, 0));
}

static void a_wait_that_finds_an_event_does_not_sleep(void)
{
    poller_open();
    for (int i = 0; i < 100; i++)
        CHECK(wait_is_busy(1, 0) && busy_polls == 1);
    pccl_poller_close(poller);
}

static void waits_that_find_nothing_soon_sleep_at_once_but_for_one_of_many(void)
{
    poller_open();
    use_up_credit();
    for (int round = 0; round < 3; round++) {
        for (int i = 1; i < RETRY; i++)
            CHECK(!wait_is_busy(0, 0));
        CHECK(wait_is_busy(0, 0));
    }
    pccl_poller_close(poller);
}

static void one_find_in_four_is_too_few(void)
{
    poller_open();
    int busy = 0;
    for (int i = 0; i < 4 * RETRY; i++)
        busy += wait_is_busy(i % 4 == 0, 0);
    CHECK(busy < RETRY);
    pccl_poller_close(poller);
}

static void busy_waits_that_find_events_again_are_kept(void)
{
    poller_open();
    use_up_credit();
    for (int i = 1; i < RETRY; i++)
        CHECK(!wait_is_busy(1, 0));
    for (int i = 0; i < 100; i++)
        CHECK(wait_is_busy(1, 0));
    use_up_credit();
    CHECK(!wait_is_busy(0, 0));
    pccl_poller_close(poller);
}

static void no_wait_is_busy_where_peers_outnumber_the_cpus(void)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    poller_open();
    CHECK(!wait_is_busy(1, (unsigned)cpus));
    CHECK(wait_is_busy(1, (unsigned)cpus - 1));
    pccl_poller_close(poller);
}

static void a_wait_without_time_polls_once(void)
{
    pccl_poll_event event;
    poller_open();
    busy_polls = found_when_busy = 0;
    CHECK(pccl_poller_wait_busily(poller, &event, 1, 0, 0) == 0 && busy_polls == 1);
    pccl_poller_close(poller);
}

int main(void)
{
    RUN(a_wait_that_finds_an_event_does_not_sleep);
    RUN(waits_that_find_nothing_soon_sleep_at_once_but_for_one_of_many);
    RUN(one_find_in_four_is_too_few);
    RUN(busy_waits_that_find_events_again_are_kept);
    RUN(no_wait_is_busy_where_peers_outnumber_the_cpus);
    RUN(a_wait_without_time_polls_once);
    return check_summary();
}
