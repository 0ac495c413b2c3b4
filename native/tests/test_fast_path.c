/* Ops on the fast path: what their callers get to know, and what the owner of the events finds. */
#include "os.h"
#include "trial.h"

#include <pthread.h>

enum { NO_WAIT_MS = 0, LONG_WAIT_MS = WAIT_MS };

/* One call of pccl_fast_path_run, in a thread of its own. */
typedef struct {
    pccl_fast_path *path;
    uint64_t opening;
    pccl_op_request request;
    uint64_t sequence;
    uint32_t wait_ms;
    pccl_fast_path_result result;
    int outcome;
    pthread_t thread;
} caller;

static void *caller_main(void *argument)
{
    caller *c = argument;
    c->outcome = pccl_fast_path_run(c->path, c->opening, &c->request, &c->sequence, c->wait_ms, &c->result);
    return NULL;
}

static void caller_start(caller *c)
{
    if (pthread_create(&c->thread, NULL, caller_main, c) != 0)
        stop_test("thread");
}

static int caller_join(caller *c)
{
    pthread_join(c->thread, NULL);
    return c->outcome;
}

static int caller_run(caller *c)
{
    caller_start(c);
    return caller_join(c);
}

/* A world whose ranks all have their fast path open. */
typedef struct {
    world w;
    pccl_fast_path *paths[WORLD_RANKS_MAX];
    uint64_t openings[WORLD_RANKS_MAX];
    uint64_t sequences[WORLD_RANKS_MAX];
} fast_world;

static void fast_world_open(fast_world *g, uint32_t size)
{
    memset(g, 0, sizeof *g);
    world_open(&g->w, size, 1, 1, 0);
    for (uint32_t rank = 0; rank < size; rank++) {
        g->paths[rank] = pccl_engine_fast_path(g->w.nodes[rank].engine);
        g->openings[rank] = pccl_fast_path_open(g->paths[rank]);
        CHECK(g->openings[rank] > 0);
    }
}

static void fast_world_close(fast_world *g)
{
    for (uint32_t rank = 0; rank < g->w.size; rank++)
        pccl_fast_path_release(g->paths[rank]);
    world_close(&g->w);
}

static caller caller_of(fast_world *g, const trial *t, uint32_t rank, uint32_t wait_ms)
{
    caller c;
    memset(&c, 0, sizeof c);
    c.path = g->paths[rank];
    c.opening = g->openings[rank];
    c.request = trial_request(t, &g->w, rank);
    c.request.awaits_completion = 1;
    c.sequence = g->sequences[rank];
    c.wait_ms = wait_ms;
    return c;
}

static void trial_open_small(trial *t, const fast_world *g, uint64_t count)
{
    pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 512, g->w.size);
    shape.algorithm = PCCL_DIRECT;
    trial_open(t, &shape, (int)random_below(2));
}

/* A world with one op that nobody has submitted. */
static void fast_world_open_trial(fast_world *g, trial *t, uint32_t size, uint64_t count)
{
    fast_world_open(g, size);
    trial_open_small(t, g, count);
}

static void fast_world_close_trial(fast_world *g, trial *t)
{
    trial_close(t);
    fast_world_close(g);
}

/* Submitted by the owner, as the fast path would. */
static void trial_submit_by_owner(const trial *t, fast_world *g, uint32_t rank)
{
    pccl_op_request request = trial_request(t, &g->w, rank);
    request.awaits_completion = 1;
    request.key.sequence = g->sequences[rank];
    CHECK(pccl_engine_submit(g->w.nodes[rank].engine, &request) == 0);
}

static void trial_leave(const trial *t, fast_world *g, uint32_t rank)
{
    node_wait(&g->w.nodes[rank], PCCL_EVENT_OP_COMPLETED, t->number);
    CHECK(node_has_event(&g->w.nodes[rank], PCCL_EVENT_OP_DONE, t->number));
    CHECK(pccl_engine_end(g->w.nodes[rank].engine, t->number, PCCL_COMMIT_BY_ALL) == 0);
}

static int is_silent(fast_world *g, uint32_t rank)
{
    struct pollfd pfd = {.fd = pccl_engine_event_fd(g->w.nodes[rank].engine), .events = POLLIN};
    return poll(&pfd, 1, 0) == 0;
}

