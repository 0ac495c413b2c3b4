/* simd.h: how one plain C loop becomes fast code for several CPUs.
 *
 * A kernel is an always-inline loop over unaligned element types. It is inlined into one function per level,
 * each with that level's target attribute, and the compiler vectorizes each copy for itself. The public entry
 * picks by pccl_simd_level. No ifunc is involved (as target_clones would), so it works under every sanitizer
 * and with clang; elsewhere only the portable level exists.
 *
 * All levels give the same bits. What that rests on: -ffp-contract=off, no fast-math flag, reductions only
 * over integers, and NaN results made canonical (which operand's payload an addition keeps is up to the
 * compiler). It also rests on the thread's floating-point environment being the default one, for which fpenv.h sees.
 *
 * AVX-512 was measured on a Zen 5. Quantization gains a quarter to a half in the L2 cache, with stochastic
 * rounding twice as much again, and has a copy; plain reduction of float32 gains a tenth, is bound by memory
 * anyway, and stays with AVX2. There are no NEON copies: NEON is in the baseline of 64-bit ARM, where compilers
 * vectorize the portable level with it.
 */
#ifndef PCCL_SIMD_H
#define PCCL_SIMD_H

#include <float.h>
#include <stdint.h>

#if FLT_EVAL_METHOD < 0 || FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2 || defined(__FAST_MATH__)
#error "kernels need float arithmetic that is rounded to float after every operation"
#endif

enum pccl_simd_level {
    PCCL_SIMD_PORTABLE = 0,
    PCCL_SIMD_AVX2 = 1, /* with F16C */
    PCCL_SIMD_AVX512 = 2, /* F, BW, DQ and VL */
    PCCL_SIMD_LEVEL_COUNT = 3
};

int pccl_simd_level(void);

/* For tests: at most this level from now on. Returns the level that results, which is lower where the CPU has
 * no such level. */
int pccl_simd_limit(int level_max);

/* Instructions that single modules use beyond their level; no limit applies to these. */
enum pccl_simd_feature {
    PCCL_SIMD_CRC32C, /* SSE4.2's or ARMv8's instruction */
    PCCL_SIMD_VPCLMULQDQ_512 /* with what else AVX-512 needs */
};

int pccl_simd_has(enum pccl_simd_feature feature);

#if defined(__GNUC__) && defined(__x86_64__) && !defined(PCCL_NO_SIMD)
#define PCCL_SIMD_X86 1
#define PCCL_TARGET_AVX2 __attribute__((target("avx2,f16c")))
#if defined(__clang__) && __clang_major__ >= 14
#define PCCL_TARGET_CRC32C "sse4.2,crc32" /* the latter is not part of the former there */
#else
#define PCCL_TARGET_CRC32C "sse4.2"
#endif
#if defined(__clang__)
#define PCCL_TARGET_AVX512 \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define PCCL_TARGET_AVX512 \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define PCCL_SIMD_X86 0
#endif

#if defined(__GNUC__)
#define PCCL_INLINE static inline __attribute__((always_inline))
#define PCCL_UNALIGNED __attribute__((aligned(1), may_alias))
#else
#define PCCL_INLINE static inline
#define PCCL_UNALIGNED
#endif

/* Before a loop whose destination may be one of its sources: element i depends on elements i alone. Without
 * it GCC's run-time alias check sends the in-place case, which is the usual one, to a scalar loop. */
#if defined(__clang__)
#define PCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define PCCL_INDEPENDENT _Pragma("GCC ivdep")
#else
#define PCCL_INDEPENDENT
#endif

/* Payload lies where frames put it. */
typedef uint8_t PCCL_UNALIGNED pccl_u8;
typedef int8_t PCCL_UNALIGNED pccl_i8;
typedef uint16_t PCCL_UNALIGNED pccl_u16;
typedef int16_t PCCL_UNALIGNED pccl_i16;
typedef uint32_t PCCL_UNALIGNED pccl_u32;
typedef int32_t PCCL_UNALIGNED pccl_i32;
typedef uint64_t PCCL_UNALIGNED pccl_u64;
typedef int64_t PCCL_UNALIGNED pccl_i64;
typedef float PCCL_UNALIGNED pccl_f32;
typedef double PCCL_UNALIGNED pccl_f64;

#endif
