/* Small ops, whose payload comes before its receiver is known to be ready: in any order with the op itself, up
 * to the window, and through every way in which the op may end meanwhile. */
#include "trial.h"

#include "frame.h"
#include "link.h"

enum {
    FULL_COUNT = 16384, /* of two ranks: chunks of FULL_BYTES, the eager limit here */
    FULL_BYTES = 32 << 10,
    WINDOW_FRAMES = PCCL_EAGER_WINDOW_BYTES / (FULL_BYTES + PCCL_EAGER_OVERHEAD_BYTES),
    /* A receiver reports what it has released only now and then. */
    REPORTED_FRAMES = PCCL_EAGER_WINDOW_BYTES * 3 / 4 / (FULL_BYTES + PCCL_EAGER_OVERHEAD_BYTES)
};

static pccl_engine_stats stats_of(const node *n)
{
    pccl_engine_stats stats;
    pccl_engine_get_stats(n->engine, &stats);
    return stats;
}

static void wait_for_sent(node *n, uint64_t wire_bytes) { node_await_stat(n, tx_wire_bytes, wire_bytes); }

static size_t chunk_bytes(const pccl_op_shape *shape, uint32_t chunk)
{
    size_t elements = (size_t)(shape->count / shape->world_size) + (chunk < shape->count % shape->world_size);
    return pccl_quantized_bytes(shape, elements);
}

/* What reaches a rank before it has submitted the op, if all others have. */
static size_t early_bytes(const pccl_op_shape *shape, uint32_t rank)
{
    uint32_t world_size = shape->world_size;
    if (shape->algorithm == PCCL_RING && shape->count < world_size)
        return 0; /* every rank announces it to every other one */
    return shape->algorithm == PCCL_DIRECT ? (world_size - 1) * chunk_bytes(shape, rank)
                                           : chunk_bytes(shape, (rank + world_size - 2) % world_size);
}

static void run_late_expecting(world *w, const pccl_op_shape *shape, int in_place, uint32_t late, size_t bytes)
{
    trial t;
    trial_open(&t, shape, in_place);
    uint64_t before = stats_of(&w->nodes[late]).rx_payload_bytes;
    for (uint32_t i = 1; i < w->size; i++)
        trial_submit(&t, w, (late + i) % w->size);
    wait_for_payload(&w->nodes[late], before + bytes);
    trial_submit(&t, w, late);
    trial_await_done(&t, w);
    trial_end_all(&t, w, 1);
    if (shape->quantization == PCCL_QUANT_NONE)
        trial_check_results(&t);
    for (uint32_t rank = 1; rank < w->size; rank++)
        CHECK(memcmp(t.recv[rank], t.recv[0], t.bytes) == 0);
    trial_close(&t);
}

static void run_late(world *w, const pccl_op_shape *shape, int in_place)
{
    uint32_t late = random_below(w->size);
    run_late_expecting(w, shape, in_place, late, early_bytes(shape, late));
}

static void payload_may_come_before_its_op(void)
{
    for (uint32_t size = 2; size <= 6; size++) {
        world w;
        world_open(&w, size, 1 + size % 3, size % 2, size == 3);
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
            for (uint32_t op = 0; op < PCCL_REDUCE_OP_COUNT; op++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    pccl_op_shape shape = plain_shape(1 + random_below(1000), dtype, op, FULL_BYTES, size);
                    run_late(&w, &shape, in_place);
                }
        for (int in_place = 0; in_place < 2; in_place++) {
            pccl_op_shape shape = plain_shape(5000, PCCL_FLOAT32, PCCL_AVG, 32 << 10, size);
            shape.quantization = PCCL_QUANT_MIN_MAX;
            shape.quantized_dtype = PCCL_UINT8;
            shape.quantization_block = 64;
            run_late(&w, &shape, in_place);
        }
        world_close(&w);
    }
}

/* Frames of one link are sent in the order of their ops as long as there is one connection: what had been eager
 * would have come before the small op that is. */
