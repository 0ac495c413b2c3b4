/* Ranks that tell each other when they are done: whoever is told that all are may take its buffers back at once. */
#include "trial.h"

#include "proxy.h"

enum { STALL_MS = 60000 };

/* Of those that agree. */
static void trial_open_agreed(trial *t, const pccl_op_shape *shape, int in_place)
{
    next_number += !ranks_agree(next_number);
    trial_open(t, shape, in_place);
}

static int has_event(node *n, uint32_t kind, uint64_t id)
{
    pccl_event event;
    node_collect(n);
    return node_take_collected(n, kind, id, &event);
}

/* Without a word before the agreement; whoever hears of it ends the op, whatever the others have heard. */
static void trial_leave(const trial *t, world *w, uint32_t rank)
{
    node_wait(&w->nodes[rank], PCCL_EVENT_OP_AGREED, t->number);
    CHECK(has_event(&w->nodes[rank], PCCL_EVENT_OP_DONE, t->number));
    CHECK(pccl_engine_end(w->nodes[rank].engine, t->number, PCCL_COMMIT_BY_ALL) == 0);
}

static void all_are_told_once_all_are_done(void)
{
    for (uint32_t size = 2; size <= 5; size++) {
        world w;
        trial t;
        world_open(&w, size, 1, 1, 0);
        pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 512, size);
        trial_open_agreed(&t, &shape, 1);
        for (uint32_t rank = 1; rank < size; rank++)
            trial_submit(&t, &w, rank);
        trial_submit(&t, &w, 0);
        for (uint32_t rank = 0; rank < size; rank++)
            trial_leave(&t, &w, rank);
        trial_check_results(&t);
        for (uint32_t rank = 0; rank < size; rank++)
            CHECK(!has_event(&w.nodes[rank], PCCL_EVENT_OP_AGREED, t.number));
        trial_close(&t);
        world_close(&w);
    }
}

/* Whoever has stopped it before the last rank came keeps all from agreeing, and each may have it aborted. */
static void a_frozen_op_is_not_agreed_on(void)
{
    for (uint32_t size = 2; size <= 4; size++) {
        world w;
        trial t, other;
        world_open(&w, size, 2, 1, 0);
        pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 512, size);
        trial_open_agreed(&t, &shape, 1);
        trial_open_agreed(&other, &shape, 1);
        for (uint32_t rank = 0; rank + 1 < size; rank++)
            trial_submit(&t, &w, rank);
        CHECK(pccl_engine_freeze_op(w.nodes[0].engine, t.number) == 0);
        node_wait(&w.nodes[0], PCCL_EVENT_OP_FROZEN, t.number);
        trial_submit(&t, &w, size - 1);
        trial_submit_all(&other, &w);
        for (uint32_t rank = 0; rank < size; rank++)
            trial_leave(&other, &w, rank);
        CHECK(!has_event(&w.nodes[0], PCCL_EVENT_OP_DONE, t.number));
        for (uint32_t rank = 0; rank < size; rank++) {
            CHECK(!has_event(&w.nodes[rank], PCCL_EVENT_OP_AGREED, t.number));
            trial_end(&t, &w, rank, 0);
            trial_check_inputs_kept(&t, rank);
        }
        trial_check_results(&other);
        trial_close(&t);
        trial_close(&other);
        world_close(&w);
    }
}

/* Nor is there a word of an op that is not there. */
static void freezing_what_has_ended_says_nothing(void)
{
    world w;
    trial t;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = plain_shape(10, PCCL_FLOAT32, PCCL_SUM, 512, 2);
    for (int i = 0; i < 2; i++) {
        trial_open_agreed(&t, &shape, 1);
        trial_submit_all(&t, &w);
        for (uint32_t rank = 0; rank < 2; rank++) {
            trial_leave(&t, &w, rank);
            CHECK(pccl_engine_freeze_op(w.nodes[rank].engine, t.number) == 0);
            CHECK(!has_event(&w.nodes[rank], PCCL_EVENT_OP_FROZEN, t.number));
        }
        trial_close(&t);
    }
    world_close(&w);
}

/* Agreed on, and aborted all the same: the caller decides. */
static void an_agreed_op_can_be_aborted(void)
{
    world w;
    trial t;
    world_open(&w, 3, 1, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 512, 3);
    trial_open_agreed(&t, &shape, 1);
    trial_submit_all(&t, &w);
    for (uint32_t rank = 0; rank < 3; rank++)
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_AGREED, t.number);
    for (uint32_t rank = 0; rank < 3; rank++) {
        trial_end(&t, &w, rank, 0);
        trial_check_inputs_kept(&t, rank);
    }
    trial_close(&t);
    world_close(&w);
}

