/* Ops whose segments take turns in few slots: the same results, whatever happens on the way, and no more scratch
 * than there may be. */
#include "trial.h"

#include "proxy.h"

enum { STALL_MS = 60000, CONNECTIONS_MAX = 4, COUNT_MAX = 6000 };

static const uint32_t scratch_bytes_max[] = {0, 1000, 4000, 16000};
static const uint32_t pace_bytes_per_s[] = {0, 20 << 20, 200 << 20};

static void test_as_usual(void)
{
    tested_op_scratch_bytes_max = UINT32_MAX;
    tested_pace_bytes_per_s = 0;
}

/* Unquantized, as a quarter of all, quantized in one way or another. */
static pccl_op_shape random_shape(uint32_t size)
{
    static const uint32_t kinds[][2] = {
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4},
        {PCCL_QUANT_CAST, PCCL_BFLOAT16},
    };
    static const uint32_t ops[] = {PCCL_SUM, PCCL_AVG, PCCL_MAX};
    uint32_t kind = random_below(4);
    pccl_op_shape shape =
        plain_shape(random_below(COUNT_MAX), PCCL_FLOAT32, ops[random_below(3)], 40 + random_below(1200), size);
    tested_algorithm = (uint8_t)random_below(PCCL_ALGORITHM_COUNT);
    shape.algorithm = tested_algorithm;
    if (kind < 3) {
        shape.quantization = (uint8_t)kinds[kind][0];
        shape.quantized_dtype = (uint8_t)kinds[kind][1];
        shape.quantization_block = shape.quantization == PCCL_QUANT_CAST ? 0 : 64;
    }
    return shape;
}

/* The same op with slots for all. */
static void check_as_with_slots_for_all(const trial *t, world *ample)
{
    trial other;
    trial_open(&other, &t->shape, t->in_place);
    other.number = t->number; /* which stochastic rounding depends on */
    for (uint32_t rank = 0; rank < t->shape.world_size; rank++)
        memcpy(other.send[rank], t->inputs[rank], t->bytes);
    trial_submit_all(&other, ample);
    trial_await_done(&other, ample);
    trial_end_all(&other, ample, 1);
    for (uint32_t rank = 0; rank < t->shape.world_size; rank++)
        CHECK_MSG(memcmp(other.recv[rank], t->recv[rank], t->bytes) == 0,
            "rank %u of %u, algorithm %u, quantization %u, %llu elements, segments of %u", rank, t->shape.world_size,
            t->shape.algorithm, t->shape.quantization, (unsigned long long)t->shape.count, t->shape.segment_bytes);
    if (t->shape.quantization == PCCL_QUANT_NONE)
        trial_check_results(t);
    trial_close(&other);
}

static uint64_t most_scratch(world *w)
{
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < w->size; rank++) {
        pccl_engine_stats stats;
        pccl_engine_get_stats(w->nodes[rank].engine, &stats);
        most = stats.scratch_bytes_max > most ? stats.scratch_bytes_max : most;
    }
    return most;
}

static void results_are_as_with_slots_for_all(void)
{
    for (uint32_t size = 2; size <= 6; size++)
        for (size_t i = 0; i < sizeof scratch_bytes_max / sizeof *scratch_bytes_max; i++) {
            world few, ample;
            world_open(&ample, size, 1, 1, 0);
            tested_op_scratch_bytes_max = scratch_bytes_max[i];
            tested_pace_bytes_per_s = pace_bytes_per_s[(size + i) % 3];
            world_open(&few, size, 1 + random_below(CONNECTIONS_MAX), 1, 0);
            test_as_usual();
            for (int run = 0; run < RUNS(15); run++) {
                trial t;
                pccl_op_shape shape = random_shape(size);
                trial_open(&t, &shape, (int)random_below(2));
                trial_submit_all(&t, &few);
                trial_await_done(&t, &few);
                trial_end_all(&t, &few, 1);
                check_as_with_slots_for_all(&t, &ample);
                trial_close(&t);
            }
            world_close(&few);
            world_close(&ample);
        }
}

