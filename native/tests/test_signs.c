/* Random signs: the generator against the published vectors of Random123, the kernel against its definition. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#include "pccl_native.h"
#include "../src/simd.h"

enum { COUNT_MAX = 9000, DIRECTIONS_MAX = 5 };

static const size_t counts[] = {0, 1, 31, 32, 127, 128, 129, 4095, 4096, 4097, COUNT_MAX};

static void test_known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff},
            {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
            {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const uint64_t seed = (uint64_t)known[i].key[1] << 32 | known[i].key[0];
        const pccl_signs of = {seed, known[i].counter[1], known[i].counter[2]};
        uint32_t words[4];
        pccl_kernel_sign_words(&of, known[i].counter[3], known[i].counter[0], words);
        CHECK_MSG(memcmp(words, known[i].words, sizeof words) == 0, "vector %d: %08x ...", (int)i, words[0]);
    }
}

static int sign(const pccl_signs *of, uint32_t direction, size_t i)
{
    uint32_t words[4];
    pccl_kernel_sign_words(of, direction, (uint32_t)(i / 128), words);
    return words[i % 128 / 32] >> i % 32 & 1 ? -1 : 1;
}

/* A misaligned buffer, as tensors may be anywhere. */
static char memory[(COUNT_MAX + 1) * sizeof(float) + 1];

static void fill(float *values, size_t count, float quantum)
{
    for (size_t i = 0; i < count; i++) {
        const float value = (float)((int)(i * 7919 % 100001) - 50000) * quantum;
        memcpy(values + i, &value, sizeof value);
    }
}

static void check_kernel(size_t count, float quantum, size_t direction_count)
{
    const pccl_signs of = {0x0123456789abcdefu, 3, 17};
    const uint32_t directions[DIRECTIONS_MAX] = {0, 5, 1u << 31, 7, 7};
    const int32_t amounts[DIRECTIONS_MAX] = {1, -1000, 12345, 0, 1 << 20};
    int32_t negative[DIRECTIONS_MAX];
    float before[COUNT_MAX], expected[COUNT_MAX];
    float *values = (float *)(void *)(memory + 1);
    const float guard = 42;
    fill(before, count, quantum);
    for (size_t i = 0; i < count; i++) {
        int64_t sum = 0;
        for (size_t k = 0; k < direction_count; k++)
            sum += (int64_t)amounts[k] * sign(&of, directions[k], i);
        expected[i] = (float)((double)before[i] + (double)sum * (double)quantum);
    }
    memcpy(memory + 1, before, count * sizeof(float));
    memcpy(memory + 1 + count * sizeof(float), &guard, sizeof guard);
    pccl_kernel_add_signs(values, count, quantum, &of, directions, amounts, direction_count);
    CHECK_MSG(memcmp(memory + 1, expected, count * sizeof(float)) == 0, "%d elements, %d directions", (int)count,
        (int)direction_count);
    CHECK(memcmp(memory + 1 + count * sizeof(float), &guard, sizeof guard) == 0);
    for (size_t k = 0; k < direction_count; k++)
        negative[k] = -amounts[k];
    pccl_kernel_add_signs(values, count, quantum, &of, directions, negative, direction_count);
    CHECK(memcmp(memory + 1, before, count * sizeof(float)) == 0);
}

static void test_every_level_does_what_is_written(void)
{
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
            for (size_t k = 0; k <= DIRECTIONS_MAX; k++) {
                check_kernel(counts[c], 0x1p-20f, k);
                check_kernel(counts[c], 0x1p-126f, k);
            }
    pccl_simd_limit(PCCL_SIMD_LEVEL_COUNT);
}

static void test_the_largest_sum(void)
{
    const pccl_signs of = {1, 0, 0};
    const uint32_t direction = 0;
    const int32_t up = PCCL_SIGNS_SUM_MAX, down = -PCCL_SIGNS_SUM_MAX;
    float values[COUNT_MAX];
    memset(values, 0, sizeof values);
    pccl_kernel_add_signs(values, COUNT_MAX, 1, &of, &direction, &up, 1);
    for (size_t i = 0; i < COUNT_MAX; i++)
        CHECK(values[i] == (float)(sign(&of, 0, i) * PCCL_SIGNS_SUM_MAX));
    pccl_kernel_add_signs(values, COUNT_MAX, 1, &of, &direction, &down, 1);
    for (size_t i = 0; i < COUNT_MAX; i++)
        CHECK(values[i] == 0);
}

/* Of 2^20 signs each, the sum and what two directions have in common are within five standard deviations of none. */
static void test_signs_are_balanced_and_independent(void)
{
    enum { BLOCKS = 1 << 13 };
    const pccl_signs of = {99, 0, 0}, later = {99, 0, 1}, elsewhere = {99, 1, 0};
    int64_t sum = 0, common[3] = {0, 0, 0};
    for (uint32_t block = 0; block < BLOCKS; block++) {
        uint32_t words[4][4];
        pccl_kernel_sign_words(&of, 0, block, words[0]);
        pccl_kernel_sign_words(&of, 1, block, words[1]);
        pccl_kernel_sign_words(&later, 0, block, words[2]);
        pccl_kernel_sign_words(&elsewhere, 0, block, words[3]);
        for (int i = 0; i < 4; i++) {
            sum += 32 - 2 * __builtin_popcount(words[0][i]);
            for (int k = 0; k < 3; k++)
                common[k] += 32 - 2 * __builtin_popcount(words[0][i] ^ words[k + 1][i]);
        }
    }
    CHECK_MSG(llabs(sum) < 5 * 1024, "sum %lld", (long long)sum);
    for (int k = 0; k < 3; k++)
        CHECK_MSG(llabs(common[k]) < 5 * 1024, "in common %lld", (long long)common[k]);
}

int main(void)
{
    RUN(test_known_answers);
    RUN(test_every_level_does_what_is_written);
    RUN(test_the_largest_sum);
    RUN(test_signs_are_balanced_and_independent);
    return check_summary();
}
