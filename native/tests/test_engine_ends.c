/* Whole engines in one process: how ops end that do not end well, and links. */
#include "base.h"
#include "check.h"
#include "trial.h"

#include <errno.h>

static void mismatch_is_told_to_both(void)
{
    world w;
    trial t;
    world_open(&w, 2, 2, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 100, 2);
    trial_open(&t, &shape, 1);
    pccl_op_request request = trial_request(&t, &w, 1);
    request.shape.count = 999;
    trial_submit(&t, &w, 0);
    CHECK(pccl_engine_submit(w.nodes[1].engine, &request) == 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_event event = node_wait(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, t.number);
        CHECK(event.mine.count == 1000 - rank && event.theirs.count == 999 + rank);
        CHECK(event.link == link_number(0, 1));
        pccl_event ended = trial_abort(&t, &w, rank);
        CHECK(ended.tx_bytes == 0 && ended.rx_bytes == 0);
    }
    trial_close(&t);
    trial_run(&w, &shape, 1);

    /* No elements here, some there. */
    trial_open(&t, &shape, 1);
    request = trial_request(&t, &w, 1);
    request.shape.count = 0;
    trial_submit(&t, &w, 0);
    CHECK(pccl_engine_submit(w.nodes[1].engine, &request) == 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, t.number);
        trial_end(&t, &w, rank, 0);
    }
    trial_close(&t);
    world_close(&w);
}

static void abort_half_way(int in_place, const pccl_op_shape *shape)
{
    world w;
    trial t;
    world_open(&w, 3, 2, 1, 0);
    trial_open(&t, shape, in_place);
    t.group = 9;
    /* Rank 2 is missing: rank 0 sends its chunk to rank 1, which reduces it and can send nothing on. */
    trial_submit(&t, &w, 0);
    trial_submit(&t, &w, 1);
    uint64_t chunk_bytes = shape->quantization == PCCL_QUANT_NONE ? t.bytes / 3 : t.bytes / 3 / 4;
    wait_for_payload(&w.nodes[1], chunk_bytes);
    CHECK(pccl_engine_freeze(w.nodes[1].engine, 9, 1) == 0);
    node_wait(&w.nodes[1], PCCL_EVENT_GROUP_FROZEN, 1);
    CHECK(memcmp(t.recv[1], t.inputs[1], t.bytes) != 0);
    for (uint32_t rank = 0; rank < 2; rank++)
        trial_abort(&t, &w, rank);
    trial_close(&t);
    pccl_op_shape after = plain_shape(500, PCCL_INT32, PCCL_SUM, 100, 3);
    trial_run(&w, &after, 1);
    world_close(&w);
}

static void abort_restores_inputs(void)
{
    pccl_op_shape shape = plain_shape(30000, PCCL_FLOAT32, PCCL_SUM, 1000, 3);
    abort_half_way(1, &shape);
    abort_half_way(0, &shape);
    shape = quantized_shape(30000, PCCL_SUM, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 3);
    abort_half_way(1, &shape);
}

/* Every rank may be anywhere: ops are aborted at arbitrary moments, some before, some after they are done. */
static void abort_at_any_moment(void)
{
    for (int round = 0; round < 10 * THOROUGHNESS; round++) {
        enum { OPS = 8 };
        static trial trials[OPS];
        world w;
        uint32_t size = 2 + (uint32_t)round % 3;
        world_open(&w, size, 1 + (unsigned)round % 2, round % 2, 0);
        for (int i = 0; i < OPS; i++) {
            int is_small = i % 4 == 1;
            uint32_t count = is_small ? 1 + random_below(5000) : 20000 + random_below(100000);
            pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, is_small ? 1 << 16 : 4000, size);
            if (i % 4 == 3) {
                shape.quantization = PCCL_QUANT_ZERO_POINT_SCALE;
                shape.quantized_dtype = PCCL_INT8;
                shape.quantization_block = 256;
            }
            trial_open(&trials[i], &shape, i % 2);
            trial_submit_all(&trials[i], &w);
        }
        node_wait(&w.nodes[random_below(size)], PCCL_EVENT_OP_DONE, trials[random_below(OPS)].number);
        for (int i = 0; i < OPS; i++) {
            for (uint32_t rank = 0; rank < size; rank++) {
                trial_abort(&trials[i], &w, rank);
                /* From here on they are not the engine's: the address sanitizer watches. */
                if (!trials[i].in_place)
                    free(trials[i].recv[rank]);
                free(trials[i].send[rank]);
                free(trials[i].inputs[rank]);
            }
        }
        pccl_op_shape after = plain_shape(5000, PCCL_FLOAT32, PCCL_SUM, 1000, size);
        trial_run(&w, &after, 0);
        world_close(&w);
    }
}

