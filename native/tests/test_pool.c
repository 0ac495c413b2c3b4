/* The pool: what is reused, and how much is held. */
#include "check.h"
#include "pool.h"

#include <stdint.h>
#include <string.h>

enum { KIB = 1 << 10, BOUND = 64 * KIB };

static pccl_pool_block taken(pccl_pool *pool, size_t bytes, enum pccl_pool_purpose purpose)
{
    pccl_pool_block block;
    CHECK(pccl_pool_take(pool, bytes, purpose, &block) == 0);
    CHECK(block.at != NULL && (uintptr_t)block.at % 64 == 0 && block.bytes == bytes);
    memset(block.at, 0x5a, bytes);
    return block;
}

static void take_and_give(pccl_pool *pool, size_t bytes, enum pccl_pool_purpose purpose)
{
    pccl_pool_block block = taken(pool, bytes, purpose);
    pccl_pool_give(pool, &block);
}

static uint64_t idle_bytes(pccl_pool *pool) { return pccl_pool_get_usage(pool).idle_bytes; }

static void a_block_is_reused_for_what_is_a_little_smaller(void)
{
    pccl_pool *pool = pccl_pool_create(BOUND);
    pccl_pool_block first = taken(pool, 32 * KIB, PCCL_POOL_WORK);
    void *at = first.at;
    pccl_pool_give(pool, &first);
    pccl_pool_block again = taken(pool, 30 * KIB, PCCL_POOL_WORK);
    CHECK(again.at == at);
    CHECK(pccl_pool_get_usage(pool).used_bytes == 30 * KIB && idle_bytes(pool) == 2 * KIB);
    pccl_pool_give(pool, &again);
    pccl_pool_block small = taken(pool, 16 * KIB, PCCL_POOL_WORK);
    CHECK(small.at != at && idle_bytes(pool) == 32 * KIB);
    pccl_pool_give(pool, &small);
    pccl_pool_block whole = taken(pool, 32 * KIB, PCCL_POOL_WORK);
    CHECK(whole.at == at);
    pccl_pool_give(pool, &whole);
    CHECK(pccl_pool_get_usage(pool).used_bytes == 0);
    CHECK(pccl_pool_get_usage(pool).used_bytes_max == 32 * KIB);
    pccl_pool_destroy(pool);
}

/* What is in use counts too, and is not touched. */
static void what_is_held_is_bounded(void)
{
    pccl_pool *pool = pccl_pool_create(BOUND);
    pccl_pool_block blocks[6];
    for (int i = 0; i < 6; i++)
        blocks[i] = taken(pool, 16 * KIB, PCCL_POOL_WORK);
    CHECK(pccl_pool_get_usage(pool).used_bytes_max == 96 * KIB);
    for (int i = 0; i < 6; i++) {
        pccl_pool_give(pool, &blocks[i]);
        pccl_pool_usage usage = pccl_pool_get_usage(pool);
        CHECK(usage.used_bytes == (uint64_t)(5 - i) * 16 * KIB);
        CHECK(usage.idle_bytes + usage.used_bytes == (i == 0 ? 80 : 64) * KIB);
    }
    /* A new one takes the place of idle ones, the oldest first. */
    void *oldest = blocks[2].at;
    pccl_pool_block small = taken(pool, 8 * KIB, PCCL_POOL_WORK);
    CHECK(idle_bytes(pool) == 48 * KIB);
    for (int i = 0; i < 3; i++) {
        blocks[i] = taken(pool, 16 * KIB, PCCL_POOL_WORK);
        CHECK(blocks[i].at != oldest);
    }
    CHECK(idle_bytes(pool) == 0);
    for (int i = 0; i < 3; i++)
        pccl_pool_give(pool, &blocks[i]);
    pccl_pool_give(pool, &small);
    CHECK(idle_bytes(pool) == 56 * KIB);
    pccl_pool_destroy(pool);
}

static void the_largest_copy_comes_on_top_while_it_is_of_use(void)
{
    pccl_pool *pool = pccl_pool_create(BOUND);
    pccl_pool_block copy = taken(pool, 1024 * KIB, PCCL_POOL_COPY);
    pccl_pool_block work = taken(pool, BOUND, PCCL_POOL_WORK);
    void *at = copy.at;
    pccl_pool_give(pool, &copy);
    pccl_pool_give(pool, &work);
    CHECK(idle_bytes(pool) == 1024 * KIB + BOUND);
    for (int step = 0; step < 10; step++) {
        for (int i = 0; i < 900; i++)
            take_and_give(pool, KIB, PCCL_POOL_COPY);
        copy = taken(pool, 1024 * KIB, PCCL_POOL_COPY);
        CHECK(copy.at == at);
        pccl_pool_give(pool, &copy);
    }
    for (int i = 0; i < 5000; i++)
        take_and_give(pool, KIB, PCCL_POOL_COPY);
    CHECK(idle_bytes(pool) <= BOUND + KIB);
    pccl_pool_destroy(pool);
}

static void a_block_larger_than_all_is_let_go(void)
{
    pccl_pool *pool = pccl_pool_create(BOUND);
    take_and_give(pool, 100 * KIB, PCCL_POOL_WORK);
    CHECK(idle_bytes(pool) == 0 && pccl_pool_get_usage(pool).used_bytes_max == 100 * KIB);
    for (int i = 0; i < 2; i++) {
        pccl_pool_block two[2];
        for (int k = 0; k < 2; k++)
            two[k] = taken(pool, 1024 * KIB, PCCL_POOL_COPY);
        for (int k = 0; k < 2; k++)
            pccl_pool_give(pool, &two[k]);
        CHECK(idle_bytes(pool) == 1024 * KIB);
    }
    pccl_pool_destroy(pool);
}

static void what_there_is_no_memory_for_is_told(void)
{
    pccl_pool *pool = pccl_pool_create(BOUND);
    pccl_pool_block block;
    CHECK(pccl_pool_take(pool, SIZE_MAX - 5, PCCL_POOL_WORK, &block) != 0 && block.at == NULL);
    pccl_pool_give(pool, &block);
    CHECK(pccl_pool_get_usage(pool).used_bytes == 0 && idle_bytes(pool) == 0);
    pccl_pool_destroy(pool);
}

int main(void)
{
    RUN(a_block_is_reused_for_what_is_a_little_smaller);
    RUN(what_is_held_is_bounded);
    RUN(the_largest_copy_comes_on_top_while_it_is_of_use);
    RUN(a_block_larger_than_all_is_let_go);
    RUN(what_there_is_no_memory_for_is_told);
    return check_summary();
}
