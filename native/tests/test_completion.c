/* Mutual completion: once an op is complete for a rank, it may take its buffers back at once, whatever the others
 * know. */
#include "trial.h"

#include "proxy.h"

enum { STALL_MS = 60000 };

/* One that is committed by mutual completion. */
static void trial_open_completing(trial *t, const pccl_op_shape *shape, int in_place)
{
    next_number += !op_awaits_completion(next_number);
    trial_open(t, shape, in_place);
}

/* Without a word before the completion; whoever hears of it ends the op, whatever the others have heard. */
static void trial_leave(const trial *t, world *w, uint32_t rank)
{
    node_wait(&w->nodes[rank], PCCL_EVENT_OP_COMPLETED, t->number);
    CHECK(node_has_event(&w->nodes[rank], PCCL_EVENT_OP_DONE, t->number));
    CHECK(pccl_engine_end(w->nodes[rank].engine, t->number, PCCL_COMMIT_BY_ALL) == 0);
}

static void trial_leave_all(const trial *t, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        trial_leave(t, w, rank);
}

static void trial_abort_incomplete(const trial *t, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++) {
        CHECK(!node_has_event(&w->nodes[rank], PCCL_EVENT_OP_COMPLETED, t->number));
        trial_abort(t, w, rank);
    }
}

/* One op with mutual completion, in a world of its own. */
typedef struct {
    world w;
    trial t;
} completing;

static void completing_open(completing *a, uint32_t size, unsigned connections, uint64_t count)
{
    world_open(&a->w, size, connections, 1, 0);
    pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 512, size);
    trial_open_completing(&a->t, &shape, 1);
}

static void completing_close(completing *a)
{
    trial_close(&a->t);
    world_close(&a->w);
}

static void completing_leave_and_close(completing *a)
{
    trial_leave_all(&a->t, &a->w);
    trial_check_results(&a->t);
    completing_close(a);
}

static void all_are_told_once_all_are_done(void)
{
    for (uint32_t size = 2; size <= 5; size++) {
        completing a;
        completing_open(&a, size, 1, 1000);
        for (uint32_t rank = size; rank-- > 0;)
            trial_submit(&a.t, &a.w, rank);
        trial_leave_all(&a.t, &a.w);
        for (uint32_t rank = 0; rank < size; rank++)
            CHECK(!node_has_event(&a.w.nodes[rank], PCCL_EVENT_OP_COMPLETED, a.t.number));
        trial_check_results(&a.t);
        completing_close(&a);
    }
}

/* Whoever has stopped it before the last rank came keeps all from completing it, and each may have it aborted. */
static void a_frozen_op_is_never_complete(void)
{
    for (uint32_t size = 2; size <= 4; size++) {
        completing a;
        trial other;
        completing_open(&a, size, 2, 1000);
        trial_open_completing(&other, &a.t.shape, 1);
        for (uint32_t rank = 0; rank + 1 < size; rank++)
            trial_submit(&a.t, &a.w, rank);
        CHECK(pccl_engine_freeze_op(a.w.nodes[0].engine, a.t.number) == 0);
        node_wait(&a.w.nodes[0], PCCL_EVENT_OP_FROZEN, a.t.number);
        trial_submit(&a.t, &a.w, size - 1);
        trial_submit_all(&other, &a.w);
        trial_leave_all(&other, &a.w);
        trial_check_results(&other);
        trial_close(&other);
        CHECK(!node_has_event(&a.w.nodes[0], PCCL_EVENT_OP_DONE, a.t.number));
        trial_abort_incomplete(&a.t, &a.w);
        completing_close(&a);
    }
}

/* Nor is there a word of an op that is not there. */
static void freezing_what_has_ended_says_nothing(void)
{
    completing a;
    completing_open(&a, 2, 1, 10);
    for (int i = 0; i < 2; i++) {
        trial t;
        trial_open_completing(&t, &a.t.shape, 1);
        trial_submit_all(&t, &a.w);
        for (uint32_t rank = 0; rank < 2; rank++) {
            trial_leave(&t, &a.w, rank);
            CHECK(pccl_engine_freeze_op(a.w.nodes[rank].engine, t.number) == 0);
            CHECK(!node_has_event(&a.w.nodes[rank], PCCL_EVENT_OP_FROZEN, t.number));
        }
        trial_close(&t);
    }
    completing_close(&a);
}

/* Complete, and aborted all the same: the owner decides. */
static void a_complete_op_can_be_aborted(void)
{
    completing a;
    completing_open(&a, 3, 1, 1000);
    trial_submit_all(&a.t, &a.w);
    for (uint32_t rank = 0; rank < 3; rank++)
        node_wait(&a.w.nodes[rank], PCCL_EVENT_OP_COMPLETED, a.t.number);
    for (uint32_t rank = 0; rank < 3; rank++)
        trial_abort(&a.t, &a.w, rank);
    completing_close(&a);
}

static void epochs_that_are_frozen_complete_no_more(void)
{
    completing a;
    completing_open(&a, 2, 1, 10);
    for (uint32_t rank = 0; rank < 2; rank++) {
        trial_submit(&a.t, &a.w, rank);
        CHECK(pccl_engine_freeze(a.w.nodes[rank].engine, 0, 1) == 0);
        node_wait(&a.w.nodes[rank], PCCL_EVENT_GROUP_FROZEN, 1);
    }
    trial_abort_incomplete(&a.t, &a.w);
    completing_close(&a);
}

