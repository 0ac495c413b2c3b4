#include "tiling.h"

#include "pccl_native.h"

/* Returns how many of `all` segments the slice has. */
static uint64_t tiling_own(const pccl_tiling *tiling, uint64_t all)
{
    return all <= tiling->slice ? 0 : pccl_div_up_u64(all - tiling->slice, tiling->slices);
}

/* Returns how many elements of a chunk belong to the slice. */
static uint64_t tiling_own_elements(const pccl_tiling *tiling, uint64_t elements)
{
    uint64_t whole = elements / tiling->segment_elements;
    uint64_t rest = whole % tiling->slices == tiling->slice ? elements % tiling->segment_elements : 0;
    return tiling_own(tiling, whole) * tiling->segment_elements + rest;
}

void pccl_tiling_init(pccl_tiling *tiling, uint64_t count, uint32_t segment_elements, uint32_t world_size,
    uint32_t slice, uint32_t slices)
{
    PCCL_ASSERT(world_size >= 1 && world_size <= PCCL_WORLD_MAX && segment_elements > 0 && slice < slices);
    tiling->parts = NULL;
    tiling->count = count;
    tiling->world_size = world_size;
    tiling->segment_elements = segment_elements;
    tiling->slice = slice;
    tiling->slices = slices;
    tiling->long_chunks = (uint32_t)(count % world_size);
    tiling->chunk_elements = count / world_size;
    tiling->short_segments = tiling_own(tiling, pccl_div_up_u64(tiling->chunk_elements, segment_elements));
    tiling->long_segments = tiling_own(tiling, pccl_div_up_u64(tiling->chunk_elements + 1, segment_elements));
    tiling->short_elements = tiling_own_elements(tiling, tiling->chunk_elements);
    tiling->long_elements = tiling_own_elements(tiling, tiling->chunk_elements + 1);
}

void pccl_tiling_init_parts(pccl_tiling *tiling, const uint64_t *lengths, pccl_tiling_part *parts,
    uint32_t segment_elements, uint32_t world_size, uint32_t slice, uint32_t slices)
{
    pccl_tiling_init(tiling, 0, segment_elements, world_size, slice, slices);
    uint64_t first = 0;
    uint64_t index = 0;
    for (uint32_t chunk = 0; chunk < world_size; chunk++) {
        parts[chunk].first = first;
        parts[chunk].index = index;
        first += lengths[chunk];
        index += tiling_own(tiling, pccl_div_up_u64(lengths[chunk], segment_elements));
    }
    parts[world_size].first = tiling->count = first;
    parts[world_size].index = index;
    tiling->parts = parts;
}

/* Returns how many elements the slice has before a chunk. */
static uint64_t tiling_place(const pccl_tiling *tiling, uint32_t chunk)
{
    uint32_t longs = chunk < tiling->long_chunks ? chunk : tiling->long_chunks;
    return longs * tiling->long_elements + (chunk - longs) * tiling->short_elements;
}

uint64_t pccl_tiling_elements(const pccl_tiling *tiling)
{
    PCCL_ASSERT(tiling->parts == NULL);
    return tiling_place(tiling, tiling->world_size);
}

uint64_t pccl_tiling_segments(const pccl_tiling *tiling) { return pccl_tiling_index(tiling, tiling->world_size, 0); }

uint64_t pccl_tiling_chunk_segments(const pccl_tiling *tiling, uint32_t chunk)
{
    if (tiling->parts != NULL)
        return tiling->parts[chunk + 1].index - tiling->parts[chunk].index;
    return chunk < tiling->long_chunks ? tiling->long_segments : tiling->short_segments;
}

uint64_t pccl_tiling_index(const pccl_tiling *tiling, uint32_t chunk, uint64_t segment)
{
    if (tiling->parts != NULL)
        return tiling->parts[chunk].index + segment;
    if (chunk <= tiling->long_chunks)
        return chunk * tiling->long_segments + segment;
    return tiling->long_chunks * tiling->long_segments + (chunk - tiling->long_chunks) * tiling->short_segments +
           segment;
}

/* The chunk is the last one that begins at the index or before: those before it that begin there are empty. */
static void tiling_locate_part(const pccl_tiling *tiling, uint64_t index, uint32_t *chunk, uint32_t *segment)
{
    uint32_t low = 0;
    uint32_t high = tiling->world_size;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (tiling->parts[middle].index <= index)
            low = middle;
        else
            high = middle;
    }
    *chunk = low;
    *segment = (uint32_t)(index - tiling->parts[low].index);
}

void pccl_tiling_locate(const pccl_tiling *tiling, uint64_t index, uint32_t *chunk, uint32_t *segment)
{
    uint64_t in_long = tiling->long_chunks * tiling->long_segments;
    PCCL_ASSERT(index < pccl_tiling_segments(tiling));
    if (tiling->parts != NULL) {
        tiling_locate_part(tiling, index, chunk, segment);
        return;
    }
    if (index < in_long) {
        *chunk = (uint32_t)(index / tiling->long_segments);
        *segment = (uint32_t)(index % tiling->long_segments);
    } else {
        *chunk = tiling->long_chunks + (uint32_t)((index - in_long) / tiling->short_segments);
        *segment = (uint32_t)((index - in_long) % tiling->short_segments);
    }
}

