/* noise.h: pseudo-random bytes, the same in every run, for the tests of kernels and checksums. */
#ifndef PCCL_NOISE_H
#define PCCL_NOISE_H

#include <stddef.h>
#include <stdint.h>

static uint32_t noise_state = 1;

static inline uint32_t noise_u32(void)
{
    noise_state ^= noise_state << 13;
    noise_state ^= noise_state >> 17;
    noise_state ^= noise_state << 5;
    return noise_state;
}

/* Any bits: among floats that are NaNs, infinities and subnormals too. */
static inline void noise_fill(uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(noise_u32() >> 11);
}

#endif