/* All complete their ops, and no owner is woken; it finds one event of each op, in order. */
static void callers_are_completed(void)
{
    for (uint32_t size = 2; size <= 4; size++) {
        enum { OPS = 20 };
        trial trials[OPS];
        fast_world g;
        fast_world_open(&g, size);
        for (int i = 0; i < OPS; i++) {
            caller callers[WORLD_RANKS_MAX];
            trial_open_small(&trials[i], &g, random_below(3000));
            for (uint32_t rank = 0; rank < size; rank++) {
                callers[rank] = caller_of(&g, &trials[i], rank, LONG_WAIT_MS);
                caller_start(&callers[rank]);
            }
            for (uint32_t rank = 0; rank < size; rank++) {
                CHECK(caller_join(&callers[rank]) == PCCL_FAST_PATH_COMPLETED);
                CHECK(callers[rank].sequence == ++g.sequences[rank]);
            }
            trial_check_results(&trials[i]);
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            CHECK(is_silent(&g, rank));
            for (int i = 0; i < OPS; i++) {
                pccl_event ran = {.sequence = UINT64_MAX};
                node_collect(&g.w.nodes[rank]);
                CHECK(node_take_collected(&g.w.nodes[rank], PCCL_EVENT_OP_FAST_COMPLETED, trials[i].number, &ran));
                CHECK(ran.sequence == (uint64_t)i);
            }
            CHECK(g.w.nodes[rank].events_count == 0);
        }
        for (int i = 0; i < OPS; i++)
            trial_close(&trials[i]);
        fast_world_close(&g);
    }
}

/* One rank's op is on the fast path, the other's is its owner's. Many quiet events wake the owner in the end. */
static void callers_and_owners_share_ops(void)
{
    enum { OPS = 200 };
    fast_world g;
    fast_world_open(&g, 2);
    for (int i = 0; i < OPS; i++) {
        trial t;
        trial_open_small(&t, &g, 100);
        caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
        caller_start(&c);
        trial_submit_by_owner(&t, &g, 1);
        trial_leave(&t, &g, 1);
        CHECK(caller_join(&c) == PCCL_FAST_PATH_COMPLETED);
        g.sequences[0]++;
        g.sequences[1]++;
        trial_check_results(&t);
        trial_close(&t);
    }
    CHECK(!is_silent(&g, 0));
    pccl_engine_stats stats;
    pccl_engine_get_stats(g.w.nodes[0].engine, &stats);
    CHECK(stats.ops_open <= 1); /* the last may be about to end */
    fast_world_close(&g);
}

/* One that takes longer than its caller waits is the owner's, as if it had submitted it. */
static void a_long_op_is_handed_over(void)
{
    fast_world g;
    trial t;
    fast_world_open_trial(&g, &t, 3, 1000);
    for (uint32_t rank = 0; rank < 2; rank++) {
        caller c = caller_of(&g, &t, rank, NO_WAIT_MS);
        CHECK(caller_run(&c) == PCCL_FAST_PATH_HANDED_OVER);
        CHECK(c.sequence == 1);
        CHECK(node_wait(&g.w.nodes[rank], PCCL_EVENT_OP_HANDED_OVER, t.number).sequence == 0);
        CHECK(!node_has_event(&g.w.nodes[rank], PCCL_EVENT_OP_DONE, t.number));
    }
    trial_submit_by_owner(&t, &g, 2);
    for (uint32_t rank = 0; rank < 3; rank++)
        trial_leave(&t, &g, rank);
    trial_check_results(&t);
    fast_world_close_trial(&g, &t);
}

/* After the cut no caller completes an op: its owner finds among the events what is under way. */
static void closing_hands_over_what_is_under_way(void)
{
    fast_world g;
    trial t;
    fast_world_open_trial(&g, &t, 2, 1000);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    caller_start(&c);
    pccl_engine_stats stats;
    do /* until it is submitted */
        pccl_engine_get_stats(g.w.nodes[0].engine, &stats);
    while (stats.ops_open == 0);
    CHECK(pccl_fast_path_close(g.paths[0]));
    CHECK(!pccl_fast_path_close(g.paths[0]));
    CHECK(caller_join(&c) == PCCL_FAST_PATH_HANDED_OVER);
    CHECK(node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_HANDED_OVER, t.number));
    CHECK(pccl_engine_freeze_op(g.w.nodes[0].engine, t.number) == 0);
    node_wait(&g.w.nodes[0], PCCL_EVENT_OP_FROZEN, t.number);
    trial_abort(&t, &g.w, 0);
    fast_world_close_trial(&g, &t);
}

