/* quant_decode.c: codes to elements, in the format of quant_format.h, and their sums with others. See simd.h for how
 * the loops become one function per CPU level. */
#include "quant.h"

#include "base.h"
#include "dtype.h"
#include "half.h"
#include "quant_format.h"
#include "quant_levels.h"
#include "simd.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* The parameters by which the codes of one block are turned into values. */
typedef struct {
    int marked;
    int wide;
    float scale;
    float base;
    float zero;
    float limit; /* of the dtype */
    double factor; /* of float64 */
} decoding;

static float dtype_limit(uint32_t dtype)
{
    if (dtype == PCCL_FLOAT16)
        return 65504.0f;
    return dtype == PCCL_BFLOAT16 ? pccl_f32_of_bits(0x7f7f0000) : FLT_MAX;
}

static decoding get_header(const pccl_op_shape *shape, const pccl_quant_code *type, const uint8_t *wire)
{
    decoding d = {0};
    uint32_t scale_bits, second;
    if (type->bits == 4) {
        scale_bits = (uint32_t)pccl_get_u16(wire) << 16;
        second = (uint32_t)pccl_get_u16(wire + 2) << 16;
    } else {
        scale_bits = pccl_get_u32(wire);
        second = pccl_get_u32(wire + 4);
    }
    d.scale = pccl_f32_of_bits(scale_bits);
    if (shape->quantization == PCCL_QUANT_MIN_MAX) {
        d.base = pccl_f32_of_bits(second);
    } else {
        /* Counted in steps; what was below the least code has become huge. */
        uint32_t zero = (type->bits == 4 ? (uint32_t)((int32_t)second >> 16) : second) + type->first;
        d.marked = zero > type->steps_max;
        d.zero = d.marked ? 0 : (float)zero;
    }
    d.factor = 1;
    if (shape->dtype == PCCL_FLOAT64) {
        const int shift = (int16_t)pccl_get_u16(wire + type->shift_at);
        if (shift >= PCCL_QUANT_SHIFT_MIN && shift <= PCCL_QUANT_SHIFT_MAX)
            d.factor = pccl_quant_power_of_two(shift);
        else
            d.marked = 1;
    }
    float scale = fabsf(d.scale), base = fabsf(d.base);
    d.marked |= !(scale <= FLT_MAX && base <= FLT_MAX);
    d.wide = !(scale <= PCCL_QUANT_SCALE_MAX && base <= PCCL_QUANT_BASE_MAX);
    d.limit = dtype_limit(shape->dtype);
    return d;
}

#define DECODE_LOOP(code, result) \
    do { \
        const code *codes = wire; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) { \
            const float value = base + scale * ((float)(int32_t)(code)(codes[i] - first) - zero); \
            values[i] = result; \
        } \
    } while (0)

/* Adds as pccl_kernel_reduce does. */
PCCL_INLINE float add(float x, float y)
{
    const float sum = x + y;
    return sum != sum ? pccl_f32_of_bits(PCCL_QUANT_NAN_BITS) : sum;
}

/* Adds to `a`, where that is not NULL; `values` may be `a`. Of 4 bits come steps, one a byte, not codes. */
PCCL_INLINE void decode(
    const decoding *d, const pccl_quant_code *type, const void *wire, size_t count, const pccl_f32 *a, pccl_f32 *values)
{
    const float base = d->base, scale = d->scale, zero = d->zero;
    const uint32_t first = type->bits == 4 ? 0 : type->first;
    if (a != NULL && type->bits <= 8)
        DECODE_LOOP(pccl_u8, add(a[i], value));
    else if (a != NULL)
        DECODE_LOOP(pccl_u16, add(a[i], value));
    else if (type->bits <= 8)
        DECODE_LOOP(pccl_u8, value);
    else
        DECODE_LOOP(pccl_u16, value);
}

static void decode_wide(
    const decoding *d, const pccl_quant_code *type, const uint8_t *wire, size_t count, pccl_f32 *values)
{
    const double limit = d->limit;
    const uint32_t first = type->bits == 4 ? 0 : type->first;
    for (size_t i = 0; i < count; i++) {
        uint32_t code = type->bits <= 8 ? wire[i] : pccl_get_u16(wire + 2 * i);
        double steps = (double)((code - first) & type->steps_max) - (double)d->zero;
        double value = (double)d->base + (double)d->scale * steps;
        value = value < limit ? value : limit;
        values[i] = (float)(value > -limit ? value : -limit);
    }
}

