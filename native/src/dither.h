/* dither.h: the random numbers of stochastic rounding.
 *
 * A counter-based generator: the number of an element is a hash of a 64-bit stream and of the low 32 bits of
 * the element's index, and of nothing else. So it does not depend on how a buffer is cut or on the order of calls,
 * and a loop over elements has no state that would keep it from being vectorized. Along indices it is as good
 * as Wellons' lowbias32, whose mixing it is. Streams have to be random numbers themselves: their second half
 * is mixed in half-way.
 */
#ifndef PCCL_DITHER_H
#define PCCL_DITHER_H

#include <stdint.h>

#include "simd.h"

PCCL_INLINE uint32_t pccl_dither(uint64_t stream, uint32_t index)
{
    uint32_t x = index + (uint32_t)stream;
    x = (x ^ x >> 16) * 0x7feb352du;
    x ^= (uint32_t)(stream >> 32);
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* Uniform in [-0.5, 0.5), in steps of 2^-24; exact in float. */
PCCL_INLINE float pccl_dither_unit(uint64_t stream, uint32_t index)
{
    return (float)(int32_t)(pccl_dither(stream, index) >> 8) * 0x1p-24f - 0.5f;
}

#endif
