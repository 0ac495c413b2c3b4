/* Ops that their callers run by themselves: who is told what, and what the owner of the events finds. */
#include "trial.h"

#include <pthread.h>

enum { NO_WAIT_MS = 0, LONG_WAIT_MS = WAIT_MS };

/* One call of pccl_fast_path_run, in a thread of its own. */
typedef struct {
    pccl_fast_path *gate;
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
    c->outcome = pccl_fast_path_run(c->gate, c->opening, &c->request, &c->sequence, c->wait_ms, &c->result);
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

/* A world whose ranks all have their gates open. */
typedef struct {
    world w;
    pccl_fast_path *gates[WORLD_RANKS_MAX];
    uint64_t openings[WORLD_RANKS_MAX];
    uint64_t sequences[WORLD_RANKS_MAX];
} gated;

static void gated_open(gated *g, uint32_t size)
{
    memset(g, 0, sizeof *g);
    world_open(&g->w, size, 1, 1, 0);
    for (uint32_t rank = 0; rank < size; rank++) {
        g->gates[rank] = pccl_engine_fast_path(g->w.nodes[rank].engine);
        g->openings[rank] = pccl_fast_path_open(g->gates[rank]);
        CHECK(g->openings[rank] > 0);
    }
}

static void gated_close(gated *g)
{
    for (uint32_t rank = 0; rank < g->w.size; rank++)
        pccl_fast_path_release(g->gates[rank]);
    world_close(&g->w);
}

static caller caller_of(gated *g, const trial *t, uint32_t rank, uint32_t wait_ms)
{
    caller c;
    memset(&c, 0, sizeof c);
    c.gate = g->gates[rank];
    c.opening = g->openings[rank];
    c.request = trial_request(t, &g->w, rank);
    c.request.awaits_completion = 1;
    c.sequence = g->sequences[rank];
    c.wait_ms = wait_ms;
    return c;
}

static void trial_open_small(trial *t, const gated *g, uint64_t count)
{
    pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 512, g->w.size);
    shape.algorithm = PCCL_DIRECT;
    trial_open(t, &shape, (int)random_below(2));
}

/* A world with one op that nobody has submitted. */
static void gated_open_trial(gated *g, trial *t, uint32_t size, uint64_t count)
{
    gated_open(g, size);
    trial_open_small(t, g, count);
}

static void gated_close_trial(gated *g, trial *t)
{
    trial_close(t);
    gated_close(g);
}

/* Submitted as the gate would have it, by the owner. */
static void trial_submit_agreed(const trial *t, gated *g, uint32_t rank)
{
    pccl_op_request request = trial_request(t, &g->w, rank);
    request.awaits_completion = 1;
    request.key.sequence = g->sequences[rank];
    CHECK(pccl_engine_submit(g->w.nodes[rank].engine, &request) == 0);
}

static void trial_leave(const trial *t, gated *g, uint32_t rank)
{
    node_wait(&g->w.nodes[rank], PCCL_EVENT_OP_COMPLETED, t->number);
    CHECK(node_has_event(&g->w.nodes[rank], PCCL_EVENT_OP_DONE, t->number));
    CHECK(pccl_engine_end(g->w.nodes[rank].engine, t->number, PCCL_COMMIT_BY_ALL) == 0);
}

static int is_silent(gated *g, uint32_t rank)
{
    struct pollfd pfd = {.fd = pccl_engine_event_fd(g->w.nodes[rank].engine), .events = POLLIN};
    return poll(&pfd, 1, 0) == 0;
}

/* All are told, and no owner is woken; it finds one event of each op, in order. */
static void callers_are_told(void)
{
    for (uint32_t size = 2; size <= 4; size++) {
        enum { OPS = 20 };
        trial trials[OPS];
        gated g;
        gated_open(&g, size);
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
                CHECK(node_take_collected(&g.w.nodes[rank], PCCL_EVENT_OP_RAN, trials[i].number, &ran));
                CHECK(ran.sequence == (uint64_t)i);
            }
            CHECK(g.w.nodes[rank].events_count == 0);
        }
        for (int i = 0; i < OPS; i++)
            trial_close(&trials[i]);
        gated_close(&g);
    }
}

