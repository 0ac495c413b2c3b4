/* half.h: float16 and bfloat16 to and from float32.
 *
 * The scalar functions are the specification. Widening is exact. Narrowing rounds to nearest even and turns
 * every NaN into the one canonical quiet NaN; overflow goes to infinity, underflow is gradual.
 */
#ifndef PCCL_HALF_H
#define PCCL_HALF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

enum { PCCL_F16_NAN = 0x7e00, PCCL_BF16_NAN = 0x7fc0 };

PCCL_INLINE uint32_t pccl_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

PCCL_INLINE float pccl_f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `a` where the condition holds, else `b`. With `?:` instead, GCC puts the float addition that leads to an
 * operand behind a branch, and then does not vectorize. */
PCCL_INLINE uint32_t pccl_select_u32(int condition, uint32_t a, uint32_t b)
{
    uint32_t mask = 0u - (uint32_t)condition;
    return (a & mask) | (b & ~mask);
}

PCCL_INLINE float pccl_f16_to_f32(uint16_t half)
{
    const uint32_t rebias = (127u - 15u) << 23;
    uint32_t shifted = (uint32_t)(half & 0x7fff) << 13;
    uint32_t normal = shifted + rebias;
    uint32_t special = normal + rebias; /* the exponent of infinity and NaN */
    /* A subnormal half is a fraction without its leading 1: give it one, then take that away again. */
    float one = pccl_f32_of_bits(rebias + (1u << 23));
    uint32_t subnormal = pccl_f32_bits(pccl_f32_of_bits(normal + (1u << 23)) - one);
    uint32_t magnitude = pccl_select_u32(shifted < 1u << 23, subnormal, normal);
    magnitude = pccl_select_u32(shifted >= 0x7c00u << 13, special, magnitude);
    return pccl_f32_of_bits(magnitude | (uint32_t)(half & 0x8000) << 16);
}

PCCL_INLINE uint16_t pccl_f16_from_f32(float value)
{
    uint32_t bits = pccl_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* Next to 0.5 a float's last bit is the last bit of a subnormal half, so the addition rounds. */
    uint32_t subnormal = pccl_f32_bits(pccl_f32_of_bits(magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = pccl_select_u32(magnitude < 0x38800000, subnormal, normal);
    half = pccl_select_u32(magnitude >= 0x47800000, 0x7c00, half);
    half |= bits >> 16 & 0x8000;
    return (uint16_t)pccl_select_u32(magnitude > 0x7f800000, PCCL_F16_NAN, half);
}

PCCL_INLINE float pccl_bf16_to_f32(uint16_t bf16) { return pccl_f32_of_bits((uint32_t)bf16 << 16); }

PCCL_INLINE uint16_t pccl_bf16_from_f32(float value)
{
    uint32_t bits = pccl_f32_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? PCCL_BF16_NAN : rounded);
}

/* Stochastic: up in magnitude with the probability of the part that is cut off, `random` being uniform. NaN,
 * infinities and what lies beyond the greatest finite half are rounded as above. */
PCCL_INLINE uint16_t pccl_bf16_dithered(float value, uint32_t random)
{
    uint32_t bits = pccl_f32_bits(value);
    uint32_t rounded = (bits + (random >> 16)) >> 16;
    return (uint16_t)pccl_select_u32((bits & 0x7fffffff) >= 0x7f7f0000, pccl_bf16_from_f32(value), rounded);
}

PCCL_INLINE uint16_t pccl_f16_dithered(float value, uint32_t random)
{
    uint32_t bits = pccl_f32_bits(value);
    uint32_t magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - ((127u - 15u) << 23) + (random >> 19)) >> 13;
    /* Counted in subnormal halves, below 2^10. The sum with 1.5 * 2^23 ends in the nearest integer. */
    float units = pccl_f32_of_bits(magnitude) * 0x1p24f;
    float dithered = units + ((float)(int32_t)(random >> 8) * 0x1p-24f - 0.5f);
    uint32_t subnormal = pccl_f32_bits(dithered + 0x1.8p23f) - 0x4b400000;
    uint32_t half = pccl_select_u32(magnitude < 0x38800000, subnormal, normal);
    half |= bits >> 16 & 0x8000;
    return (uint16_t)pccl_select_u32(magnitude >= 0x477fe000, pccl_f16_from_f32(value), half);
}

/* From and to nearest for arrays, with the CPU's own conversion where it has one. */
void pccl_f16_widen(const void *halves, size_t count, float *values);
void pccl_f16_narrow(const pccl_f32 *values, size_t count, void *halves);
void pccl_bf16_widen(const void *bf16s, size_t count, float *values);
void pccl_bf16_narrow(const pccl_f32 *values, size_t count, void *bf16s);

#endif
