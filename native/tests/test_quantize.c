/* Quantization: golden bytes, errors within their bounds, hostile bytes, at every level the CPU has. */
#include "kernel_data.h"

#include <time.h>

/* Quantization */

static double steps_of(const pccl_op_shape *shape)
{
    if (shape->quantized_dtype >= PCCL_CODE_UINT4)
        return 15;
    return pccl_dtype_bytes(shape->quantized_dtype) == 1 ? 255 : 65535;
}

static void test_quant_shapes(void)
{
    pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256);
    CHECK(pccl_quant_valid(&shape));
    CHECK(pccl_quantized_bytes(&shape, 0) == 0);
    CHECK(pccl_quantized_bytes(&shape, 1) == 9);
    CHECK(pccl_quantized_bytes(&shape, 256) == 264);
    CHECK(pccl_quantized_bytes(&shape, 257) == 273);
    shape.quantized_dtype = PCCL_INT16;
    CHECK(pccl_quantized_bytes(&shape, 257) == 16 + 514);
    shape.quantized_dtype = PCCL_UINT32;
    CHECK(!pccl_quant_valid(&shape) && pccl_quantized_bytes(&shape, 257) == 0);
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_FLOAT16, 256);
    CHECK(!pccl_quant_valid(&shape));
    shape = quantized_shape(PCCL_INT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256);
    CHECK(!pccl_quant_valid(&shape));
    shape = quantized_shape(PCCL_FLOAT16, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 64);
    CHECK(pccl_quant_valid(&shape));
    CHECK(pccl_quantized_bytes(&shape, 0) == 0);
    CHECK(pccl_quantized_bytes(&shape, 1) == 5);
    CHECK(pccl_quantized_bytes(&shape, 64) == 36);
    CHECK(pccl_quantized_bytes(&shape, 67) == 36 + 6);
    shape.quantization_block = 63;
    CHECK(!pccl_quant_valid(&shape));
    shape.quantized_dtype = PCCL_CODE_UINT2;
    shape.quantization_block = 64;
    CHECK(!pccl_quant_valid(&shape));
    for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
        for (uint32_t to = 0; to < 80; to++) {
            int saves = dtype >= PCCL_FLOAT32 && (to == PCCL_FLOAT16 || to == PCCL_BFLOAT16);
            shape = quantized_shape(dtype, PCCL_QUANT_CAST, to, 0);
            CHECK(!pccl_quant_valid(&shape) == !saves);
            CHECK(pccl_quantized_bytes(&shape, 7) == (saves ? 14 : 0));
            shape.quantization_block = 2;
            CHECK(!pccl_quant_valid(&shape));
        }
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_COUNT, PCCL_UINT8, 256);
    CHECK(!pccl_quant_valid(&shape));
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0);
    CHECK(!pccl_quant_valid(&shape));
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, PCCL_QUANT_BLOCK_MAX + 1);
    CHECK(!pccl_quant_valid(&shape));
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_NONE, 0, 0);
    CHECK(!pccl_quant_valid(&shape) && pccl_quantized_bytes(&shape, 257) == 4 * 257);
}

static void check_wire(
    const pccl_op_shape *shape, const float *values, size_t count, const uint8_t *expected, size_t expected_bytes)
{
    uint8_t wire[256];
    REQUIRE(pccl_quantized_bytes(shape, count) == expected_bytes && expected_bytes <= sizeof wire);
    EACH_LEVEL {
        memset(wire, GUARD, sizeof wire);
        pccl_kernel_quantize(shape, values, count, wire);
        for (size_t i = 0; i < expected_bytes; i++)
            CHECK_MSG(wire[i] == expected[i], "%s, code %s: wire byte %zu is %02x, not %02x",
                pccl_quantization_name(shape->quantization), pccl_dtype_name(shape->quantized_dtype), i, wire[i],
                expected[i]);
    }
}

static void check_golden(
    const pccl_op_shape *shape, const float *values, size_t count, const uint8_t *expected, size_t expected_bytes)
{
    float back[64];
    check_wire(shape, values, count, expected, expected_bytes);
    EACH_LEVEL {
        /* These values are all codes exactly, but for ties. */
        pccl_kernel_dequantize(shape, expected, count, back);
        for (size_t i = 0; i < count; i++)
            CHECK(isnan(back[i]) || back[i] == values[i] || fabsf(back[i] - values[i]) <= 0.5f);
    }
}