static void large_or_divided_ops_wait(void)
{
    world w;
    trial large, divided, small;
    world_open(&w, 2, 1, 0, 0);
    pccl_op_shape shape = plain_shape(FULL_COUNT + 2, PCCL_FLOAT32, PCCL_SUM, 2 * FULL_BYTES, 2);
    trial_open(&large, &shape, 1);
    shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 48, 2);
    trial_open(&divided, &shape, 1);
    shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 200, 2);
    trial_open(&small, &shape, 1);
    trial_submit(&large, &w, 0);
    trial_submit(&divided, &w, 0);
    trial_submit(&small, &w, 0);
    wait_for_payload(&w.nodes[1], 200);
    CHECK(stats_of(&w.nodes[1]).rx_payload_bytes == 200);
    trial *const all[] = {&large, &divided, &small};
    for (int i = 0; i < 3; i++) {
        trial_submit(all[i], &w, 1);
        trial_commit_all(all[i], &w);
        trial_close(all[i]);
    }
    world_close(&w);
}

/* Of a chunk, what may go in one frame where segments of it lie one after the other. */
static size_t first_segments_bytes(const pccl_op_shape *shape)
{
    size_t bytes = 0;
    size_t segment_elements = shape->segment_bytes / pccl_dtype_bytes(shape->dtype);
    size_t left = (size_t)shape->count / shape->world_size;
    while (left > 0) {
        size_t elements = pccl_min_size(left, segment_elements);
        size_t more_bytes = pccl_quantized_bytes(shape, elements);
        if (bytes + more_bytes > FULL_BYTES)
            break;
        bytes += more_bytes;
        left -= elements;
    }
    return bytes;
}

static void first_segments_may_come_before_their_op(void)
{
    enum { SEGMENT_COUNT = 2048, BLOCK_OF_SLOTS_APART = 100 };
    static const uint32_t blocks[] = {0, 64, BLOCK_OF_SLOTS_APART};
    tested_far = 1;
    for (uint32_t size = 2; size <= 5; size++)
        for (int in_place = 0; in_place < 2; in_place++)
            for (size_t i = 0; i < PCCL_COUNT_OF(blocks); i++) {
                world w;
                world_open(&w, size, 1 + size % 3, 1, size == 3);
                uint32_t chunk_count = (2 + random_below(5)) * SEGMENT_COUNT - random_below(SEGMENT_COUNT);
                pccl_op_shape shape = plain_shape(size * chunk_count, PCCL_FLOAT32, PCCL_AVG, SEGMENT_COUNT * 4, size);
                shape.algorithm = PCCL_DIRECT;
                shape.quantization = blocks[i] > 0 ? PCCL_QUANT_MIN_MAX : PCCL_QUANT_NONE;
                shape.quantized_dtype = blocks[i] > 0 ? PCCL_UINT8 : 0;
                shape.quantization_block = blocks[i];
                size_t bytes = blocks[i] == BLOCK_OF_SLOTS_APART ? 0 : first_segments_bytes(&shape);
                run_late_expecting(&w, &shape, in_place, random_below(size), (size - 1) * bytes);
                world_close(&w);
            }
    tested_far = 0;
}

static void nothing_is_eager_without_a_limit(void)
{
    world w;
    trial t;
    tested_eager_bytes_max = 0;
    world_open(&w, 2, 1, 0, 0);
    tested_eager_bytes_max = FULL_BYTES;
    pccl_op_shape shape = plain_shape(100, PCCL_FLOAT32, PCCL_SUM, 200, 2);
    trial_open(&t, &shape, 1);
    trial_submit(&t, &w, 0);
    wait_for_sent(&w.nodes[0], PCCL_FRAME_BYTES);
    CHECK(stats_of(&w.nodes[0]).tx_payload_bytes == 0);
    trial_submit(&t, &w, 1);
    trial_commit_all(&t, &w);
    trial_close(&t);
    world_close(&w);
}

static void shuffle(trial **trials, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t j = random_below(i + 1);
        trial *other = trials[i];
        trials[i] = trials[j];
        trials[j] = other;
    }
}

static trial *open_full(uint64_t epoch)
{
    pccl_op_shape shape = plain_shape(FULL_COUNT, PCCL_FLOAT32, PCCL_SUM, FULL_BYTES, 2);
    trial *t = malloc(sizeof *t);
    if (t == NULL)
        stop_test("memory");
    trial_open(t, &shape, (int)random_below(2));
    t->epoch = epoch;
    return t;
}

