/* Whole engines in one process, beside a model that folds the ranks' inputs in the algorithm's order. Most
 * tests are run with both algorithms. */
#include "base.h"
#include "check.h"
#include "trial.h"

#include <errno.h>
#include <sys/wait.h>

static void for_all_worlds(void (*body)(world *w, uint32_t size))
{
    for (uint32_t size = 1; size <= 6; size++) {
        world w;
        world_open(&w, size, 1 + size % 4, size % 2, size == 4);
        body(&w, size);
        world_close(&w);
    }
}

static void run_every_dtype_and_op(world *w, uint32_t size)
{
    for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
        for (uint32_t op = 0; op < PCCL_REDUCE_OP_COUNT; op++) {
            pccl_op_shape shape = plain_shape(97, dtype, op, 24, size);
            trial_run(w, &shape, (dtype + op + size) % 2);
            shape.segment_bytes = 1024; /* all of it */
            trial_run(w, &shape, (dtype + op) % 2);
        }
}

static void all_dtypes_and_ops(void) { for_all_worlds(run_every_dtype_and_op); }

static void run_many_counts(world *w, uint32_t size)
{
    static const uint32_t counts[] = {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 255, 1000, 20011};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int k = 0; k < THOROUGHNESS; k++) {
            uint32_t dtype = random_below(PCCL_DTYPE_COUNT);
            uint32_t element_bytes = pccl_dtype_bytes(dtype);
            uint32_t segment_bytes = counts[i] > 1000 ? 1000 : element_bytes * (1 + random_below(9)) + k % 2;
            if (counts[i] <= 1000 && random_below(3) == 0)
                segment_bytes = element_bytes * 1000;
            pccl_op_shape shape =
                plain_shape(counts[i], dtype, random_below(PCCL_REDUCE_OP_COUNT), segment_bytes, size);
            trial_run(w, &shape, (int)random_below(2));
        }
}

static void all_counts(void) { for_all_worlds(run_many_counts); }

static void all_connection_counts(void)
{
    for (unsigned connections = 1; connections <= 4; connections++)
        for (int is_tcp = 0; is_tcp < 2; is_tcp++)
            for (int force_poll = 0; force_poll < 2; force_poll++) {
                world w;
                world_open(&w, 3, connections, is_tcp, force_poll);
                pccl_op_shape shape = plain_shape(RUNS(250000) + 3, PCCL_FLOAT32, PCCL_AVG, 4096, 3);
                trial_run(&w, &shape, 0);
                shape.segment_bytes = 20000;
                trial_run(&w, &shape, 1);
                world_close(&w);
            }
}

static void segments_larger_than_staging(void)
{
    world w;
    world_open(&w, 2, 1, 1, 0);
    for (int in_place = 0; in_place < 2; in_place++) {
        pccl_op_shape shape = plain_shape(1500001, PCCL_FLOAT32, PCCL_SUM, 3 << 20, 2);
        trial_run(&w, &shape, in_place);
    }
    world_close(&w);
}

/* Ranks that launch the same ops in different orders must not hold each other up. */
static void concurrent_ops_in_any_order(void)
{
    enum { OPS = 60 };
    for (uint32_t size = 2; size <= 5; size++) {
        static trial trials[OPS];
        world w;
        world_open(&w, size, size - 1, 1, 0);
        for (int i = 0; i < OPS; i++) {
            uint32_t count = i % 7 == 0 ? 30000 + random_below(30000) : random_below(600);
            pccl_op_shape shape = plain_shape(
                count, random_below(PCCL_DTYPE_COUNT), random_below(PCCL_REDUCE_OP_COUNT), i % 3 ? 64 : 2000, size);
            trial_open(&trials[i], &shape, (int)random_below(2));
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            int order[OPS];
            random_order(order, OPS);
            for (int i = 0; i < OPS; i++)
                trial_submit(&trials[order[i]], &w, rank);
        }
        for (int i = 0; i < OPS; i++)
            trial_await_done(&trials[i], &w);
        for (int i = 0; i < OPS; i++) {
            trial_end_all(&trials[i], &w, 1);
            trial_check_results(&trials[i]);
            trial_close(&trials[i]);
        }
        world_close(&w);
    }
}

