/* Kernels against element-by-element references that are written another way, at every level the CPU has. */
#include "kernel_data.h"

static void check_narrow(float value)
{
    uint16_t expected = f16_nearest((double)value), got = pccl_f16_from_f32(value);
    CHECK_MSG(got == expected, "f16 of %a: %04x, not %04x", (double)value, got, expected);
    expected = bf16_nearest((double)value);
    got = pccl_bf16_from_f32(value);
    CHECK_MSG(got == expected, "bf16 of %a: %04x, not %04x", (double)value, got, expected);
}

static void test_half_scalar(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        double expected = f16_value((uint16_t)h);
        float got = pccl_f16_to_f32((uint16_t)h);
        int same = (double)got == expected && !signbit(got) == !signbit(expected);
        CHECK_MSG(isnan(expected) ? isnan(got) : same, "f32 of half %04x: %a", h, (double)got);
        CHECK(pccl_f16_from_f32(got) == (isnan(got) ? 0x7e00 : h));
        CHECK(pccl_bf16_from_f32(pccl_bf16_to_f32((uint16_t)h)) == ((h & 0x7fff) > 0x7f80 ? 0x7fc0 : h));
        /* The float half-way to the next half, a bit less and a bit more. */
        if (!isfinite(expected) || (h & 0x7fff) == 0x7bff)
            continue;
        float middle = (float)((expected + f16_value((uint16_t)(h + 1))) / 2);
        check_narrow(middle);
        check_narrow(pccl_f32_of_bits(pccl_f32_bits(middle) + 1));
        check_narrow(pccl_f32_of_bits(pccl_f32_bits(middle) - 1));
    }
    static const float edges[] = {65519.996f, 65520, 65535, 65536, 1e30f, 0x1p-25f, 0x1.000002p-25f, 0x1p-26f,
        0x1p-149f, 0x1p-126f, 0x1.ffcp-15f, 0x1.ffep-15f, 0x1.fffffep127f};
    for (size_t i = 0; i < PCCL_COUNT_OF(edges); i++) {
        check_narrow(edges[i]);
        check_narrow(-edges[i]);
    }
    for (int i = 0; i < 300000; i++)
        check_narrow(pccl_f32_of_bits((uint32_t)random_u64()));
}

static void test_half_arrays(void)
{
    static uint16_t halves[65536], narrow[65536];
    static float wide[65536];
    for (uint32_t h = 0; h < 65536; h++)
        halves[h] = (uint16_t)h;
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++) {
        pccl_f16_widen(halves, 65536, wide);
        for (uint32_t h = 0; h < 65536; h++) {
            float expected = pccl_f16_to_f32((uint16_t)h);
            /* A conversion instruction quiets a signaling NaN; narrowing hides that. */
            CHECK(isnan(expected) ? isnan(wide[h]) : pccl_f32_bits(wide[h]) == pccl_f32_bits(expected));
        }
        pccl_bf16_widen(halves, 65536, wide);
        for (uint32_t h = 0; h < 65536; h++)
            CHECK(pccl_f32_bits(wide[h]) == h << 16);
        for (int round = 0; round < 8; round++) {
            for (uint32_t i = 0; i < 65536; i++) {
                uint64_t random = random_u64();
                /* Half of them in float16's range, and close to ties. */
                uint32_t near = (uint32_t)(random >> 40 & 0x8fffe000) + 0x37fff000 + (random >> 32 & 3);
                wide[i] = pccl_f32_of_bits(random & 1 ? (uint32_t)(random >> 32) : near);
            }
            pccl_f16_narrow(wide, 65535, narrow);
            for (uint32_t i = 0; i < 65535; i++)
                CHECK(narrow[i] == pccl_f16_from_f32(wide[i]));
            pccl_bf16_narrow(wide, 65535, narrow);
            for (uint32_t i = 0; i < 65535; i++)
                CHECK(narrow[i] == pccl_bf16_from_f32(wide[i]));
        }
    }
    pccl_simd_limit(PCCL_SIMD_LEVEL_COUNT);
}

/* Reduction */

/* An element of any integer dtype as a wide integer, sign-extended where that applies. */
static uint64_t get_integer(uint32_t dtype, const uint8_t *at)
{
    uint32_t bytes = pccl_dtype_bytes(dtype);
    uint64_t value = 0;
    memcpy(&value, at, bytes);
    int is_signed = dtype % 2;
    if (is_signed && bytes < 8 && value >> (8 * bytes - 1))
        value |= UINT64_MAX << (8 * bytes);
    return value;
}

