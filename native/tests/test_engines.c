/* Several engines as one: what is reported of an op whose slices are in all of them. */
#include "check.h"
#include "engine_world.h"

#include <errno.h>

/* Allocations as large as an op are counted; the one with this number is denied. 0: none. */
static int denied_op;
static int large_allocations;

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

void *__wrap_calloc(size_t count, size_t bytes)
{
    int is_large = count == 1 && bytes > 1500 && denied_op > 0;
    return is_large && ++large_allocations == denied_op ? NULL : __real_calloc(count, bytes);
}

enum { ENGINES = 3, COUNT = 10007, SEGMENT_BYTES = 256, RANKS = 2, LINK = 7 };

static float buffers[RANKS][COUNT];
static float others[RANKS][COUNT];

static float value(int rank, int i) { return (float)(i % 977) + (float)rank; }

static void fill(float at[RANKS][COUNT])
{
    for (int rank = 0; rank < RANKS; rank++)
        for (int i = 0; i < COUNT; i++)
            at[rank][i] = value(rank, i);
}

static void open_both(pccl_engines *both[RANKS])
{
    char error[128];
    for (int rank = 0; rank < RANKS; rank++) {
        both[rank] = pccl_engines_create(NULL, ENGINES, error, sizeof error);
        if (both[rank] == NULL)
            stop_test(error);
    }
    for (uint32_t index = 0; index < ENGINES; index++) {
        int fds[2];
        pair_unix(fds);
        for (int rank = 0; rank < RANKS; rank++)
            CHECK(pccl_engines_link_add(both[rank], LINK, index, fds[rank], NULL) == 0);
    }
}

static void close_both(pccl_engines *both[RANKS])
{
    for (int rank = 0; rank < RANKS; rank++)
        pccl_engines_destroy(both[rank]);
}

static pccl_op_request request_of(uint32_t rank, uint64_t op, float *at)
{
    pccl_op_request request;
    memset(&request, 0, sizeof request);
    request.op = op;
    request.key.epoch = 1;
    request.key.tag = op;
    request.shape.count = COUNT;
    request.shape.dtype = PCCL_FLOAT32;
    request.shape.segment_bytes = SEGMENT_BYTES;
    request.shape.world_size = RANKS;
    request.rank = rank;
    request.link_prev = request.link_next = LINK;
    request.send = request.recv = at;
    return request;
}

static void submit(pccl_engines *engines, uint32_t rank, uint64_t op, float at[RANKS][COUNT], uint32_t slices)
{
    pccl_op_request request = request_of(rank, op, at[rank]);
    CHECK(pccl_engines_submit(engines, &request, slices) == 0);
}

/* Returns the next event, which is to be of this kind; with `kind` 0 the number of events that come within 50 ms. */
static int next_event(pccl_engines *engines, uint32_t kind, pccl_event *event)
{
    int64_t end_ms = now_ms() + (kind != 0 ? WAIT_MS : 50);
    int count = 0;
    while (count == 0 && now_ms() < end_ms) {
        struct pollfd fds[ENGINES];
        for (uint32_t i = 0; i < ENGINES; i++) {
            fds[i].fd = pccl_engines_event_fd(engines, i);
            fds[i].events = POLLIN;
        }
        poll(fds, ENGINES, 10);
        count = pccl_engines_poll_events(engines, event, 1);
    }
    CHECK(kind == 0 || (count == 1 && event->kind == kind));
    return count;
}

static void expect(pccl_engines *engines, uint32_t kind, uint64_t id)
{
    pccl_event event;
    next_event(engines, kind, &event);
    CHECK(event.id == id);
}

static void expect_nothing(pccl_engines *engines)
{
    pccl_event event;
    CHECK(next_event(engines, 0, &event) == 0);
}

