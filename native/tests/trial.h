/* trial.h: one op on all ranks of a world, with a model that folds the ranks' inputs in the algorithm's order. Shared
 * by the tests of whole engines. */
#ifndef PCCL_TRIAL_H
#define PCCL_TRIAL_H

#include "check.h"
#include "engine_world.h"

/* Sanitizers slow everything down by an order of magnitude. RUNS is for the longest loops: ThreadSanitizer is the
 * slowest, and the bytes that random runs check are those of the other builds. */
#if defined(__SANITIZE_THREAD__)
enum { THOROUGHNESS = 1 };
#define RUNS(count) ((count) / 4)
#elif defined(__SANITIZE_ADDRESS__)
enum { THOROUGHNESS = 1 };
#define RUNS(count) (count)
#else
enum { THOROUGHNESS = 4 };
#define RUNS(count) (4 * (count))
#endif

static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline uint32_t random_below(uint32_t bound) { return (uint32_t)(random_u64() >> 33) % bound; }

/* The numbers below `count`, in random order. */
static inline void random_order(int *order, int count)
{
    for (int i = 0; i < count; i++) {
        int j = (int)random_below((uint32_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
}

/* Finite floats of similar size: exponent is the one random part that is bounded. */
static inline void fill_random(void *values, uint32_t dtype, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random_u64();
        uint32_t spread = random_below(8);
        switch (dtype) {
        case PCCL_FLOAT16: ((uint16_t *)values)[i] = (uint16_t)((bits & 0x83ff) | (10 + spread) << 10); break;
        case PCCL_BFLOAT16: ((uint16_t *)values)[i] = (uint16_t)((bits & 0x807f) | (120 + spread) << 7); break;
        case PCCL_FLOAT32: ((uint32_t *)values)[i] = (uint32_t)((bits & 0x807fffff) | (120 + spread) << 23); break;
        case PCCL_FLOAT64:
            ((uint64_t *)values)[i] = (bits & 0x800fffffffffffffu) | (uint64_t)(1016 + spread) << 52;
            break;
        default: memcpy((uint8_t *)values + i * pccl_dtype_bytes(dtype), &bits, pccl_dtype_bytes(dtype));
        }
    }
}

/* One op on all ranks. */
typedef struct {
    uint64_t number;
    uint32_t group;
    uint64_t epoch;
    pccl_op_shape shape;
    int in_place;
    size_t bytes;
    uint8_t *inputs[WORLD_RANKS_MAX];
    uint8_t *send[WORLD_RANKS_MAX];
    uint8_t *recv[WORLD_RANKS_MAX];
} trial;

static uint64_t next_number = 1;

static inline uint8_t *allocate(size_t bytes)
{
    uint8_t *buffer = malloc(bytes == 0 ? 1 : bytes);
    if (buffer == NULL)
        stop_test("memory");
    return buffer;
}

static inline void trial_open(trial *t, const pccl_op_shape *shape, int in_place)
{
    memset(t, 0, sizeof *t);
    t->number = next_number++;
    t->epoch = 1;
    t->shape = *shape;
    t->in_place = in_place;
    t->bytes = (size_t)shape->count * pccl_dtype_bytes(shape->dtype);
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        t->inputs[rank] = allocate(t->bytes);
        t->send[rank] = allocate(t->bytes);
        t->recv[rank] = in_place ? t->send[rank] : allocate(t->bytes);
        fill_random(t->inputs[rank], shape->dtype, (size_t)shape->count);
        memset(t->recv[rank], 0xee, t->bytes);
        memcpy(t->send[rank], t->inputs[rank], t->bytes);
    }
}

static inline void trial_close(trial *t)
{
    for (uint32_t rank = 0; rank < t->shape.world_size; rank++) {
        free(t->inputs[rank]);
        free(t->send[rank]);
        if (!t->in_place)
            free(t->recv[rank]);
    }
}

static inline pccl_op_request trial_request(const trial *t, const world *w, uint32_t rank)
{
    pccl_op_request request = request_for(w, rank, t->number, &t->shape);
    request.key.group = t->group;
    request.key.epoch = t->epoch;
    request.send = t->send[rank];
    request.recv = t->recv[rank];
    /* Ranks need not agree on this. */
    request.rounding =
        t->shape.quantization != PCCL_QUANT_NONE && rank % 2 ? PCCL_ROUND_STOCHASTIC : PCCL_ROUND_NEAREST;
    request.rounding_seed = rank;
    return request;
}

static inline void trial_submit(const trial *t, world *w, uint32_t rank)
{
    pccl_op_request request = trial_request(t, w, rank);
    CHECK(pccl_engine_submit(w->nodes[rank].engine, &request) == 0);
}

static inline void trial_submit_all(const trial *t, world *w)
{
    uint32_t first = random_below(w->size);
    for (uint32_t i = 0; i < w->size; i++)
        trial_submit(t, w, (first + i) % w->size);
}

static inline void trial_await_done(const trial *t, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        node_wait_done(&w->nodes[rank], t->number);
}

static inline pccl_event trial_end(const trial *t, world *w, uint32_t rank, int commit)
{
    CHECK(pccl_engine_end(w->nodes[rank].engine, t->number, commit) == 0);
    return node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, t->number);
}