/* What others submit meets what comes through a gate. Many that nobody hears of are said aloud in the end. */
static void gates_and_owners_meet(void)
{
    enum { OPS = 200 };
    gated g;
    gated_open(&g, 2);
    for (int i = 0; i < OPS; i++) {
        trial t;
        trial_open_small(&t, &g, 100);
        caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
        caller_start(&c);
        trial_submit_agreed(&t, &g, 1);
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
    gated_close(&g);
}

/* One that takes longer than its caller waits is the owner's, as if it had submitted it. */
static void a_long_op_is_shown(void)
{
    gated g;
    trial t;
    gated_open_trial(&g, &t, 3, 1000);
    for (uint32_t rank = 0; rank < 2; rank++) {
        caller c = caller_of(&g, &t, rank, NO_WAIT_MS);
        CHECK(caller_run(&c) == PCCL_FAST_PATH_HANDED_OVER);
        CHECK(c.sequence == 1);
        CHECK(node_wait(&g.w.nodes[rank], PCCL_EVENT_OP_STARTED, t.number).sequence == 0);
        CHECK(!node_has_event(&g.w.nodes[rank], PCCL_EVENT_OP_DONE, t.number));
    }
    trial_submit_agreed(&t, &g, 2);
    for (uint32_t rank = 0; rank < 3; rank++)
        trial_leave(&t, &g, rank);
    trial_check_results(&t);
    gated_close_trial(&g, &t);
}

/* After the cut nobody is told: who is done with it and who is not finds that among the events. */
static void closing_shows_what_is_under_way(void)
{
    gated g;
    trial t;
    gated_open_trial(&g, &t, 2, 1000);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    caller_start(&c);
    pccl_engine_stats stats;
    do /* until it is submitted */
        pccl_engine_get_stats(g.w.nodes[0].engine, &stats);
    while (stats.ops_open == 0);
    CHECK(pccl_fast_path_close(g.gates[0]));
    CHECK(!pccl_fast_path_close(g.gates[0]));
    CHECK(caller_join(&c) == PCCL_FAST_PATH_HANDED_OVER);
    CHECK(node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_STARTED, t.number));
    CHECK(pccl_engine_freeze_op(g.w.nodes[0].engine, t.number) == 0);
    node_wait(&g.w.nodes[0], PCCL_EVENT_OP_FROZEN, t.number);
    trial_abort(&t, &g.w, 0);
    gated_close_trial(&g, &t);
}

/* What is asked of another opening, or of none, is not submitted. */
static void closed_gates_take_nothing(void)
{
    gated g;
    trial t;
    gated_open_trial(&g, &t, 2, 10);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    uint64_t next = pccl_fast_path_open(g.gates[0]);
    CHECK(next > c.opening);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    CHECK(c.sequence == 0);
    c.opening = 0;
    pccl_fast_path_close(g.gates[0]);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    c.request.awaits_completion = 0;
    CHECK(caller_run(&c) == PCCL_E_INVALID);
    trial_check_inputs_kept(&t, 0);
    CHECK(g.w.nodes[0].events_count == 0);
    gated_close_trial(&g, &t);
}

/* Freezing is a cut, too. */
static void freezing_closes_the_gate(void)
{
    gated g;
    trial t;
    gated_open_trial(&g, &t, 2, 10);
    CHECK(pccl_engine_freeze(g.w.nodes[0].engine, 0, 1) == 0);
    node_wait(&g.w.nodes[0], PCCL_EVENT_GROUP_FROZEN, 1);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
    gated_close_trial(&g, &t);
}