/* These bytes are the wire format: to change them is to change the protocol's version. */
static void test_quant_golden(void)
{
    static const float bytes_range[] = {-64, 0, 0.5f, 1.5f, 191, -1, -1, INFINITY, 3, 0};
    /* clang-format off */
    static const uint8_t min_max_uint8[] = {
        0, 0, 0x80, 0x3f, 0, 0, 0x80, 0xc2, 0, 64, 64, 66, 255, /* scale 1, minimum -64; ties to even */
        0, 0, 0xc0, 0x7f, 0, 0, 0, 0, 0, 0, 0, 0, 0, /* infinity: marked */
    };
    static const uint8_t zero_point_int8[] = {
        0, 0, 0x80, 0x3f, 0xc0, 0xff, 0xff, 0xff, 0x80, 0xc0, 0xc0, 0xc2, 0x7f, /* zero point -64 */
        0, 0, 0xc0, 0x7f, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    };
    /* clang-format on */
    pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 5);
    check_golden(&shape, bytes_range, 10, min_max_uint8, sizeof min_max_uint8);
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 5);
    check_golden(&shape, bytes_range, 10, zero_point_int8, sizeof zero_point_int8);

    static const float words_range[] = {-2, 65533, 0, 258, -7, -7, 0};
    /* clang-format off */
    static const uint8_t min_max_int16[] = {
        0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 0, 0x80, 0xff, 0x7f, 2, 0x80, 4, 0x81, /* scale 1, minimum -2 */
        0xe1, 0, 0xe0, 0x38, 0, 0, 0xe0, 0xc0, 0, 0x80, 0, 0x80, 0xff, 0x7f, /* scale 7/65535 rounded up */
    };
    static const uint8_t zero_point_uint16[] = {
        0, 0, 0x80, 0x3f, 2, 0, 0, 0, 0, 0, 0xff, 0xff, 2, 0, 4, 1, /* zero point 2 */
        0, 0, 0xe0, 0x40, 1, 0, 0, 0, 0, 0, 0, 0, /* a constant: one step of 7 below zero */
    };
    /* clang-format on */
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_INT16, 4);
    check_golden(&shape, words_range, 7, min_max_int16, sizeof min_max_int16);
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT16, 4);
    check_golden(&shape, words_range, 6, zero_point_uint16, sizeof zero_point_uint16);

    static const float halves_range[] = {-4, 11, 0, 0.5f, 1.5f, 7, 3, 1e9f, NAN, 2};
    /* clang-format off */
    static const uint8_t min_max_uint4[] = {
        0x80, 0x3f, 0x80, 0xc0, 0xf0, 0x44, 0xb6, /* scale 1, minimum -4; the first one is the low half */
        0xc0, 0x7f, 0, 0, 0, 0, /* a NaN: marked */
    };
    static const uint8_t zero_point_int4[] = {
        0x80, 0x3f, 0xfc, 0xff, 0x78, 0xcc, 0x3e, /* zero point -4 */
        0xc0, 0x7f, 0, 0, 0, 0,
    };
    /* clang-format on */
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4, 6);
    check_golden(&shape, halves_range, 9, min_max_uint4, sizeof min_max_uint4);
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 6);
    check_golden(&shape, halves_range, 9, zero_point_int4, sizeof zero_point_int4);

    static const float casts[] = {1, -2, 0x1.0001p0f, 65504, INFINITY, -INFINITY, NAN, 0x1p-24f};
    static const uint8_t as_float16[] = {0, 0x3c, 0, 0xc0, 0, 0x3c, 0xff, 0x7b, 0, 0x7c, 0, 0xfc, 0, 0x7e, 1, 0};
    static const uint8_t as_bfloat16[] = {
        0x80, 0x3f, 0, 0xc0, 0x80, 0x3f, 0x80, 0x47, 0x80, 0x7f, 0x80, 0xff, 0xc0, 0x7f, 0x80, 0x33};
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_FLOAT16, 0);
    check_golden(&shape, casts, 8, as_float16, sizeof as_float16);
    shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_BFLOAT16, 0);
    check_wire(&shape, casts, 8, as_bfloat16, sizeof as_bfloat16); /* 65504 has too many digits */

    /* A long pseudo-random segment, its wire bytes and what comes out of them, as hashes. */
    static const struct {
        uint32_t quantization, quantized_dtype;
        uint64_t wire_hash, value_hash;
        int is_stochastic;
    } hashes[] = {
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0x89ecabeb6c6f5168u, 0x3ba82caaa450e59cu, 0},
        {PCCL_QUANT_MIN_MAX, PCCL_INT16, 0xd46c0044da12810bu, 0x838ba6464dee4f03u, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 0x7ad240e2c807c627u, 0x907d66cb1611d0cbu, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT16, 0xa70b48192dda76f9u, 0xb0ca7abf1fba3534u, 0},
        {PCCL_QUANT_MIN_MAX, PCCL_CODE_INT4, 0x7361a35b8165230fu, 0xca36c2ecb378a723u, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_UINT4, 0x749120b80d366f7du, 0x7cdd2689913563f3u, 0},
        {PCCL_QUANT_CAST, PCCL_FLOAT16, 0x91604824085de48au, 0x7b0d301c9717fe24u, 0},
        {PCCL_QUANT_CAST, PCCL_BFLOAT16, 0xd95f792bcbe5fff5u, 0x6f1c97b4461155edu, 0},
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0xb8c95fd8d8a5c505u, 0xd8fc394dc8404796u, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT16, 0xcd6598622b9cda06u, 0x6523ae70a940f59bu, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 0xe8e91c234a097f47u, 0x589d3c7cdfb7286cu, 1},
        {PCCL_QUANT_CAST, PCCL_FLOAT16, 0xfbe4f6257b3b0b56u, 0x6309cf5b20689ee0u, 1},
        {PCCL_QUANT_CAST, PCCL_BFLOAT16, 0xafc125a5061952f3u, 0x22d6cd4dd9f55623u, 1},
    };
    static float values[5000], back[5000];
    static uint8_t wire[20000];
    uint32_t lcg = 1;
    for (size_t i = 0; i < 5000; i++) {
        lcg = lcg * 1664525u + 1013904223u;
        values[i] = (float)(int32_t)lcg * (i / 1000 == 3 ? 0x1p-60f : 0x1p-31f);
    }
    for (size_t k = 0; k < PCCL_COUNT_OF(hashes); k++)
        EACH_LEVEL {
            const uint32_t block = hashes[k].quantization == PCCL_QUANT_CAST ? 0 : 300;
            shape = quantized_shape(PCCL_FLOAT32, hashes[k].quantization, hashes[k].quantized_dtype, block);
            if (hashes[k].is_stochastic)
                pccl_kernel_quantize_stochastic(&shape, 0x123456789abcdefu, 7, values, 5000, wire);
            else
                pccl_kernel_quantize(&shape, values, 5000, wire);
            uint64_t wire_hash = hash_bytes(wire, pccl_quantized_bytes(&shape, 5000));
            pccl_kernel_dequantize(&shape, wire, 5000, back);
            uint64_t value_hash = hash_bytes(back, sizeof back);
            CHECK_MSG(wire_hash == hashes[k].wire_hash && value_hash == hashes[k].value_hash,
                "case %zu: 0x%llxu, 0x%llxu", k, (unsigned long long)wire_hash, (unsigned long long)value_hash);
        }
}

/* Half a scale or a whole one, what float32 arithmetic adds, what rounding to the dtype adds. */
static void check_error(
    const pccl_op_shape *shape, const void *values, const void *back, size_t count, int is_stochastic)
{
    const double roundings[] = {0x1p-11, 0x1p-8, 0x1p-23, 0x1p-23};
    const double subnormals[] = {0x1p-25, 0x1p-134, 0x1p-150, 0x1p-150};
    const uint32_t which = shape->dtype - PCCL_FLOAT16;
    const double codes = steps_of(shape);
    for (size_t start = 0; start < count; start += shape->quantization_block) {
        size_t end = pccl_min_size(start + shape->quantization_block, count);
        double lo = get_float(shape->dtype, values, start), hi = lo;
        for (size_t i = start; i < end; i++) {
            double value = get_float(shape->dtype, values, i);
            lo = value < lo ? value : lo;
            hi = value > hi ? value : hi;
        }
        int exact = lo == hi && codes > 15;
        double spare = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE && is_stochastic ? 1 : 0;
        if (shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE) {
            lo = lo < 0 ? lo : 0;
            hi = hi > 0 ? hi : 0;
        }
        /* Below float32's normal range a scale is a multiple of its least value. */
        double step = (hi - lo) / (codes - spare) * (1 + 0x1p-22) + 0x1p-149, outside = 0;
        if (codes == 15) {
            double lower = shape->quantization == PCCL_QUANT_MIN_MAX ? fabs(lo) * 0x1p-7 + 0x1p-133 : 0;
            step = (hi - lo + lower) / (codes - spare) * (1 + 0x1p-7) + 0x1p-133;
            /* The lower end, where there is no such bfloat16. */
            outside = lo < -0x1.fep127 ? 0x1p120 : 0;
        }
        for (size_t i = start; i < end; i++) {
            double value = get_float(shape->dtype, values, i), got = get_float(shape->dtype, back, i);
            double slack = fmax(-lo, hi) * 1.01 * roundings[which] + subnormals[which];
            double bound = step * (is_stochastic ? 1 : 0.5) * (codes < 256 ? 1.002 : 1.04) + slack + outside;
            if (exact)
                bound = fabs(value) * 0x1p-24 + 0x1p-150;
            CHECK_MSG(fabs(got - value) <= bound, "%s, %s, %s, level %d, element %zu: %a became %a, bound %a",
                pccl_dtype_name(shape->dtype), pccl_quantization_name(shape->quantization),
                pccl_dtype_name(shape->quantized_dtype), pccl_simd_level(), i, value, got, bound);
        }
    }
}