static inline void trial_end_all(const trial *t, world *w, int commit)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        CHECK(pccl_engine_end(w->nodes[rank].engine, t->number, commit) == 0);
    for (uint32_t rank = 0; rank < w->size; rank++)
        CHECK(node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, t->number).system_error == 0);
}

static inline uint8_t *trial_expected(const trial *t)
{
    const pccl_op_shape *shape = &t->shape;
    uint32_t world_size = shape->world_size;
    size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    uint8_t *expected = allocate(t->bytes);
    size_t at = 0;
    for (uint32_t chunk = 0; chunk < world_size; chunk++) {
        size_t elements = (size_t)(shape->count / world_size) + (chunk < shape->count % world_size);
        int is_direct = shape->algorithm == PCCL_DIRECT;
        memcpy(expected + at, t->inputs[is_direct ? 0 : (chunk + 1) % world_size] + at, elements * element_bytes);
        for (uint32_t i = 1; i < world_size; i++)
            if (is_direct)
                pccl_kernel_reduce(
                    shape->dtype, shape->reduce_op, expected + at, expected + at, t->inputs[i] + at, elements);
            else
                pccl_kernel_reduce(shape->dtype, shape->reduce_op, expected + at,
                    t->inputs[(chunk + 1 + i) % world_size] + at, expected + at, elements);
        if (shape->reduce_op == PCCL_AVG && world_size > 1)
            pccl_kernel_average(shape->dtype, expected + at, elements, world_size);
        at += elements * element_bytes;
    }
    return expected;
}

static inline void trial_check_results(const trial *t)
{
    uint8_t *expected = trial_expected(t);
    for (uint32_t rank = 0; rank < t->shape.world_size; rank++) {
        CHECK_MSG(memcmp(t->recv[rank], expected, t->bytes) == 0,
            "rank %u of %u, algorithm %u, %llu elements of type %u, op %u, segments of %u, in place %d", rank,
            t->shape.world_size, t->shape.algorithm, (unsigned long long)t->shape.count, t->shape.dtype,
            t->shape.reduce_op, t->shape.segment_bytes, t->in_place);
        if (!t->in_place)
            CHECK(memcmp(t->send[rank], t->inputs[rank], t->bytes) == 0);
    }
    free(expected);
}

/* All ranks commit once they are done, and have the right result. */
static inline void trial_commit_all(const trial *t, world *w)
{
    trial_await_done(t, w);
    trial_end_all(t, w, 1);
    trial_check_results(t);
}

static inline void trial_check_inputs_kept(const trial *t, uint32_t rank)
{
    CHECK(memcmp(t->send[rank], t->inputs[rank], t->bytes) == 0);
}

static inline void trial_check_result(const trial *t, uint32_t rank)
{
    uint8_t *expected = trial_expected(t);
    CHECK(memcmp(t->recv[rank], expected, t->bytes) == 0);
    free(expected);
}

/* Aborts it on this rank, which has its input back. */
static inline pccl_event trial_abort(const trial *t, world *w, uint32_t rank)
{
    pccl_event ended = trial_end(t, w, rank, PCCL_ABORT);
    trial_check_inputs_kept(t, rank);
    return ended;
}

/* Aborts it on this rank, whose result is right if it is done. */
static inline void trial_abort_checked(const trial *t, world *w, uint32_t rank)
{
    if (node_has_event(&w->nodes[rank], PCCL_EVENT_OP_DONE, t->number))
        trial_check_result(t, rank);
    trial_abort(t, w, rank);
}

static inline void trial_run(world *w, const pccl_op_shape *shape, int in_place)
{
    trial t;
    trial_open(&t, shape, in_place);
    trial_submit_all(&t, w);
    trial_commit_all(&t, w);
    trial_close(&t);
}

static inline void wait_for_payload(node *n, uint64_t bytes) { node_await_stat(n, rx_payload_bytes, bytes); }

static inline pccl_op_shape quantized_shape(
    uint64_t count, uint32_t op, uint32_t quantization, uint32_t quantized_dtype, uint32_t world_size)
{
    pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, op, 1000, world_size);
    shape.quantization = (uint8_t)quantization;
    shape.quantized_dtype = (uint8_t)quantized_dtype;
    shape.quantization_block = quantization == PCCL_QUANT_CAST ? 0 : 64;
    return shape;
}

#endif