/* `first` is 0 or 8: without it a code is its number of steps. */
PCCL_INLINE void unpack(const pccl_u8 *wire, size_t count, uint32_t first, uint8_t *steps)
{
    const uint32_t flip = first * 0x0101;
    pccl_u16 *pairs = (pccl_u16 *)(void *)steps;
    PCCL_INDEPENDENT
    for (size_t i = 0; i < (count + 1) / 2; i++)
        pairs[i] = (uint16_t)((((uint32_t)wire[i] | (uint32_t)wire[i] << 4) & 0x0f0f) ^ flip);
}

PCCL_INLINE void fill_nan(pccl_f32 *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = pccl_f32_of_bits(PCCL_QUANT_NAN_BITS);
}

/* Float32 to the dtype. Only a float16 can leave its finite range here, where the block was not wide. */
PCCL_INLINE void store(const decoding *d, uint32_t dtype, float *values, size_t count, void *destination)
{
    switch (dtype) {
    case PCCL_FLOAT16:
        for (size_t i = 0; i < count; i++) {
            float value = values[i];
            value = value > d->limit ? d->limit : value; /* a NaN stays */
            values[i] = value < -d->limit ? -d->limit : value;
        }
        pccl_f16_narrow(values, count, destination);
        break;
    case PCCL_BFLOAT16: {
        pccl_u16 *halves = destination;
        for (size_t i = 0; i < count; i++)
            halves[i] = pccl_bf16_from_f32(values[i]);
        break;
    }
    default: {
        pccl_f64 *doubles = destination;
        for (size_t i = 0; i < count; i++) {
            double value = (double)values[i] * d->factor;
            value = value > DBL_MAX ? DBL_MAX : value; /* a NaN stays */
            doubles[i] = value < -DBL_MAX ? -DBL_MAX : value;
        }
    }
    }
}

/* Elements first .. first + count - 1 of a segment; `first` is even. With `a`, which is float32 as then the
 * dtype has to be, their sums with it; `destination` may be `a`. */
PCCL_INLINE void dequantize_blocks(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, const pccl_f32 *a, void *destination)
{
    const pccl_quant_code type = pccl_quant_code_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const size_t block = shape->quantization_block;
    const size_t block_bytes = type.header_bytes + pccl_quant_codes_bytes(&type, block);
    size_t in_block = first % block;
    wire += first / block * block_bytes;
    uint8_t *out = destination;
    float buffer[PCCL_QUANT_CHUNK];
    uint8_t nibbles[PCCL_QUANT_CHUNK];
    while (count > 0) {
        const decoding d = get_header(shape, &type, wire);
        size_t left = pccl_min_size(block - in_block, count);
        const uint8_t *codes = wire + type.header_bytes + pccl_quant_codes_bytes(&type, in_block);
        count -= left;
        while (left > 0) {
            const size_t n = pccl_min_size(PCCL_QUANT_CHUNK, left);
            const int is_usual = !d.marked && !d.wide;
            pccl_f32 *sums = (pccl_f32 *)(void *)out; /* where the dtype is float32 */
            pccl_f32 *values = shape->dtype != PCCL_FLOAT32 || (a != NULL && !is_usual) ? buffer : sums;
            const uint8_t *steps = codes;
            if (type.bits == 4) {
                unpack(codes, n, type.first, nibbles);
                steps = nibbles;
            }
            if (is_usual)
                decode(&d, &type, steps, n, a, values);
            else if (d.marked)
                fill_nan(values, n);
            else
                decode_wide(&d, &type, steps, n, values);
            if (shape->dtype != PCCL_FLOAT32)
                store(&d, shape->dtype, buffer, n, out);
            if (a != NULL && !is_usual)
                for (size_t i = 0; i < n; i++)
                    sums[i] = add(a[i], buffer[i]);
            a = a != NULL ? a + n : NULL;
            codes += pccl_quant_codes_bytes(&type, n);
            out += n * element_bytes;
            left -= n;
        }
        wire += block_bytes;
        in_block = 0;
    }
}

static void widen(const pccl_op_shape *shape, const uint8_t *halves, size_t count, float *values)
{
    if (shape->quantized_dtype == PCCL_FLOAT16)
        pccl_f16_widen(halves, count, values);
    else
        pccl_bf16_widen(halves, count, values);
    /* Which bits of a NaN a conversion keeps depends on the CPU. */
    pccl_u32 *bits = (pccl_u32 *)(void *)values;
    for (size_t i = 0; i < count; i++)
        bits[i] = (bits[i] & 0x7fffffff) > 0x7f800000 ? PCCL_QUANT_NAN_BITS : bits[i];
}