static uint8_t source[COUNT_MAX * 8 + 16], wires[2][COUNT_MAX * 10 + 16];
static uint8_t backs[2][COUNT_MAX * 8 + 16];

/* Quantizes `count` elements of `source` at every level, and compares them with each other and the bound. */
static void check_rounding(const pccl_op_shape *shape, size_t count, int is_stochastic)
{
    const uint64_t stream = random_u64();
    const size_t wire_bytes = pccl_quantized_bytes(shape, count);
    const size_t bytes = count * pccl_dtype_bytes(shape->dtype);
    REQUIRE(wire_bytes + 1 + GUARD_BYTES <= sizeof wires[0]);
    EACH_LEVEL {
        int other = level_ > 0;
        uint8_t *wire = wires[other] + other, *back = backs[other] + other;
        memset(wire + wire_bytes, GUARD, GUARD_BYTES - 1);
        memset(back + bytes, GUARD, GUARD_BYTES - 1);
        if (is_stochastic)
            pccl_kernel_quantize_stochastic(shape, stream, UINT32_MAX - 10, source, count, wire);
        else
            pccl_kernel_quantize(shape, source, count, wire);
        pccl_kernel_dequantize(shape, wire, count, back);
        check_error(shape, source, back, count, is_stochastic);
        for (size_t i = 0; i < GUARD_BYTES - 1; i++)
            CHECK(wire[wire_bytes + i] == GUARD && back[bytes + i] == GUARD);
        if (other) {
            CHECK(memcmp(wires[0], wire, wire_bytes) == 0);
            CHECK(memcmp(backs[0], back, bytes) == 0);
        }
    }
}

static void check_round_trip(const pccl_op_shape *shape, size_t count)
{
    check_rounding(shape, count, 1);
    check_rounding(shape, count, 0);
}

static void test_quant_error(void)
{
    static const uint32_t blocks[] = {1, 3, 16, 64, 100, 256, 1024, 1025};
    pccl_op_shape shape;
    for (size_t b = 0; b < PCCL_COUNT_OF(blocks); b++)
        EACH_QUANTIZATION (shape, blocks[b]) {
            size_t count = blocks[b] < 4 ? 200 : COUNT_MAX - 3;
            /* Ranges on both sides of zero and on one, far from it and near. */
            float middle = (float[]){0, 0, 1, -30, 1e-3f}[random_u64() % 5];
            for (size_t i = 0; i < count; i++)
                put_float(shape.dtype, source, i, middle + random_unit());
            check_round_trip(&shape, count);
        }
}

static void test_quant_extremes(void)
{
    pccl_op_shape shape;
    EACH_QUANTIZATION (shape, 64) {
        const float largest = shape.dtype == PCCL_FLOAT16    ? 65504.0f
                              : shape.dtype == PCCL_BFLOAT16 ? pccl_f32_of_bits(0x7f7f0000)
                                                             : pccl_f32_of_bits(0x7f7fffff);
        static const float scales[] = {0x1p-149f, 0x1p-140f, 0x1p-127f, 0x1p-118f, 0x1p-100f, 0x1p-92f, 0x1p-14f, 1,
            0x1p100f, 0x1p107f, 0x1p116f, 0x1p126f};
        /* The whole range: its width overflows float32. */
        for (size_t i = 0; i < 64; i++)
            put_float(shape.dtype, source, i, i % 2 ? largest * random_unit() : i % 4 ? largest : -largest);
        check_round_trip(&shape, 64);
        for (size_t i = 0; i < 64; i++)
            put_float(shape.dtype, source, i, largest * (1 - 0.4f * (float)(i & 7) / 8));
        check_round_trip(&shape, 64);
        for (size_t s = 0; s < PCCL_COUNT_OF(scales); s++) {
            if (scales[s] > largest || (shape.dtype == PCCL_FLOAT16 && scales[s] < 0x1p-24f))
                continue;
            for (size_t i = 0; i < 64; i++)
                put_float(shape.dtype, source, i, scales[s] * ((float)(random_u64() % 3) - (s % 2 ? 0 : 1)));
            check_round_trip(&shape, 64);
            for (size_t i = 0; i < 64; i++)
                put_float(shape.dtype, source, i, scales[s] * random_unit());
            check_round_trip(&shape, 64);
        }
        /* Constants, zeros of both signs. */
        static const float constants[] = {0, -0.0f, 1, -1, 0.1f, -3e-5f, 1e-40f, -1e-45f, 3.4e38f, -3.4e38f, 65504};
        for (size_t k = 0; k < PCCL_COUNT_OF(constants); k++) {
            if (fabsf(constants[k]) > largest)
                continue;
            for (size_t i = 0; i < 64; i++)
                put_float(shape.dtype, source, i, constants[k] == 0 && i % 2 ? 0 : constants[k]);
            check_round_trip(&shape, 64);
            double expected = (double)(float)get_float(shape.dtype, source, 0);
            for (size_t i = 0; i < 64 && (steps_of(&shape) > 15 || expected == 0); i++)
                CHECK(get_float(shape.dtype, backs[0], i) == expected);
        }
    }
}