static void a_mismatch_shows_its_op(void)
{
    gated g;
    trial t, other;
    gated_open_trial(&g, &t, 2, 10);
    trial_open_small(&other, &g, 11);
    caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
    caller_start(&c);
    trial_submit_agreed(&other, &g, 1);
    CHECK(caller_join(&c) == PCCL_FAST_PATH_HANDED_OVER);
    CHECK(node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_STARTED, t.number));
    node_wait(&g.w.nodes[0], PCCL_EVENT_OP_MISMATCH, t.number);
    node_wait(&g.w.nodes[1], PCCL_EVENT_OP_MISMATCH, other.number);
    trial_abort(&t, &g.w, 0);
    trial_abort(&other, &g.w, 1);
    trial_close(&t);
    trial_close(&other);
    gated_close(&g);
}

/* Openings and closings at any time: each op is either told, and heard of as that, or shown. */
static void cuts_are_clean(void)
{
    for (int run = 0; run < 400 * THOROUGHNESS; run++) {
        gated g;
        trial t;
        caller callers[2];
        gated_open_trial(&g, &t, 2, random_below(500));
        for (uint32_t rank = 0; rank < 2; rank++) {
            callers[rank] = caller_of(&g, &t, rank, random_below(2) ? LONG_WAIT_MS : random_below(2));
            caller_start(&callers[rank]);
        }
        for (volatile uint32_t left = random_below(3000); left > 0; left--)
            ;
        pccl_fast_path_close(g.gates[0]);
        node_collect(&g.w.nodes[0]);
        int is_ran = node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_RAN, t.number);
        int is_shown = node_has_event(&g.w.nodes[0], PCCL_EVENT_OP_STARTED, t.number);
        int outcome = caller_join(&callers[0]);
        CHECK((outcome == PCCL_FAST_PATH_COMPLETED) == is_ran);
        CHECK((outcome == PCCL_FAST_PATH_HANDED_OVER) == is_shown);
        if (outcome == PCCL_FAST_PATH_CLOSED)
            trial_submit_agreed(&t, &g, 0);
        if (!is_ran)
            trial_leave(&t, &g, 0);
        if (caller_join(&callers[1]) == PCCL_FAST_PATH_HANDED_OVER) {
            node_wait(&g.w.nodes[1], PCCL_EVENT_OP_STARTED, t.number);
            trial_leave(&t, &g, 1);
        } else {
            CHECK(callers[1].outcome == PCCL_FAST_PATH_COMPLETED);
        }
        trial_check_results(&t);
        gated_close_trial(&g, &t);
    }
}

/* The engine may go while somebody waits in its gate, which outlives it. */
static void gates_outlive_their_engines(void)
{
    for (int run = 0; run < 20 * THOROUGHNESS; run++) {
        gated g;
        trial t;
        gated_open_trial(&g, &t, 2, 1000);
        caller c = caller_of(&g, &t, 0, LONG_WAIT_MS);
        caller_start(&c);
        if (random_below(2))
            trial_submit_agreed(&t, &g, 1);
        world_close(&g.w);
        if (caller_join(&c) != PCCL_FAST_PATH_COMPLETED)
            trial_check_inputs_kept(&t, 0);
        CHECK(caller_run(&c) == PCCL_FAST_PATH_CLOSED);
        CHECK(pccl_fast_path_open(c.gate) == 0);
        for (uint32_t rank = 0; rank < 2; rank++)
            pccl_fast_path_release(g.gates[rank]);
        trial_close(&t);
    }
}

int main(void)
{
    RUN(callers_are_told);
    RUN(gates_and_owners_meet);
    RUN(a_long_op_is_shown);
    RUN(closing_shows_what_is_under_way);
    RUN(closed_gates_take_nothing);
    RUN(freezing_closes_the_gate);
    RUN(a_mismatch_shows_its_op);
    RUN(cuts_are_clean);
    RUN(gates_outlive_their_engines);
    return check_summary();
}