static void commit_of_an_unfinished_op_aborts(void)
{
    world w;
    trial t;
    world_open(&w, 2, 1, 0, 0);
    pccl_op_shape shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 100, 2);
    trial_open(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    CHECK(trial_end(&t, &w, 0, 1).system_error == EPROTO);
    trial_check_inputs_kept(&t, 0);
    trial_close(&t);
    world_close(&w);
}

static void freeze_stops_a_group(void)
{
    world w;
    trial done, stuck, other, late;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 100, 2);
    trial_open(&done, &shape, 1);
    trial_open(&stuck, &shape, 1);
    trial_open(&other, &shape, 1);
    trial_open(&late, &shape, 1);
    trial_submit_all(&done, &w);
    trial_await_done(&done, &w);
    trial_submit(&stuck, &w, 0);
    other.group = 7;
    trial_submit(&other, &w, 0);

    CHECK(pccl_engine_freeze(w.nodes[0].engine, 0, 1) == 0);
    pccl_event frozen = node_wait(&w.nodes[0], PCCL_EVENT_GROUP_FROZEN, 1);
    CHECK(frozen.group == 0);
    trial_submit(&late, &w, 0);
    trial_submit(&late, &w, 1);
    trial_submit(&stuck, &w, 1);
    trial_submit(&other, &w, 1);

    /* The other group goes on, and so does a later epoch of the frozen one; what follows on the same
     * connection was handled after whatever the frozen ops might have sent. */
    trial_await_done(&other, &w);
    trial after;
    trial_open(&after, &shape, 1);
    after.epoch = 2;
    trial_submit_all(&after, &w);
    trial_await_done(&after, &w);
    for (uint32_t rank = 0; rank < 2; rank++) {
        pccl_event event;
        CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, stuck.number, &event));
        CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, late.number, &event));
    }
    trial_end_all(&stuck, &w, 0);
    trial_end_all(&late, &w, 0);
    for (uint32_t rank = 0; rank < 2; rank++) {
        trial_check_inputs_kept(&stuck, rank);
        trial_check_inputs_kept(&late, rank);
    }
    trial_end_all(&done, &w, 1);
    trial_end_all(&other, &w, 1);
    trial_end_all(&after, &w, 1);
    trial_check_results(&done);
    trial_check_results(&other);
    trial_check_results(&after);
    trial_close(&done);
    trial_close(&stuck);
    trial_close(&other);
    trial_close(&late);
    trial_close(&after);
    world_close(&w);
}

/* Frozen in full flight, on all ranks: what is not done then never will be. */
static void freeze_in_flight(void)
{
    for (int round = 0; round < 5 * THOROUGHNESS; round++) {
        world w;
        trial t;
        world_open(&w, 3, 2, 1, 0);
        pccl_op_shape shape = plain_shape(400000, PCCL_FLOAT32, PCCL_SUM, 8000, 3);
        trial_open(&t, &shape, 1);
        trial_submit_all(&t, &w);
        wait_for_payload(&w.nodes[0], 1 + random_below(300000));
        for (uint32_t rank = 0; rank < 3; rank++)
            CHECK(pccl_engine_freeze(w.nodes[rank].engine, 0, 1) == 0);
        int done[3];
        for (uint32_t rank = 0; rank < 3; rank++) {
            pccl_event event;
            node_wait(&w.nodes[rank], PCCL_EVENT_GROUP_FROZEN, 1);
            done[rank] = node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, t.number, &event);
        }
        int commit = done[0] && done[1] && done[2];
        for (uint32_t rank = 0; rank < 3; rank++) {
            pccl_event event;
            trial_end(&t, &w, rank, commit);
            CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, t.number, &event));
            if (!commit)
                trial_check_inputs_kept(&t, rank);
        }
        if (commit)
            trial_check_results(&t);
        trial_close(&t);
        world_close(&w);
    }
}