static int integer_less(uint32_t dtype, uint64_t x, uint64_t y)
{
    uint64_t flip = dtype % 2 ? (uint64_t)1 << 63 : 0;
    return (x ^ flip) < (y ^ flip);
}

static void reference_integer(uint32_t dtype, uint32_t op, uint8_t *d, const uint8_t *a, const uint8_t *b)
{
    uint64_t x = get_integer(dtype, a), y = get_integer(dtype, b), result;
    if (op == PCCL_PROD)
        result = x * y;
    else if (op == PCCL_MAX)
        result = integer_less(dtype, y, x) ? x : y;
    else if (op == PCCL_MIN)
        result = integer_less(dtype, x, y) ? x : y;
    else
        result = x + y;
    memcpy(d, &result, pccl_dtype_bytes(dtype));
}

/* clang-format off */
#define CHOOSE(op, x, y) \
    ((op) == PCCL_PROD ? (x) * (y) \
    : (op) != PCCL_MAX && (op) != PCCL_MIN ? (x) + (y) \
    : isnan(x) ? (x) \
    : isnan(y) ? (y) \
    : ((op) == PCCL_MAX ? (x) > (y) : (x) < (y)) ? (x) : (y))
/* clang-format on */

static void reference_float(uint32_t dtype, uint32_t op, uint8_t *d, const uint8_t *a, const uint8_t *b)
{
    int selects = op == PCCL_MAX || op == PCCL_MIN;
    if (dtype == PCCL_FLOAT64) {
        double x, y, result;
        memcpy(&x, a, 8);
        memcpy(&y, b, 8);
        result = CHOOSE(op, x, y);
        uint64_t nan = 0x7ff8000000000000u;
        memcpy(d, isnan(result) && !selects ? (const void *)&nan : (const void *)&result, 8);
    } else if (dtype == PCCL_FLOAT32) {
        float x, y, result;
        memcpy(&x, a, 4);
        memcpy(&y, b, 4);
        result = CHOOSE(op, x, y);
        uint32_t nan = 0x7fc00000;
        memcpy(d, isnan(result) && !selects ? (const void *)&nan : (const void *)&result, 4);
    } else {
        uint16_t h[2], result;
        memcpy(&h[0], a, 2);
        memcpy(&h[1], b, 2);
        /* In double: exact for products and for nearly all sums. */
        double x, y;
        if (dtype == PCCL_FLOAT16) {
            x = f16_value(h[0]);
            y = f16_value(h[1]);
            result = f16_nearest(CHOOSE(op, x, y));
        } else {
            x = (double)pccl_f32_of_bits((uint32_t)h[0] << 16);
            y = (double)pccl_f32_of_bits((uint32_t)h[1] << 16);
            result = bf16_nearest(CHOOSE(op, x, y));
        }
        memcpy(d, &result, 2);
    }
}

static uint8_t storage[3][COUNT_MAX * ELEMENT_BYTES_MAX + 64];

static void check_reduce(uint32_t dtype, uint32_t op, size_t count, size_t shift_bytes, int in_place)
{
    static uint8_t expected[COUNT_MAX * ELEMENT_BYTES_MAX];
    const size_t bytes = pccl_dtype_bytes(dtype), total = count * bytes;
    uint8_t *a = storage[0] + shift_bytes, *b = storage[1] + 2 * shift_bytes;
    uint8_t *d = in_place ? a : storage[2] + 3 * shift_bytes;
    fill(dtype, a, count);
    fill(dtype, b, count);
    for (size_t i = 0; i < count; i++)
        (dtype < PCCL_FLOAT16 ? reference_integer : reference_float)(
            dtype, op, expected + i * bytes, a + i * bytes, b + i * bytes);
    memset(d + total, GUARD, GUARD_BYTES);
    pccl_kernel_reduce(dtype, op, d, a, b, count);
    for (size_t i = 0; i < count; i++)
        CHECK_MSG(memcmp(d + i * bytes, expected + i * bytes, bytes) == 0, "%s %s, level %d: element %zu of %zu",
            pccl_dtype_name(dtype), pccl_reduce_op_name(op), pccl_simd_level(), i, count);
    for (size_t i = 0; i < GUARD_BYTES; i++)
        CHECK(d[total + i] == GUARD);
}

