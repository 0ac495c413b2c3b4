/* Tilings: their arithmetic beside plain counting. */
#include "check.h"
#include "tiling.h"

#include "pccl_native.h"

enum { COUNT_MAX = 70 };

static void segments_tile_the_elements(void)
{
    for (uint32_t world = 2; world <= 7; world++)
        for (uint64_t count = 0; count <= COUNT_MAX; count++)
            for (uint32_t segment_elements = 1; segment_elements <= 9; segment_elements++) {
                pccl_tiling tiling;
                pccl_tiling_init(&tiling, count, segment_elements, world, 0, 1);
                uint64_t next_element = 0;
                uint64_t next_index = 0;
                uint32_t longest = 0;
                for (uint32_t chunk = 0; chunk < world; chunk++) {
                    uint64_t chunk_begin = next_element;
                    for (uint64_t segment = 0; segment < pccl_tiling_chunk_segments(&tiling, chunk); segment++) {
                        uint32_t found_chunk;
                        uint32_t found_segment;
                        pccl_range range = pccl_tiling_range(&tiling, chunk, segment);
                        CHECK(range.first == next_element && range.place == next_element);
                        CHECK(range.count > 0 && range.count <= segment_elements);
                        CHECK(pccl_tiling_index(&tiling, chunk, segment) == next_index);
                        pccl_tiling_locate(&tiling, next_index, &found_chunk, &found_segment);
                        CHECK(found_chunk == chunk && found_segment == segment);
                        next_element += range.count;
                        next_index++;
                        longest = range.count > longest ? range.count : longest;
                    }
                    CHECK(next_element - chunk_begin == count / world + (chunk < count % world));
                }
                CHECK(next_element == count);
                CHECK(next_index == pccl_tiling_segments(&tiling));
                CHECK(count == 0 || longest == pccl_tiling_longest_segment(&tiling));
            }
}

/* Each segment is in one slice, as it is in the whole, and a slice's places have no gaps. */
static void slices_have_each_segment_once(void)
{
    for (uint32_t slices = 2; slices <= 5; slices++)
        for (uint32_t world = 2; world <= 4; world++)
            for (uint64_t count = 0; count <= COUNT_MAX; count++) {
                enum { SEGMENT_ELEMENTS = 3 };
                pccl_tiling whole;
                pccl_tiling tilings[5];
                uint64_t next_places[5] = {0};
                uint64_t segments = 0;
                uint64_t elements = 0;
                pccl_tiling_init(&whole, count, SEGMENT_ELEMENTS, world, 0, 1);
                for (uint32_t slice = 0; slice < slices; slice++) {
                    pccl_tiling_init(&tilings[slice], count, SEGMENT_ELEMENTS, world, slice, slices);
                    segments += pccl_tiling_segments(&tilings[slice]);
                    elements += pccl_tiling_elements(&tilings[slice]);
                }
                CHECK(segments == pccl_tiling_segments(&whole));
                CHECK(elements == count && elements == pccl_tiling_elements(&whole));
                for (uint32_t chunk = 0; chunk < world; chunk++)
                    for (uint64_t i = 0; i < pccl_tiling_chunk_segments(&whole, chunk); i++) {
                        pccl_range range = pccl_tiling_range(&whole, chunk, i);
                        pccl_range part = pccl_tiling_range(&tilings[i % slices], chunk, i / slices);
                        CHECK(part.first == range.first && part.count == range.count);
                        CHECK(part.place == next_places[i % slices]);
                        next_places[i % slices] += part.count;
                    }
                for (uint32_t slice = 0; slice < slices; slice++)
                    CHECK(next_places[slice] == pccl_tiling_elements(&tilings[slice]));
            }
}

static void ops_are_sliced_where_there_is_enough_of_them(void)
{
    CHECK(pccl_slices_default(1 << 24, PCCL_FLOAT32, 1 << 19, 2, 1) == 1);
    CHECK(pccl_slices_default(1 << 24, PCCL_FLOAT32, 1 << 19, 2, 3) == 3);
    CHECK(pccl_slices_default(1 << 24, PCCL_FLOAT32, 1 << 19, 2, 1000) == PCCL_SLICES_MAX);
    CHECK(pccl_slices_default(1 << 10, PCCL_FLOAT32, 1 << 17, 2, 4) == 1);
    CHECK(pccl_slices_default(0, PCCL_FLOAT32, 1 << 17, 2, 4) == 1);
    CHECK(pccl_slices_default(1 << 24, 99, 1 << 19, 2, 4) == 1);
    CHECK(pccl_slices_default(1 << 24, PCCL_FLOAT64, 4, 2, 4) == 1);
    CHECK(pccl_slices_default(1 << 24, PCCL_FLOAT32, 1 << 19, 0, 4) == 1);
}

static void large_counts_do_not_wrap(void)
{
    pccl_tiling tiling;
    uint64_t count = (UINT64_C(1) << 40) + 3;
    pccl_tiling_init(&tiling, count, 65536, 5, 0, 1);
    uint64_t last = pccl_tiling_chunk_segments(&tiling, 4) - 1;
    pccl_range range = pccl_tiling_range(&tiling, 4, last);
    CHECK(range.first + range.count == count);
}

static void default_segments_are_in_bounds(void)
{
    static const uint64_t counts[] = {0, 1, 1000, 1 << 16, 1 << 20, 1 << 24, UINT64_C(1) << 40, UINT64_MAX};
    for (size_t i = 0; i < PCCL_COUNT_OF(counts); i++)
        for (uint32_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++)
            for (uint32_t world = 0; world < 6; world++) {
                uint32_t bytes = pccl_segment_bytes_default(counts[i], dtype, world, 0);
                uint32_t local_bytes = pccl_segment_bytes_default(counts[i], dtype, world, 1);
                CHECK(bytes >= 4096 && bytes % 8 == 0 && local_bytes % 8 == 0);
                CHECK(bytes <= local_bytes && local_bytes <= 1 << 20);
            }
}

int main(void)
{
    RUN(segments_tile_the_elements);
    RUN(slices_have_each_segment_once);
    RUN(ops_are_sliced_where_there_is_enough_of_them);
    RUN(large_counts_do_not_wrap);
    RUN(default_segments_are_in_bounds);
    return check_summary();
}