static void thousands_of_ops(void)
{
    enum { OPS = 3000, COUNT = 5 };
    static float values[2][OPS][COUNT];
    world w;
    world_open(&w, 2, 2, 1, 0);
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, 8, 2);
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint64_t i = 0; i < OPS; i++) {
            for (int k = 0; k < COUNT; k++)
                values[rank][i][k] = (float)(i * (rank + 1) + (uint64_t)k);
            pccl_op_request request = request_for(&w, rank, i, &shape);
            request.send = request.recv = values[rank][i];
            CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
        }
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint64_t i = 0; i < OPS; i++)
            node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, i);
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint64_t i = 0; i < OPS; i++)
            pccl_engine_end(w.nodes[rank].engine, i, i + 1 < OPS ? PCCL_COMMIT_BY_ALL : PCCL_COMMIT);
    for (uint32_t rank = 0; rank < 2; rank++) {
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_ENDED, OPS - 1);
        for (uint64_t i = 0; i < OPS; i++) {
            pccl_event none;
            CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_ENDED, i, &none));
            for (int k = 0; k < COUNT; k++)
                CHECK(values[rank][i][k] == (float)(3 * i + 2 * (uint64_t)k));
        }
    }
    pccl_engine_stats stats;
    pccl_engine_get_stats(w.nodes[0].engine, &stats);
    CHECK(stats.ops_open == 0 && stats.scratch_bytes == 0 && stats.connections == 2);
    CHECK(stats.pool_bytes > 0);
    CHECK(stats.tx_payload_bytes == OPS * COUNT * sizeof(float));
    CHECK(stats.rx_payload_bytes == stats.tx_payload_bytes);
    CHECK(stats.tx_wire_bytes > stats.tx_payload_bytes);
    world_close(&w);
}

static void done_counts_payload_bytes(void)
{
    world w;
    trial t;
    world_open(&w, 4, 2, 1, 0);
    pccl_op_shape shape = plain_shape(4000, PCCL_FLOAT64, PCCL_MAX, 800, 4);
    trial_open(&t, &shape, 0);
    trial_submit_all(&t, &w);
    for (uint32_t rank = 0; rank < 4; rank++) {
        pccl_event done = node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, t.number);
        CHECK(done.rx_bytes == 6 * 1000 * 8 && done.tx_bytes == 6 * 1000 * 8);
    }
    for (uint32_t rank = 0; rank < 4; rank++)
        CHECK(trial_end(&t, &w, rank, 1).tx_bytes == 6 * 1000 * 8);
    trial_check_results(&t);
    trial_close(&t);
    world_close(&w);
}

static void links_are_counted_apart(void)
{
    world w;
    trial t;
    world_open(&w, 3, 2, 1, 0);
    pccl_op_shape shape = plain_shape(3000, PCCL_FLOAT64, PCCL_MAX, 800, 3);
    trial_open(&t, &shape, 0);
    trial_submit_all(&t, &w);
    for (uint32_t rank = 0; rank < 3; rank++)
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, t.number);
    for (uint32_t rank = 0; rank < 3; rank++)
        trial_end(&t, &w, rank, 1);
    uint64_t share_bytes = tested_algorithm == PCCL_RING ? 4 * 1000 * 8 : 2 * 1000 * 8;
    for (uint32_t rank = 0; rank < 3; rank++) {
        uint64_t next = link_to_next(&w, rank);
        CHECK(pccl_engine_request_link_metrics(w.nodes[rank].engine, 9999) ==
              0); /* of an unknown one there is no event */
        CHECK(pccl_engine_request_link_metrics(w.nodes[rank].engine, next) == 0);
        pccl_event counted = node_wait(&w.nodes[rank], PCCL_EVENT_LINK_METRICS, next);
        CHECK(counted.tx_bytes == share_bytes);
        CHECK(counted.rx_bytes == (tested_algorithm == PCCL_RING ? 0 : share_bytes));
    }
    trial_close(&t);
    world_close(&w);
}