static void test_quant_keeps_zero(void)
{
    pccl_op_shape shape;
    EACH_QUANTIZATION (shape, 50) {
        if (shape.quantization != PCCL_QUANT_ZERO_POINT_SCALE)
            continue;
        for (size_t i = 0; i < 1000; i++)
            put_float(shape.dtype, source, i, i % 3 ? random_unit() + (float)(i / 50 % 5) * 0.5f - 1 : 0);
        for (int is_stochastic = 0; is_stochastic < 2; is_stochastic++) {
            check_rounding(&shape, 1000, is_stochastic);
            for (size_t i = 0; i < 1000; i += 3)
                CHECK(get_float(shape.dtype, backs[0], i) == 0);
        }
    }
}

/* Blocks of float64 far beyond the range of float32, in either direction: within the bounds of all others. */
static void test_quant_of_any_magnitude(void)
{
    static const double greatest[] = {3.5e38, 1e39, 1e300, DBL_MAX, 1e-35, 1e-40, 1e-290};
    pccl_op_shape shape;
    EACH_QUANTIZATION (shape, 40) {
        if (shape.dtype != PCCL_FLOAT64)
            continue;
        for (size_t g = 0; g < PCCL_COUNT_OF(greatest); g++) {
            double values[40];
            for (int i = 0; i < 40; i++) {
                values[i] = greatest[g] * (i == 39 ? 1 : i == 38 ? -1 : (double)(i - 20) / 21);
                memcpy(source + 8 * i, &values[i], 8);
            }
            EACH_LEVEL {
                const int level = pccl_simd_level() > 0;
                pccl_kernel_quantize(&shape, source, 40, wires[level]);
                pccl_kernel_dequantize(&shape, wires[level], 40, backs[level]);
                CHECK(memcmp(wires[level], wires[0], pccl_quantized_bytes(&shape, 40)) == 0);
                CHECK(memcmp(backs[level], backs[0], sizeof values) == 0);
                for (int i = 0; i < 40; i++) {
                    const double found = get_float(PCCL_FLOAT64, backs[level], i);
                    const double off = fabs(found / greatest[g] - values[i] / greatest[g]);
                    CHECK_MSG(off <= 2.0 / 15 * 0.55, "magnitude %g: element %d is off by %g", greatest[g], i, off);
                }
            }
        }
    }
}

static void test_quant_marks(void)
{
    static const float poisons[] = {NAN, -NAN, INFINITY, -INFINITY};
    pccl_op_shape shape;
    EACH_QUANTIZATION (shape, 40)
        EACH_LEVEL
            for (size_t p = 0; p < PCCL_COUNT_OF(poisons); p++) {
                size_t poisoned = 40 + random_u64() % 40;
                for (size_t i = 0; i < 100; i++)
                    put_float(shape.dtype, source, i, i == poisoned ? poisons[p] : (float)(i % 3));
                pccl_kernel_quantize(&shape, source, 100, wires[0]);
                pccl_kernel_dequantize(&shape, wires[0], 100, backs[0]);
                for (size_t i = 0; i < 100; i++)
                    CHECK(!isnan(get_float(shape.dtype, backs[0], i)) == (i < 40 || i >= 80));
                shape.reduce_op = PCCL_SUM;
                pccl_quant_dequantize_reduce(&shape, backs[1], source, wires[0], 100);
                for (size_t i = 0; i < 100; i++)
                    CHECK(!isnan(get_float(shape.dtype, backs[1], i)) == (i < 40 || i >= 80));
            }
}

static void test_quant_bad_parameters(void)
{
    static const struct {
        uint32_t quantization, quantized_dtype, scale, second;
        int nan;
    } cases[] = {
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0x3f800000, 0x40000000, 0},
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0x7f800000, 0x40000000, 1},
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0x3f800000, 0xff800000, 1},
        {PCCL_QUANT_MIN_MAX, PCCL_UINT8, 0x3f800000, 0x7fc00000, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT8, 0x3f800000, 255, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT8, 0x3f800000, 256, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT8, 0x3f800000, 0xffffffff, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 0x3f800000, 0xffffff80, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 0x3f800000, 0xffffff7f, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 0x3f800000, 128, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT16, 0x3f800000, 65535, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_UINT16, 0x3f800000, 65536, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT16, 0x3f800000, 32767, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT16, 0x3f800000, 32768, 1},
        {PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4, 0x3f80, 0x4000, 0},
        {PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4, 0x7f80, 0x4000, 1},
        {PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4, 0x3f80, 0xff80, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_UINT4, 0x3f80, 15, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_UINT4, 0x3f80, 16, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_UINT4, 0x3f80, 0xffff, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 0x3f80, 0xfff8, 0},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 0x3f80, 0xfff7, 1},
        {PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 0x3f80, 8, 1},
    };
    for (size_t k = 0; k < PCCL_COUNT_OF(cases); k++)
        EACH_LEVEL {
            pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, cases[k].quantization, cases[k].quantized_dtype, 20);
            memset(wires[0], 1, sizeof wires[0]);
            if (steps_of(&shape) > 15) {
                pccl_put_u32(wires[0], cases[k].scale);
                pccl_put_u32(wires[0] + 4, cases[k].second);
            } else {
                pccl_put_u32(wires[0], cases[k].scale | cases[k].second << 16);
            }
            pccl_kernel_dequantize(&shape, wires[0], 20, backs[0]);
            for (size_t i = 0; i < 20; i++)
                CHECK_MSG(!isnan(get_float(PCCL_FLOAT32, backs[0], i)) == !cases[k].nan, "case %zu", k);
        }
}

/* Whatever a peer sends: no trap, the same bits at every level, and finite or NaN. */
static void test_quant_hostile_wire(void)
{
    static const uint32_t words[] = {0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 1,
        0x7f7fffff, 0xff7fffff, 0x3f800000, 255, 256, 65535, 65536, 0xffffff80, 0xffff8000, 0x7fffffff};
    pccl_op_shape shape;
    for (int round = 0; round < 40; round++)
        EACH_QUANTIZATION (shape, 24) {
            const size_t count = 200, bytes = count * pccl_dtype_bytes(shape.dtype);
            const size_t wire_bytes = pccl_quantized_bytes(&shape, count);
            const size_t block_bytes = pccl_quantized_bytes(&shape, 24);
            const int is_short = shape.quantized_dtype >= PCCL_CODE_UINT4;
            fill(PCCL_UINT8, wires[0], wire_bytes);
            for (size_t at = 0; at < wire_bytes; at += block_bytes) {
                uint32_t scale = words[random_u64() % PCCL_COUNT_OF(words)];
                uint32_t second = words[random_u64() % PCCL_COUNT_OF(words)];
                pccl_put_u32(wires[0] + at, is_short ? scale >> 16 | (second & 0xffff0000) : scale);
                if (!is_short)
                    pccl_put_u32(wires[0] + at + 4, second);
            }
            EACH_LEVEL {
                pccl_kernel_dequantize(&shape, wires[0], count, backs[level_ > 0]);
                CHECK(level_ == 0 || memcmp(backs[0], backs[1], bytes) == 0);
            }
            for (size_t i = 0; i < count; i++)
                CHECK(!isinf(get_float(shape.dtype, backs[0], i)));
        }
}