PCCL_INLINE void cast_back(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, void *destination)
{
    float buffer[PCCL_QUANT_CHUNK];
    for (size_t at = 0; at < count; at += PCCL_QUANT_CHUNK) {
        const size_t n = pccl_min_size(PCCL_QUANT_CHUNK, count - at);
        widen(shape, wire + 2 * (first + at), n, buffer);
        if (shape->dtype == PCCL_FLOAT32) {
            memcpy((uint8_t *)destination + 4 * at, buffer, 4 * n);
        } else {
            pccl_f64 *doubles = (pccl_f64 *)destination + at;
            for (size_t i = 0; i < n; i++)
                doubles[i] = (double)buffer[i];
        }
    }
}

PCCL_INLINE void dequantize_any(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, void *destination)
{
    if (shape->quantization == PCCL_QUANT_CAST)
        cast_back(shape, wire, first, count, destination);
    else
        dequantize_blocks(shape, wire, first, count, NULL, destination);
}

/* One of each per level of the CPU. */
#define FOR_LEVEL(target, level) \
    target static void dequantize_##level( \
        const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination) \
    { \
        dequantize_any(shape, wire, first, count, destination); \
    } \
    target static void dequantize_add_##level( \
        const pccl_op_shape *shape, const void *wire, size_t count, const void *a, void *destination) \
    { \
        dequantize_blocks(shape, wire, 0, count, a, destination); \
    }

FOR_LEVEL(, portable)
#if PCCL_SIMD_X86
FOR_LEVEL(PCCL_TARGET_AVX2, avx2)
FOR_LEVEL(PCCL_TARGET_AVX512, avx512)
#endif

/* Loops over few bytes, as decoding small blocks of 4-bit codes has them, lose more in the remainders of
 * 512-bit vectors than they gain: 14 GB/s of float32 at 64 elements a block, against 23. */
static int decoding_level(const pccl_op_shape *shape)
{
    const int level = pccl_simd_level();
    const int is_short = shape->quantized_dtype == PCCL_CODE_UINT4 || shape->quantized_dtype == PCCL_CODE_INT4;
    return is_short && level > PCCL_SIMD_AVX2 ? PCCL_SIMD_AVX2 : level;
}

static void dequantize(const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination)
{
    if (pccl_quant_has_levels(shape)) {
        pccl_levels_dequantize(shape, wire, first, count, destination);
        return;
    }
    switch (decoding_level(shape)) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: dequantize_avx512(shape, wire, first, count, destination); break;
    case PCCL_SIMD_AVX2: dequantize_avx2(shape, wire, first, count, destination); break;
#endif
    default: dequantize_portable(shape, wire, first, count, destination);
    }
}

static void dequantize_add(const pccl_op_shape *shape, const void *wire, size_t count, const void *a, void *destination)
{
    switch (decoding_level(shape)) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: dequantize_add_avx512(shape, wire, count, a, destination); break;
    case PCCL_SIMD_AVX2: dequantize_add_avx2(shape, wire, count, a, destination); break;
#endif
    default: dequantize_add_portable(shape, wire, count, a, destination);
    }
}

void pccl_kernel_dequantize(const pccl_op_shape *shape, const void *wire, size_t count, void *destination)
{
    PCCL_ASSERT(pccl_quant_valid(shape));
    dequantize(shape, wire, 0, count, destination);
}

void pccl_quant_dequantize_reduce(
    const pccl_op_shape *shape, void *destination, const void *a, const void *wire, size_t count)
{
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    double buffer[PCCL_QUANT_CHUNK]; /* the widest dtype */
    PCCL_ASSERT(pccl_quant_valid(shape));
    if (shape->dtype == PCCL_FLOAT32 && shape->quantization != PCCL_QUANT_CAST && !pccl_quant_has_levels(shape) &&
        (shape->reduce_op == PCCL_SUM || shape->reduce_op == PCCL_AVG)) {
        dequantize_add(shape, wire, count, a, destination);
        return;
    }
    for (size_t at = 0; at < count; at += PCCL_QUANT_CHUNK) {
        size_t n = pccl_min_size(PCCL_QUANT_CHUNK, count - at);
        dequantize(shape, wire, at, n, buffer);
        pccl_kernel_reduce(shape->dtype, shape->reduce_op, (uint8_t *)destination + at * element_bytes,
            (const uint8_t *)a + at * element_bytes, buffer, n);
    }
}
