/* quant_levels.c: see quant_format.h for the format, and simd.h for how the loops become one function per CPU level. */
#include "quant_levels.h"

#include "base.h"
#include "dtype.h"
#include "half.h"
#include "simd.h"

#include <math.h>
#include <string.h>

enum { LANES = 16, USUAL_BLOCK = 64, AHEAD = 8, OCTAVE_MIN = -44, SCALE_NONE = 0, SCALE_NAN = 255 };

/* The quantizer of least mean square error for a normal distribution of variance 1 (Max, 1960). */
#define LEVEL_LOW 0.4528f
#define LEVEL_HIGH 1.510f
#define THRESHOLD 0.9816f

/* The mantissas of 2^(k/4), and those of 2^((2k + 1)/8), between which a scale is rounded to them. */
static const uint32_t quarters[4] = {0, 0x1837f0, 0x3504f3, 0x5744fd};
static const uint32_t borders[4] = {0x0b95c2, 0x25fed7, 0x45672a, 0x6ac0c7};

static uint32_t byte_of_scale(float scale)
{
    const uint32_t bits = pccl_f32_bits(scale), mantissa = bits & 0x7fffff;
    if (bits >= 0x7f800000) /* infinite, or NaN of either sign */
        return SCALE_NAN;
    int byte = 4 * ((int)(bits >> 23) - 127 - OCTAVE_MIN) + 1;
    for (int k = 0; k < 4; k++)
        byte += mantissa >= borders[k];
    if (byte < 1)
        return SCALE_NONE;
    return byte < SCALE_NAN ? (uint32_t)byte : SCALE_NAN;
}

static float scale_of_byte(uint32_t byte)
{
    if (byte == SCALE_NONE)
        return 0;
    const uint32_t octave = (byte - 1) / 4 + 127 + (uint32_t)OCTAVE_MIN;
    return pccl_f32_of_bits(octave << 23 | quarters[(byte - 1) % 4]);
}

/* The sum of what the lanes have added, in one order on every CPU. */
static float sum_of_lanes(const float *lanes)
{
    float sums[LANES];
    memcpy(sums, lanes, sizeof sums);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

/* The root mean square of a block, or with SIGN the mean magnitude. */
PCCL_INLINE float scale_of(const pccl_f32 *x, size_t count, int is_sign)
{
    float lanes[LANES] = {0};
    const size_t even = count / LANES * LANES;
    for (size_t at = 0; at < even; at += LANES)
        for (size_t i = 0; i < LANES; i++) {
            const float magnitude = pccl_f32_of_bits(pccl_f32_bits(x[at + i]) & 0x7fffffff);
            lanes[i] += is_sign ? magnitude : magnitude * magnitude;
        }
    for (size_t i = 0; i < count - even; i++) {
        const float magnitude = pccl_f32_of_bits(pccl_f32_bits(x[even + i]) & 0x7fffffff);
        lanes[i] += is_sign ? magnitude : magnitude * magnitude;
    }
    const float mean = sum_of_lanes(lanes) / (float)count;
    return is_sign ? mean : sqrtf(mean);
}

/* One code a byte: the sign, and above it whether the magnitude has the higher level. */
PCCL_INLINE void encode(const pccl_f32 *x, size_t count, uint32_t threshold, pccl_u8 *codes)
{
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; i++) {
        const uint32_t bits = pccl_f32_bits(x[i]);
        codes[i] = (uint8_t)(bits >> 31 | ((int32_t)(bits & 0x7fffffff) >= (int32_t)threshold ? 2u : 0u));
    }
}

/* `codes` has zeros up to a multiple of 8. */
PCCL_INLINE void pack(const uint8_t *codes, size_t bytes, int is_sign, pccl_u8 *wire)
{
    const pccl_u32 *fours = (const pccl_u32 *)(const void *)codes;
    const pccl_u64 *eights = (const pccl_u64 *)(const void *)codes;
    if (is_sign) {
        PCCL_INDEPENDENT
        for (size_t i = 0; i < bytes; i++) {
            uint64_t bits = eights[i];
            bits |= bits >> 7;
            bits |= bits >> 14;
            wire[i] = (uint8_t)(bits | bits >> 28);
        }
    } else {
        PCCL_INDEPENDENT
        for (size_t i = 0; i < bytes; i++)
            wire[i] = (uint8_t)(fours[i] * 0x01041040u >> 24); /* code k moves from bit 8 k to bit 24 + 2 k */
    }
}

/* With SIGN a code of 1 becomes some other number than 0. */
PCCL_INLINE void unpack(const pccl_u8 *wire, size_t bytes, int is_sign, uint8_t *codes)
{
    pccl_u32 *fours = (pccl_u32 *)(void *)codes;
    pccl_u64 *eights = (pccl_u64 *)(void *)codes;
    if (is_sign) {
        PCCL_INDEPENDENT
        for (size_t i = 0; i < bytes; i++)
            eights[i] = wire[i] * 0x0101010101010101u & 0x8040201008040201u;
    } else {
        PCCL_INDEPENDENT
        for (size_t i = 0; i < bytes; i++) {
            const uint32_t pairs = wire[i] | (uint32_t)wire[i] << 12;
            fours[i] = (pairs | pairs << 6) & 0x03030303;
        }
    }
}

PCCL_INLINE void decode_signs(const pccl_u8 *marks, size_t count, uint32_t scale, pccl_f32 *values)
{
    pccl_u32 *bits = (pccl_u32 *)(void *)values;
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; i++)
        bits[i] = marks[i] != 0 ? scale | 0x80000000u : scale;
}