static void lost_link_is_told_once(void)
{
    world w;
    trial t;
    world_open(&w, 3, 3, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 100, 3);
    trial_open(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    trial_submit(&t, &w, 1);
    CHECK(pccl_engine_link_close(w.nodes[2].engine, link_number(1, 2)) == 0);
    pccl_event lost = node_wait(&w.nodes[1], PCCL_EVENT_LINK_LOST, link_number(1, 2));
    CHECK(strlen(lost.detail) > 0 && memchr(lost.detail, 0, sizeof lost.detail) != NULL);
    CHECK(pccl_engine_link_close(w.nodes[2].engine, 424242) == 0);
    trial_submit(&t, &w, 2);
    for (uint32_t rank = 0; rank < 3; rank++) {
        pccl_event event;
        trial_abort(&t, &w, rank);
        CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(1, 2), &event));
    }
    pccl_engine_stats stats;
    pccl_engine_get_stats(w.nodes[1].engine, &stats);
    CHECK(stats.connections == 3);
    trial_close(&t);
    world_close(&w);
}

/* A link that was lost is not revived by connections that come late. */
static void lost_link_stays_lost(void)
{
    world w;
    int fds[2];
    char byte;
    world_open(&w, 2, 1, 0, 0);
    CHECK(pccl_engine_link_close(w.nodes[1].engine, link_number(0, 1)) == 0);
    node_wait(&w.nodes[0], PCCL_EVENT_LINK_LOST, link_number(0, 1));
    pair_unix(fds);
    CHECK(pccl_engine_link_add(w.nodes[0].engine, link_number(0, 1), fds[0], NULL) == 0);
    CHECK(read(fds[1], &byte, 1) == 0);
    close(fds[1]);
    world_close(&w);
}

/* Ops may be submitted before their links are there. */
static void links_may_come_late(void)
{
    world w;
    trial t;
    int fds[2];
    world_open(&w, 2, 0, 0, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 100, 2);
    trial_open(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    pair_unix(fds);
    CHECK(pccl_engine_link_add(w.nodes[0].engine, link_number(0, 1), fds[0], NULL) == 0);
    CHECK(pccl_engine_link_add(w.nodes[1].engine, link_number(0, 1), fds[1], NULL) == 0);
    trial_submit(&t, &w, 1);
    trial_commit_all(&t, &w);
    trial_close(&t);
    world_close(&w);
}

static void destroy_restores_open_ops(void)
{
    for (int round = 0; round < 3 * THOROUGHNESS; round++) {
        world w;
        trial t[3];
        world_open(&w, 3, 2, 1, 0);
        for (int i = 0; i < 3; i++) {
            pccl_op_shape shape = plain_shape(100000, PCCL_FLOAT32, PCCL_SUM, 3000, 3);
            trial_open(&t[i], &shape, 1);
            trial_submit_all(&t[i], &w);
        }
        wait_for_payload(&w.nodes[1], random_below(200000));
        world_close(&w);
        for (int i = 0; i < 3; i++) {
            for (uint32_t rank = 0; rank < 3; rank++)
                trial_check_inputs_kept(&t[i], rank);
            trial_close(&t[i]);
        }
    }
}

int main(void)
{
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        RUN(mismatch_is_told_to_both);
        RUN(abort_restores_inputs);
        RUN(abort_at_any_moment);
        RUN(commit_of_an_unfinished_op_aborts);
        RUN(freeze_stops_a_group);
        RUN(freeze_in_flight);
        RUN(lost_link_is_told_once);
        RUN(links_may_come_late);
        RUN(destroy_restores_open_ops);
    }
    tested_algorithm = PCCL_RING;
    RUN(lost_link_stays_lost);
    return check_summary();
}