static void close_full(trial *t)
{
    trial_close(t);
    free(t);
}

/* A receiver that submits late and in another order: the window fills to the last frame, all other ops wait
 * for it, and then it opens again. */
static void the_window_is_kept(void)
{
    enum { OPS = 100, ROUNDS = 3 };
    trial *trials[OPS];
    world w;
    world_open(&w, 2, 1, 0, 0);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t before = stats_of(&w.nodes[1]).rx_payload_bytes;
        for (int i = 0; i < OPS; i++) {
            trials[i] = open_full(1);
            trial_submit(trials[i], &w, 0);
        }
        if (round == 0) {
            /* An announcement of each op, which in a ring goes by itself. */
            uint64_t announced = tested_algorithm == PCCL_DIRECT ? OPS : OPS + WINDOW_FRAMES;
            uint64_t wire_bytes = announced * PCCL_FRAME_BYTES + (uint64_t)WINDOW_FRAMES * FULL_BYTES;
            wait_for_sent(&w.nodes[0], wire_bytes + PCCL_FRAME_BYTES); /* and a greeting */
            CHECK(stats_of(&w.nodes[0]).tx_payload_bytes == (uint64_t)WINDOW_FRAMES * FULL_BYTES);
            wait_for_payload(&w.nodes[1], (uint64_t)WINDOW_FRAMES * FULL_BYTES);
        } else {
            wait_for_payload(&w.nodes[1], before + (uint64_t)REPORTED_FRAMES * FULL_BYTES);
        }
        shuffle(trials, OPS);
        for (int i = 0; i < OPS; i++)
            trial_submit(trials[i], &w, 1);
        for (int i = 0; i < OPS; i++)
            trial_await_done(trials[i], &w);
        for (int i = 0; i < OPS; i++) {
            trial_end_all(trials[i], &w, 1);
            trial_check_results(trials[i]);
            close_full(trials[i]);
        }
    }
    world_close(&w);
}

/* However an epoch ends on either side, the next one finds the window open. */
static void dead_epochs_open_the_window(void)
{
    enum { OPS = 70, ROUNDS = 12 };
    trial *trials[OPS];
    world w;
    world_open(&w, 2, 2, 1, 0);
    for (uint64_t epoch = 1; epoch <= ROUNDS; epoch++) {
        uint64_t before = stats_of(&w.nodes[1]).rx_payload_bytes;
        uint32_t submitted = epoch % 3 == 0 ? OPS / 2 : 0;
        for (int i = 0; i < OPS; i++) {
            trials[i] = open_full(epoch);
            trial_submit(trials[i], &w, 0);
        }
        wait_for_payload(&w.nodes[1], before + (uint64_t)REPORTED_FRAMES * FULL_BYTES);
        shuffle(trials, OPS);
        for (uint32_t i = 0; i < submitted; i++)
            trial_submit(trials[i], &w, 1);
        /* The receiver may hear of the end of an epoch by a freeze or by the next one's first op. */
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t rank = (i + (uint32_t)epoch) % 2;
            if (rank == 0 || epoch % 2 == 0)
                CHECK(pccl_engine_freeze(w.nodes[rank].engine, 0, epoch) == 0);
        }
        for (uint32_t i = 0; i < OPS; i++) {
            trial_end(trials[i], &w, 0, 0);
            trial_check_inputs_kept(trials[i], 0);
            if (i < submitted) {
                trial_end(trials[i], &w, 1, 0);
                trial_check_inputs_kept(trials[i], 1);
            }
            close_full(trials[i]);
        }
        pccl_op_shape shape = plain_shape(10, PCCL_INT32, PCCL_SUM, 1000, 2);
        trial next;
        trial_open(&next, &shape, 1);
        next.epoch = epoch + 1;
        trial_submit(&next, &w, 1);
        trial_submit(&next, &w, 0);
        trial_commit_all(&next, &w);
        trial_close(&next);
    }
    for (int rank = 0; rank < 2; rank++) {
        pccl_engine_stats stats = stats_of(&w.nodes[rank]);
        CHECK(stats.ops_open == 0 && stats.scratch_bytes == 0 && stats.connections == 2);
    }
    world_close(&w);
}