/* What is asked of another opening, or of none, is not submitted. */
static void a_closed_path_takes_nothing(void)
{
    fast_world g;
    trial t;
    fast_world_open_trial(&g, &t, 2, 10);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    uint64_t next = pccl_fast_path_open(g.paths[0]);
    CHECK(next > c.opening);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    CHECK(c.sequence == 0);
    c.opening = 0;
    pccl_fast_path_close(g.paths[0]);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    c.request.awaits_completion = 0;
    CHECK(caller_run(&c) == PCCL_E_INVALID);
    trial_check_inputs_kept(&t, 0);
    CHECK(g.w.nodes[0].events_count == 0);
    fast_world_close_trial(&g, &t);
}

/* Freezing is a cut, too. */
static void freezing_closes_the_path(void)
{
    fast_world g;
    trial t;
    fast_world_open_trial(&g, &t, 2, 10);
    CHECK(pccl_engine_freeze(g.w.nodes[0].engine, 0, 1) == 0);
    node_wait(&g.w.nodes[0], PCCL_EVENT_GROUP_FROZEN, 1);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    fast_world_close_trial(&g, &t);
}

static void a_mismatch_is_handed_over(void)
{
    fast_world g;
    trial t, other;
    fast_world_open_trial(&g, &t, 2, 10);
    trial_open_small(&other, &g, 11);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    caller_start(&c);
    trial_submit_by_owner(&other, &g, 1);
    CHECK(caller_join(&c) == PCCL_FAST_PATH_HANDED_OVER);
    CHECK(node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_HANDED_OVER, t.number));
    node_wait(&g.w.nodes[0], PCCL_EVENT_OP_MISMATCH, t.number);
    node_wait(&g.w.nodes[1], PCCL_EVENT_OP_MISMATCH, other.number);
    trial_abort(&t, &g.w, 0);
    trial_abort(&other, &g.w, 1);
    trial_close(&t);
    trial_close(&other);
    fast_world_close(&g);
}

/* Openings and closings at any time: each op is either completed, and reported as that, or handed over. */
static void cuts_are_clean(void)
{
    for (int run = 0; run < 400 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        caller callers[2];
        fast_world_open_trial(&g, &t, 2, random_below(500));
        for (uint32_t rank = 0; rank < 2; rank++) {
            callers[rank] = caller_of(&g, &t, rank, random_below(2) ? LONG_WAIT_MS : random_below(2));
            caller_start(&callers[rank]);
        }
        for (volatile uint32_t left = random_below(3000); left > 0; left--)
            ;
        pccl_fast_path_close(g.paths[0]);
        node_collect(&g.w.nodes[0]);
        int is_completed = node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_FAST_COMPLETED, t.number);
        int is_handed_over = node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_HANDED_OVER, t.number);
        int outcome = caller_join(&callers[0]);
        CHECK((outcome == PCCL_FAST_PATH_COMPLETED) == is_completed);
        CHECK((outcome == PCCL_FAST_PATH_HANDED_OVER) == is_handed_over);
        if (outcome == PCCL_FAST_PATH_CLOSED)
            trial_submit_by_owner(&t, &g, 0);
        if (!is_completed)
            trial_leave(&t, &g, 0);
        if (caller_join(&callers[1]) == PCCL_FAST_PATH_HANDED_OVER) {
            node_wait(&g.w.nodes[1], PCCL_EVENT_OP_HANDED_OVER, t.number);
            trial_leave(&t, &g, 1);
        } else {
            CHECK(callers[1].outcome == PCCL_FAST_PATH_COMPLETED);
        }
        trial_check_results(&t);
        fast_world_close_trial(&g, &t);
    }
}

