/* kernels.c: elementwise arithmetic. See simd.h for how the loops become one function per CPU level.
 *
 * Rules of the arithmetic, the same on every CPU:
 *   integers   wrap; computed unsigned, in at least 32 bits, so that nothing overflows a signed type
 *   floats     one IEEE operation an element; a NaN that arithmetic gives is the canonical quiet NaN
 *   MAX, MIN   the operand itself, bits and all; a NaN wins, that of `a` first; of equals (0 and -0), `b`
 *   halves     widened to float, one operation, rounded to nearest even: as if the exact result were rounded
 *              once, for a float has more than twice their bits. Every NaN becomes the canonical one
 */
#include "pccl_native.h"

#include "base.h"
#include "half.h"
#include "simd.h"

PCCL_INLINE float canonical_f32(float value) { return value != value ? pccl_f32_of_bits(0x7fc00000) : value; }

PCCL_INLINE double canonical_f64(double value)
{
    const uint64_t nan_bits = 0x7ff8000000000000u;
    double nan;
    memcpy(&nan, &nan_bits, sizeof nan);
    return value != value ? nan : value;
}

/* `|` instead of `||` keeps the body free of branches. */
#define FLOAT_MAX(x, y) ((((x) > (y)) | ((x) != (x))) ? (x) : (y))
#define FLOAT_MIN(x, y) ((((x) < (y)) | ((x) != (x))) ? (x) : (y))

#define LOOP(type, expression) \
    do { \
        type *d = destination; \
        const type *xs = a; \
        const type *ys = b; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) { \
            const type x = xs[i]; \
            const type y = ys[i]; \
            d[i] = (type)(expression); \
        } \
    } while (0)

#define REDUCE(type, sum_type, sum, product, max, min) \
    switch (reduce_op) { \
    case PCCL_SUM: \
    case PCCL_AVG: LOOP(sum_type, sum); break; \
    case PCCL_PROD: LOOP(sum_type, product); break; \
    case PCCL_MAX: LOOP(type, max); break; \
    default: LOOP(type, min); break; \
    } \
    break

#define REDUCE_INTEGER(type, sum_type, wide) \
    REDUCE(type, sum_type, (wide)x + (wide)y, (wide)x * (wide)y, x > y ? x : y, x < y ? x : y)

#define REDUCE_FLOAT(type, canonical) \
    REDUCE(type, type, canonical(x + y), canonical((x) * (y)), FLOAT_MAX(x, y), FLOAT_MIN(x, y))

PCCL_INLINE float max_f32(float x, float y) { return FLOAT_MAX(x, y); }
PCCL_INLINE float min_f32(float x, float y) { return FLOAT_MIN(x, y); }

#define REDUCE_BF16 \
    REDUCE(pccl_u16, pccl_u16, pccl_bf16_from_f32(pccl_bf16_to_f32(x) + pccl_bf16_to_f32(y)), \
        pccl_bf16_from_f32(pccl_bf16_to_f32(x) * pccl_bf16_to_f32(y)), \
        pccl_bf16_from_f32(max_f32(pccl_bf16_to_f32(x), pccl_bf16_to_f32(y))), \
        pccl_bf16_from_f32(min_f32(pccl_bf16_to_f32(x), pccl_bf16_to_f32(y))))

/* Every dtype but float16. */
PCCL_INLINE void reduce_loops(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count)
{
    switch (dtype) {
    case PCCL_UINT8: REDUCE_INTEGER(pccl_u8, pccl_u8, uint32_t);
    case PCCL_INT8: REDUCE_INTEGER(pccl_i8, pccl_u8, uint32_t);
    case PCCL_UINT16: REDUCE_INTEGER(pccl_u16, pccl_u16, uint32_t);
    case PCCL_INT16: REDUCE_INTEGER(pccl_i16, pccl_u16, uint32_t);
    case PCCL_UINT32: REDUCE_INTEGER(pccl_u32, pccl_u32, uint32_t);
    case PCCL_INT32: REDUCE_INTEGER(pccl_i32, pccl_u32, uint32_t);
    case PCCL_UINT64: REDUCE_INTEGER(pccl_u64, pccl_u64, uint64_t);
    case PCCL_INT64: REDUCE_INTEGER(pccl_i64, pccl_u64, uint64_t);
    case PCCL_BFLOAT16: REDUCE_BF16;
    case PCCL_FLOAT32: REDUCE_FLOAT(pccl_f32, canonical_f32);
    default: REDUCE_FLOAT(pccl_f64, canonical_f64);
    }
}

/* Elements of a float16 buffer that are widened at a time: two arrays of 2 KiB, at home in the L1 cache. Left
 * to the compiler, one loop that widens, adds and narrows in registers runs at a fifth of the speed. */
enum { F16_CHUNK = 512 };

