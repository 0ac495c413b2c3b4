#include "pool.h"

#include "base.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum {
    POOL_BLOCKS_MAX = 256,
    POOL_ALIGNMENT_BYTES = 64,
    POOL_GRAIN_BYTES = 4096,
    POOL_HUGE_BYTES = 2 << 20,
    POOL_GENERATION_TAKES = 1024 /* "lately" is this generation and the last one */
};

typedef struct {
    void *at[POOL_BLOCKS_MAX + 1];
    size_t count;
} pool_evicted;

struct pccl_pool {
    pthread_mutex_t mutex;
    uint64_t bytes_max;
    uint64_t held_bytes;
    uint64_t used_bytes;
    uint64_t used_bytes_max;
    unsigned generation_takes;
    size_t largest_copy_bytes; /* of this generation */
    size_t last_largest_copy_bytes;
    size_t idle_count;
    pccl_pool_block idle[POOL_BLOCKS_MAX + 1]; /* oldest first; the last only until it is evicted */
};

pccl_pool *pccl_pool_create(uint64_t bytes_max)
{
    pccl_pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    if (pthread_mutex_init(&pool->mutex, NULL) != 0) {
        free(pool);
        return NULL;
    }
    pool->bytes_max = bytes_max;
    return pool;
}

void pccl_pool_destroy(pccl_pool *pool)
{
    if (pool == NULL)
        return;
    PCCL_ASSERT(pool->used_bytes == 0);
    for (size_t i = 0; i < pool->idle_count; i++)
        free(pool->idle[i].at);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static void *pool_allocate(size_t bytes)
{
    void *block;
    size_t alignment = bytes >= POOL_HUGE_BYTES ? POOL_HUGE_BYTES : POOL_ALIGNMENT_BYTES;
    if (posix_memalign(&block, alignment, bytes) != 0)
        return NULL;
#if defined(__linux__)
    if (bytes >= POOL_HUGE_BYTES)
        (void)madvise(block, bytes / POOL_HUGE_BYTES * POOL_HUGE_BYTES, MADV_HUGEPAGE);
#endif
    return block;
}

static pccl_pool_block pool_extract(pccl_pool *pool, size_t index)
{
    pccl_pool_block block = pool->idle[index];
    pool->idle_count--;
    memmove(&pool->idle[index], &pool->idle[index + 1], (pool->idle_count - index) * sizeof block);
    return block;
}

/* The smallest that is large enough, and not much too large; idle_count: none. */
static size_t pool_find_idle(const pccl_pool *pool, size_t bytes)
{
    size_t best = pool->idle_count;
    size_t best_bytes = bytes + bytes / 8 + POOL_GRAIN_BYTES;
    for (size_t i = pool->idle_count; i-- > 0;) {
        size_t allocated_bytes = pool->idle[i].allocated_bytes;
        if (allocated_bytes >= bytes && allocated_bytes < best_bytes) {
            best = i;
            best_bytes = allocated_bytes;
        }
    }
    return best;
}

static void pool_note_take(pccl_pool *pool, size_t bytes, enum pccl_pool_purpose purpose)
{
    pool->used_bytes += bytes;
    pool->used_bytes_max = pccl_max_u64(pool->used_bytes_max, pool->used_bytes);
    if (purpose == PCCL_POOL_COPY)
        pool->largest_copy_bytes = pccl_max_size(pool->largest_copy_bytes, bytes);
    if (++pool->generation_takes < POOL_GENERATION_TAKES)
        return;
    pool->generation_takes = 0;
    pool->last_largest_copy_bytes = pool->largest_copy_bytes;
    pool->largest_copy_bytes = 0;
}

/* The oldest but for the one that the largest copy will want: the bound has room for that. */
static void pool_evict_one(pccl_pool *pool, size_t largest_copy_bytes, pool_evicted *evicted)
{
    size_t wanted = pool_find_idle(pool, largest_copy_bytes);
    pccl_pool_block block = pool_extract(pool, wanted == 0 && pool->idle_count > 1);
    pool->held_bytes -= block.allocated_bytes;
    evicted->at[evicted->count++] = block.at;
}

static void pool_evict(pccl_pool *pool, pool_evicted *evicted)
{
    size_t largest_copy_bytes = pccl_max_size(pool->largest_copy_bytes, pool->last_largest_copy_bytes);
    while (pool->idle_count > POOL_BLOCKS_MAX ||
           (pool->idle_count > 0 && pool->held_bytes > pool->bytes_max + largest_copy_bytes))
        pool_evict_one(pool, largest_copy_bytes, evicted);
}

/* Unmapping takes its time, which other threads need not wait for. */
static void pool_free_evicted(const pool_evicted *evicted)
{
    for (size_t i = 0; i < evicted->count; i++)
        free(evicted->at[i]);
}

int pccl_pool_take(pccl_pool *pool, size_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block)
{
    pool_evicted evicted;
    evicted.count = 0;
    memset(block, 0, sizeof *block);
    if (bytes > SIZE_MAX / 2)
        return -1;
    pthread_mutex_lock(&pool->mutex);
    size_t found = pool_find_idle(pool, bytes);
    if (found < pool->idle_count) {
        *block = pool_extract(pool, found);
    } else {
        /* Counted first, so that there is room before there is more. */
        block->allocated_bytes = (bytes + POOL_GRAIN_BYTES - 1) / POOL_GRAIN_BYTES * POOL_GRAIN_BYTES;
        pool->held_bytes += block->allocated_bytes;
    }
    block->bytes = bytes;
    pool_note_take(pool, bytes, purpose);
    pool_evict(pool, &evicted);
    pthread_mutex_unlock(&pool->mutex);
    pool_free_evicted(&evicted);
    if (block->at != NULL)
        return 0;
    block->at = pool_allocate(block->allocated_bytes);
    if (block->at != NULL)
        return 0;
    pthread_mutex_lock(&pool->mutex);
    pool->used_bytes -= bytes;
    pool->held_bytes -= block->allocated_bytes;
    pthread_mutex_unlock(&pool->mutex);
    return -1;
}

void pccl_pool_give(pccl_pool *pool, const pccl_pool_block *block)
{
    pool_evicted evicted;
    evicted.count = 0;
    if (block->at == NULL)
        return;
    pthread_mutex_lock(&pool->mutex);
    PCCL_ASSERT(pool->used_bytes >= block->bytes);
    pool->used_bytes -= block->bytes;
    pool->idle[pool->idle_count++] = *block;
    pool_evict(pool, &evicted);
    pthread_mutex_unlock(&pool->mutex);
    pool_free_evicted(&evicted);
}

pccl_pool_usage pccl_pool_get_usage(pccl_pool *pool)
{
    pccl_pool_usage usage;
    pthread_mutex_lock(&pool->mutex);
    usage.idle_bytes = pool->held_bytes - pool->used_bytes;
    usage.used_bytes = pool->used_bytes;
    usage.used_bytes_max = pool->used_bytes_max;
    pthread_mutex_unlock(&pool->mutex);
    return usage;
}
