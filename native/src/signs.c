/* signs.c: see simd.h for how the loops become one function per CPU level.
 *
 * What is added is made of integers: the sum of +-amount over all directions, in int32, then one conversion, one
 * multiplication by a power of two and one addition in float. Within the limits that the public header gives each of
 * these is exact, so neither their order nor fusing them could change a bit. (The rounding mode could: where it is
 * downward, a sum of zero is -0.)
 *
 * The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).
 * A 64-bit key and a 128-bit counter give 128 bits, by integer operations alone:
 *
 *     ten times: (c0, c1, c2, c3) = (high(B * c2) ^ c1 ^ k0, low(B * c2), high(A * c0) ^ c3 ^ k1, low(A * c0)),
 *                then k0 += 0x9e3779b9, k1 += 0xbb67ae85
 *
 * where A = 0xd2511f53, B = 0xcd9e8d57, high and low are the halves of the 64-bit product, and the sums wrap.
 *
 * The sign of element i of tensor t, in direction d of step s, for a seed:
 *
 *     the key is the seed's low and high half, the counter (i / 128, t, s, d);
 *     of the four words that come out, bit i % 32 of word i % 128 / 32 counts; 1 is minus.
 *
 * So signs need no memory: four numbers give them again, from anywhere in the tensor.
 */
#include "pccl_native.h"

#include <string.h>

#include "base.h"
#include "fpenv.h"
#include "simd.h"

/* Elements that share a counter. */
enum { PCCL_SIGNS_BLOCK = 128 };

enum { LANES = 32, BATCH = LANES * PCCL_SIGNS_BLOCK, ROUNDS = 10 };

/* Blocks `first` to `first + LANES - 1`, their words one after the other. With fewer lanes GCC unrolls the loops before
 * it looks for vectors, and finds none. */
PCCL_INLINE void philox_lanes(const pccl_signs *of, uint32_t direction, uint32_t first, uint32_t *words)
{
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    uint32_t k0 = (uint32_t)of->seed, k1 = (uint32_t)(of->seed >> 32);
    for (uint32_t i = 0; i < LANES; i++) {
        c0[i] = first + i;
        c1[i] = of->tensor;
        c2[i] = of->step;
        c3[i] = direction;
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < LANES; i++) {
            const uint64_t a = (uint64_t)0xd2511f53u * c0[i];
            const uint64_t b = (uint64_t)0xcd9e8d57u * c2[i];
            c0[i] = (uint32_t)(b >> 32) ^ c1[i] ^ k0;
            c1[i] = (uint32_t)b;
            c2[i] = (uint32_t)(a >> 32) ^ c3[i] ^ k1;
            c3[i] = (uint32_t)a;
        }
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    for (uint32_t i = 0; i < LANES; i++) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

PCCL_INLINE void add_any(pccl_f32 *values, size_t count, float quantum, const pccl_signs *of,
    const uint32_t *directions, const int32_t *amounts, size_t direction_count)
{
    uint32_t words[BATCH / 32];
    int32_t sums[BATCH];
    int32_t all_plus = 0;
    for (size_t k = 0; k < direction_count; k++)
        all_plus += amounts[k];
    for (size_t begin = 0; begin < count; begin += BATCH) {
        const size_t n = pccl_min_size(BATCH, count - begin);
        for (int i = 0; i < BATCH; i++)
            sums[i] = all_plus;
        for (size_t k = 0; k < direction_count; k++) {
            philox_lanes(of, directions[k], (uint32_t)(begin / PCCL_SIGNS_BLOCK), words);
            const int32_t twice = 2 * amounts[k];
            for (int w = 0; w < BATCH / 32; w++)
                for (int bit = 0; bit < 32; bit++)
                    sums[32 * w + bit] -= -(int32_t)(words[w] >> bit & 1) & twice;
        }
        for (size_t i = 0; i < n; i++)
            values[begin + i] += (float)sums[i] * quantum;
    }
}

static void add_portable(pccl_f32 *values, size_t count, float quantum, const pccl_signs *of,
    const uint32_t *directions, const int32_t *amounts, size_t direction_count)
{
    add_any(values, count, quantum, of, directions, amounts, direction_count);
}

#if PCCL_SIMD_X86
PCCL_TARGET_AVX2 static void add_avx2(pccl_f32 *values, size_t count, float quantum, const pccl_signs *of,
    const uint32_t *directions, const int32_t *amounts, size_t direction_count)
{
    add_any(values, count, quantum, of, directions, amounts, direction_count);
}

PCCL_TARGET_AVX512 static void add_avx512(pccl_f32 *values, size_t count, float quantum, const pccl_signs *of,
    const uint32_t *directions, const int32_t *amounts, size_t direction_count)
{
    add_any(values, count, quantum, of, directions, amounts, direction_count);
}
#endif

typedef void (*add_function)(pccl_f32 *values, size_t count, float quantum, const pccl_signs *of,
    const uint32_t *directions, const int32_t *amounts, size_t direction_count);

static add_function add_by_level(void)
{
#if PCCL_SIMD_X86
    const int level = pccl_simd_level();
    if (level >= PCCL_SIMD_AVX512)
        return add_avx512;
    if (level >= PCCL_SIMD_AVX2)
        return add_avx2;
#endif
    return add_portable;
}

static int is_power_of_two(float quantum)
{
    uint32_t bits;
    memcpy(&bits, &quantum, sizeof bits);
    const uint32_t exponent = bits >> 23; /* with the sign */
    return (bits & 0x7fffff) == 0 && exponent > 0 && exponent < 255;
}

void pccl_kernel_add_signs(float *values, size_t count, float quantum, const pccl_signs *of, const uint32_t *directions,
    const int32_t *amounts, size_t direction_count)
{
    int64_t most = 0;
    for (size_t k = 0; k < direction_count; k++)
        most += amounts[k] < 0 ? -(int64_t)amounts[k] : amounts[k];
    PCCL_ASSERT(is_power_of_two(quantum) && most <= PCCL_SIGNS_SUM_MAX);
    PCCL_ASSERT((count + BATCH) / PCCL_SIGNS_BLOCK <= UINT32_MAX);
    const uint64_t before = pccl_fpenv_enter();
    add_by_level()(values, count, quantum, of, directions, amounts, direction_count);
    pccl_fpenv_leave(before);
}

void pccl_kernel_sign_words(const pccl_signs *of, uint32_t direction, uint32_t block, uint32_t words[4])
{
    uint32_t lanes[BATCH / 32];
    philox_lanes(of, direction, block, lanes);
    for (int i = 0; i < 4; i++)
        words[i] = lanes[i];
}