static void check_quantized(world *w, const pccl_op_shape *shape, int in_place)
{
    trial t;
    trial_open(&t, shape, in_place);
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        for (uint64_t i = 0; i < shape->count; i++)
            ((float *)t.inputs[rank])[i] = (float)random_below(2001) / 1000.0f - 0.9f;
        memcpy(t.send[rank], t.inputs[rank], t.bytes);
    }
    trial_submit_all(&t, w);
    trial_await_done(&t, w);
    trial_end_all(&t, w, 1);
    const float *expected = (const float *)trial_expected(&t);
    double worst = 0;
    for (uint64_t i = 0; i < shape->count; i++) {
        double error = (double)((float *)t.recv[0])[i] - (double)expected[i];
        worst = error > worst ? error : -error > worst ? -error : worst;
    }
    const int has_levels = shape->quantized_dtype >= PCCL_CODE_UINT2;
    const int is_coarse = shape->quantized_dtype >= PCCL_CODE_UINT4;
    const double error_max = has_levels ? 300 : is_coarse ? 2 : 0.2;
    CHECK_MSG(worst < error_max, "quantization %u of op %u is off by %f", shape->quantization, shape->reduce_op, worst);
    for (uint32_t rank = 1; rank < shape->world_size; rank++)
        CHECK(memcmp(t.recv[rank], t.recv[0], t.bytes) == 0);
    free((void *)(uintptr_t)expected);
    trial_close(&t);
}

static void quantized_results_are_identical(void)
{
    static const struct {
        uint32_t quantization, dtype;
    } kinds[] = {
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8},
        {PCCL_QUANT_MIN_MAX, PCCL_INT16},
        {PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT16},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4},
        {PCCL_QUANT_CAST, PCCL_FLOAT16},
        {PCCL_QUANT_CAST, PCCL_BFLOAT16},
        {PCCL_QUANT_LLOYD_MAX, PCCL_CODE_UINT2},
        {PCCL_QUANT_SIGN, PCCL_CODE_UINT1},
    };
    for (uint32_t size = 1; size <= 5; size++) {
        world w;
        world_open(&w, size, 2, 1, 0);
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
            for (uint32_t op = 0; op < PCCL_REDUCE_OP_COUNT; op++)
                for (uint64_t count = 3; count < 5000; count = count * 12 + 5) {
                    pccl_op_shape shape = quantized_shape(count, op, kinds[k].quantization, kinds[k].dtype, size);
                    check_quantized(&w, &shape, k % 2);
                }
        world_close(&w);
    }
}

/* Shares of all others wait for that of the first rank, and the result is as if they had not. */
static void shares_wait_for_their_turn(void)
{
    for (uint32_t size = 3; size <= 5; size++)
        for (int is_quantized = 0; is_quantized < 2; is_quantized++)
            for (int in_place = 0; in_place < 2; in_place++) {
                world w;
                trial first, second;
                world_open(&w, size, 2, 1, 0);
                pccl_op_shape shape = plain_shape(50000, PCCL_FLOAT32, PCCL_AVG, 4000, size);
                if (is_quantized)
                    shape = quantized_shape(50000, PCCL_AVG, PCCL_QUANT_MIN_MAX, PCCL_UINT8, size);
                trial_open(&first, &shape, in_place);
                uint64_t share_bytes = pccl_quantized_bytes(&shape, 50000 / size) - 1000;
                for (uint32_t rank = size - 1; rank > 0; rank--)
                    trial_submit(&first, &w, rank);
                for (uint32_t rank = 1; rank < size; rank++)
                    wait_for_payload(&w.nodes[rank], (size - 2) * share_bytes);
                trial_submit(&first, &w, 0);
                trial_await_done(&first, &w);
                trial_end_all(&first, &w, 1);
                if (!is_quantized)
                    trial_check_results(&first);
                trial_open(&second, &shape, 1 - in_place);
                second.number = first.number; /* which stochastic rounding depends on */
                for (uint32_t rank = 0; rank < size; rank++)
                    memcpy(second.send[rank], first.inputs[rank], first.bytes);
                trial_submit_all(&second, &w);
                trial_await_done(&second, &w);
                trial_end_all(&second, &w, 1);
                for (uint32_t rank = 0; rank < size; rank++)
                    CHECK(memcmp(second.recv[rank], first.recv[0], first.bytes) == 0);
                trial_close(&first);
                trial_close(&second);
                world_close(&w);
            }
}

