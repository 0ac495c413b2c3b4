/* Memory and descriptors that the system denies this machine: the engine waits where they may come back, never blames a
 * peer for them, and aborts nothing. Calls of the engine to sendmsg, readv and malloc come through here (the Makefile's
 * --wrap). */
#include "wire.h"

#include <dirent.h>
#include <errno.h>
#include <sys/syscall.h>
#include <sys/uio.h>

enum { COUNT = 3000, DENIALS = 8 /* 1 + 2 + ... + 64 + 100 ms */, DENIED_MS_MIN = 100, FD_MAX = 1024 };

/* How many of the next calls fail, and how; engine threads read it. */
typedef struct {
    int left;
    int error;
} denial;

static denial sendmsg_denial, readv_denial, malloc_denial;

static int is_denied(denial *d)
{
    int left = __atomic_load_n(&d->left, __ATOMIC_SEQ_CST);
    while (left > 0 && !__atomic_compare_exchange_n(&d->left, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        continue;
    if (left > 0)
        errno = d->error;
    return left > 0;
}

static void deny(denial *d, int times, int error)
{
    d->error = error;
    __atomic_store_n(&d->left, times, __ATOMIC_SEQ_CST);
}

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    return is_denied(&sendmsg_denial) ? -1 : __real_sendmsg(fd, message, flags);
}

ssize_t __real_readv(int fd, const struct iovec *iov, int count);
ssize_t __wrap_readv(int fd, const struct iovec *iov, int count);
ssize_t __wrap_readv(int fd, const struct iovec *iov, int count)
{
    return is_denied(&readv_denial) ? -1 : __real_readv(fd, iov, count);
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) { return is_denied(&malloc_denial) ? NULL : __real_malloc(bytes); }

static float values[2][COUNT];

static void reduce_among(world *w, uint64_t op)
{
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, 4096, 2);
    for (uint32_t rank = 0; rank < 2; rank++) {
        for (int i = 0; i < COUNT; i++)
            values[rank][i] = (float)(i + (int)rank);
        pccl_op_request request = request_for(w, rank, op, &shape);
        request.send = request.recv = values[rank];
        if (pccl_engine_submit(w->nodes[rank].engine, &request) != 0)
            stop_test("submit");
    }
}

static void expect_sum(world *w, uint64_t op)
{
    for (uint32_t rank = 0; rank < 2; rank++) {
        node_wait_done(&w->nodes[rank], op);
        pccl_engine_end(w->nodes[rank].engine, op, PCCL_COMMIT);
        node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, op);
        for (int i = 0; i < COUNT; i++)
            CHECK(values[rank][i] == (float)(2 * i + 1));
        node_collect(&w->nodes[rank]);
        CHECK(w->nodes[rank].events_count == 0);
    }
}

/* No connection is lost, and who waits does not ask all the time. */
static void memory_that_the_system_lacks_is_waited_for(void)
{
    static const int errors[] = {ENOBUFS, ENOMEM};
    denial *denials[] = {&sendmsg_denial, &readv_denial};
    for (int force_poll = 0; force_poll < 2; force_poll++)
        for (size_t i = 0; i < 4; i++) {
            world w;
            uint64_t op = 1;
            world_open(&w, 2, 1, 0, force_poll);
            reduce_among(&w, op);
            expect_sum(&w, op);
            int64_t begin_ms = now_ms();
            deny(denials[i / 2], 2 * DENIALS, errors[i % 2]); /* shared by two connections */
            reduce_among(&w, ++op);
            expect_sum(&w, op);
            CHECK(denials[i / 2]->left == 0);
            CHECK(now_ms() - begin_ms >= DENIED_MS_MIN);
            world_close(&w);
        }
}

/* A signal may come to any thread. */
static void interrupted_calls_are_made_again(void)
{
    denial *denials[] = {&sendmsg_denial, &readv_denial};
    for (size_t i = 0; i < 2; i++) {
        world w;
        world_open(&w, 2, 1, 0, 0);
        deny(denials[i], DENIALS, EINTR);
        reduce_among(&w, 1);
        expect_sum(&w, 1);
        CHECK(denials[i]->left == 0);
        world_close(&w);
    }
}

static void other_errors_lose_the_connection(void)
{
    world w;
    world_open(&w, 2, 1, 0, 0);
    deny(&readv_denial, 1, ECONNRESET);
    reduce_among(&w, 1);
    for (uint32_t rank = 0; rank < 2; rank++)
        node_wait(&w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(0, 1));
    world_close(&w);
}

/* One engine, rank 0 of two, whose peer is the test itself. */
typedef struct {
    node n;
    int peer;
    pccl_op_request request;
    uint64_t links[2];
} wire;