uint64_t pccl_tiling_chunk_first(const pccl_tiling *tiling, uint32_t chunk)
{
    if (tiling->parts != NULL)
        return tiling->parts[chunk].first;
    return chunk * tiling->chunk_elements + pccl_min_u64(chunk, tiling->long_chunks);
}

uint64_t pccl_tiling_chunk_elements(const pccl_tiling *tiling, uint32_t chunk)
{
    if (tiling->parts != NULL)
        return tiling->parts[chunk + 1].first - tiling->parts[chunk].first;
    return tiling->chunk_elements + (chunk < tiling->long_chunks);
}

pccl_range pccl_tiling_range(const pccl_tiling *tiling, uint32_t chunk, uint64_t segment)
{
    uint64_t chunk_first = pccl_tiling_chunk_first(tiling, chunk);
    uint64_t offset = (segment * tiling->slices + tiling->slice) * tiling->segment_elements;
    PCCL_ASSERT(chunk < tiling->world_size && segment < pccl_tiling_chunk_segments(tiling, chunk));
    pccl_range range;
    range.first = chunk_first + offset;
    range.place = tiling_place(tiling, chunk) + segment * tiling->segment_elements;
    range.count = (uint32_t)pccl_min_u64(tiling->segment_elements, pccl_tiling_chunk_elements(tiling, chunk) - offset);
    return range;
}

uint32_t pccl_tiling_longest_segment(const pccl_tiling *tiling)
{
    uint64_t longest_chunk = tiling->chunk_elements + (tiling->long_chunks > 0);
    for (uint32_t chunk = 0; tiling->parts != NULL && chunk < tiling->world_size; chunk++)
        longest_chunk = pccl_max_u64(longest_chunk, pccl_tiling_chunk_elements(tiling, chunk));
    return (uint32_t)pccl_min_u64(tiling->segment_elements, longest_chunk);
}

/* Measured on loopback, 64 MiB float32 between two ranks: segments of 64 KiB cost a quarter more than those of 256 KiB,
 * these a tenth more than those of 512 KiB, and larger ones gain nothing. Between hosts a chunk needs several segments
 * for each connection, of which a lossy path has up to 64, and an op ends with the last segment of the slowest: with
 * CUBIC at 50 ms, 500 Mbit/s and 0.1 % loss, segments of 512 KiB cost 32 MiB twice the time of those of 64 KiB. Chunks
 * of up to PCCL_WHOLE_CHUNK_BYTES are one segment: such ops go direct, and their shares eagerly, without waiting to be
 * asked for. */
uint32_t pccl_segment_bytes_default(uint64_t count, uint32_t dtype, uint32_t world_size, uint32_t is_local)
{
    enum { SEGMENT_BYTES_MIN = 64 << 10, LOCAL_SEGMENT_BYTES_MIN = 128 << 10, SEGMENT_BYTES_MAX = 512 << 10 };
    enum { SEGMENTS_PER_CHUNK = 256, SEGMENTS_PER_LOCAL_CHUNK = 8 };
    uint64_t segments = is_local ? SEGMENTS_PER_LOCAL_CHUNK : SEGMENTS_PER_CHUNK;
    uint32_t element_bytes = pccl_dtype_bytes(dtype);
    if (element_bytes == 0 || world_size == 0)
        return SEGMENT_BYTES_MIN;
    uint64_t chunk_elements = pccl_div_up_u64(count, world_size);
    uint64_t chunk_bytes = UINT64_MAX;
    if (chunk_elements <= UINT64_MAX / element_bytes)
        chunk_bytes = chunk_elements * element_bytes;
    if (chunk_bytes <= PCCL_WHOLE_CHUNK_BYTES)
        return PCCL_WHOLE_CHUNK_BYTES;
    uint64_t bytes = is_local ? LOCAL_SEGMENT_BYTES_MIN : SEGMENT_BYTES_MIN;
    while (bytes < SEGMENT_BYTES_MAX && bytes * segments < chunk_bytes)
        bytes *= 2;
    return (uint32_t)bytes;
}

/* A slice costs each rank a submit and an announcement; four segments of each chunk are worth that, and keep
 * a slice's pipeline full. */
uint32_t pccl_slices_default(
    uint64_t count, uint32_t dtype, uint32_t segment_bytes, uint32_t world_size, uint32_t engines)
{
    enum { SEGMENTS_PER_SLICE = 4 };
    uint32_t element_bytes = pccl_dtype_bytes(dtype);
    if (element_bytes == 0 || segment_bytes < element_bytes || world_size < 2)
        return 1;
    uint64_t chunk_segments = count / world_size / (segment_bytes / element_bytes);
    uint64_t slices = pccl_min_u64(pccl_min_u64(engines, PCCL_SLICES_MAX), chunk_segments / SEGMENTS_PER_SLICE);
    return (uint32_t)pccl_max_u64(1, slices);
}