PCCL_INLINE void decode(const pccl_u8 *codes, size_t count, uint32_t low, uint32_t change, pccl_f32 *values)
{
    pccl_u32 *bits = (pccl_u32 *)(void *)values;
    PCCL_INDEPENDENT
    for (size_t i = 0; i < count; i++) {
        const uint32_t code = codes[i];
        bits[i] = code << 31 | (low ^ ((0u - (code >> 1)) & change));
    }
}

PCCL_INLINE uint8_t *quantize_block(const pccl_f32 *x, size_t count, uint32_t byte, int is_sign, uint8_t *wire)
{
    uint8_t codes[PCCL_QUANT_CHUNK + 8];
    const size_t bytes = is_sign ? (count + 7) / 8 : (count + 3) / 4;
    *wire++ = (uint8_t)byte;
    if (byte == SCALE_NONE || byte == SCALE_NAN) {
        memset(wire, 0, bytes);
        return wire + bytes;
    }
    memset(codes + count, 0, (8 - count % 8) % 8);
    encode(x, count, is_sign ? INT32_MAX : pccl_f32_bits(THRESHOLD * scale_of_byte(byte)), codes);
    pack(codes, bytes, is_sign, wire);
    return wire + bytes;
}

/* Loops of a known count need no remainders, and the CPU computes several scales at the same time. */
PCCL_INLINE void quantize_all(
    const pccl_op_shape *shape, const pccl_f32 *source, size_t count, int is_sign, uint8_t *wire)
{
    while (shape->quantization_block == USUAL_BLOCK && count >= AHEAD * USUAL_BLOCK) {
        uint32_t scales[AHEAD];
        for (size_t i = 0; i < AHEAD; i++)
            scales[i] = byte_of_scale(scale_of(source + i * USUAL_BLOCK, USUAL_BLOCK, is_sign));
        for (size_t i = 0; i < AHEAD; i++, source += USUAL_BLOCK, count -= USUAL_BLOCK)
            wire = quantize_block(source, USUAL_BLOCK, scales[i], is_sign, wire);
    }
    while (count > 0) {
        const size_t block = pccl_min_size(shape->quantization_block, count);
        wire = quantize_block(source, block, byte_of_scale(scale_of(source, block, is_sign)), is_sign, wire);
        source += block;
        count -= block;
    }
}

/* Of a block's codes, `count` ones from a whole byte on. */
PCCL_INLINE void dequantize_block(uint32_t byte, const uint8_t *wire, size_t count, int is_sign, pccl_f32 *values)
{
    uint8_t codes[PCCL_QUANT_CHUNK + 8];
    if (byte == SCALE_NAN) {
        for (size_t i = 0; i < count; i++)
            values[i] = pccl_f32_of_bits(PCCL_QUANT_NAN_BITS);
        return;
    }
    const float scale = scale_of_byte(byte);
    const uint32_t low = pccl_f32_bits(is_sign ? scale : LEVEL_LOW * scale);
    const uint32_t high = pccl_f32_bits(is_sign ? scale : LEVEL_HIGH * scale);
    unpack(wire, is_sign ? (count + 7) / 8 : (count + 3) / 4, is_sign, codes);
    if (is_sign)
        decode_signs(codes, count, low, values);
    else
        decode(codes, count, low, low ^ high, values);
}

PCCL_INLINE void dequantize_all(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, int is_sign, pccl_f32 *destination)
{
    const size_t block = shape->quantization_block, codes_a_byte = is_sign ? 8 : 4;
    size_t in_block = first % block;
    wire += first / block * (1 + block / codes_a_byte);
    while (count > 0) {
        const size_t n = pccl_min_size(block - in_block, count);
        const uint8_t *codes = wire + 1 + in_block / codes_a_byte;
        if (n == USUAL_BLOCK)
            dequantize_block(*wire, codes, USUAL_BLOCK, is_sign, destination);
        else
            dequantize_block(*wire, codes, n, is_sign, destination);
        wire += 1 + block / codes_a_byte;
        destination += n;
        count -= n;
        in_block = 0;
    }
}

/* One of each per level of the CPU. */
#define FOR_LEVEL(target, level) \
    target static void quantize_##level(const pccl_op_shape *shape, const float *source, size_t count, uint8_t *wire) \
    { \
        if (shape->quantization == PCCL_QUANT_SIGN) \
            quantize_all(shape, source, count, 1, wire); \
        else \
            quantize_all(shape, source, count, 0, wire); \
    } \
    target static void dequantize_##level( \
        const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, float *destination) \
    { \
        if (shape->quantization == PCCL_QUANT_SIGN) \
            dequantize_all(shape, wire, first, count, 1, destination); \
        else \
            dequantize_all(shape, wire, first, count, 0, destination); \
    }

FOR_LEVEL(, portable)
#if PCCL_SIMD_X86
FOR_LEVEL(PCCL_TARGET_AVX2, avx2)
#endif

/* Blocks are too short to gain by wider vectors than AVX2's. */
void pccl_levels_quantize(const pccl_op_shape *shape, const float *source, size_t count, uint8_t *wire)
{
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        quantize_avx2(shape, source, count, wire);
        return;
    }
#endif
    quantize_portable(shape, source, count, wire);
}

void pccl_levels_dequantize(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, float *destination)
{
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        dequantize_avx2(shape, wire, first, count, destination);
        return;
    }
#endif
    dequantize_portable(shape, wire, first, count, destination);
}