static void test_quant_dequantize_reduce(void)
{
    static uint8_t sums[2][COUNT_MAX * 8 + 16];
    static const size_t some_counts[] = {0, 1, 30, 257, 1023, 1097};
    pccl_op_shape shape;
    for (size_t c = 0; c < PCCL_COUNT_OF(some_counts); c++)
        EACH_QUANTIZATION (shape, 96) {
            const size_t count = some_counts[c], bytes = count * pccl_dtype_bytes(shape.dtype);
            for (size_t i = 0; i < count; i++)
                put_float(shape.dtype, source, i, random_unit());
            pccl_kernel_quantize(&shape, source, count, wires[0] + 1);
            pccl_kernel_dequantize(&shape, wires[0] + 1, count, backs[0]);
            for (uint32_t op = 0; op < PCCL_REDUCE_OP_COUNT; op++)
                EACH_LEVEL {
                    shape.reduce_op = (uint8_t)op;
                    fill(shape.dtype, backs[1], count);
                    pccl_kernel_reduce(shape.dtype, op, sums[0], backs[1], backs[0], count);
                    memset(sums[1] + 1 + bytes, GUARD, 8);
                    pccl_quant_dequantize_reduce(&shape, sums[1] + 1, backs[1], wires[0] + 1, count);
                    CHECK(memcmp(sums[0], sums[1] + 1, bytes) == 0);
                    pccl_quant_dequantize_reduce(&shape, backs[1], backs[1], wires[0] + 1, count);
                    CHECK(memcmp(sums[0], backs[1], bytes) == 0);
                    for (size_t i = 0; i < 8; i++)
                        CHECK(sums[1][1 + bytes + i] == GUARD);
                }
        }
}

static void test_quant_large_blocks(void)
{
    enum { LARGE = 70000 };
    static float values[LARGE], back[LARGE];
    static uint8_t wire[LARGE * 2 + 64];
    for (size_t i = 0; i < LARGE; i++)
        values[i] = random_unit();
    pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT16, 65536);
    EACH_LEVEL {
        pccl_kernel_quantize(&shape, values, LARGE, wire);
        pccl_kernel_dequantize(&shape, wire, LARGE, back);
        check_error(&shape, values, back, LARGE, 0);
    }
}

/* Casts */

static void test_cast(void)
{
    static const float specials[] = {NAN, INFINITY, -INFINITY, 65504, 65519.99f, 65520, -65536, 3.38e38f, 3.4e38f,
        -3.4028234e38f, 1e-8f, 1e-45f, 0, -0.0f, 6e-5f};
    for (uint32_t dtype = PCCL_FLOAT32; dtype <= PCCL_FLOAT64; dtype++)
        for (uint32_t to = PCCL_FLOAT16; to <= PCCL_BFLOAT16; to++) {
            const pccl_op_shape shape = quantized_shape(dtype, PCCL_QUANT_CAST, to, 0);
            const size_t count = COUNT_MAX - 1, bytes = pccl_dtype_bytes(dtype);
            for (size_t i = 0; i < count; i++)
                put_float(dtype, source, i,
                    i < PCCL_COUNT_OF(specials) ? specials[i] : ldexpf(random_unit(), (int)(i % 40) - 25));
            for (int is_stochastic = 0; is_stochastic < 2; is_stochastic++)
                EACH_LEVEL {
                    int other = level_ > 0;
                    uint8_t *wire = wires[other] + other, *back = backs[other] + other;
                    if (is_stochastic)
                        pccl_kernel_quantize_stochastic(&shape, 99, 3, source, count, wire);
                    else
                        pccl_kernel_quantize(&shape, source, count, wire);
                    pccl_kernel_dequantize(&shape, wire, count, back);
                    CHECK(memcmp(wire, wires[0], 2 * count) == 0 && memcmp(back, backs[0], bytes * count) == 0);
                }
            for (int is_stochastic = 1; is_stochastic >= 0; is_stochastic--) {
                if (is_stochastic)
                    pccl_kernel_quantize_stochastic(&shape, 99, 3, source, count, wires[0]);
                else
                    pccl_kernel_quantize(&shape, source, count, wires[0]);
                pccl_kernel_dequantize(&shape, wires[0], count, backs[0]);
                for (size_t i = 0; i < count; i++) {
                    const double value = get_float(dtype, source, i), got = get_float(dtype, backs[0], i);
                    const double nearest = to == PCCL_FLOAT16 ? f16_value(f16_nearest(value))
                                                              : (double)pccl_bf16_to_f32(bf16_nearest(value));
                    /* With randomness one of two neighbours, unless the nearest is exact or infinite. */
                    const double unit = to == PCCL_FLOAT16 ? fmax(fabs(value) * 0x1p-10, 0x1p-24)
                                                           : fmax(fabs(value) * 0x1p-7, 0x1p-133);
                    const int is_free = is_stochastic && isfinite(nearest) && nearest != value;
                    if (isnan(value))
                        CHECK(isnan(got));
                    else
                        CHECK_MSG(
                            is_free ? fabs(got - value) <= unit : got == nearest && !signbit(got) == !signbit(value),
                            "%a became %a (%u -> %u)", value, got, dtype, to);
                }
            }
        }
}

/* Stochastic rounding */

static void test_dither_is_uniform(void)
{
    enum { BINS = 256, DRAWS = 1 << 18 };
    static const uint64_t streams[] = {0, 1, 0x100000000u, 0xdeadbeefcafef00du};
    for (size_t s = 0; s < PCCL_COUNT_OF(streams); s++)
        for (int way = 0; way < 2; way++) {
            /* Along the elements of an op, and along ops for one element. */
            static unsigned bins[BINS], pairs[BINS];
            memset(bins, 0, sizeof bins);
            memset(pairs, 0, sizeof pairs);
            uint32_t before = 0;
            for (uint32_t i = 0; i < DRAWS; i++) {
                pccl_op_request request = {0};
                request.rounding_seed = streams[s];
                request.key.sequence = i;
                uint32_t x = way == 0 ? pccl_dither(streams[s], i) : pccl_dither(pccl_quant_stream(&request), 5);
                bins[x >> 24]++;
                pairs[x >> 28 | (before >> 28) << 4]++;
                before = x;
                float unit = pccl_dither_unit(streams[s], i);
                CHECK(unit >= -0.5f && unit < 0.5f);
            }
            double chi[2] = {0, 0}, expected = (double)DRAWS / BINS;
            for (int b = 0; b < BINS; b++) {
                chi[0] += (bins[b] - expected) * (bins[b] - expected) / expected;
                chi[1] += (pairs[b] - expected) * (pairs[b] - expected) / expected;
            }
            /* Of 255 degrees of freedom: mean 255, deviation 22.6. */
            CHECK_MSG(chi[0] < 400 && chi[1] < 400, "stream %zu, way %d: %f, %f", s, way, chi[0], chi[1]);
        }
}

