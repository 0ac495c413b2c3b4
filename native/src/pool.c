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
    POOL_HUGE_BYTES = 2 << 20
};

typedef struct {
    void *at;
    size_t bytes;
} pool_block;

struct pccl_pool {
    pthread_mutex_t mutex;
    uint64_t bytes_max;
    uint64_t idle_bytes;
    uint64_t used_bytes;
    size_t idle_count;
    pool_block idle[POOL_BLOCKS_MAX]; /* oldest first */
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

static size_t pool_class_bytes(size_t bytes)
{
    size_t grain = POOL_GRAIN_BYTES;
    while (grain < bytes / 8)
        grain *= 2;
    return bytes > SIZE_MAX - grain ? 0 : (bytes + grain - 1) / grain * grain;
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

static pool_block pool_extract(pccl_pool *pool, size_t index)
{
    pool_block block = pool->idle[index];
    pool->idle_count--;
    memmove(&pool->idle[index], &pool->idle[index + 1], (pool->idle_count - index) * sizeof block);
    pool->idle_bytes -= block.bytes;
    return block;
}

void *pccl_pool_take(pccl_pool *pool, size_t bytes)
{
    size_t class_bytes = pool_class_bytes(bytes);
    if (class_bytes == 0)
        return NULL;
    void *at = NULL;
    pthread_mutex_lock(&pool->mutex);
    for (size_t i = pool->idle_count; i-- > 0;) {
        if (pool->idle[i].bytes == class_bytes) {
            at = pool_extract(pool, i).at;
            break;
        }
    }
    pool->used_bytes += class_bytes;
    pthread_mutex_unlock(&pool->mutex);
    if (at != NULL)
        return at;
    at = pool_allocate(class_bytes);
    if (at == NULL) {
        pthread_mutex_lock(&pool->mutex);
        pool->used_bytes -= class_bytes;
        pthread_mutex_unlock(&pool->mutex);
    }
    return at;
}

void pccl_pool_give(pccl_pool *pool, void *block, size_t bytes)
{
    if (block == NULL)
        return;
    size_t class_bytes = pool_class_bytes(bytes);
    pool_block evicted[POOL_BLOCKS_MAX + 1];
    size_t evicted_count = 0;
    pthread_mutex_lock(&pool->mutex);
    PCCL_ASSERT(pool->used_bytes >= class_bytes);
    pool->used_bytes -= class_bytes;
    if (class_bytes > pool->bytes_max) {
        evicted[evicted_count++].at = block;
    } else {
        while (pool->idle_count == POOL_BLOCKS_MAX || pool->idle_bytes + class_bytes > pool->bytes_max)
            evicted[evicted_count++] = pool_extract(pool, 0);
        pool->idle[pool->idle_count].at = block;
        pool->idle[pool->idle_count].bytes = class_bytes;
        pool->idle_count++;
        pool->idle_bytes += class_bytes;
    }
    pthread_mutex_unlock(&pool->mutex);
    for (size_t i = 0; i < evicted_count; i++)
        free(evicted[i].at);
}

void pccl_pool_usage(pccl_pool *pool, uint64_t *idle_bytes, uint64_t *used_bytes)
{
    pthread_mutex_lock(&pool->mutex);
    *idle_bytes = pool->idle_bytes;
    *used_bytes = pool->used_bytes;
    pthread_mutex_unlock(&pool->mutex);
}
