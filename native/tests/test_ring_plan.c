/* The plan beside a naive simulation of the ring: tokens that walk from rank to rank. */
#include "check.h"
#include "ring_plan.h"

#include "pccl_native.h"

#include <string.h>

enum { COUNT_MAX = 70 };

static void segments_tile_the_elements(void)
{
    for (uint32_t world = 2; world <= 7; world++)
        for (uint64_t count = 0; count <= COUNT_MAX; count++)
            for (uint32_t segment_elements = 1; segment_elements <= 9; segment_elements++) {
                pccl_ring_plan plan;
                pccl_ring_plan_init(&plan, count, segment_elements, world, 0);
                uint64_t next_element = 0;
                uint64_t next_index = 0;
                uint32_t longest = 0;
                for (uint32_t chunk = 0; chunk < world; chunk++) {
                    uint64_t chunk_begin = next_element;
                    for (uint64_t segment = 0; segment < pccl_ring_chunk_segments(&plan, chunk); segment++) {
                        uint32_t found_chunk;
                        uint32_t found_segment;
                        pccl_ring_range range = pccl_ring_segment_range(&plan, chunk, segment);
                        CHECK(range.first == next_element);
                        CHECK(range.count > 0 && range.count <= segment_elements);
                        CHECK(pccl_ring_index(&plan, chunk, segment) == next_index);
                        pccl_ring_locate(&plan, next_index, &found_chunk, &found_segment);
                        CHECK(found_chunk == chunk && found_segment == segment);
                        next_element += range.count;
                        next_index++;
                        longest = range.count > longest ? range.count : longest;
                    }
                    CHECK(next_element - chunk_begin == count / world + (chunk < count % world));
                }
                CHECK(next_element == count);
                CHECK(next_index == pccl_ring_segments(&plan));
                CHECK(count == 0 || longest == pccl_ring_longest_segment(&plan));
            }
}

static void hops_follow_the_ring(void)
{
    for (uint32_t world = 2; world <= 9; world++)
        for (uint32_t chunk = 0; chunk < world; chunk++) {
            pccl_ring_hops expected[9];
            memset(expected, 0xff, sizeof expected);
            for (uint32_t hop = 0; hop < 2 * (world - 1); hop++) {
                pccl_ring_hops *from = &expected[(chunk + hop) % world];
                pccl_ring_hops *to = &expected[(chunk + hop + 1) % world];
                *(hop < world - 1 ? &from->send_partial : &from->send_final) = hop;
                *(hop < world - 1 ? &to->receive_partial : &to->receive_final) = hop;
            }
            for (uint32_t rank = 0; rank < world; rank++) {
                pccl_ring_plan plan;
                pccl_ring_plan_init(&plan, 100, 10, world, rank);
                pccl_ring_hops hops = pccl_ring_hops_of(&plan, chunk);
                CHECK(memcmp(&hops, &expected[rank], sizeof hops) == 0);
            }
        }
}

static void large_counts_do_not_wrap(void)
{
    pccl_ring_plan plan;
    uint64_t count = (UINT64_C(1) << 40) + 3;
    pccl_ring_plan_init(&plan, count, 65536, 5, 4);
    uint64_t last = pccl_ring_chunk_segments(&plan, 4) - 1;
    pccl_ring_range range = pccl_ring_segment_range(&plan, 4, last);
    CHECK(range.first + range.count == count);
}

static void default_segments_are_in_bounds(void)
{
    static const uint64_t counts[] = {0, 1, 1000, 1 << 16, 1 << 20, 1 << 24, UINT64_C(1) << 40, UINT64_MAX};
    for (size_t i = 0; i < PCCL_COUNT_OF(counts); i++)
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
            for (uint32_t world = 0; world < 6; world++) {
                uint32_t bytes = pccl_segment_bytes_default(counts[i], dtype, world);
                CHECK(bytes >= 4096 && bytes <= 1 << 20 && bytes % 8 == 0);
            }
}

int main(void)
{
    RUN(segments_tile_the_elements);
    RUN(hops_follow_the_ring);
    RUN(large_counts_do_not_wrap);
    RUN(default_segments_are_in_bounds);
    return check_summary();
}
