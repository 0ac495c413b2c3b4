/* What happens on the way between engines that are themselves well: damaged bytes, lost connections, and
 * connections that stand still. */
#include "trial.h"

#include "proxy.h"

enum { STALL_MS = 60000 };

static int is_about_damage(const char *detail)
{
    return strstr(detail, "checksum") != NULL || strstr(detail, "not a pccl frame") != NULL ||
           strstr(detail, "unknown frame version") != NULL;
}

static void check_no_link_lost(world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        for (uint32_t other = 0; other < w->size; other++)
            CHECK(!node_has_event(&w->nodes[rank], PCCL_EVENT_LINK_LOST, link_number(rank, other)));
}

static void trial_run_all(const trial *t, world *w)
{
    trial_submit_all(t, w);
    trial_await_done(t, w);
    trial_end_all(t, w, 1);
}

/* One bit anywhere in what an op needs, where there is no other connection: whose bytes they are notices and
 * never is done, whoever is done has the right result, and an abort gives everyone the input back. */
static void a_flipped_bit_never_reaches_a_result(void)
{
    for (int run = 0; run < RUNS(40); run++) {
        proxied p;
        trial t;
        uint32_t size = 2 + (uint32_t)run % 2;
        pccl_op_shape shape = plain_shape(9000, run % 3 ? PCCL_FLOAT32 : PCCL_UINT8, PCCL_SUM, 4096, size);
        trial_open(&t, &shape, run / 2 % 2);
        proxied_open(&p, size, 1, run / 4 % 2, STALL_MS);
        /* Around a ring of three payload goes 0 -> 1 -> 2 -> 0: the pumps of these. */
        static const unsigned busy[2][3] = {{0, 1, 0}, {0, 4, 3}};
        pump *faulty = &p.pumps[busy[size - 2][random_below(size)]];
        set_fault(faulty, FAULT_FLIP, random_below((uint32_t)(2 * (size - 1) * (t.bytes / size))), random_below(8));
        proxied_start(&p);
        for (uint32_t rank = 0; rank < size; rank++)
            trial_submit(&t, &p.w, rank);
        unsigned at = (unsigned)(faulty - p.pumps);
        const pump *forth = &p.pumps[at & ~1u];
        node *receiver = &p.w.nodes[at & 1 ? forth->a : forth->b];
        pccl_event event = node_wait(receiver, PCCL_EVENT_LINK_LOST, link_number(forth->a, forth->b));
        CHECK_MSG(is_about_damage(event.detail), "'%s'", event.detail);
        CHECK(!node_has_event(receiver, PCCL_EVENT_OP_DONE, t.number));
        for (uint32_t rank = 0; rank < size; rank++)
            trial_abort_checked(&t, &p.w, rank);
        proxied_close(&p);
        trial_close(&t);
    }
}

/* All connections of every link but one break, at any byte, while ops run. */
static void ops_survive_lost_connections(void)
{
    uint64_t lost = 0;
    for (int run = 0; run < RUNS(60); run++) {
        enum { OPS = 3 };
        proxied p;
        trial trials[OPS];
        uint32_t size = 2 + random_below(3);
        unsigned connections = size == 4 ? 2 : 2 + random_below(3);
        uint32_t count = run % 4 == 0 ? 1 + random_below(400) : 20000 + random_below(50000);
        proxied_open(&p, size, connections, (int)random_below(2), STALL_MS);
        proxied_doom_spares(&p, connections, count * 4 / connections + 2000);
        for (int i = 0; i < OPS; i++) {
            pccl_op_shape shape =
                plain_shape(count, i ? PCCL_FLOAT32 : PCCL_BFLOAT16, run % 2 ? PCCL_SUM : PCCL_AVG, 8192, size);
            trial_open(&trials[i], &shape, (int)random_below(2));
        }
        proxied_start(&p);
        for (int i = 0; i < OPS; i++)
            for (uint32_t rank = 0; rank < size; rank++)
                trial_submit(&trials[i], &p.w, rank);
        for (int i = 0; i < OPS; i++)
            trial_await_done(&trials[i], &p.w);
        for (int i = 0; i < OPS; i++) {
            trial_end_all(&trials[i], &p.w, 1);
            trial_check_results(&trials[i]);
            trial_close(&trials[i]);
        }
        check_no_link_lost(&p.w);
        for (uint32_t rank = 0; rank < size; rank++)
            for (uint32_t other = 0; other < size; other++)
                while (node_has_event(&p.w.nodes[rank], PCCL_EVENT_CONNECTION_LOST, link_number(rank, other)))
                    lost++;
        proxied_close(&p);
    }
    CHECK_MSG(lost > RUNS(60), "%llu connections lost", (unsigned long long)lost);
}