static void a_lost_link_takes_what_was_kept(void)
{
    for (int is_submitted = 0; is_submitted < 2; is_submitted++) {
        world w;
        trial t;
        world_open(&w, 3, 2, 1, 0);
        pccl_op_shape shape = plain_shape(3000, PCCL_FLOAT32, PCCL_SUM, FULL_BYTES, 3);
        trial_open(&t, &shape, 1);
        trial_submit(&t, &w, 0);
        if (is_submitted)
            trial_submit(&t, &w, 1);
        wait_for_payload(&w.nodes[1], 4000);
        CHECK(pccl_engine_link_close(w.nodes[0].engine, link_number(0, 1)) == 0);
        node_wait(&w.nodes[1], PCCL_EVENT_LINK_LOST, link_number(0, 1));
        if (!is_submitted)
            trial_submit(&t, &w, 1);
        trial_submit(&t, &w, 2);
        for (uint32_t rank = 0; rank < 3; rank++)
            trial_abort(&t, &w, rank);
        trial_close(&t);
        world_close(&w);
    }
}

static void change_shape(pccl_op_shape *shape, int change)
{
    switch (change) {
    case 0: shape->count--; break;
    case 1: shape->dtype = PCCL_INT32; break;
    case 2: shape->reduce_op = PCCL_MAX; break;
    case 3: shape->segment_bytes += 4; break;
    case 4: shape->algorithm ^= 1; break;
    case 5: shape->count = 0; break;
    default:
        shape->quantization = PCCL_QUANT_MIN_MAX;
        shape->quantized_dtype = PCCL_UINT8;
        shape->quantization_block = 64;
    }
}

/* One rank differs, and submits before, after or between the others. */
static void mismatch_with(uint32_t size, int change, uint32_t submitted_before)
{
    world w;
    trial t;
    world_open(&w, size, 2, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, FULL_BYTES, size);
    trial_open(&t, &shape, 1);
    uint32_t odd = random_below(size);
    pccl_op_request request = trial_request(&t, &w, odd);
    change_shape(&request.shape, change);
    for (uint32_t i = 1; i < size; i++) {
        if (i - 1 == submitted_before)
            CHECK(pccl_engine_submit(w.nodes[odd].engine, &request) == 0);
        trial_submit(&t, &w, (odd + i) % size);
    }
    if (submitted_before >= size - 1) {
        wait_for_payload(&w.nodes[odd], chunk_bytes(&shape, odd) - 4);
        CHECK(pccl_engine_submit(w.nodes[odd].engine, &request) == 0);
    }
    /* Around a ring neighbours notice, with the direct algorithm everyone. */
    for (uint32_t rank = 0; rank < size; rank++) {
        pccl_event event;
        int is_neighbour = rank == odd || (rank + 1) % size == odd || (odd + 1) % size == rank;
        if (is_neighbour || (shape.algorithm == PCCL_DIRECT && request.shape.algorithm == PCCL_DIRECT))
            event = node_wait(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, t.number);
        else if (!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, t.number, &event))
            continue;
        const pccl_op_shape *mine = rank == odd ? &request.shape : &shape;
        const pccl_op_shape *theirs = rank == odd ? &shape : &request.shape;
        CHECK(pccl_op_shape_equal(&event.mine, mine) && pccl_op_shape_equal(&event.theirs, theirs));
    }
    for (uint32_t rank = 0; rank < size; rank++) {
        pccl_event event;
        trial_abort(&t, &w, rank);
        CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, t.number, &event));
        if (shape.algorithm == PCCL_DIRECT)
            CHECK(!node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, t.number, &event));
    }
    trial_close(&t);
    trial_run(&w, &shape, 1);
    for (uint32_t rank = 0; rank < size; rank++) {
        pccl_engine_stats stats = stats_of(&w.nodes[rank]);
        CHECK(stats.ops_open == 0 && stats.scratch_bytes == 0 && stats.connections == 2 * (size - 1));
    }
    world_close(&w);
}

