/* The floating-point environment: threads of the library compute in the default one, whatever the thread that made them
 * had, and a thread of the caller's gets its own back. */
#include <fenv.h>
#include <stdint.h>
#include <string.h>

#include "check.h"
#include "engine_world.h"

#include "../src/fpenv.h"

/* Rounds downward, flushes subnormals on either side, traps division by zero. */
static uint64_t odd_environment(void)
{
#if defined(__SSE2__)
    return (0x1f80 & ~0x0200u) | 0x8000 | 0x0040 | 0x2000;
#elif defined(__aarch64__)
    return 1u << 24 | 1u << 19 | 2u << 22;
#else
    return FE_DOWNWARD;
#endif
}

static volatile float smallest_normal = 0x1p-126f, half = 0.5f, one = 1.0f, tiny = 0x1p-60f;

static int is_usual(void)
{
    return smallest_normal * half != 0 && one + tiny == one && one - tiny == one && -one - tiny == -one;
}

static void test_enter_and_leave(void)
{
    CHECK(pccl_fpenv_get() == pccl_fpenv_default());
    CHECK(is_usual());
    pccl_fpenv_set(odd_environment());
    CHECK(!is_usual());
    const uint64_t odd = pccl_fpenv_get();
    const uint64_t before = pccl_fpenv_enter();
    const int was_usual = is_usual();
    pccl_fpenv_leave(before);
    const uint64_t after = pccl_fpenv_get();
    pccl_fpenv_set(pccl_fpenv_default());
    CHECK(was_usual);
    CHECK(before == odd && after == odd);
    CHECK(is_usual());
}

static void test_signs_of_callers_threads(void)
{
    const pccl_signs of = {1, 2, 3};
    const uint32_t direction = 0;
    const int32_t there = 1, back = -1;
    float values[300];
    uint32_t wrong = 0;
    memset(values, 0, sizeof values);
    pccl_fpenv_set(odd_environment());
    const uint64_t odd = pccl_fpenv_get();
    pccl_kernel_add_signs(values, 300, 0x1p-126f, &of, &direction, &there, 1);
    pccl_kernel_add_signs(values, 300, 0x1p-126f, &of, &direction, &back, 1);
    const uint64_t after = pccl_fpenv_get();
    pccl_fpenv_set(pccl_fpenv_default());
    for (int i = 0; i < 300; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        wrong += bits != 0;
    }
    CHECK_MSG(wrong == 0, "%u values are not 0 again", (unsigned)wrong);
    CHECK(after == odd);
}

enum { WORLD = 2, COUNT = 4099 };

static float buffers[WORLD][COUNT];

/* Sums are subnormal, or lie between two floats. */
static float value(uint32_t rank, uint32_t i)
{
    return (i % 256 < 128 ? 0x1p-130f : 0.1f) * (float)(1 + (i * 7 + rank * 13) % 101);
}

static uint8_t code_of(uint8_t quantization)
{
    switch (quantization) {
    case PCCL_QUANT_CAST: return PCCL_FLOAT16;
    case PCCL_QUANT_LLOYD_MAX: return PCCL_CODE_UINT2;
    case PCCL_QUANT_SIGN: return PCCL_CODE_UINT1;
    default: return PCCL_UINT8;
    }
}

static void reduce_between_engines_of_two_environments(uint8_t quantization, uint8_t algorithm)
{
    world w;
    world_init(&w, WORLD);
    node_open(&w.nodes[0], 0);
    pccl_fpenv_set(odd_environment());
    node_open(&w.nodes[1], 0);
    pccl_fpenv_set(pccl_fpenv_default());
    world_link(&w, 0, 1, 0);
    tested_algorithm = algorithm;
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        for (uint32_t i = 0; i < COUNT; i++)
            buffers[rank][i] = value(rank, i);
        pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_AVG, 1024, WORLD);
        if (quantization != PCCL_QUANT_NONE) {
            shape.quantization = quantization;
            shape.quantized_dtype = code_of(quantization);
            shape.quantization_block = quantization == PCCL_QUANT_CAST ? 0 : 128;
        }
        pccl_op_request request = request_for(&w, rank, 1, &shape);
        request.send = request.recv = buffers[rank];
        CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
    }
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, 1);
        CHECK(pccl_engine_end(w.nodes[rank].engine, 1, PCCL_COMMIT) == 0);
        node_wait(&w.nodes[rank], PCCL_EVENT_OP_ENDED, 1);
    }
    CHECK_MSG(memcmp(buffers[0], buffers[1], sizeof buffers[0]) == 0, "quantization %d, algorithm %d", quantization,
        algorithm);
    for (uint32_t i = 0; i < COUNT && quantization == PCCL_QUANT_NONE; i++)
        CHECK_MSG(buffers[0][i] == (value(0, i) + value(1, i)) / 2, "element %d", (int)i);
    world_close(&w);
    tested_algorithm = PCCL_RING;
}

static void test_engines_made_in_two_environments(void)
{
    for (uint8_t quantization = 0; quantization < PCCL_QUANT_COUNT; quantization++)
        for (uint8_t algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++)
            reduce_between_engines_of_two_environments(quantization, algorithm);
}

int main(void)
{
    RUN(test_enter_and_leave);
    RUN(test_signs_of_callers_threads);
    RUN(test_engines_made_in_two_environments);
    return check_summary();
}
