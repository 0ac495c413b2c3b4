/* folding.h: CRC32C by carry-less multiplication, as steps for a loop that has the bytes in registers anyway: crc32c.c
 * has no other work in it, reduce.c has.
 *
 * Four registers of 512 bits take a block of PCCL_FOLD_BYTES in turn. Moving 128 bits X = low x^64 + high (the lower
 * address has the higher powers) by d bits:
 *
 *     X x^d = low x^(d+64) + high x^d
 *
 * The product of two reflected 64-bit numbers, read as a reflected 128-bit one, has one x too many, and a 32-bit
 * number in the lower half of 64 bits means x^32 times itself. So the factors are x^(d+31) and x^(d-33).
 *
 * Only where pccl_crc32c_has(PCCL_CRC32C_FOLDING), which also computes the factors. */
#ifndef PCCL_FOLDING_H
#define PCCL_FOLDING_H

#include "simd.h"

#if PCCL_SIMD_X86
#include <immintrin.h>

#define PCCL_TARGET_FOLDING __attribute__((target(PCCL_TARGET_CRC32C ",avx512f,avx512vl,vpclmulqdq")))

enum { PCCL_FOLD_BYTES = 256, PCCL_FOLD_LANES = 4, PCCL_FOLD_LANE_BYTES = PCCL_FOLD_BYTES / PCCL_FOLD_LANES };

extern uint64_t pccl_fold_by_block[2]; /* of 128 bits by PCCL_FOLD_BYTES */
extern uint64_t pccl_fold_by_lane[2];

typedef struct {
    __m512i lanes[PCCL_FOLD_LANES];
    __m512i before; /* the register that the first bytes meet */
    __m512i factors;
} pccl_folding;

PCCL_TARGET_FOLDING
static inline __m512i pccl_fold_load(const uint8_t *at) { return _mm512_loadu_si512((const void *)at); }

PCCL_TARGET_FOLDING
static inline __m512i pccl_fold_factors(const uint64_t factors[2])
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)factors));
}

PCCL_TARGET_FOLDING
static inline __m512i pccl_fold_onto(__m512i x, __m512i factors, __m512i onto)
{
    enum { XOR_OF_THREE = 0x96 };
    __m512i low = _mm512_clmulepi64_epi128(x, factors, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(x, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, XOR_OF_THREE);
}

/* `r` is the register, which is the complement of the checksum so far. */
PCCL_TARGET_FOLDING
static inline void pccl_fold_begin(pccl_folding *folding, uint32_t r)
{
    for (int i = 0; i < PCCL_FOLD_LANES; i++)
        folding->lanes[i] = _mm512_setzero_si512();
    folding->before = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)r));
    folding->factors = pccl_fold_factors(pccl_fold_by_block);
}

/* Lane after lane of a block. */
PCCL_TARGET_FOLDING
static inline void pccl_fold_lane(pccl_folding *folding, int lane, __m512i bytes)
{
    if (lane == 0) {
        bytes = _mm512_xor_si512(bytes, folding->before);
        folding->before = _mm512_setzero_si512();
    }
    folding->lanes[lane] = pccl_fold_onto(folding->lanes[lane], folding->factors, bytes);
}

/* The register after one block or more. What the lanes come to is a message like any other, which begins with 0. */
PCCL_TARGET_FOLDING
static inline uint32_t pccl_fold_end(const pccl_folding *folding)
{
    __m512i factors = pccl_fold_factors(pccl_fold_by_lane);
    __m512i x = folding->lanes[0];
    for (int i = 1; i < PCCL_FOLD_LANES; i++)
        x = pccl_fold_onto(x, factors, folding->lanes[i]);
    uint64_t rest[8];
    _mm512_storeu_si512((void *)rest, x);
    uint64_t r = 0;
    for (int i = 0; i < 8; i++)
        r = _mm_crc32_u64(r, rest[i]);
    return (uint32_t)r;
}

#endif

#endif
