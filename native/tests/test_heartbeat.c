/* Heartbeats against each other and against sockets that behave badly. Limits of time are only lower bounds, or what a
 * hanging test gives up after. */
#include "pccl_native.h"

#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* LIVE_MS is the timeout where somebody is to be found alive: a thread that hardly gets a processor sends a heartbeat
 * within it. */
enum { TIMEOUT_MS = 400, LIVE_MS = 4000, LONG_MS = 600000, HANG_MS = 60000 };

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static pccl_heartbeat *heartbeat(uint32_t timeout_ms)
{
    char error[256] = "";
    pccl_heartbeat *made = pccl_heartbeat_create(timeout_ms, error, sizeof error);
    CHECK_MSG(made != NULL, "%s", error);
    return made;
}

static int pair(int fds[2]) { return socketpair(AF_UNIX, SOCK_STREAM, 0, fds); }

/* The next event, or kind 0 if there is none within the limit. */
static pccl_heartbeat_event next_event(pccl_heartbeat *from, int limit_ms)
{
    pccl_heartbeat_event event;
    memset(&event, 0, sizeof event);
    struct pollfd news = {.fd = pccl_heartbeat_event_fd(from), .events = POLLIN, .revents = 0};
    if (poll(&news, 1, limit_ms) == 1)
        CHECK(pccl_heartbeat_poll_events(from, &event, 1) == 1);
    return event;
}

static int has_news(pccl_heartbeat *from)
{
    struct pollfd news = {.fd = pccl_heartbeat_event_fd(from), .events = POLLIN, .revents = 0};
    return poll(&news, 1, 0) == 1;
}

static void test_those_who_beat_are_alive(void)
{
    int fds[2];
    pccl_heartbeat *a = heartbeat(LIVE_MS);
    pccl_heartbeat *b = heartbeat(LIVE_MS);
    REQUIRE(a != NULL && b != NULL && pair(fds) == 0);
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    CHECK(pccl_heartbeat_add(b, 2, fds[1]) == PCCL_OK);
    CHECK(next_event(a, LIVE_MS + TIMEOUT_MS).kind == 0);
    CHECK(!has_news(b));
    pccl_heartbeat_destroy(a);
    pccl_heartbeat_event event = next_event(b, HANG_MS);
    CHECK(event.kind == PCCL_HEARTBEAT_CLOSED && event.connection == 2);
    /* A heartbeat that had not been read when its socket was closed resets the connection. */
    CHECK(event.system_error == 0 || event.system_error == ECONNRESET);
    pccl_heartbeat_destroy(b);
}

static void test_who_is_late_is_known_before_and_until_it_is_told(void)
{
    int fds[2];
    uint64_t quiet[2] = {0, 0};
    pccl_heartbeat *a = heartbeat(TIMEOUT_MS);
    REQUIRE(a != NULL && pair(fds) == 0);
    CHECK(pccl_heartbeat_add(a, 7, fds[0]) == PCCL_OK);
    CHECK(pccl_heartbeat_quiet(a, LONG_MS, quiet, 2) == 0);
    while (pccl_heartbeat_quiet(a, 1, quiet, 2) == 0)
        (void)poll(NULL, 0, 1);
    CHECK(quiet[0] == 7 && quiet[1] == 0);
    struct pollfd news = {.fd = pccl_heartbeat_event_fd(a), .events = POLLIN, .revents = 0};
    CHECK(poll(&news, 1, HANG_MS) == 1);
    CHECK(pccl_heartbeat_quiet(a, TIMEOUT_MS, quiet, 2) == 1);
    CHECK(pccl_heartbeat_quiet(a, 1, quiet, 0) == 0);
    CHECK(next_event(a, HANG_MS).kind == PCCL_HEARTBEAT_SILENT);
    CHECK(pccl_heartbeat_quiet(a, 1, quiet, 2) == 0);
    pccl_heartbeat_destroy(a);
    close(fds[1]);
}