/* An upper bound of the distance between the two codes that each of the values lies between (quant_format.h). */
static void code_distances(const pccl_op_shape *shape, const float *values, size_t count, double *distances)
{
    if (shape->quantization == PCCL_QUANT_CAST) {
        const int digits = shape->quantized_dtype == PCCL_FLOAT16 ? 10 : 7;
        const int least_exponent = shape->quantized_dtype == PCCL_FLOAT16 ? -14 : -126;
        for (size_t i = 0; i < count; i++) {
            int exponent;
            frexp((double)values[i], &exponent);
            exponent = exponent - 1 < least_exponent ? least_exponent : exponent - 1;
            distances[i] = ldexp(1, exponent - digits);
        }
        return;
    }
    const int is_zero_point = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE;
    const double steps = steps_of(shape);
    double lo = is_zero_point ? 0 : (double)values[0], hi = lo;
    for (size_t i = 0; i < count; i++) {
        lo = fmin(lo, (double)values[i]);
        hi = fmax(hi, (double)values[i]);
    }
    double range = steps > 15 ? hi - lo : (hi - lo + fabs(lo) * 0x1p-7) * (1 + 0x1p-7);
    for (size_t i = 0; i < count; i++)
        distances[i] = range / (steps - is_zero_point);
}

/* The mean of many roundings of a value is the value: the error of one is a random number in an interval of known
 * width, and its expectation has to be 0. By Hoeffding's inequality the mean of n such errors is off by more than t
 * widths with a probability of at most 2 exp(-2 n t^2), whatever the value; t is such that with probability
 * FALSE_ALARMS at most any of all means is off. So values and streams are drawn anew each time. SEED=n in the
 * environment plays a run again. */
static void test_stochastic_is_unbiased(void)
{
    enum { VALUES = 64, ROUNDS = 10000 };
    const double FALSE_ALARMS = 1e-10;
    const char *given = getenv("SEED");
    const uint64_t seed = given != NULL ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 2654435761u + 1;
    printf("test_stochastic_is_unbiased: SEED=%llu\n", (unsigned long long)seed);
    random_state = seed | 1;
    for (int i = 0; i < 20; i++)
        random_u64();
    pccl_op_shape shapes[14];
    size_t shape_count = 0;
    for (uint32_t q = PCCL_QUANT_MIN_MAX; q <= PCCL_QUANT_ZERO_POINT_SCALE; q++)
        for (size_t c = 0; c < PCCL_COUNT_OF(code_types); c++)
            shapes[shape_count++] = quantized_shape(PCCL_FLOAT32, q, code_types[c], VALUES);
    shapes[shape_count++] = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_FLOAT16, 0);
    shapes[shape_count++] = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_BFLOAT16, 0);
    const double means = (double)shape_count * VALUES;
    const double tolerance = sqrt(log(2 * means / FALSE_ALARMS) / (2.0 * ROUNDS));
    for (size_t s = 0; s < shape_count; s++) {
        const int is_cast = shapes[s].quantization == PCCL_QUANT_CAST;
        static float values[VALUES], back[VALUES];
        double distances[VALUES], sums[VALUES], least[VALUES], greatest[VALUES];
        for (size_t i = 0; i < VALUES; i++) {
            values[i] = is_cast && i % 2 ? random_unit() * 0x1p-17f : random_unit() + 0.3f;
            sums[i] = 0;
            least[i] = INFINITY;
            greatest[i] = -INFINITY;
        }
        code_distances(&shapes[s], values, VALUES, distances);
        const uint64_t stream = random_u64();
        for (uint64_t round = 0; round < ROUNDS; round++) {
            pccl_kernel_quantize_stochastic(&shapes[s], stream, round * VALUES, values, VALUES, wires[0]);
            pccl_kernel_dequantize(&shapes[s], wires[0], VALUES, back);
            for (size_t i = 0; i < VALUES; i++) {
                double error = (double)back[i] - (double)values[i];
                sums[i] += error;
                least[i] = fmin(least[i], error);
                greatest[i] = fmax(greatest[i], error);
            }
        }
        for (size_t i = 0; i < VALUES; i++) {
            /* 16-bit codes leave 8 bits of a float to what is random: a value next to a code may go to three. */
            const int is_coarse = !is_cast && steps_of(&shapes[s]) > 255;
            const double width = distances[i] * (is_coarse ? 2 : 1);
            const double slack = is_coarse ? distances[i] * 0x1p-6 : 4e-7;
            CHECK_MSG(greatest[i] - least[i] <= width + 2 * slack, "shape %zu: element %zu, %a, spreads by %g of %g", s,
                i, (double)values[i], greatest[i] - least[i], width);
            CHECK_MSG(fabs(sums[i] / ROUNDS) <= tolerance * width + slack,
                "shape %zu: element %zu, %a, is off by %g of %g", s, i, (double)values[i], sums[i] / ROUNDS, width);
        }
    }
}

/* Random numbers belong to indices: cutting a segment between blocks changes no byte. */
static void test_stochastic_position(void)
{
    pccl_op_shape shape;
    for (size_t i = 0; i < 1000; i++)
        put_float(PCCL_FLOAT32, source, i, random_unit());
    EACH_QUANTIZATION (shape, 40) {
        if (shape.dtype != PCCL_FLOAT32)
            continue;
        EACH_LEVEL
            for (uint64_t first = 0; first < 3 * (uint64_t)UINT32_MAX; first += UINT32_MAX - 100) {
                const size_t cut_bytes = pccl_quantized_bytes(&shape, 400);
                const size_t bytes = pccl_quantized_bytes(&shape, 1000);
                pccl_kernel_quantize_stochastic(&shape, 5, first, source, 1000, wires[0]);
                pccl_kernel_quantize_stochastic(&shape, 5, first, source, 400, wires[1]);
                pccl_kernel_quantize_stochastic(&shape, 5, first + 400, source + 1600, 600, wires[1] + cut_bytes);
                CHECK(memcmp(wires[0], wires[1], bytes) == 0);
                pccl_kernel_quantize_stochastic(&shape, 6, first, source, 1000, wires[1]);
                CHECK(memcmp(wires[0], wires[1], bytes) != 0);
            }
    }
}