static void slices_are_one_op(void)
{
    pccl_engines *both[RANKS];
    open_both(both);
    fill(buffers);
    for (uint32_t rank = 0; rank < RANKS; rank++)
        submit(both[rank], rank, 1, buffers, ENGINES);
    for (int rank = 0; rank < RANKS; rank++) {
        pccl_event event;
        next_event(both[rank], PCCL_EVENT_OP_DONE, &event);
        CHECK(event.id == 1 && event.tx_bytes == sizeof buffers[0] && event.rx_bytes == sizeof buffers[0]);
    }
    for (int rank = 0; rank < RANKS; rank++)
        CHECK(pccl_engines_end(both[rank], 1, PCCL_COMMIT) == 0);
    for (int rank = 0; rank < RANKS; rank++) {
        expect(both[rank], PCCL_EVENT_OP_ENDED, 1);
        expect_nothing(both[rank]);
    }
    for (int i = 0; i < COUNT; i++)
        CHECK(buffers[0][i] == value(0, i) + value(1, i) && buffers[1][i] == buffers[0][i]);
    close_both(both);
}

static void completion_and_commit_by_all(void)
{
    pccl_engines *both[RANKS];
    open_both(both);
    fill(buffers);
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        pccl_op_request request = request_of(rank, 1, buffers[rank]);
        request.awaits_completion = 1;
        CHECK(pccl_engines_submit(both[rank], &request, ENGINES) == 0);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        expect(both[rank], PCCL_EVENT_OP_DONE, 1);
        expect(both[rank], PCCL_EVENT_OP_COMPLETED, 1);
        CHECK(pccl_engines_end(both[rank], 1, PCCL_COMMIT_BY_ALL) == 0);
        CHECK(pccl_engines_freeze_op(both[rank], 1) == 0); /* there is no such op any more */
        expect_nothing(both[rank]);
    }
    close_both(both);
}

static void freeze_and_abort_restore(void)
{
    pccl_engines *both[RANKS];
    open_both(both);
    fill(buffers);
    fill(others);
    submit(both[0], 0, 1, buffers, ENGINES);
    submit(both[0], 0, 2, others, 1);
    CHECK(pccl_engines_freeze_op(both[0], 1) == 0);
    expect(both[0], PCCL_EVENT_OP_FROZEN, 1);
    CHECK(pccl_engines_freeze(both[0], 0, 1) == 0);
    CHECK(pccl_engines_freeze(both[0], 0, 2) == 0);
    expect(both[0], PCCL_EVENT_GROUP_FROZEN, 1);
    expect(both[0], PCCL_EVENT_GROUP_FROZEN, 2);
    for (uint64_t op = 1; op <= 2; op++) {
        CHECK(pccl_engines_end(both[0], op, PCCL_ABORT) == 0);
        expect(both[0], PCCL_EVENT_OP_ENDED, op);
    }
    expect_nothing(both[0]);
    for (int i = 0; i < COUNT; i++)
        CHECK(buffers[0][i] == value(0, i) && others[0][i] == value(0, i));
    close_both(both);
}

static void detached_before_and_after_the_end(void)
{
    pccl_engines *both[RANKS];
    pccl_event event;
    open_both(both);
    fill(buffers);
    submit(both[0], 0, 1, buffers, ENGINES);
    CHECK(pccl_engines_detach(both[0], 1) == 0);
    next_event(both[0], PCCL_EVENT_OP_DETACHED, &event);
    CHECK(event.id == 1 && event.system_error == 0);
    CHECK(pccl_engines_end(both[0], 1, PCCL_ABORT) == 0);
    CHECK(pccl_engines_detach(both[0], 1) == 0);
    int ended = 0;
    for (int i = 0; i < 2; i++) { /* in either order */
        int looks = WAIT_MS / 50;
        while (next_event(both[0], 0, &event) == 0 && --looks > 0)
            ;
        CHECK(looks > 0);
        ended += event.kind == PCCL_EVENT_OP_ENDED;
        CHECK(event.kind == PCCL_EVENT_OP_ENDED || event.system_error == ENOENT);
    }
    CHECK(ended == 1);
    CHECK(pccl_engines_detach(both[0], 1) == 0);
    next_event(both[0], PCCL_EVENT_OP_DETACHED, &event);
    CHECK(event.system_error == ENOENT);
    close_both(both);
}