static void mismatches_are_told(void)
{
    for (uint32_t size = 2; size <= 4; size++)
        for (int change = 0; change <= 6; change++)
            for (uint32_t submitted_before = 0; submitted_before < size; submitted_before++)
                mismatch_with(size, change, submitted_before);
}

/* Ranks submit what they like in any order, an epoch ends when it does, and what is done everywhere is
 * committed: the windows and what is kept go through it all. */
static void any_epoch_may_end_at_any_moment(void)
{
    enum { OPS = 40, EPOCHS = 12 };
    for (uint32_t size = 2; size <= 4; size++) {
        world w;
        world_open(&w, size, 1 + size % 2, size % 2, 0);
        for (uint64_t epoch = 1; epoch <= (uint64_t)RUNS(EPOCHS); epoch++) {
            trial *trials[OPS];
            uint8_t is_submitted[OPS][WORLD_RANKS_MAX];
            uint32_t share_percent = 50 + random_below(51);
            for (int i = 0; i < OPS; i++) {
                uint32_t count = random_below(2) ? 1 + random_below(100) : 1 + random_below(20000);
                pccl_op_shape shape = plain_shape(
                    count, random_below(PCCL_DTYPE_COUNT), random_below(PCCL_REDUCE_OP_COUNT), 32 << 10, size);
                shape.algorithm = (uint8_t)random_below(PCCL_ALGORITHM_COUNT);
                trials[i] = malloc(sizeof *trials[i]);
                if (trials[i] == NULL)
                    stop_test("memory");
                trial_open(trials[i], &shape, (int)random_below(2));
                trials[i]->epoch = epoch;
            }
            for (uint32_t rank = 0; rank < size; rank++) {
                int order[OPS];
                random_order(order, OPS);
                for (int i = 0; i < OPS; i++) {
                    is_submitted[order[i]][rank] = random_below(100) < share_percent;
                    if (is_submitted[order[i]][rank])
                        trial_submit(trials[order[i]], &w, rank);
                }
            }
            if (random_below(2))
                poll(NULL, 0, (int)random_below(3));
            for (uint32_t rank = 0; rank < size; rank++)
                CHECK(pccl_engine_freeze(w.nodes[rank].engine, 0, epoch) == 0);
            for (uint32_t rank = 0; rank < size; rank++)
                node_wait(&w.nodes[rank], PCCL_EVENT_GROUP_FROZEN, epoch);
            for (int i = 0; i < OPS; i++) {
                int commit = 1;
                pccl_event event;
                for (uint32_t rank = 0; rank < size; rank++)
                    commit &= node_take_collected(&w.nodes[rank], PCCL_EVENT_OP_DONE, trials[i]->number, &event);
                for (uint32_t rank = 0; rank < size; rank++) {
                    if (!is_submitted[i][rank])
                        continue;
                    trial_end(trials[i], &w, rank, commit);
                    if (!commit)
                        trial_check_inputs_kept(trials[i], rank);
                }
                if (commit)
                    trial_check_results(trials[i]);
                close_full(trials[i]);
            }
        }
        for (uint32_t rank = 0; rank < size; rank++) {
            pccl_engine_stats stats = stats_of(&w.nodes[rank]);
            CHECK(stats.ops_open == 0 && stats.scratch_bytes == 0);
            CHECK(stats.connections == (size - 1) * (1 + size % 2));
        }
        world_close(&w);
    }
}

static void with_both_algorithms(void)
{
    RUN(payload_may_come_before_its_op);
    RUN(large_or_divided_ops_wait);
    RUN(nothing_is_eager_without_a_limit);
    RUN(the_window_is_kept);
    RUN(dead_epochs_open_the_window);
    RUN(a_lost_link_takes_what_was_kept);
    RUN(mismatches_are_told);
}

int main(void)
{
    tested_eager_bytes_max = FULL_BYTES;
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        with_both_algorithms();
    }
    RUN(first_segments_may_come_before_their_op);
    RUN(any_epoch_may_end_at_any_moment);
    tested_far = 1;
    RUN(any_epoch_may_end_at_any_moment);
    return check_summary();
}