static void epochs_that_are_frozen_agree_no_more(void)
{
    world w;
    trial t;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = plain_shape(10, PCCL_FLOAT32, PCCL_SUM, 512, 2);
    trial_open_agreed(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    CHECK(pccl_engine_freeze(w.nodes[0].engine, 0, 1) == 0);
    node_wait(&w.nodes[0], PCCL_EVENT_GROUP_FROZEN, 1);
    trial_submit(&t, &w, 1);
    CHECK(pccl_engine_freeze(w.nodes[1].engine, 0, 1) == 0);
    node_wait(&w.nodes[1], PCCL_EVENT_GROUP_FROZEN, 1);
    for (uint32_t rank = 0; rank < 2; rank++) {
        CHECK(!has_event(&w.nodes[rank], PCCL_EVENT_OP_AGREED, t.number));
        trial_end(&t, &w, rank, 0);
        trial_check_inputs_kept(&t, rank);
    }
    trial_close(&t);
    world_close(&w);
}

/* What has to say so may itself be lost with a connection, of ops that have long ended where it comes from. */
static void agreements_survive_lost_connections(void)
{
    static const enum fault deadly[] = {FAULT_CUT, FAULT_RESET, FAULT_FLIP};
    for (int run = 0; run < 40 * THOROUGHNESS; run++) {
        enum { OPS = 30 };
        proxied p;
        static trial trials[OPS];
        uint32_t size = 2 + random_below(3);
        proxied_open(&p, size, 2, (int)random_below(2), STALL_MS);
        /* The second of each link: the first may break before the engine has been told of the second. */
        for (unsigned i = 2; i < p.pumps_count; i += 4)
            set_fault(&p.pumps[i + random_below(2)], deadly[random_below(3)], random_below(6000), random_below(8));
        proxied_start(&p);
        for (int i = 0; i < OPS; i++) {
            pccl_op_shape shape = plain_shape(random_below(60), PCCL_FLOAT32, PCCL_SUM, 256, size);
            trial_open_agreed(&trials[i], &shape, (int)random_below(2));
            trial_submit_all(&trials[i], &p.w);
            for (uint32_t k = 0; i >= 5 && k < size; k++)
                trial_leave(&trials[i - 5], &p.w, ((uint32_t)i + k) % size);
        }
        for (int i = OPS - 5; i < OPS; i++)
            for (uint32_t rank = 0; rank < size; rank++)
                trial_leave(&trials[i], &p.w, rank);
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
    for (int run = 0; run < 20 * THOROUGHNESS; run++) {
        enum { OPS = 20 };
        static trial trials[OPS];
        world w;
        world_open(&w, 3, 1 + (unsigned)run % 2, 1, 0);
        for (int i = 0; i < OPS; i++) {
            pccl_op_shape shape = plain_shape(random_below(2000), PCCL_FLOAT32, PCCL_SUM, 256, 3);
            trial_open_agreed(&trials[i], &shape, 1);
            trial_submit_all(&trials[i], &w);
        }
        for (int i = 0; i < (int)random_below(OPS); i++)
            trial_leave(&trials[i], &w, random_below(3));
        world_close(&w);
        for (int i = 0; i < OPS; i++)
            trial_close(&trials[i]);
    }
}

static void agreement_needs_links_to_all(void)
{
    world w;
    trial t;
    world_open(&w, 3, 1, 1, 0);
    pccl_op_shape shape = plain_shape(10, PCCL_FLOAT32, PCCL_SUM, 512, 3);
    shape.algorithm = PCCL_RING;
    trial_open_agreed(&t, &shape, 1);
    pccl_op_request request = trial_request(&t, &w, 0);
    request.rank_links = NULL;
    CHECK(pccl_engine_submit(w.nodes[0].engine, &request) == PCCL_E_INVALID);
    request = trial_request(&t, &w, 0);
    request.agrees = 2;
    CHECK(pccl_engine_submit(w.nodes[0].engine, &request) == PCCL_E_INVALID);
    trial_close(&t);
    world_close(&w);
}

/* Two know each other's link without a list of all. */
static void two_need_no_list(void)
{
    world w;
    trial t;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = plain_shape(10, PCCL_FLOAT32, PCCL_SUM, 512, 2);
    shape.algorithm = PCCL_RING;
    trial_open_agreed(&t, &shape, 1);
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_op_request request = trial_request(&t, &w, rank);
        request.rank_links = NULL;
        CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        trial_leave(&t, &w, rank);
    trial_check_results(&t);
    trial_close(&t);
    world_close(&w);
}

/* Links may come after the ops that use them. */
static void links_may_come_late(void)
{
    world w;
    trial t;
    world_init(&w, 3);
    for (uint32_t rank = 0; rank < 3; rank++)
        node_open(&w.nodes[rank], 0);
    world_link(&w, 0, 1, 1);
    world_link(&w, 1, 2, 1);
    pccl_op_shape shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 64, 3);
    trial_open_agreed(&t, &shape, 1);
    trial_submit_all(&t, &w);
    world_link(&w, 0, 2, 1);
    for (uint32_t rank = 0; rank < 3; rank++)
        trial_leave(&t, &w, rank);
    trial_check_results(&t);
    trial_close(&t);
    world_close(&w);
}

int main(void)
{
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        RUN(all_are_told_once_all_are_done);
        RUN(a_frozen_op_is_not_agreed_on);
        RUN(freezing_what_has_ended_says_nothing);
        RUN(an_agreed_op_can_be_aborted);
        RUN(epochs_that_are_frozen_agree_no_more);
        RUN(agreements_survive_lost_connections);
        RUN(engines_may_go_at_any_time);
        RUN(links_may_come_late);
    }
    RUN(agreement_needs_links_to_all);
    RUN(two_need_no_list);
    return check_summary();
}
