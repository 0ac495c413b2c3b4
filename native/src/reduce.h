/* reduce.h: all that is done to a part of a partial segment as it comes: its checksum, a copy of the own elements
 * before they are overwritten, the sum, the sum's checksum.
 *
 * Each of these alone is bound by memory or by arithmetic, so together they had better be one pass. For the sum of
 * float32 they are, where the CPU can fold (folding.h); all else goes part by part through the L1 cache. The results
 * are those of pccl_kernel_reduce and pccl_kernel_average. */
#ifndef PCCL_REDUCE_H
#define PCCL_REDUCE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    uint8_t *destination; /* may be own */
    const uint8_t *own;
    const uint8_t *payload;
    uint8_t *backup; /* gets own elements; past the caches, where that is one pass. NULL: none */
    uint32_t *payload_crc; /* goes on; NULL: not wanted */
    uint32_t *sum_crc; /* the same, of what is in destination in the end */
    uint32_t ranks; /* the sum is divided by that; 0: it is not */
    uint8_t is_payload_first; /* of the two operands */
} pccl_reduction;

/* Reduces `elements` elements, and moves the pointers on. */
void pccl_reduce(uint8_t dtype, uint8_t reduce_op, pccl_reduction *reduction, size_t elements);

#endif
