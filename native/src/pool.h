/* pool.h: scratch that is kept for reuse. Fresh memory costs a page fault every few kilobytes, which for a
 * large op is more than copying it; an op therefore gives its scratch back here, and the next of its size
 * finds it mapped. Sizes are rounded up to an eighth of a power of two so that similar ops share blocks.
 * What is idle is bounded by bytes_max, oldest out first. Any thread may call. */
#ifndef PCCL_POOL_H
#define PCCL_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct pccl_pool pccl_pool;

pccl_pool *pccl_pool_create(uint64_t bytes_max);
void pccl_pool_destroy(pccl_pool *pool); /* all blocks must have been given back */

/* At least `bytes` > 0 of undefined content, aligned to 64; NULL without memory. */
void *pccl_pool_take(pccl_pool *pool, size_t bytes);
void pccl_pool_give(pccl_pool *pool, void *block, size_t bytes); /* `bytes` as taken; NULL is ignored */

void pccl_pool_usage(pccl_pool *pool, uint64_t *idle_bytes, uint64_t *used_bytes);

#endif