static void a_mismatch_is_one(void)
{
    pccl_engines *both[RANKS];
    open_both(both);
    submit(both[0], 0, 1, buffers, ENGINES);
    pccl_op_request request = request_of(1, 1, buffers[1]);
    request.shape.reduce_op = PCCL_MAX;
    CHECK(pccl_engines_submit(both[1], &request, ENGINES) == 0);
    for (int rank = 0; rank < RANKS; rank++) {
        expect(both[rank], PCCL_EVENT_OP_MISMATCH, 1);
        expect_nothing(both[rank]);
    }
    close_both(both);
}

static void one_engine_without_memory_refuses_the_op(void)
{
    pccl_engines *both[RANKS];
    pccl_event event;
    open_both(both);
    fill(buffers);
    pccl_op_request request = request_of(0, 1, buffers[0]);
    large_allocations = 0;
    denied_op = 1;
    CHECK(pccl_engines_submit(both[0], &request, ENGINES) == PCCL_E_MEMORY);
    large_allocations = 0;
    denied_op = ENGINES;
    CHECK(pccl_engines_submit(both[0], &request, ENGINES) == 0);
    CHECK(large_allocations == ENGINES);
    denied_op = 0;
    CHECK(pccl_engines_end(both[0], 1, PCCL_ABORT) == 0); /* which is of no concern any more */
    next_event(both[0], PCCL_EVENT_OP_REFUSED, &event);
    CHECK(event.id == 1 && strcmp(event.detail, "out of memory") == 0);
    expect_nothing(both[0]);
    close_both(both);
}

static void an_op_of_the_fast_path_is_handed_over(void)
{
    pccl_engines *both[RANKS];
    open_both(both);
    fill(buffers);
    pccl_op_request request = request_of(0, 1, buffers[0]);
    request.awaits_completion = 1;
    uint64_t sequence = 0;
    uint32_t at = pccl_first_engine(request.key.tag, sequence, ENGINES);
    CHECK(at < ENGINES && pccl_engines_fast_path(both[0], ENGINES) == NULL);
    pccl_fast_path *path = pccl_engines_fast_path(both[0], at);
    pccl_fast_path_result result;
    uint64_t opening = pccl_fast_path_open(path);
    CHECK(pccl_fast_path_run(path, opening, &request, &sequence, 1, &result) == PCCL_FAST_PATH_HANDED_OVER);
    expect(both[0], PCCL_EVENT_OP_HANDED_OVER, 1);
    CHECK(pccl_engines_end(both[0], 1, PCCL_ABORT) == 0);
    expect(both[0], PCCL_EVENT_OP_ENDED, 1);
    pccl_fast_path_wake_owner(path);
    struct pollfd woken = {pccl_engines_event_fd(both[0], at), POLLIN, 0};
    CHECK(poll(&woken, 1, WAIT_MS) == 1);
    expect_nothing(both[0]);
    CHECK(poll(&woken, 1, 0) == 0);
    close_both(both);
    pccl_fast_path_wake_owner(path); /* of engines that are no more */
    pccl_fast_path_release(path);
}

static void arguments(void)
{
    char error[128];
    CHECK(pccl_engines_create(NULL, 0, error, sizeof error) == NULL);
    CHECK(pccl_engines_create(NULL, PCCL_SLICES_MAX + 1, error, sizeof error) == NULL);
    pccl_engines *one = pccl_engines_create(NULL, 1, error, sizeof error);
    pccl_op_request request = request_of(0, 1, buffers[0]);
    CHECK(pccl_engines_submit(one, &request, 2) == PCCL_E_INVALID);
    CHECK(pccl_engines_event_fd(one, 1) == -1);
    pccl_engines_destroy(one);
    pccl_engines_destroy(NULL);
}

int main(void)
{
    RUN(slices_are_one_op);
    RUN(completion_and_commit_by_all);
    RUN(freeze_and_abort_restore);
    RUN(detached_before_and_after_the_end);
    RUN(a_mismatch_is_one);
    RUN(one_engine_without_memory_refuses_the_op);
    RUN(an_op_of_the_fast_path_is_handed_over);
    RUN(arguments);
    return check_summary();
}
