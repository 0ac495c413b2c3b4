/* siphash.h: short keyed hashes (Aumasson and Bernstein, 2012). Without the key it is not feasible to find inputs that
 * collide, nor the hash of an input. */
#ifndef PCCL_SIPHASH_H
#define PCCL_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

/* SipHash-1-3 of the words as their little-endian bytes. */
uint64_t pccl_siphash_1_3(uint64_t key_0, uint64_t key_1, const uint64_t *words, size_t count);

/* SipHash-2-4 of the head, whose size is a multiple of 8, with the bytes after it. */
uint64_t pccl_siphash_2_4(
    uint64_t key_0, uint64_t key_1, const uint8_t *head, size_t head_bytes, const uint8_t *rest, size_t rest_bytes);

#endif
