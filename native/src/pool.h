/* pool.h: scratch memory, which is reused. Fresh memory costs a page fault every few kilobytes, which for a
 * large op is more than copying it; an op therefore gives its scratch back here, and the next one finds it
 * mapped. A block may go to an op that needs up to an eighth less.
 *
 * What is held, in use or idle, stays within bytes_max and the largest copy taken lately beyond that, or
 * within what is in use where that alone is more: idle blocks go as soon as they exceed it, oldest first,
 * but for the one that such a copy would get. A
 * copy is what an op in place keeps of the caller's own array, and so as large as that; it would never fit
 * into a bound of its own, and without it every op on a large array would begin with page faults. Any thread
 * may call. */
#ifndef PCCL_POOL_H
#define PCCL_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pccl_pool pccl_pool;

enum pccl_pool_purpose { PCCL_POOL_WORK, PCCL_POOL_COPY };

typedef struct {
    uint8_t *at; /* NULL: none */
    size_t bytes; /* as taken */
    size_t allocated_bytes;
} pccl_pool_block;

typedef struct {
    uint64_t idle_bytes; /* of what is held, also what blocks in use are larger than was asked for */
    uint64_t used_bytes;
    uint64_t used_bytes_max; /* at any time */
} pccl_pool_usage;

pccl_pool *pccl_pool_create(uint64_t bytes_max);
void pccl_pool_destroy(pccl_pool *pool); /* all blocks must have been given back */

/* Takes a block of at least `bytes` > 0 of undefined content, aligned to 64. Returns 0, or -1 without memory, and then
 * there is no block. */
int pccl_pool_take(pccl_pool *pool, size_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block);
void pccl_pool_give(pccl_pool *pool, const pccl_pool_block *block); /* no block is ignored */

pccl_pool_usage pccl_pool_get_usage(pccl_pool *pool);

#endif