static void wire_open(wire *w, int force_poll)
{
    int fds[2];
    memset(w, 0, sizeof *w);
    node_open(&w->n, force_poll);
    w->links[1] = 7;
    pair_unix(fds);
    w->peer = fds[1];
    if (pccl_engine_link_add(w->n.engine, w->links[1], fds[0], NULL) != 0)
        stop_test("link_add");
    write_hello(w->peer, 1);
    w->request.op = w->request.key.sequence = 1;
    w->request.key.epoch = 1;
    w->request.shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, 4096, 2);
    w->request.rank_links = w->links;
    w->request.link_prev = w->request.link_next = w->links[1];
    w->request.send = w->request.recv = values[0];
    for (int i = 0; i < COUNT; i++)
        values[0][i] = (float)i;
}

static pccl_event wire_await_failure(wire *w)
{
    int64_t deadline_ms = now_ms() + WAIT_MS;
    while (!pccl_engine_has_failed(w->n.engine))
        if (now_ms() > deadline_ms)
            stop_test("the engine has not failed");
    pccl_event event = node_wait(&w->n, PCCL_EVENT_ENGINE_FAILED, 0);
    CHECK(!node_has_event(&w->n, PCCL_EVENT_LINK_LOST, w->links[1]));
    CHECK(!node_has_event(&w->n, PCCL_EVENT_CONNECTION_LOST, w->links[1]));
    return event;
}

static void wire_close(wire *w)
{
    node_close(&w->n);
    close(w->peer);
    for (int i = 0; i < COUNT; i++)
        CHECK(values[0][i] == (float)i);
}

/* It is this machine's, and not the fault of who has sent something. */
static void memory_for_what_a_peer_sends_is_our_own_affair(void)
{
    static uint8_t payload[4096];
    wire w;
    wire_open(&w, 0);
    pccl_frame eager = op_frame(&w.request, PCCL_FRAME_EAGER, sizeof payload);
    if (pccl_engine_submit(w.n.engine, &w.request) != 0)
        stop_test("submit");
    eager.key.sequence++; /* of an op that is not there yet */
    deny(&malloc_denial, 1, ENOMEM);
    write_frame(w.peer, &eager, payload);
    pccl_event event = wire_await_failure(&w);
    CHECK(malloc_denial.left == 0);
    CHECK(event.system_error == ENOMEM);
    CHECK_MSG(strstr(event.detail, "no memory") != NULL, "%s", event.detail);
    /* Commands that come too late are left, too. */
    w.request.op = 2;
    w.request.send = w.request.recv = values[1];
    CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
    CHECK(pccl_engine_end(w.n.engine, 1, PCCL_ABORT) == 0);
    wire_close(&w);
}

/* Its caller has been told, and may have freed or changed the buffers since. */
static void what_has_completed_on_the_fast_path_survives_a_failing_engine(void)
{
    static uint8_t payload[4096];
    enum { SMALL = 1000 };
    wire w;
    wire_open(&w, 0);
    w.request.shape = plain_shape(SMALL, PCCL_FLOAT32, PCCL_SUM, SMALL * 4, 2);
    w.request.shape.algorithm = PCCL_DIRECT;
    w.request.awaits_completion = 1;
    pccl_fast_path *path = pccl_engine_fast_path(w.n.engine);
    pccl_fast_path_call *call;
    pccl_fast_path_result result;
    uint64_t sequence = 1;
    CHECK(pccl_fast_path_start(path, pccl_fast_path_open(path), &w.request, &sequence, WAIT_MS, &call) == 0);
    pccl_frame frame;
    read_frame(w.peer, &frame, NULL, 0);
    CHECK(frame.type == PCCL_FRAME_HELLO);
    read_frame(w.peer, &frame, payload, sizeof payload);
    CHECK(frame.type == PCCL_FRAME_EAGER);
    memset(payload, 0, sizeof payload);
    pccl_frame eager = op_frame(&w.request, PCCL_FRAME_EAGER, SMALL * 4);
    write_frame(w.peer, &eager, payload);
    do /* until all is here */
        read_frame(w.peer, &frame, payload, sizeof payload);
    while (frame.type != PCCL_FRAME_DONE);
    /* What completes the op, and what there is no memory for, come together. */
    uint8_t both[2 * PCCL_FRAME_BYTES + 4];
    pccl_frame done = op_frame(&w.request, PCCL_FRAME_DONE, 0);
    eager.key.sequence++;
    eager.payload_bytes = 4;
    pccl_frame_encode(&done, both);
    pccl_frame_encode(&eager, both + PCCL_FRAME_BYTES);
    memset(both + 2 * PCCL_FRAME_BYTES, 0, 4);
    deny(&malloc_denial, 1, ENOMEM);
    write_all(w.peer, both, sizeof both);
    CHECK(pccl_fast_path_wait(path, call, &result) == PCCL_FAST_PATH_COMPLETED);
    pccl_fast_path_forget(path, call);
    (void)wire_await_failure(&w);
    CHECK(node_has_event(&w.n, PCCL_EVENT_OP_FAST_COMPLETED, w.request.op));
    for (int i = 0; i < SMALL; i++) {
        CHECK(values[0][i] == (float)i);
        values[0][i] = -1;
    }
    pccl_fast_path_release(path);
    node_close(&w.n);
    close(w.peer);
    for (int i = 0; i < SMALL; i++)
        CHECK(values[0][i] == -1);
}

