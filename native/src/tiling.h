/* tiling.h: how an op's elements are divided among ranks and frames, as arithmetic. No I/O, no state.
 *
 * `count` elements are divided into one chunk for each of W ranks, the first count % W of them one element
 * longer; chunks into segments of segment_elements, the last one shorter. A segment is what one frame
 * carries.
 *
 * A tiling is that of one slice of the op: of each chunk's segments it has every slices-th, beginning with number
 * `slice`. All else is as if the slice were a whole: its segments of a chunk are numbered 0, 1, 2 ..., and also
 * through, in the order of their elements: their `index`. An element's chunk, and with it the order in which
 * ranks' shares of it are added, is the same however the op is sliced.
 *
 * Chunks may also be of any lengths, one after the other: `parts` then says where each begins.
 *
 * plans.h says what the chunks mean. A broadcast has a single chunk; those of an exchange may be of any lengths: here W
 * is the number of chunks. */
#ifndef PCCL_TILING_H
#define PCCL_TILING_H

#include "base.h"

enum {
    PCCL_WORLD_MAX = 1 << 20,
    PCCL_WHOLE_CHUNK_BYTES = 512 << 10 /* a chunk of an op that is worth no division */
};

/* Where a chunk begins; that of chunk W is where the last one ends. */
typedef struct {
    uint64_t first; /* element of the op */
    uint64_t index; /* of the chunk's first segment */
} pccl_tiling_part;

typedef struct {
    const pccl_tiling_part *parts; /* W + 1; NULL: as above, and what follows says it all */
    uint64_t count;
    uint32_t world_size;
    uint32_t segment_elements;
    uint32_t slice;
    uint32_t slices;
    uint32_t long_chunks; /* how many chunks are one element longer */
    uint64_t chunk_elements; /* of a short one */
    uint64_t long_segments; /* of the slice, in a long chunk */
    uint64_t short_segments;
    uint64_t long_elements; /* the same, elements */
    uint64_t short_elements;
} pccl_tiling;

typedef struct {
    uint64_t first; /* element of the op */
    uint64_t place; /* of that element among those of the slice */
    uint32_t count; /* elements */
} pccl_range;

void pccl_tiling_init(pccl_tiling *tiling, uint64_t count, uint32_t segment_elements, uint32_t world_size,
    uint32_t slice, uint32_t slices);

/* Divides chunks of these lengths, whose sum is in 64 bits. `parts` has room for world_size + 1 of them, and stays the
 * tiling's. */
void pccl_tiling_init_parts(pccl_tiling *tiling, const uint64_t *lengths, pccl_tiling_part *parts,
    uint32_t segment_elements, uint32_t world_size, uint32_t slice, uint32_t slices);

uint64_t pccl_tiling_elements(const pccl_tiling *tiling); /* of all chunks; not where there are parts */
uint64_t pccl_tiling_segments(const pccl_tiling *tiling);
uint64_t pccl_tiling_chunk_segments(const pccl_tiling *tiling, uint32_t chunk);
uint64_t pccl_tiling_index(const pccl_tiling *tiling, uint32_t chunk, uint64_t segment);
void pccl_tiling_locate(const pccl_tiling *tiling, uint64_t index, uint32_t *chunk, uint32_t *segment);
uint64_t pccl_tiling_chunk_first(const pccl_tiling *tiling, uint32_t chunk); /* element of the op; of any slice */
uint64_t pccl_tiling_chunk_elements(const pccl_tiling *tiling, uint32_t chunk); /* of any slice */
pccl_range pccl_tiling_range(const pccl_tiling *tiling, uint32_t chunk, uint64_t segment);
uint32_t pccl_tiling_longest_segment(const pccl_tiling *tiling); /* elements; of any slice */

#endif