/* The same bytes as over connections that hold. */
static void quantized_ops_survive_lost_connections(void)
{
    static const uint32_t kinds[][2] = {{PCCL_QUANT_MIN_MAX, PCCL_UINT8}, {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT16}};
    for (int run = 0; run < RUNS(20); run++) {
        proxied p;
        trial first, second;
        uint32_t size = 2 + random_below(3);
        uint32_t count = 60000;
        pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 16384, size);
        shape.quantization = (uint8_t)kinds[run % 2][0];
        shape.quantized_dtype = (uint8_t)kinds[run % 2][1];
        shape.quantization_block = 64;
        proxied_open(&p, size, 2, run % 2, STALL_MS);
        for (unsigned i = 0; i < p.pumps_count; i += 4)
            set_deadly_fault(&p.pumps[i + random_below(2)], count);
        trial_open(&first, &shape, (int)random_below(2));
        trial_open(&second, &shape, (int)random_below(2));
        second.number = first.number; /* which stochastic rounding depends on */
        for (uint32_t rank = 0; rank < size; rank++) {
            memcpy(second.inputs[rank], first.inputs[rank], first.bytes);
            memcpy(second.send[rank], first.inputs[rank], first.bytes);
        }
        proxied_start(&p);
        trial_run_all(&first, &p.w);
        check_no_link_lost(&p.w);
        proxied_close(&p);

        proxied_open(&p, size, 1, 0, STALL_MS);
        proxied_start(&p);
        trial_run_all(&second, &p.w);
        for (uint32_t rank = 0; rank < size; rank++)
            CHECK(memcmp(first.recv[rank], second.recv[rank], first.bytes) == 0);
        proxied_close(&p);
        trial_close(&first);
        trial_close(&second);
    }
}

/* One beside a good one breaks, and so do its replacements, one after the other. */
static void connections_can_be_replaced(void)
{
    enum { LOSSES = 10, FAULT_BYTES_MAX = 60000 };
    proxied p;
    pccl_op_shape shape = plain_shape(50000, PCCL_FLOAT32, PCCL_SUM, 16384, 2);
    proxied_open(&p, 2, 2, 0, STALL_MS);
    for (unsigned i = 1; i <= LOSSES; i++) {
        if (i > 1)
            proxied_connect(&p, 0, 1, (int)i % 2);
        set_deadly_fault(&p.pumps[2 * i + i % 2], FAULT_BYTES_MAX);
        proxied_start(&p);
        while (!node_has_event(&p.w.nodes[0], PCCL_EVENT_CONNECTION_LOST, link_number(0, 1)))
            trial_run(&p.w, &shape, 1);
    }
    check_no_link_lost(&p.w);
    proxied_close(&p);
}

static void the_last_connection_takes_the_link(void)
{
    for (int run = 0; run < RUNS(8); run++) {
        proxied p;
        trial t;
        pccl_op_shape shape = plain_shape(200000, PCCL_FLOAT32, PCCL_SUM, 8192, 2);
        trial_open(&t, &shape, run % 2);
        proxied_open(&p, 2, 3, run / 2 % 2, STALL_MS);
        for (unsigned i = 0; i < 3; i++)
            set_deadly_fault(&p.pumps[2 * i + random_below(2)], 100000);
        proxied_start(&p);
        trial_submit(&t, &p.w, 0);
        trial_submit(&t, &p.w, 1);
        for (uint32_t rank = 0; rank < 2; rank++) {
            node_wait(&p.w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(0, 1));
            CHECK(!node_has_event(&p.w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(0, 1)));
            trial_abort(&t, &p.w, rank);
        }
        proxied_close(&p);
        trial_close(&t);
    }
}