/* What has to say so may itself be lost with a connection, of ops that have long ended where it comes from. */
static void completions_survive_lost_connections(void)
{
    for (int run = 0; run < RUNS(40); run++) {
        enum { OPS = 30 };
        proxied p;
        static trial trials[OPS];
        uint32_t size = 2 + random_below(3);
        proxied_open(&p, size, 2, (int)random_below(2), STALL_MS);
        /* The second of each link: the first may break before the engine has been told of the second. */
        for (unsigned i = 2; i < p.pumps_count; i += 4)
            set_deadly_fault(&p.pumps[i + random_below(2)], 6000);
        proxied_start(&p);
        for (int i = 0; i < OPS; i++) {
            pccl_op_shape shape = plain_shape(random_below(60), PCCL_FLOAT32, PCCL_SUM, 256, size);
            trial_open_completing(&trials[i], &shape, (int)random_below(2));
            trial_submit_all(&trials[i], &p.w);
            for (uint32_t k = 0; i >= 5 && k < size; k++)
                trial_leave(&trials[i - 5], &p.w, ((uint32_t)i + k) % size);
        }
        for (int i = OPS - 5; i < OPS; i++)
            trial_leave_all(&trials[i], &p.w);
        for (int i = 0; i < OPS; i++) {
            trial_check_results(&trials[i]);
            trial_close(&trials[i]);
        }
        proxied_close(&p);
    }
}

/* Engines go while they have something to say, of ops that are there and of ops that are not. */
static void engines_may_go_at_any_time(void)
{
    for (int run = 0; run < RUNS(20); run++) {
        enum { OPS = 20 };
        static trial trials[OPS];
        world w;
        world_open(&w, 3, 1 + (unsigned)run % 2, 1, 0);
        for (int i = 0; i < OPS; i++) {
            pccl_op_shape shape = plain_shape(random_below(2000), PCCL_FLOAT32, PCCL_SUM, 256, 3);
            trial_open_completing(&trials[i], &shape, 1);
            trial_submit_all(&trials[i], &w);
        }
        for (int i = 0; i < (int)random_below(OPS); i++)
            trial_leave(&trials[i], &w, random_below(3));
        world_close(&w);
        for (int i = 0; i < OPS; i++)
            trial_close(&trials[i]);
    }
}

static void completion_needs_links_to_all(void)
{
    completing a;
    completing_open(&a, 3, 1, 10);
    pccl_op_request request = trial_request(&a.t, &a.w, 0);
    request.rank_links = NULL;
    CHECK(pccl_engine_submit(a.w.nodes[0].engine, &request) == PCCL_E_INVALID);
    request = trial_request(&a.t, &a.w, 0);
    request.awaits_completion = 2;
    CHECK(pccl_engine_submit(a.w.nodes[0].engine, &request) == PCCL_E_INVALID);
    completing_close(&a);
}

/* Two know each other's link without a list of all. */
static void two_need_no_list(void)
{
    completing a;
    completing_open(&a, 2, 1, 10);
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_op_request request = trial_request(&a.t, &a.w, rank);
        request.rank_links = NULL;
        CHECK(pccl_engine_submit(a.w.nodes[rank].engine, &request) == 0);
    }
    completing_leave_and_close(&a);
}

/* A rank that is no neighbour in the ring has announced another op by its name, before and after it was submitted. */
static void other_ops_of_ranks_far_away_are_noticed(void)
{
    for (int is_before = 0; is_before < 2; is_before++) {
        completing a;
        trial other;
        completing_open(&a, 4, 1, 1000);
        pccl_op_shape empty = plain_shape(0, PCCL_UINT8, PCCL_SUM, 4096, 4);
        trial_open_completing(&other, &empty, 1);
        pccl_op_request announcing = trial_request(&other, &a.w, 0);
        announcing.key = trial_request(&a.t, &a.w, 0).key;
        if (!is_before)
            trial_submit(&a.t, &a.w, 2);
        CHECK(pccl_engine_submit(a.w.nodes[0].engine, &announcing) == 0);
        if (is_before) {
            trial passing; /* whose DONE comes later on the same connection */
            trial_open_completing(&passing, &a.t.shape, 1);
            trial_submit_all(&passing, &a.w);
            trial_leave_all(&passing, &a.w);
            trial_close(&passing);
            trial_submit(&a.t, &a.w, 2);
        }
        pccl_event event = node_wait(&a.w.nodes[2], PCCL_EVENT_OP_MISMATCH, a.t.number);
        CHECK(event.link == link_number(0, 2) && event.theirs.count == 0 && event.mine.count == 1000);
        trial_abort(&a.t, &a.w, 2);
        CHECK(pccl_engine_end(a.w.nodes[0].engine, other.number, PCCL_ABORT) == 0);
        node_wait(&a.w.nodes[0], PCCL_EVENT_OP_ENDED, other.number);
        trial_close(&other);
        completing_close(&a);
    }
}

/* Links may come after the ops that use them. */
static void links_may_come_late(void)
{
    completing a;
    completing_open(&a, 3, 0, 1000);
    world_link(&a.w, 0, 1, 1);
    world_link(&a.w, 1, 2, 1);
    trial_submit_all(&a.t, &a.w);
    world_link(&a.w, 0, 2, 1);
    completing_leave_and_close(&a);
}

int main(void)
{
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        RUN(all_are_told_once_all_are_done);
        RUN(a_frozen_op_is_never_complete);
        RUN(freezing_what_has_ended_says_nothing);
        RUN(a_complete_op_can_be_aborted);
        RUN(epochs_that_are_frozen_complete_no_more);
        RUN(completions_survive_lost_connections);
        RUN(engines_may_go_at_any_time);
        RUN(links_may_come_late);
    }
    tested_algorithm = PCCL_RING;
    RUN(completion_needs_links_to_all);
    RUN(two_need_no_list);
    RUN(other_ops_of_ranks_far_away_are_noticed);
    return check_summary();
}