static void test_reduce(void)
{
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++)
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
            for (uint32_t op = 0; op < PCCL_REDUCE_OP_COUNT; op++)
                for (size_t i = 0; i < PCCL_COUNT_OF(counts); i++) {
                    check_reduce(dtype, op, counts[i], 0, 0);
                    check_reduce(dtype, op, counts[i], pccl_dtype_bytes(dtype), 1);
                    check_reduce(dtype, op, counts[i], 1, i % 2 == 0);
                }
    pccl_simd_limit(PCCL_SIMD_LEVEL_COUNT);
}

static void test_average(void)
{
    static const uint32_t world_sizes[] = {1, 2, 3, 5, 8, 100, 255, 256, 65537, INT32_MAX};
    static uint8_t values[COUNT_MAX * ELEMENT_BYTES_MAX], before[sizeof values];
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++)
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
            for (size_t w = 0; w < PCCL_COUNT_OF(world_sizes); w++) {
                const size_t bytes = pccl_dtype_bytes(dtype), count = 700 + w;
                const uint32_t world_size = world_sizes[w];
                fill(dtype, values, count);
                memcpy(before, values, sizeof values);
                pccl_kernel_average(dtype, values, count, world_size);
                for (size_t i = 0; i < count; i++) {
                    uint8_t expected[8];
                    const uint8_t *x = before + i * bytes;
                    if (dtype < PCCL_FLOAT16) {
                        uint64_t dividend = get_integer(dtype, x), quotient = dividend / world_size;
                        /* -n // w == ~((n - 1) // w) == ~(~-n // w) */
                        if (dtype % 2 && dividend >> 63)
                            quotient = ~(~dividend / world_size);
                        memcpy(expected, &quotient, bytes);
                    } else if (dtype == PCCL_FLOAT64) {
                        double value;
                        memcpy(&value, x, 8);
                        value /= (double)world_size;
                        uint64_t nan = 0x7ff8000000000000u;
                        memcpy(expected, isnan(value) ? (void *)&nan : (void *)&value, 8);
                    } else if (dtype == PCCL_FLOAT32) {
                        float value;
                        memcpy(&value, x, 4);
                        value /= (float)world_size;
                        uint32_t nan = 0x7fc00000;
                        memcpy(expected, isnan(value) ? (void *)&nan : (void *)&value, 4);
                    } else {
                        uint16_t half;
                        memcpy(&half, x, 2);
                        if (dtype == PCCL_FLOAT16)
                            half = f16_nearest((double)(pccl_f16_to_f32(half) / (float)world_size));
                        else
                            half = bf16_nearest((double)(pccl_bf16_to_f32(half) / (float)world_size));
                        memcpy(expected, &half, 2);
                    }
                    CHECK_MSG(memcmp(values + i * bytes, expected, bytes) == 0, "%s / %u: element %zu",
                        pccl_dtype_name(dtype), world_size, i);
                }
                CHECK(memcmp(values + count * bytes, before + count * bytes, 8) == 0);
            }
    pccl_simd_limit(PCCL_SIMD_LEVEL_COUNT);
}

static void test_names(void)
{
    for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
        CHECK(pccl_dtype_bytes(dtype) >= 1 && pccl_dtype_is_float(dtype) == (dtype >= PCCL_FLOAT16));
    CHECK(pccl_dtype_bytes(PCCL_DTYPE_COUNT) == 0 && !pccl_dtype_is_float(PCCL_DTYPE_COUNT));
    CHECK(strcmp(pccl_dtype_name(PCCL_BFLOAT16), "bfloat16") == 0);
    CHECK(strcmp(pccl_dtype_name(PCCL_DTYPE_COUNT), "unknown") == 0);
    CHECK(strcmp(pccl_reduce_op_name(PCCL_AVG), "avg") == 0);
    CHECK(strcmp(pccl_reduce_op_name(PCCL_REDUCE_OP_COUNT), "unknown") == 0);
    CHECK(strcmp(pccl_quantization_name(PCCL_QUANT_MIN_MAX), "min_max") == 0);
    CHECK(strcmp(pccl_quantization_name(PCCL_QUANT_COUNT), "unknown") == 0);
}

int main(void)
{
    RUN(test_names);
    RUN(test_half_scalar);
    RUN(test_half_arrays);
    RUN(test_reduce);
    RUN(test_average);
    return check_summary();
}