/* However large the op; in place its copy comes on top. */
static void scratch_is_bounded(void)
{
    enum { BOUND = 20000 };
    for (uint32_t size = 2; size <= 5; size++)
        for (int run = 0; run < 20; run++) {
            world w;
            trial t;
            tested_op_scratch_bytes_max = BOUND;
            world_open(&w, size, 2, 1, 0);
            tested_op_scratch_bytes_max = UINT32_MAX;
            pccl_op_shape shape = random_shape(size);
            shape.count = 20 * COUNT_MAX;
            trial_open(&t, &shape, run % 2);
            trial_submit_all(&t, &w);
            trial_await_done(&t, &w);
            trial_end_all(&t, &w, 1);
            uint64_t copy_bytes = t.in_place ? t.bytes : 0;
            CHECK(most_scratch(&w) >= copy_bytes && most_scratch(&w) <= copy_bytes + BOUND);
            if (shape.quantization != PCCL_QUANT_NONE)
                CHECK(most_scratch(&w) > copy_bytes + BOUND / 4);
            trial_close(&t);
            world_close(&w);
        }
}

/* All connections of every link but one break, at any byte: what is sent again is still what it was. */
static void lost_connections_are_survived(void)
{
    uint64_t lost = 0;
    for (int run = 0; run < RUNS(40); run++) {
        proxied p;
        trial t;
        world ample;
        uint32_t size = 2 + random_below(3);
        unsigned connections = 2 + random_below(2);
        pccl_op_shape shape = random_shape(size);
        shape.count = COUNT_MAX + random_below(2 * COUNT_MAX);
        trial_open(&t, &shape, (int)random_below(2));
        world_open(&ample, size, 1, 1, 0);
        tested_op_scratch_bytes_max = scratch_bytes_max[run % 4];
        tested_pace_bytes_per_s = pace_bytes_per_s[run % 3];
        proxied_open(&p, size, connections, (int)random_below(2), STALL_MS);
        test_as_usual();
        proxied_doom_spares(&p, connections, (uint32_t)shape.count);
        proxied_start(&p);
        trial_submit_all(&t, &p.w);
        trial_await_done(&t, &p.w);
        trial_end_all(&t, &p.w, 1);
        check_as_with_slots_for_all(&t, &ample);
        for (uint32_t rank = 0; rank < size; rank++) {
            node_collect(&p.w.nodes[rank]);
            for (int i = 0; i < p.w.nodes[rank].events_count; i++) {
                CHECK(p.w.nodes[rank].events[i].kind != PCCL_EVENT_LINK_LOST);
                lost += p.w.nodes[rank].events[i].kind == PCCL_EVENT_CONNECTION_LOST;
            }
        }
        proxied_close(&p);
        world_close(&ample);
        trial_close(&t);
    }
    CHECK_MSG(lost > RUNS(40), "%llu connections lost", (unsigned long long)lost);
}

/* Whatever an op waits for, its end leaves the inputs as they were, and nothing behind. */
static void aborts_restore_inputs(void)
{
    for (uint32_t size = 2; size <= 4; size++) {
        world w;
        tested_op_scratch_bytes_max = 2000;
        tested_pace_bytes_per_s = pace_bytes_per_s[size % 3];
        world_open(&w, size, 2, 1, 0);
        test_as_usual();
        for (int run = 0; run < RUNS(30); run++) {
            trial t;
            pccl_op_shape shape = random_shape(size);
            uint32_t absent = run % 3 == 0 ? random_below(size) : size;
            trial_open(&t, &shape, (int)random_below(2));
            t.epoch = (uint64_t)run + 1;
            for (uint32_t rank = 0; rank < size; rank++)
                if (rank != absent)
                    trial_submit(&t, &w, rank);
            poll(NULL, 0, (int)random_below(3));
            for (uint32_t i = 0; i < size; i++) {
                uint32_t rank = (i + (uint32_t)run) % size;
                CHECK(pccl_engine_freeze(w.nodes[rank].engine, 0, t.epoch) == 0);
                if (rank != absent)
                    CHECK(pccl_engine_end(w.nodes[rank].engine, t.number, 0) == 0);
            }
            for (uint32_t rank = 0; rank < size; rank++) {
                node_wait(&w.nodes[rank], PCCL_EVENT_GROUP_FROZEN, t.epoch);
                if (rank != absent)
                    node_wait(&w.nodes[rank], PCCL_EVENT_OP_ENDED, t.number);
                trial_check_inputs_kept(&t, rank);
            }
            trial_close(&t);
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            pccl_engine_stats stats;
            pccl_engine_get_stats(w.nodes[rank].engine, &stats);
            CHECK(stats.scratch_bytes == 0 && stats.ops_open == 0);
        }
        world_close(&w);
    }
}

int main(void)
{
    RUN(results_are_as_with_slots_for_all);
    RUN(scratch_is_bounded);
    RUN(lost_connections_are_survived);
    RUN(aborts_restore_inputs);
    return check_summary();
}