/* The engine may go while somebody waits on its fast path, which outlives it. */
static void paths_outlive_their_engines(void)
{
    for (int run = 0; run < 20 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        fast_world_open_trial(&g, &t, 2, 1000);
        caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
        caller_start(&c);
        if (random_below(2))
            trial_submit_by_owner(&t, &g, 1);
        world_close(&g.w);
        if (caller_join(&c) != PCCL_FAST_PATH_COMPLETED)
            trial_check_inputs_kept(&t, 0);
        CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
        CHECK(pccl_fast_path_open(c.path) == 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            pccl_fast_path_release(g.paths[rank]);
        trial_close(&t);
    }
}

/* The time in ops goes on while one is in flight, and only then; any thread may ask for it, also after the end. */
static void time_in_ops_is_told(void)
{
    fast_world g;
    trial t;
    fast_world_open_trial(&g, &t, 2, 100);
    pccl_fast_path *path = g.paths[0];
    CHECK(pccl_fast_path_in_ops_ns(path, 0) == 0);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    caller_start(&c);
    uint64_t before = 0;
    for (int64_t end_ms = pccl_now_ms() + WAIT_MS; before == 0 && pccl_now_ms() < end_ms;)
        before = pccl_fast_path_in_ops_ns(path, 0);
    CHECK(before > 0);
    CHECK(pccl_fast_path_in_ops_ns(path, 0) > before);
    trial_submit_by_owner(&t, &g, 1);
    trial_leave(&t, &g, 1);
    CHECK(caller_join(&c) == PCCL_FAST_PATH_COMPLETED);
    pccl_engine_stats stats;
    do
        pccl_engine_get_stats(g.w.nodes[0].engine, &stats);
    while (stats.ops_open > 0);
    uint64_t after = pccl_fast_path_in_ops_ns(path, 0);
    CHECK(after > before && after == pccl_fast_path_in_ops_ns(path, 0));
    CHECK(pccl_fast_path_in_ops_ns(path, 1) == 0);
    pccl_engine_get_stats(g.w.nodes[0].engine, &stats);
    CHECK(stats.in_ops_us == after / 1000);
    pccl_op_record record;
    CHECK(pccl_fast_path_get_stats(path, &stats) && stats.in_ops_us == after / 1000);
    CHECK(pccl_fast_path_read_records(path, 0, &record, 1) == 1);
    trial_close(&t);
    world_close(&g.w);
    CHECK(pccl_fast_path_in_ops_ns(path, 0) == 0);
    CHECK(!pccl_fast_path_get_stats(path, &stats));
    CHECK(pccl_fast_path_read_records(path, 0, &record, 1) == 0);
    for (uint32_t rank = 0; rank < 2; rank++)
        pccl_fast_path_release(g.paths[rank]);
}

/* One thread's next calls of calloc wait until they are let go, or for so long. */
static struct {
    pthread_t thread;
    int state; /* atomic: 0: nothing, 1: the thread's calls wait, 2: one of them does, 3: let go, 4: waited in vain */
} slow_memory;

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    int waiting = 1;
    if (__atomic_load_n(&slow_memory.state, __ATOMIC_ACQUIRE) == 1 &&
        pthread_equal(slow_memory.thread, pthread_self()) &&
        __atomic_compare_exchange_n(&slow_memory.state, &waiting, 2, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        int64_t end_ms = now_ms() + 2000;
        while (__atomic_load_n(&slow_memory.state, __ATOMIC_ACQUIRE) == 2 && now_ms() < end_ms)
            poll(NULL, 0, 1);
        waiting = 2;
        __atomic_compare_exchange_n(&slow_memory.state, &waiting, 4, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    return __real_calloc(count, bytes);
}

/* The thread that destroys the engine waits for the caller, which goes on then. */
static int lets_go_by_waiting; /* atomic */

int __real_pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns);
int __wrap_pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns);
int __wrap_pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns)
{
    int waiting = 2;
    if (__atomic_load_n(&lets_go_by_waiting, __ATOMIC_ACQUIRE))
        __atomic_compare_exchange_n(&slow_memory.state, &waiting, 3, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return __real_pccl_cond_wait(cond, mutex, end_ns);
}

static void *caller_main_slowly(void *argument)
{
    slow_memory.thread = pthread_self();
    __atomic_store_n(&slow_memory.state, 1, __ATOMIC_RELEASE);
    return caller_main(argument);
}

/* The owner closes the path, and destroys the engine, while a caller waits for memory: its op is not submitted. */
static void memory_for_an_op_is_taken_beside_the_path(void)
{
    for (int is_destroyed = 0; is_destroyed < 2; is_destroyed++) {
        fast_world g;
        trial t;
        fast_world_open_trial(&g, &t, 2, 100);
        caller c = caller_of(&g, &t, 0, WAIT_MS);
        if (pthread_create(&c.thread, NULL, caller_main_slowly, &c) != 0)
            stop_test("thread");
        while (__atomic_load_n(&slow_memory.state, __ATOMIC_ACQUIRE) != 2)
            poll(NULL, 0, 1);
        CHECK(pccl_fast_path_close(c.path));
        if (is_destroyed) {
            __atomic_store_n(&lets_go_by_waiting, 1, __ATOMIC_RELEASE);
            node_close(&g.w.nodes[0]);
            __atomic_store_n(&lets_go_by_waiting, 0, __ATOMIC_RELEASE);
            CHECK(__atomic_load_n(&slow_memory.state, __ATOMIC_ACQUIRE) == 3);
        } else {
            __atomic_store_n(&slow_memory.state, 3, __ATOMIC_RELEASE);
        }
        pthread_join(c.thread, NULL);
        slow_memory.state = 0;
        CHECK(c.outcome == PCCL_FAST_PATH_CLOSED && c.sequence == g.sequences[0]);
        fast_world_close_trial(&g, &t);
    }
}

/* Any thread may look at an engine while another one destroys it. */
static void *look(void *argument)
{
    pccl_fast_path *path = argument;
    pccl_op_record record;
    pccl_engine_stats stats;
    do
        (void)pccl_fast_path_read_records(path, 0, &record, 1);
    while (pccl_fast_path_get_stats(path, &stats));
    return NULL;
}

static void engines_may_go_while_they_are_looked_at(void)
{
    for (int run = 0; run < 10 * THOROUGHNESS; run++) {
        fast_world g;
        pthread_t thread;
        fast_world_open(&g, 2);
        if (pthread_create(&thread, NULL, look, g.paths[0]) != 0)
            stop_test("thread");
        world_close(&g.w);
        pthread_join(thread, NULL);
        for (uint32_t rank = 0; rank < 2; rank++)
            pccl_fast_path_release(g.paths[rank]);
    }
}

/* A caller that drives the engine does all that is asked of it meanwhile. Whether it drives is chance. */
static void callers_serve_the_owner(void)
{
    enum { OPS = 50 };
    fast_world g;
    fast_world_open(&g, 2);
    for (int i = 0; i < OPS * THOROUGHNESS; i++) {
        trial t;
        caller callers[2];
        trial_open_small(&t, &g, random_below(3000));
        for (uint32_t rank = 0; rank < 2; rank++)
            callers[rank] = caller_of(&g, &t, rank, LONG_WAIT_MS);
        caller_start(&callers[0]);
        if (random_below(2)) { /* nothing comes of its op before this is answered */
            CHECK(pccl_engine_request_link_metrics(g.w.nodes[0].engine, callers[0].request.link_next) == 0);
            node_wait(&g.w.nodes[0], PCCL_EVENT_LINK_METRICS, callers[0].request.link_next);
        }
        caller_start(&callers[1]);
        for (uint32_t rank = 0; rank < 2; rank++) {
            CHECK(caller_join(&callers[rank]) == PCCL_FAST_PATH_COMPLETED);
            g.sequences[rank]++;
        }
        trial_check_results(&t);
        trial_close(&t);
    }
    fast_world_close(&g);
}

/* Several callers at once: one of them drives at most, and leaves nothing behind for which the others wait. */
static void callers_take_turns(void)
{
    enum { AT_ONCE = 3, ROUNDS = 30 };
    fast_world g;
    fast_world_open(&g, 2);
    for (int round = 0; round < ROUNDS * THOROUGHNESS; round++) {
        trial trials[AT_ONCE];
        caller callers[AT_ONCE][2];
        for (int i = 0; i < AT_ONCE; i++) {
            trial_open_small(&trials[i], &g, random_below(2000));
            for (uint32_t rank = 0; rank < 2; rank++) {
                callers[i][rank] = caller_of(&g, &trials[i], rank, LONG_WAIT_MS);
                callers[i][rank].request.key.tag = (uint64_t)i;
                callers[i][rank].sequence = (uint64_t)round;
            }
        }
        for (int i = 0; i < AT_ONCE; i++)
            caller_start(&callers[i][0]);
        for (int i = AT_ONCE - 1; i >= 0; i--)
            caller_start(&callers[i][1]);
        for (int i = 0; i < AT_ONCE; i++) {
            for (uint32_t rank = 0; rank < 2; rank++)
                CHECK(caller_join(&callers[i][rank]) == PCCL_FAST_PATH_COMPLETED);
            trial_check_results(&trials[i]);
            trial_close(&trials[i]);
        }
    }
    fast_world_close(&g);
}

static pccl_fast_path_call *start_call(fast_world *g, const trial *t, uint32_t rank, uint32_t wait_ms)
{
    caller c = caller_of(g, t, rank, wait_ms);
    pccl_fast_path_call *call = NULL;
    CHECK(pccl_fast_path_start(c.path, c.opening, &c.request, &c.sequence, wait_ms, &call) == 0);
    CHECK(c.sequence == ++g->sequences[rank]);
    return call;
}

/* One thread starts ops on all ranks, and waits for them in any order. */
static void started_ops_are_waited_for(void)
{
    for (int run = 0; run < 60 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        pccl_fast_path_call *calls[WORLD_RANKS_MAX];
        uint32_t size = 2 + random_below(3);
        fast_world_open(&g, size);
        for (int i = 0; i < 5; i++) {
            trial_open_small(&t, &g, random_below(30000));
            for (uint32_t rank = 0; rank < size; rank++)
                calls[rank] = start_call(&g, &t, rank, LONG_WAIT_MS);
            uint32_t first = random_below(size);
            for (uint32_t k = 0; k < size; k++) {
                uint32_t rank = (first + k) % size;
                pccl_fast_path_result result;
                CHECK(pccl_fast_path_wait(g.paths[rank], calls[rank], &result) == PCCL_FAST_PATH_COMPLETED);
                CHECK(pccl_fast_path_wait(g.paths[rank], calls[rank], &result) == PCCL_FAST_PATH_COMPLETED);
                pccl_fast_path_forget(g.paths[rank], calls[rank]);
            }
            trial_check_results(&t);
            for (uint32_t rank = 0; rank < size; rank++) {
                node_collect(&g.w.nodes[rank]);
                CHECK(node_has_event(&g.w.nodes[rank], PCCL_EVENT_OP_FAST_COMPLETED, t.number));
            }
            trial_close(&t);
        }
        fast_world_close(&g);
    }
}

/* Where nobody waits the owner is woken, be it in the end. */
static void started_ops_end_without_anybody(void)
{
    for (int run = 0; run < 60 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        fast_world_open_trial(&g, &t, 2, random_below(30000));
        for (uint32_t rank = 0; rank < 2; rank++) {
            pccl_fast_path_call *call = start_call(&g, &t, rank, LONG_WAIT_MS);
            pccl_fast_path_forget(g.paths[rank], call);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            CHECK(node_wait(&g.w.nodes[rank], PCCL_EVENT_OP_FAST_COMPLETED, t.number).sequence == 0);
        trial_check_results(&t);
        fast_world_close_trial(&g, &t);
    }
}

/* A caller that drives completes others' ops, too. Who has started these may never ask: then the owner is woken. */
static void what_a_waiting_caller_completes_is_not_forgotten(void)
{
    for (int run = 0; run < 60 * THOROUGHNESS; run++) {
        fast_world g;
        trial asked, unasked;
        fast_world_open(&g, 2);
        trial_open_small(&asked, &g, random_below(3000));
        trial_open_small(&unasked, &g, random_below(3000));
        const trial *trials[] = {&asked, &unasked};
        pccl_fast_path_call *calls[2][2];
        for (uint32_t rank = 0; rank < 2; rank++)
            for (int i = 0; i < 2; i++)
                calls[rank][i] = start_call(&g, trials[i], rank, LONG_WAIT_MS);
        pccl_fast_path_result result;
        for (uint32_t rank = 0; rank < 2; rank++)
            CHECK(pccl_fast_path_wait(g.paths[rank], calls[rank][0], &result) == PCCL_FAST_PATH_COMPLETED);
        for (uint32_t rank = 0; rank < 2; rank++) {
            CHECK(node_wait(&g.w.nodes[rank], PCCL_EVENT_OP_FAST_COMPLETED, unasked.number).sequence == 1);
            for (int i = 0; i < 2; i++)
                pccl_fast_path_forget(g.paths[rank], calls[rank][i]);
        }
        trial_check_results(&asked);
        trial_check_results(&unasked);
        trial_close(&asked);
        trial_close(&unasked);
        fast_world_close(&g);
    }
}

/* What takes longer is the owner's, whether or not its caller waits. */
static void started_ops_are_handed_over(void)
{
    for (int run = 0; run < 20 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        fast_world_open_trial(&g, &t, 2, 1 + random_below(30000));
        int is_closed = (int)random_below(2);
        pccl_fast_path_call *call = start_call(&g, &t, 0, is_closed ? LONG_WAIT_MS : random_below(10));
        pccl_fast_path_result result;
        if (is_closed)
            pccl_fast_path_close(g.paths[0]);
        if (random_below(2))
            CHECK(pccl_fast_path_wait(g.paths[0], call, &result) == PCCL_FAST_PATH_HANDED_OVER);
        node_wait(&g.w.nodes[0], PCCL_EVENT_OP_HANDED_OVER, t.number);
        CHECK(pccl_fast_path_wait(g.paths[0], call, &result) == PCCL_FAST_PATH_HANDED_OVER);
        pccl_fast_path_forget(g.paths[0], call);
        if (random_below(2)) {
            trial_submit_by_owner(&t, &g, 1);
            trial_leave(&t, &g, 0);
            trial_leave(&t, &g, 1);
            trial_check_results(&t);
        } else {
            CHECK(pccl_engine_freeze_op(g.w.nodes[0].engine, t.number) == 0);
            node_wait(&g.w.nodes[0], PCCL_EVENT_OP_FROZEN, t.number);
            trial_abort(&t, &g.w, 0);
        }
        fast_world_close_trial(&g, &t);
    }
}

/* The engine goes while a call is started, and perhaps waited for. */
static void started_calls_outlive_their_engines(void)
{
    for (int run = 0; run < 20 * THOROUGHNESS; run++) {
        fast_world g;
        trial t;
        fast_world_open_trial(&g, &t, 2, 1000);
        pccl_fast_path_call *call = start_call(&g, &t, 0, LONG_WAIT_MS);
        int is_forgotten = (int)random_below(2);
        if (is_forgotten)
            pccl_fast_path_forget(g.paths[0], call);
        world_close(&g.w);
        trial_check_inputs_kept(&t, 0);
        pccl_fast_path_result result;
        if (!is_forgotten) {
            CHECK(pccl_fast_path_wait(g.paths[0], call, &result) == PCCL_FAST_PATH_HANDED_OVER);
            pccl_fast_path_forget(g.paths[0], call);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            pccl_fast_path_release(g.paths[rank]);
        trial_close(&t);
    }
}

int main(void)
{
    RUN(started_ops_are_waited_for);
    RUN(started_ops_end_without_anybody);
    RUN(what_a_waiting_caller_completes_is_not_forgotten);
    RUN(started_ops_are_handed_over);
    RUN(started_calls_outlive_their_engines);
    RUN(callers_serve_the_owner);
    RUN(callers_take_turns);
    RUN(time_in_ops_is_told);
    RUN(memory_for_an_op_is_taken_beside_the_path);
    RUN(engines_may_go_while_they_are_looked_at);
    RUN(callers_are_completed);
    RUN(callers_and_owners_share_ops);
    RUN(a_long_op_is_handed_over);
    RUN(closing_hands_over_what_is_under_way);
    RUN(a_closed_path_takes_nothing);
    RUN(freezing_closes_the_path);
    RUN(a_mismatch_is_handed_over);
    RUN(cuts_are_clean);
    RUN(paths_outlive_their_engines);
    return check_summary();
}