/* Nothing breaks, but one connection stops passing bytes on. */
static void a_connection_that_stands_still_is_given_up(void)
{
    for (int run = 0; run < 3; run++) {
        proxied p;
        trial t;
        pccl_op_shape shape = plain_shape(1 << 20, PCCL_FLOAT32, PCCL_SUM, 65536, 2);
        trial_open(&t, &shape, run % 2);
        proxied_open(&p, 2, 2 + (unsigned)run, run % 2, 300);
        set_fault(&p.pumps[(unsigned)run % 2], FAULT_HOLD, 50000 + random_below(300000), random_below(8));
        proxied_start(&p);
        trial_run_all(&t, &p.w);
        trial_check_results(&t);
        /* The others may have carried so much that it has not come so far. */
        while (!node_has_event(&p.w.nodes[0], PCCL_EVENT_CONNECTION_LOST, link_number(0, 1)) &&
               !node_has_event(&p.w.nodes[1], PCCL_EVENT_CONNECTION_LOST, link_number(0, 1)))
            trial_run(&p.w, &shape, run % 2);
        check_no_link_lost(&p.w);
        proxied_close(&p);
        trial_close(&t);
    }
}

static void set_link_timeout(world *w, uint32_t timeout_ms)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        pccl_engine_set_link_timeout(w->nodes[rank].engine, timeout_ms);
}

/* All connections of a link stop passing bytes on, from rank 0, from rank 1 or from both, at any byte: the first
 * too, before the ends have greeted each other. Whose bytes they are notices. */
static void a_link_that_stands_still_is_lost(void)
{
    for (int run = 0; run < 9; run++) {
        proxied p;
        trial t;
        unsigned connections = 1 + (unsigned)run % 2;
        int is_held[2] = {run % 3 != 1, run % 3 != 0};
        pccl_op_shape shape = plain_shape(1 << 20, PCCL_FLOAT32, PCCL_SUM, 65536, 2);
        trial_open(&t, &shape, run % 2);
        proxied_open(&p, 2, connections, 0, STALL_MS);
        set_link_timeout(&p.w, 300);
        for (unsigned i = 0; i < 2 * connections; i++)
            if (is_held[i % 2])
                set_fault(&p.pumps[i], FAULT_HOLD, run < 3 ? 0 : random_below(300000), random_below(8));
        proxied_start(&p);
        trial_submit(&t, &p.w, 0);
        trial_submit(&t, &p.w, 1);
        for (uint32_t rank = 0; rank < 2; rank++) {
            if (!is_held[rank])
                continue;
            pccl_event event = node_wait(&p.w.nodes[rank], PCCL_EVENT_LINK_LOST, link_number(0, 1));
            CHECK_MSG(strstr(event.detail, "nothing got through") != NULL, "'%s'", event.detail);
        }
        for (uint32_t rank = 0; rank < 2; rank++)
            trial_abort(&t, &p.w, rank);
        proxied_close(&p);
        trial_close(&t);
    }
}

/* Nor is one that only waits for its other end to launch an op, nor one that passes little at a time. */
static void a_link_with_nothing_to_carry_is_not_lost(void)
{
    enum { LIVE_MS = 4000 }; /* within which a proxy's thread that hardly gets a processor passes bytes on */
    proxied p;
    trial t;
    pccl_op_shape shape = plain_shape(1 << 18, PCCL_FLOAT32, PCCL_SUM, 65536, 2);
    trial_open(&t, &shape, 0);
    proxied_open(&p, 2, 2, 0, STALL_MS);
    set_link_timeout(&p.w, LIVE_MS);
    proxied_start(&p);
    poll(NULL, 0, LIVE_MS + 500);
    trial_submit(&t, &p.w, 0);
    poll(NULL, 0, LIVE_MS + 500);
    trial_submit(&t, &p.w, 1);
    trial_commit_all(&t, &p.w);
    check_no_link_lost(&p.w);
    proxied_close(&p);
    trial_close(&t);
}

int main(void)
{
    RUN(a_flipped_bit_never_reaches_a_result);
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        RUN(ops_survive_lost_connections);
        RUN(quantized_ops_survive_lost_connections);
        RUN(connections_can_be_replaced);
        RUN(the_last_connection_takes_the_link);
        RUN(a_connection_that_stands_still_is_given_up);
        RUN(a_link_that_stands_still_is_lost);
        RUN(a_link_with_nothing_to_carry_is_not_lost);
    }
    return check_summary();
}