static void test_stochastic_streams(void)
{
    pccl_op_request request = {0}, other;
    const uint64_t stream = pccl_quant_stream(&request);
    uint64_t streams[6];
#define CHANGED(at, change) (other = request, (change), streams[at] = pccl_quant_stream(&other))
    CHANGED(0, other.rank = 1);
    CHANGED(1, other.key.sequence = 1);
    CHANGED(2, other.key.tag = 1);
    CHANGED(3, other.key.epoch = 1);
    CHANGED(4, other.key.group = 1);
    CHANGED(5, other.rounding_seed = 1);
#undef CHANGED
    for (size_t i = 0; i < PCCL_COUNT_OF(streams); i++) {
        CHECK(streams[i] != stream);
        for (size_t k = 0; k < i; k++)
            CHECK(streams[i] != streams[k]);
    }
    for (size_t i = 0; i < 100; i++)
        put_float(PCCL_FLOAT32, source, i, random_unit());
    request.shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 100);
    pccl_kernel_quantize(&request.shape, source, 100, wires[0]);
    pccl_quant_quantize(&request, 11, source, 100, wires[1]);
    CHECK(memcmp(wires[0], wires[1], 108) == 0);
    request.rounding = PCCL_ROUND_STOCHASTIC;
    pccl_kernel_quantize_stochastic(&request.shape, stream, 11, source, 100, wires[0]);
    pccl_quant_quantize(&request, 11, source, 100, wires[1]);
    CHECK(memcmp(wires[0], wires[1], 108) == 0);
}

/* Elements 100 .. 699 of an op, with and without what the last one left. */
static void test_feedback(void)
{
    enum { FIRST = 100, COUNT = 600 };
    static float x[COUNT], residual[FIRST + COUNT], next[FIRST + COUNT], sum[COUNT], back[COUNT];
    const pccl_op_shape shapes[] = {
        quantized_shape(PCCL_FLOAT32, PCCL_QUANT_LLOYD_MAX, PCCL_CODE_UINT2, 64),
        quantized_shape(PCCL_FLOAT32, PCCL_QUANT_SIGN, PCCL_CODE_UINT1, 64),
        quantized_shape(PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 64),
        quantized_shape(PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_FLOAT16, 0),
    };
    for (size_t i = 0; i < COUNT; i++) {
        x[i] = random_unit();
        residual[FIRST + i] = random_unit() * 0.1f;
    }
    EACH_LEVEL {
        for (size_t k = 0; k < 2 * PCCL_COUNT_OF(shapes); k++) {
            pccl_op_request request = {0};
            request.shape = shapes[k / 2];
            request.residual = k % 2 ? residual : NULL;
            request.residual_next = next;
            request.feedback_decay = 0.4;
            for (size_t i = 0; i < COUNT; i++)
                sum[i] = x[i] + (k % 2 ? residual[FIRST + i] : 0);
            pccl_kernel_quantize(&request.shape, sum, COUNT, wires[0]);
            pccl_kernel_dequantize(&request.shape, wires[0], COUNT, back);
            memset(next, 0, sizeof next);
            pccl_quant_quantize_fed_back(&request, FIRST, x, COUNT, wires[1]);
            CHECK(memcmp(wires[0], wires[1], pccl_quantized_bytes(&request.shape, COUNT)) == 0);
            for (size_t i = 0; i < FIRST; i++)
                CHECK(next[i] == 0);
            for (size_t i = 0; i < COUNT; i++)
                CHECK(next[FIRST + i] == 0.4f * (sum[i] - back[i]));
        }
    }
}

/* A residual that is no normal number would never go away again, or make all that follows slow. */
static void test_feedback_of_odd_values(void)
{
    float x[128] = {0}, next[128];
    pccl_op_request request = {0};
    request.shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_SIGN, PCCL_CODE_UINT1, 64);
    request.residual_next = next;
    request.feedback_decay = 1;
    x[5] = INFINITY;
    x[6] = 1;
    x[64] = 0x1p-130f;
    x[65] = 0x1p-100f; /* both below the least scale */
    pccl_quant_quantize_fed_back(&request, 0, x, 128, wires[0]);
    for (size_t i = 0; i < 128; i++)
        CHECK(next[i] == (i == 65 ? x[i] : 0));
}

static const struct {
    uint32_t quantization, code, bits;
} with_levels[] = {{PCCL_QUANT_LLOYD_MAX, PCCL_CODE_UINT2, 2}, {PCCL_QUANT_SIGN, PCCL_CODE_UINT1, 1}};

static void test_levels_shapes(void)
{
    for (size_t k = 0; k < 2; k++) {
        const uint32_t bits = with_levels[k].bits;
        pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, with_levels[k].quantization, with_levels[k].code, 64);
        CHECK(pccl_quantized_bytes(&shape, 64) == 1 + 8 * bits);
        CHECK(pccl_quantized_bytes(&shape, 65) == 1 + 8 * bits + 2);
        CHECK(pccl_quantized_bytes(&shape, 5) == 1 + bits);
        shape.quantized_dtype = with_levels[1 - k].code;
        CHECK(!pccl_quant_valid(&shape));
        const uint32_t blocks[] = {0, 4, 60, 1032};
        for (size_t b = 0; b < PCCL_COUNT_OF(blocks); b++) {
            shape = quantized_shape(PCCL_FLOAT32, with_levels[k].quantization, with_levels[k].code, blocks[b]);
            CHECK(!pccl_quant_valid(&shape));
        }
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++) {
            shape = quantized_shape(dtype, with_levels[k].quantization, with_levels[k].code, 1024);
            CHECK(pccl_quant_valid(&shape) == (dtype == PCCL_FLOAT32));
        }
    }
}

