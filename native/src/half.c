#include "half.h"

#if PCCL_SIMD_X86
#include <immintrin.h>
#endif

#define CONVERT_LOOP(name, from, to, convert) \
    PCCL_INLINE void name(const void *source, size_t count, void *destination) \
    { \
        const from *x = source; \
        to *y = destination; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) \
            y[i] = convert(x[i]); \
    }

CONVERT_LOOP(f16_widen_loop, pccl_u16, pccl_f32, pccl_f16_to_f32)
CONVERT_LOOP(f16_narrow_loop, pccl_f32, pccl_u16, pccl_f16_from_f32)
CONVERT_LOOP(bf16_widen_loop, pccl_u16, pccl_f32, pccl_bf16_to_f32)
CONVERT_LOOP(bf16_narrow_loop, pccl_f32, pccl_u16, pccl_bf16_from_f32)

#if PCCL_SIMD_X86

PCCL_TARGET_AVX2 static void f16_widen_avx2(const void *halves, size_t count, float *values)
{
    const pccl_u16 *x = halves;
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + i))));
    f16_widen_loop(x + i, count - i, values + i);
}

PCCL_TARGET_AVX2 static void f16_narrow_avx2(const pccl_f32 *values, size_t count, void *halves)
{
    pccl_u16 *y = halves;
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 v = _mm256_loadu_ps((const float *)(const void *)(values + i));
        v = _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        _mm_storeu_si128((__m128i *)(void *)(y + i), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    f16_narrow_loop(values + i, count - i, y + i);
}

PCCL_TARGET_AVX2 static void bf16_widen_avx2(const void *bf16s, size_t count, float *values)
{
    bf16_widen_loop(bf16s, count, values);
}

PCCL_TARGET_AVX2 static void bf16_narrow_avx2(const pccl_f32 *values, size_t count, void *bf16s)
{
    bf16_narrow_loop(values, count, bf16s);
}

#define USE_AVX2(call) \
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) { \
        call; \
        return; \
    }
#else
#define USE_AVX2(call)
#endif

void pccl_f16_widen(const void *halves, size_t count, float *values)
{
    USE_AVX2(f16_widen_avx2(halves, count, values))
    f16_widen_loop(halves, count, values);
}

void pccl_f16_narrow(const pccl_f32 *values, size_t count, void *halves)
{
    USE_AVX2(f16_narrow_avx2(values, count, halves))
    f16_narrow_loop(values, count, halves);
}

void pccl_bf16_widen(const void *bf16s, size_t count, float *values)
{
    USE_AVX2(bf16_widen_avx2(bf16s, count, values))
    bf16_widen_loop(bf16s, count, values);
}

void pccl_bf16_narrow(const pccl_f32 *values, size_t count, void *bf16s)
{
    USE_AVX2(bf16_narrow_avx2(values, count, bf16s))
    bf16_narrow_loop(values, count, bf16s);
}
