/* keyed_hash.h: a hash of numbers that others choose, for tables: SipHash-1-3 under a key that this process draws at
 * random and nobody else knows, so that nobody can choose them to collide. */
#ifndef PCCL_KEYED_HASH_H
#define PCCL_KEYED_HASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t pccl_keyed_hash(const uint64_t *words, size_t count);

/* Hashes the words, as their little-endian bytes, under this key; for tests. */
uint64_t pccl_siphash_1_3(uint64_t key_0, uint64_t key_1, const uint64_t *words, size_t count);

#endif