PCCL_INLINE void reduce_any(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count)
{
    if (dtype != PCCL_FLOAT16) {
        reduce_loops(dtype, reduce_op, destination, a, b, count);
        return;
    }
    const pccl_u16 *xs = a;
    const pccl_u16 *ys = b;
    pccl_u16 *d = destination;
    float x[F16_CHUNK], y[F16_CHUNK];
    for (size_t i = 0; i < count; i += F16_CHUNK) {
        size_t n = pccl_min_size(F16_CHUNK, count - i);
        pccl_f16_widen(xs + i, n, x);
        pccl_f16_widen(ys + i, n, y);
        reduce_loops(PCCL_FLOAT32, reduce_op, x, x, y, n);
        pccl_f16_narrow(x, n, d + i);
    }
}

/* C truncates; a negative quotient with a remainder lies one further down. */
#define FLOOR_DIVIDE(type) \
    PCCL_INLINE type floor_divide_##type(type x, type divisor) { return (type)(x / divisor - (x % divisor < 0)); }

FLOOR_DIVIDE(int32_t)
FLOOR_DIVIDE(int64_t)

#define AVERAGE(type, expression) \
    do { \
        type *xs = values; \
        for (size_t i = 0; i < count; i++) { \
            const type x = xs[i]; \
            xs[i] = (type)(expression); \
        } \
    } while (0)

PCCL_INLINE void average_any(uint32_t dtype, void *values, size_t count, uint32_t world_size)
{
    const int32_t divisor = (int32_t)world_size;
    const float divisor_f32 = (float)world_size;
    switch (dtype) {
    case PCCL_UINT8: AVERAGE(pccl_u8, x / world_size); break;
    case PCCL_INT8: AVERAGE(pccl_i8, floor_divide_int32_t(x, divisor)); break;
    case PCCL_UINT16: AVERAGE(pccl_u16, x / world_size); break;
    case PCCL_INT16: AVERAGE(pccl_i16, floor_divide_int32_t(x, divisor)); break;
    case PCCL_UINT32: AVERAGE(pccl_u32, x / world_size); break;
    case PCCL_INT32: AVERAGE(pccl_i32, floor_divide_int32_t(x, divisor)); break;
    case PCCL_UINT64: AVERAGE(pccl_u64, x / world_size); break;
    case PCCL_INT64: AVERAGE(pccl_i64, floor_divide_int64_t(x, divisor)); break;
    case PCCL_FLOAT16: {
        pccl_u16 *halves = values;
        float wide[F16_CHUNK];
        for (size_t i = 0; i < count; i += F16_CHUNK) {
            size_t n = pccl_min_size(F16_CHUNK, count - i);
            pccl_f16_widen(halves + i, n, wide);
            for (size_t k = 0; k < n; k++)
                wide[k] /= divisor_f32;
            pccl_f16_narrow(wide, n, halves + i);
        }
        break;
    }
    case PCCL_BFLOAT16: AVERAGE(pccl_u16, pccl_bf16_from_f32(pccl_bf16_to_f32(x) / divisor_f32)); break;
    case PCCL_FLOAT32: AVERAGE(pccl_f32, canonical_f32(x / divisor_f32)); break;
    default: AVERAGE(pccl_f64, canonical_f64(x / (double)world_size)); break;
    }
}

static void reduce_portable(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count)
{
    reduce_any(dtype, reduce_op, destination, a, b, count);
}

static void average_portable(uint32_t dtype, void *values, size_t count, uint32_t world_size)
{
    average_any(dtype, values, count, world_size);
}

#if PCCL_SIMD_X86
PCCL_TARGET_AVX2 static void reduce_avx2(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count)
{
    reduce_any(dtype, reduce_op, destination, a, b, count);
}

PCCL_TARGET_AVX2 static void average_avx2(uint32_t dtype, void *values, size_t count, uint32_t world_size)
{
    average_any(dtype, values, count, world_size);
}
#endif

void pccl_kernel_reduce(
    uint32_t dtype, uint32_t reduce_op, void *destination, const void *a, const void *b, size_t count)
{
    PCCL_ASSERT(dtype < PCCL_DTYPE_COUNT && reduce_op < PCCL_REDUCE_OP_COUNT);
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        reduce_avx2(dtype, reduce_op, destination, a, b, count);
        return;
    }
#endif
    reduce_portable(dtype, reduce_op, destination, a, b, count);
}

void pccl_kernel_average(uint32_t dtype, void *values, size_t count, uint32_t world_size)
{
    PCCL_ASSERT(dtype < PCCL_DTYPE_COUNT && world_size >= 1 && world_size <= INT32_MAX);
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        average_avx2(dtype, values, count, world_size);
        return;
    }
#endif
    average_portable(dtype, values, count, world_size);
}
