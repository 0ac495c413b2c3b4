/* kernel_data.h: what the kernels are given in tests, and the 16-bit floats by way of powers of two. */
#ifndef PCCL_KERNEL_DATA_H
#define PCCL_KERNEL_DATA_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#include "base.h"
#include "dither.h"
#include "dtype.h"
#include "half.h"
#include "pccl_native.h"
#include "quant.h"
#include "simd.h"

enum { COUNT_MAX = 1100, ELEMENT_BYTES_MAX = 8, GUARD_BYTES = 16, GUARD = 0xa5 };

static const size_t counts[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 63, 64, 65, 255, 257, 511, 513, 1025};

static uint64_t random_state = 88172645463325252u;

static const uint32_t float_dtypes[] = {PCCL_FLOAT16, PCCL_BFLOAT16, PCCL_FLOAT32, PCCL_FLOAT64};

static const uint32_t code_types[] = {PCCL_UINT8, PCCL_INT8, PCCL_UINT16, PCCL_INT16, PCCL_CODE_UINT4, PCCL_CODE_INT4};

static inline uint64_t random_u64(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline float random_unit(void) { return (float)((double)(random_u64() >> 11) * 0x1p-52 - 1.0); }

static inline uint64_t hash_bytes(const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ at[i]) * 1099511628211u;
    return hash;
}

static inline double f16_value(uint16_t half)
{
    int exponent = half >> 10 & 31, fraction = half & 1023;
    double magnitude = exponent == 0 ? ldexp(fraction, -24) : ldexp(1024 + fraction, exponent - 25);
    if (exponent == 31)
        magnitude = fraction ? (double)NAN : (double)INFINITY;
    return half & 0x8000 ? -magnitude : magnitude;
}

static inline uint16_t f16_nearest(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs(value);
    if (isnan(value))
        return 0x7e00;
    if (magnitude >= 65520)
        return sign | 0x7c00;
    int exponent;
    frexp(magnitude, &exponent);
    int last_bit = exponent - 11 < -24 || magnitude == 0 ? -24 : exponent - 11;
    double units = nearbyint(ldexp(magnitude, -last_bit));
    /* A carry out of the fraction moves into the exponent, where it belongs. */
    return (uint16_t)(sign | ((uint32_t)(last_bit + 24) * 1024 + (uint32_t)units));
}

static inline uint16_t bf16_nearest(double value)
{
    uint32_t bits = pccl_f32_bits((float)value), low = bits & 0xffff, high = bits >> 16;
    if (isnan(value))
        return 0x7fc0;
    return (uint16_t)(high + (low > 0x8000 || (low == 0x8000 && (high & 1))));
}

static inline int next_level(int *level)
{
    ++*level;
    if (*level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(*level) == *level)
        return 1;
    pccl_simd_limit(PCCL_SIMD_LEVEL_COUNT);
    return 0;
}

/* Random bits, and often the values where mistakes live. */
static inline void fill(uint32_t dtype, uint8_t *at, size_t count)
{
    static const uint64_t f64s[] = {0, (uint64_t)1 << 63, 0x7ff0000000000000u, 0xfff0000000000000u, 0x7ff8000000000000u,
        0xfff8000000000001u, 0x7ff0000000000001u, 0x3ff0000000000000u, 1, 0x7fefffffffffffffu};
    static const uint32_t f32s[] = {
        0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0x3f800000, 1, 0x7f7fffff};
    static const uint16_t f16s[] = {0, 0x8000, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01, 0x3c00, 1, 0x7bff};
    static const uint16_t bf16s[] = {0, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7f81, 0x3f80, 1, 0x7f7f};
    uint32_t bytes = pccl_dtype_bytes(dtype);
    for (size_t i = 0; i < count; i++, at += bytes) {
        uint64_t bits = random_u64(), pick = random_u64() >> 8, special = pick / 4 % 10;
        if (pick % 4 == 0 && dtype == PCCL_FLOAT64)
            bits = f64s[special];
        else if (pick % 4 == 0 && dtype == PCCL_FLOAT32)
            bits = f32s[special];
        else if (pick % 4 == 0 && dtype == PCCL_FLOAT16)
            bits = f16s[special];
        else if (pick % 4 == 0 && dtype == PCCL_BFLOAT16)
            bits = bf16s[special];
        else if (pick % 4 == 0)
            bits = UINT64_MAX << (pick / 4 % 64) >> 1;
        memcpy(at, &bits, bytes);
    }
}

static inline pccl_op_shape quantized_shape(
    uint32_t dtype, uint32_t quantization, uint32_t quantized_dtype, uint32_t block)
{
    pccl_op_shape shape = {0};
    shape.dtype = (uint8_t)dtype;
    shape.quantization = (uint8_t)quantization;
    shape.quantized_dtype = (uint8_t)quantized_dtype;
    shape.quantization_block = block;
    return shape;
}

static inline void put_float(uint32_t dtype, void *values, size_t i, float value)
{
    uint16_t half = dtype == PCCL_FLOAT16 ? pccl_f16_from_f32(value) : pccl_bf16_from_f32(value);
    double wide = (double)value;
    uint32_t bytes = pccl_dtype_bytes(dtype);
    const void *source = bytes == 2 ? (void *)&half : bytes == 4 ? (void *)&value : (void *)&wide;
    memcpy((uint8_t *)values + i * bytes, source, bytes);
}

static inline double get_float(uint32_t dtype, const void *values, size_t i)
{
    uint16_t half;
    float value;
    double wide;
    const uint8_t *at = (const uint8_t *)values + i * pccl_dtype_bytes(dtype);
    switch (dtype) {
    case PCCL_FLOAT16: memcpy(&half, at, 2); return f16_value(half);
    case PCCL_BFLOAT16: memcpy(&half, at, 2); return (double)pccl_bf16_to_f32(half);
    case PCCL_FLOAT32: memcpy(&value, at, 4); return (double)value;
    default: memcpy(&wide, at, 8); return wide;
    }
}

/* Loops over the levels that this CPU has. */
#define EACH_LEVEL for (int level_ = -1; next_level(&level_);)

/* Over 4 dtypes x 2 quantizations x 6 code types, less what cannot have blocks of this size. */
#define EACH_QUANTIZATION(shape, block) \
    for (uint32_t k_ = 0; k_ < 48; k_++) \
        if (shape = quantized_shape(float_dtypes[k_ / 12], 1 + k_ / 6 % 2, code_types[k_ % 6], block), \
            pccl_quant_valid(&shape))

#endif