/* All ranks but the owner add the error of rounding one input, and then comes that of the result, whose range
 * is as many times as large. Half of the ranks round by chance, so that an error is up to a step. */
static void direct_quantization_is_rounded_twice(void)
{
    for (uint32_t size = 2; size <= 6; size++) {
        enum { COUNT = 3000 };
        world w;
        trial t;
        world_open(&w, size, 1, 1, 0);
        pccl_op_shape shape = quantized_shape(COUNT, PCCL_SUM, PCCL_QUANT_MIN_MAX, PCCL_UINT8, size);
        trial_open(&t, &shape, 0);
        for (uint32_t rank = 0; rank < size; rank++)
            for (int i = 0; i < COUNT; i++)
                ((float *)t.send[rank])[i] = (float)random_below(2001) / 1000.0f - 1.0f;
        trial_submit_all(&t, &w);
        trial_await_done(&t, &w);
        trial_end_all(&t, &w, 1);
        double worst = 0;
        for (int i = 0; i < COUNT; i++) {
            double sum = 0;
            for (uint32_t rank = 0; rank < size; rank++)
                sum += (double)((float *)t.send[rank])[i];
            double error = (double)((float *)t.recv[0])[i] - sum;
            worst = error > worst ? error : -error > worst ? -error : worst;
        }
        double step = 2.0 / 255;
        CHECK_MSG(worst <= (size - 1) * step + size * step + 1e-4, "%u ranks: off by %f", size, worst);
        trial_close(&t);
        world_close(&w);
    }
}

static int submit_status(const pccl_op_request *request)
{
    static node n;
    if (n.engine == NULL)
        node_open(&n, 0);
    if (request == NULL) {
        node_close(&n);
        return 0;
    }
    return pccl_engine_submit(n.engine, request);
}

static void invalid_requests_are_refused(void)
{
    static float buffer[200];
    world w = {.size = 2};
    pccl_op_shape shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 100, 2);
    pccl_op_request good = request_for(&w, 0, 1, &shape);
    good.send = good.recv = buffer;
    pccl_op_request bad;

#define REFUSED(change) \
    do { \
        bad = good; \
        change; \
        CHECK(submit_status(&bad) == PCCL_E_INVALID); \
    } while (0)
    REFUSED(bad.shape.dtype = PCCL_DTYPE_COUNT);
    REFUSED(bad.shape.reduce_op = PCCL_REDUCE_OP_COUNT);
    REFUSED(bad.shape.quantization = PCCL_QUANT_COUNT);
    REFUSED(bad.shape.quantization = PCCL_QUANT_MIN_MAX);
    REFUSED(bad.shape.quantized_dtype = PCCL_INT8);
    REFUSED(bad.shape.quantization_block = 64);
    REFUSED(bad.shape.world_size = 0);
    REFUSED(bad.shape.world_size = UINT32_MAX);
    REFUSED(bad.rank = 2);
    REFUSED(bad.shape.segment_bytes = 3);
    REFUSED(bad.shape.count = UINT64_MAX);
    REFUSED(bad.send = NULL);
    REFUSED(bad.recv = NULL);
    REFUSED(bad.recv = buffer + 99);
    REFUSED(bad.send = buffer + 99);
    REFUSED(bad.rounding = PCCL_ROUNDING_COUNT);
    REFUSED(bad.key.reserved = 1);
    REFUSED(bad.shape.collective = PCCL_COLLECTIVE_COUNT);
    REFUSED(bad.shape.root = 1);
    REFUSED(bad.shape.slice = 1);
    REFUSED(bad.shape.last_slice = PCCL_SLICES_MAX);
    REFUSED((bad.rank = 0, bad.shape.world_size = 1, bad.shape.last_slice = 1));
    REFUSED(bad.shape.algorithm = PCCL_ALGORITHM_COUNT);
    REFUSED((bad.shape.algorithm = PCCL_DIRECT, bad.rank_links = NULL));
    REFUSED((bad.shape.quantization = PCCL_QUANT_MIN_MAX, bad.shape.quantized_dtype = PCCL_UINT8,
        bad.shape.quantization_block = 64, bad.shape.dtype = PCCL_INT32));
    float residual[100];
    REFUSED(bad.residual_next = residual); /* without quantization */
    good.shape.quantization = PCCL_QUANT_MIN_MAX;
    good.shape.quantized_dtype = PCCL_UINT8;
    good.shape.quantization_block = 64;
    REFUSED(bad.residual = residual);
    good.residual_next = residual;
    REFUSED(bad.shape.dtype = PCCL_FLOAT64);
    REFUSED(bad.feedback_decay = 1.5);
    REFUSED(bad.feedback_decay = 0.0 / 0.0);
    good.residual_next = NULL;
    good.shape.quantization = good.shape.quantized_dtype = PCCL_QUANT_NONE;
    good.shape.quantization_block = 0;