static void test_silence_is_told_once_and_closes(void)
{
    int fds[2];
    char byte;
    pccl_heartbeat *a = heartbeat(TIMEOUT_MS);
    REQUIRE(a != NULL && pair(fds) == 0);
    int64_t start_ms = now_ms();
    CHECK(pccl_heartbeat_add(a, UINT64_C(1) << 40, fds[0]) == PCCL_OK);
    pccl_heartbeat_event event = next_event(a, HANG_MS);
    CHECK(event.kind == PCCL_HEARTBEAT_SILENT && event.connection == UINT64_C(1) << 40 && event.system_error == 0);
    CHECK(now_ms() - start_ms >= TIMEOUT_MS);
    CHECK(event.silent_ms >= TIMEOUT_MS);
    ssize_t n;
    while ((n = read(fds[1], &byte, 1)) > 0)
        CHECK(byte == 'b');
    CHECK(n == 0);
    CHECK(next_event(a, 2 * TIMEOUT_MS).kind == 0);
    close(fds[1]);
    pccl_heartbeat_destroy(a);
}

static void test_one_who_never_reads_is_heard_as_long_as_it_beats(void)
{
    int fds[2];
    int small = 1;
    char fill[4096] = {0};
    pccl_heartbeat *a = heartbeat(LIVE_MS);
    REQUIRE(a != NULL && pair(fds) == 0);
    CHECK(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
    CHECK(fcntl(fds[0], F_SETFL, O_NONBLOCK) == 0);
    while (write(fds[0], fill, sizeof fill) > 0 || write(fds[0], fill, 1) > 0)
        ;
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    for (int64_t until_ms = now_ms() + LIVE_MS + TIMEOUT_MS; now_ms() < until_ms;) {
        CHECK(write(fds[1], "b", 1) == 1);
        CHECK(next_event(a, TIMEOUT_MS / 10).kind == 0);
    }
    CHECK(next_event(a, HANG_MS).kind == PCCL_HEARTBEAT_SILENT);
    close(fds[1]);
    pccl_heartbeat_destroy(a);
}

static void test_what_is_no_beat_closes(void)
{
    int fds[2];
    pccl_heartbeat *a = heartbeat(LONG_MS);
    REQUIRE(a != NULL && pair(fds) == 0);
    CHECK(pccl_heartbeat_add(a, 7, fds[0]) == PCCL_OK);
    CHECK(write(fds[1], "bbx", 3) == 3);
    pccl_heartbeat_event event = next_event(a, HANG_MS);
    CHECK(event.kind == PCCL_HEARTBEAT_CLOSED && event.connection == 7 && event.system_error == EPROTO);
    close(fds[1]);
    pccl_heartbeat_destroy(a);
}

static void test_removal_closes_without_a_word(void)
{
    int fds[2];
    int others[2];
    char byte;
    pccl_heartbeat *a = heartbeat(LONG_MS);
    REQUIRE(a != NULL && pair(fds) == 0 && pair(others) == 0);
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    CHECK(pccl_heartbeat_add(a, 2, others[0]) == PCCL_OK);
    pccl_heartbeat_remove(a, 1);
    pccl_heartbeat_remove(a, 1);
    pccl_heartbeat_remove(a, 9);
    CHECK(read(fds[1], &byte, 1) == 1 && read(fds[1], &byte, 1) == 0);
    close(others[1]);
    struct pollfd news = {.fd = pccl_heartbeat_event_fd(a), .events = POLLIN, .revents = 0};
    CHECK(poll(&news, 1, HANG_MS) == 1);
    pccl_heartbeat_remove(a, 2);
    CHECK(!has_news(a));
    close(fds[1]);
    pccl_heartbeat_destroy(a);
}

static void test_many_events_are_collected_piecemeal(void)
{
    enum { MANY = 40 };
    int fds[2];
    int seen[MANY] = {0};
    pccl_heartbeat *a = heartbeat(LONG_MS);
    REQUIRE(a != NULL);
    for (uint64_t i = 0; i < MANY; i++) {
        REQUIRE(pair(fds) == 0);
        close(fds[1]);
        CHECK(pccl_heartbeat_add(a, i, fds[0]) == PCCL_OK);
    }
    for (int count = 0; count < MANY;) {
        pccl_heartbeat_event events[3];
        struct pollfd news = {.fd = pccl_heartbeat_event_fd(a), .events = POLLIN, .revents = 0};
        REQUIRE(poll(&news, 1, HANG_MS) == 1);
        int n = pccl_heartbeat_poll_events(a, events, 3);
        REQUIRE(n > 0 && n <= 3);
        for (int i = 0; i < n; i++)
            CHECK(events[i].connection < MANY && seen[events[i].connection]++ == 0);
        count += n;
    }
    CHECK(!has_news(a));
    pccl_heartbeat_destroy(a);
}

/* Stops this process for a while. `stopped_ms` is a moment just before it goes on: this thread may do so later than
 * others. */
static void sleep_stopped(int milliseconds, int64_t *stopped_ms)
{
    int report[2];
    REQUIRE(pipe(report) == 0);
    pid_t child = fork();
    if (child == 0) {
        kill(getppid(), SIGSTOP);
        poll(NULL, 0, milliseconds);
        *stopped_ms = now_ms();
        ssize_t n = write(report[1], stopped_ms, sizeof *stopped_ms);
        kill(getppid(), SIGCONT);
        _exit(n != (ssize_t)sizeof *stopped_ms);
    }
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    CHECK(status == 0 && read(report[0], stopped_ms, sizeof *stopped_ms) == (ssize_t)sizeof *stopped_ms);
    close(report[0]);
    close(report[1]);
}

static void test_one_who_was_stopped_itself_blames_nobody(void)
{
    int fds[2];
    int mute[2];
    pccl_heartbeat *a = heartbeat(LIVE_MS);
    pccl_heartbeat *b = heartbeat(LIVE_MS);
    REQUIRE(a != NULL && b != NULL && pair(fds) == 0 && pair(mute) == 0);
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    CHECK(pccl_heartbeat_add(b, 2, fds[1]) == PCCL_OK);
    CHECK(pccl_heartbeat_add(a, 3, mute[0]) == PCCL_OK);
    int64_t stopped_ms = 0;
    sleep_stopped(LIVE_MS + TIMEOUT_MS, &stopped_ms);
    pccl_heartbeat_event event = next_event(a, HANG_MS);
    CHECK(event.kind == PCCL_HEARTBEAT_SILENT && event.connection == 3);
    CHECK_MSG(now_ms() - stopped_ms >= LIVE_MS / 2, "after %d ms", (int)(now_ms() - stopped_ms));
    CHECK(!has_news(a) && !has_news(b));
    close(mute[1]);
    pccl_heartbeat_destroy(a);
    pccl_heartbeat_destroy(b);
}

static void test_a_stopped_process_is_silent(void)
{
    int fds[2];
    REQUIRE(pair(fds) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(fds[0]);
        pccl_heartbeat *theirs = heartbeat(LIVE_MS);
        pccl_heartbeat_add(theirs, 1, fds[1]);
        for (;;)
            pause();
    }
    close(fds[1]);
    pccl_heartbeat *ours = heartbeat(LIVE_MS);
    REQUIRE(ours != NULL);
    CHECK(pccl_heartbeat_add(ours, 1, fds[0]) == PCCL_OK);
    CHECK(next_event(ours, LIVE_MS + TIMEOUT_MS).kind == 0);
    kill(child, SIGSTOP);
    CHECK(next_event(ours, HANG_MS).kind == PCCL_HEARTBEAT_SILENT);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    pccl_heartbeat_destroy(ours);
}

/* What one side hears of a heartbeat that vouches for a loop, if it is anything within the limit: the loop turns, or
 * somebody looks, or neither. */
static pccl_heartbeat_event vouched(int turns, int looks, uint32_t hold_ms, uint32_t still_ms, int limit_ms)
{
    int fds[2];
    pccl_heartbeat_event event;
    pccl_progress progress = {0, 0};
    memset(&event, 0, sizeof event);
    pccl_heartbeat *a = heartbeat(LIVE_MS);
    pccl_heartbeat *b = heartbeat(LIVE_MS);
    if (a == NULL || b == NULL || pair(fds) != 0)
        return event;
    pccl_heartbeat_vouch(b, &progress, hold_ms, still_ms);
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    CHECK(pccl_heartbeat_add(b, 2, fds[1]) == PCCL_OK);
    for (int64_t until_ms = now_ms() + limit_ms; now_ms() < until_ms && event.kind == 0;) {
        if (turns)
            pccl_progress_turn(&progress);
        if (looks)
            pccl_progress_look(&progress);
        event = next_event(a, TIMEOUT_MS / 20);
    }
    pccl_heartbeat_destroy(a);
    pccl_heartbeat_destroy(b);
    return event;
}

static void test_beats_vouch_for_a_loop(void)
{
    enum { STILL_MS = LIVE_MS / 2 };
    CHECK(vouched(1, 1, LIVE_MS, STILL_MS, 2 * LIVE_MS).kind == 0);
    CHECK(vouched(1, 0, LIVE_MS, STILL_MS, 2 * LIVE_MS).kind == 0);
    CHECK(vouched(0, 1, LONG_MS, STILL_MS, HANG_MS).kind == PCCL_HEARTBEAT_SILENT); /* it is stuck */
    CHECK(vouched(0, 0, LONG_MS, STILL_MS, 2 * LIVE_MS).kind == 0); /* nobody gets in */
    CHECK(vouched(0, 0, STILL_MS, 0, HANG_MS).kind == PCCL_HEARTBEAT_SILENT); /* for too long */
    CHECK(vouched(0, 1, LONG_MS, 0, 2 * LIVE_MS).kind == 0);
}

static void test_a_forked_child_lets_go(void)
{
    int fds[2];
    int release[2];
    char byte;
    REQUIRE(pair(fds) == 0 && pair(release) == 0);
    pccl_heartbeat *a = heartbeat(LONG_MS);
    REQUIRE(a != NULL);
    CHECK(pccl_heartbeat_add(a, 1, fds[0]) == PCCL_OK);
    pid_t child = fork();
    if (child == 0) {
        close(fds[1]);
        close(release[1]);
        pccl_heartbeat_forget_after_fork(a);
        CHECK(read(release[0], &byte, 1) == 0);
        _exit(0);
    }
    pccl_heartbeat_destroy(a);
    while (read(fds[1], &byte, 1) == 1)
        ;
    close(release[0]);
    close(release[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    close(fds[1]);
}

static void test_wrong_arguments(void)
{
    char error[256] = "";
    CHECK(pccl_heartbeat_create(0, error, sizeof error) == NULL && strstr(error, "timeout") != NULL);
    pccl_heartbeat *a = heartbeat(LONG_MS);
    REQUIRE(a != NULL);
    CHECK(pccl_heartbeat_add(a, 1, -1) == PCCL_E_INVALID);
    CHECK(pccl_heartbeat_add(a, 1, 1 << 20) == PCCL_E_INVALID);
    CHECK(pccl_heartbeat_poll_events(a, NULL, 0) == 0);
    pccl_heartbeat_destroy(a);
    pccl_heartbeat_destroy(NULL);
}

int main(void)
{
    RUN(test_wrong_arguments);
    RUN(test_those_who_beat_are_alive);
    RUN(test_who_is_late_is_known_before_and_until_it_is_told);
    RUN(test_silence_is_told_once_and_closes);
    RUN(test_one_who_never_reads_is_heard_as_long_as_it_beats);
    RUN(test_what_is_no_beat_closes);
    RUN(test_removal_closes_without_a_word);
    RUN(test_many_events_are_collected_piecemeal);
    RUN(test_one_who_was_stopped_itself_blames_nobody);
    RUN(test_a_stopped_process_is_silent);
    RUN(test_beats_vouch_for_a_loop);
    RUN(test_a_forked_child_lets_go);
    return check_summary();
}