/* Levels are those of the format, whatever the CPU. */
static void test_levels_golden(void)
{
    const float x[9] = {0.25f, -4, 1, -0.0f, 2, -1, 0, 8, 3};
    static const uint8_t sign[] = {181, 0x2a, 183, 0}, lloyd_max[] = {184, 0x4c, 0x84, 183, 0x02};
    float back[9];
    EACH_LEVEL {
        pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_SIGN, PCCL_CODE_UINT1, 8);
        pccl_kernel_quantize(&shape, x, 9, wires[0]); /* of a mean magnitude of 2.03, and of 3 */
        CHECK_MSG(memcmp(wires[0], sign, sizeof sign) == 0, "%u %02x %u %02x", wires[0][0], wires[0][1], wires[0][2],
            wires[0][3]);
        pccl_kernel_dequantize(&shape, wires[0], 9, back);
        CHECK(back[0] == 2 && back[1] == -2 && back[3] == -2 && back[6] == 2);
        shape = quantized_shape(PCCL_FLOAT32, PCCL_QUANT_LLOYD_MAX, PCCL_CODE_UINT2, 8);
        pccl_kernel_quantize(&shape, x, 9, wires[0]); /* of a root mean square of 3.28, and of 3 */
        CHECK_MSG(memcmp(wires[0], lloyd_max, sizeof lloyd_max) == 0, "%u %02x %02x %u %02x", wires[0][0], wires[0][1],
            wires[0][2], wires[0][3], wires[0][4]);
        pccl_kernel_dequantize(&shape, wires[0], 9, back);
        const float scale = 0x1.ae89fap+1f; /* 2^(7/4) */
        CHECK(back[0] == 0.4528f * scale && back[1] == -1.510f * scale && back[7] == 1.510f * scale);
    }
}

/* Means over many normally distributed elements, of blocks of any length and from any one on. */
static void test_levels_error(void)
{
    enum { COUNT = 1000 };
    static float x[COUNT], back[COUNT], part[COUNT], expected[COUNT];
    const size_t blocks[] = {8, 24, 64, 1024};
    double square = 0;
    for (size_t i = 0; i < COUNT; i++) {
        x[i] = 0;
        for (int k = 0; k < 12; k++)
            x[i] += random_unit() * 1e-3f;
        square += (double)x[i] * (double)x[i];
    }
    for (size_t k = 0; k < 2; k++)
        for (size_t b = 0; b < PCCL_COUNT_OF(blocks); b++) {
            pccl_op_shape shape =
                quantized_shape(PCCL_FLOAT32, with_levels[k].quantization, with_levels[k].code, (uint32_t)blocks[b]);
            shape.reduce_op = PCCL_SUM;
            EACH_LEVEL {
                const size_t bytes = pccl_quantized_bytes(&shape, COUNT);
                memset(wires[0] + bytes, GUARD, GUARD_BYTES);
                pccl_kernel_quantize(&shape, x, COUNT, wires[0]);
                for (size_t i = 0; i < GUARD_BYTES; i++)
                    CHECK(wires[0][bytes + i] == GUARD);
                pccl_kernel_dequantize(&shape, wires[0], COUNT, back);
                double error = 0;
                for (size_t i = 0; i < COUNT; i++)
                    error += ((double)back[i] - (double)x[i]) * ((double)back[i] - (double)x[i]);
                CHECK_MSG(error < (k == 0 ? 0.14 : 0.41) * square, "%g of it", error / square);
                pccl_quant_dequantize_reduce(&shape, part, x, wires[0], COUNT);
                pccl_kernel_reduce(PCCL_FLOAT32, PCCL_SUM, expected, x, back, COUNT);
                CHECK(memcmp(part, expected, sizeof part) == 0);
            }
        }
}

static void test_levels_marks_and_extremes(void)
{
    static const float not_finite[] = {NAN, INFINITY, -INFINITY, 3e38f};
    float x[24], back[24];
    for (size_t k = 0; k < 2; k++) {
        const pccl_op_shape shape = quantized_shape(PCCL_FLOAT32, with_levels[k].quantization, with_levels[k].code, 8);
        EACH_LEVEL {
            for (size_t m = 0; m < PCCL_COUNT_OF(not_finite); m++) {
                for (size_t i = 0; i < 24; i++)
                    x[i] = i < 8 ? 1 : 0;
                x[9] = not_finite[m];
                pccl_kernel_quantize(&shape, x, 24, wires[0]);
                pccl_kernel_dequantize(&shape, wires[0], 24, back);
                for (size_t i = 0; i < 24; i++)
                    CHECK(i / 8 == 1 ? isnan(back[i]) : i / 8 == 0 ? fabs((double)back[i]) > 0.4 : back[i] == 0);
            }
            for (int exponent = -43; exponent < 19; exponent++) {
                for (size_t i = 0; i < 8; i++)
                    x[i] = ldexpf(i % 2 ? -1 : 1, exponent);
                pccl_kernel_quantize(&shape, x, 8, wires[0]);
                pccl_kernel_dequantize(&shape, wires[0], 8, back);
                for (size_t i = 0; i < 8; i++)
                    CHECK(back[i] == x[i] * (k == 0 ? 1.510f : 1));
            }
            for (size_t i = 0; i < 8; i++)
                x[i] = 1e-20f;
            pccl_kernel_quantize(&shape, x, 8, wires[0]);
            pccl_kernel_dequantize(&shape, wires[0], 8, back);
            for (size_t i = 0; i < 8; i++)
                CHECK(back[i] == 0);
            for (size_t round = 0; round < 300; round++) { /* hostile bytes mean some float, or NaN */
                for (size_t i = 0; i < 1 + with_levels[k].bits; i++)
                    wires[0][i] = (uint8_t)(i == 0 ? round : random_u64());
                pccl_kernel_dequantize(&shape, wires[0], 8, back);
                for (size_t i = 0; i < 8; i++)
                    CHECK(wires[0][0] == 255 ? isnan(back[i]) : fabs((double)back[i]) < 0x1p20);
            }
        }
    }
}

int main(void)
{
    RUN(test_levels_shapes);
    RUN(test_levels_golden);
    RUN(test_levels_error);
    RUN(test_levels_marks_and_extremes);
    RUN(test_quant_shapes);
    RUN(test_quant_golden);
    RUN(test_quant_error);
    RUN(test_quant_extremes);
    RUN(test_quant_keeps_zero);
    RUN(test_quant_of_any_magnitude);
    RUN(test_quant_marks);
    RUN(test_quant_bad_parameters);
    RUN(test_quant_hostile_wire);
    RUN(test_quant_dequantize_reduce);
    RUN(test_quant_large_blocks);
    RUN(test_cast);
    RUN(test_dither_is_uniform);
    RUN(test_stochastic_is_unbiased);
    RUN(test_stochastic_position);
    RUN(test_stochastic_streams);
    RUN(test_feedback);
    RUN(test_feedback_of_odd_values);
    return check_summary();
}