#undef REFUSED
    CHECK(submit_status(&good) == 0);
    bad = good;
    bad.op = 2;
    bad.recv = buffer + 100;
    CHECK(submit_status(&bad) == 0);
    bad.op = 3;
    bad.shape.count = 0;
    bad.send = bad.recv = NULL;
    CHECK(submit_status(&bad) == 0);
    submit_status(NULL);
}

static void bad_descriptors_are_refused(void)
{
    node n;
    node_open(&n, 0);
    CHECK(pccl_engine_link_add(n.engine, 1, -1, NULL) == PCCL_E_INVALID);
    int fds[2];
    pair_unix(fds);
    close(fds[0]);
    CHECK(pccl_engine_link_add(n.engine, 1, fds[0], NULL) == PCCL_E_SYSTEM);
    close(fds[1]);
    node_close(&n);
}

/* A child that forgets the engine does not keep its connections alive. */
static void forked_child_lets_go(void)
{
    node n;
    int fds[2];
    int hold[2];
    char byte;
    node_open(&n, 0);
    pair_unix(fds);
    if (pipe(hold) != 0)
        stop_test("pipe");
    CHECK(pccl_engine_link_add(n.engine, 1, fds[0], NULL) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(hold[1]);
        close(fds[1]);
        pccl_engine_forget_after_fork(n.engine);
        _exit(write(fds[0], "x", 1) >= 0 ? 1 : read(hold[0], &byte, 1) != 0);
    }
    close(hold[0]);
    CHECK(child > 0);
    node_close(&n);
    struct pollfd pfd = {.fd = fds[1], .events = POLLIN};
    CHECK(poll(&pfd, 1, WAIT_MS) == 1);
    while (read(fds[1], &byte, 1) > 0)
        continue; /* the engine's greeting */
    CHECK(read(fds[1], &byte, 1) == 0);
    close(fds[1]);
    close(hold[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* With ops waiting for peers and nothing to do, nothing is done. */
static void idle_engines_sleep(void)
{
    world w;
    trial t;
    world_open(&w, 2, 4, 1, 0);
    pccl_op_shape shape = plain_shape(100000, PCCL_FLOAT32, PCCL_SUM, 1000, 2);
    trial_run(&w, &shape, 1);
    trial_open(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    pccl_event event;
    double before_s = cpu_s();
    CHECK(!node_wait_for(&w.nodes[0], PCCL_EVENT_OP_DONE, t.number, &event, 300));
    CHECK(cpu_s() - before_s < 0.1);
    trial_end(&t, &w, 0, 0);
    trial_close(&t);
    world_close(&w);
}

static void with_both_algorithms(void)
{
    RUN(all_dtypes_and_ops);
    RUN(all_counts);
    RUN(all_connection_counts);
    RUN(segments_larger_than_staging);
    RUN(concurrent_ops_in_any_order);
    RUN(thousands_of_ops);
    RUN(done_counts_payload_bytes);
    RUN(links_are_counted_apart);
    RUN(quantized_results_are_identical);
    RUN(idle_engines_sleep);
}

int main(void)
{
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        with_both_algorithms();
    }
    tested_algorithm = PCCL_DIRECT;
    RUN(shares_wait_for_their_turn);
    RUN(direct_quantization_is_rounded_twice);
    tested_algorithm = PCCL_RING;
    RUN(invalid_requests_are_refused);
    RUN(bad_descriptors_are_refused);
    RUN(forked_child_lets_go);
    return check_summary();
}