/* Half of a frame is out when its op ends, and what is left of it has to be kept. */
static void memory_for_the_rest_of_a_frame_is_our_own_affair(void)
{
    enum { LARGE = 1 << 20 };
    static float large[LARGE];
    wire w;
    wire_open(&w, 0);
    w.request.shape = plain_shape(LARGE, PCCL_FLOAT32, PCCL_SUM, LARGE * 2, 2);
    w.request.send = w.request.recv = large;
    if (pccl_engine_submit(w.n.engine, &w.request) != 0)
        stop_test("submit");
    pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
    write_frame(w.peer, &ready, NULL);
    pccl_engine_stats stats;
    do /* until more than its announcement is out, but for the rest of a segment that the socket has no room for */
        pccl_engine_get_stats(w.n.engine, &stats);
    while (stats.tx_wire_bytes <= 4 * PCCL_FRAME_BYTES);
    deny(&malloc_denial, 1, ENOMEM);
    CHECK(pccl_engine_end(w.n.engine, w.request.op, PCCL_ABORT) == 0);
    pccl_event event = wire_await_failure(&w);
    CHECK(event.system_error == ENOMEM);
    CHECK_MSG(strstr(event.detail, "no memory") != NULL, "%s", event.detail);
    wire_close(&w);
}

static void note_open_fds(uint8_t *is_open)
{
    DIR *listing = opendir("/proc/self/fd");
    struct dirent *entry;
    memset(is_open, 0, FD_MAX);
    while (listing != NULL && (entry = readdir(listing)) != NULL) {
        int fd = atoi(entry->d_name);
        if (fd > 2 && fd < FD_MAX && fd != dirfd(listing))
            is_open[fd] = 1;
    }
    if (listing != NULL)
        closedir(listing);
}

/* By somebody else in the process, as os.closerange does. */
static void descriptors_may_be_closed(void)
{
    for (int force_poll = 0; force_poll < 2; force_poll++)
        for (int which = -1; which < 8; which++) {
            static uint8_t before[FD_MAX], after[FD_MAX];
            wire w;
            int closed = 0;
            note_open_fds(before);
            wire_open(&w, force_poll);
            uint8_t hello[PCCL_FRAME_BYTES];
            if (recv(w.peer, hello, sizeof hello, MSG_WAITALL) != (ssize_t)sizeof hello)
                stop_test("hello");
            if (pccl_engine_submit(w.n.engine, &w.request) != 0)
                stop_test("submit");
            note_open_fds(after);
            int number = 0;
            for (int fd = 3; fd < FD_MAX; fd++)
                if (after[fd] && !before[fd] && fd != w.peer && (which < 0 || number++ == which)) {
                    (void)syscall(SYS_close, fd); /* past the thread sanitizer, which minds, rightly */
                    closed++;
                }
            if (closed > 0) {
                int64_t deadline_ms = now_ms() + 20000;
                /* Whatever it wants next it cannot have. */
                if (!force_poll)
                    CHECK(pccl_engine_link_close(w.n.engine, w.links[1]) == 0);
                while (!pccl_engine_has_failed(w.n.engine) && now_ms() < deadline_ms) {
                    CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
                    (void)poll(NULL, 0, 10);
                }
                CHECK_MSG(pccl_engine_has_failed(w.n.engine), "poll %d, descriptor %d", force_poll, which);
                node_wait(&w.n, PCCL_EVENT_ENGINE_FAILED, 0);
            }
            wire_close(&w);
        }
}

int main(void)
{
    RUN(memory_that_the_system_lacks_is_waited_for);
    RUN(interrupted_calls_are_made_again);
    RUN(other_errors_lose_the_connection);
    RUN(memory_for_what_a_peer_sends_is_our_own_affair);
    RUN(what_has_completed_on_the_fast_path_survives_a_failing_engine);
    RUN(memory_for_the_rest_of_a_frame_is_our_own_affair);
    RUN(descriptors_may_be_closed);
    return check_summary();
}
