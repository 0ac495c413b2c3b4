/* The collectives besides all-reduce on whole engines in one process, beside what their names say: a reduce-scatter
 * beside the model of the all-reduce, of which it is a part. */
#include "trial.h"

#include "proxy.h"

#include <errno.h>

enum { STALL_MS = 60000, RANDOM_RUNS = RUNS(60) };

/* One op on all ranks. Buffers of ranks that have none are empty. */
typedef struct {
    uint64_t number;
    pccl_op_shape shape;
    int in_place;
    int is_uneven; /* an all-to-all of parts of these elements, from the first rank to the second */
    uint64_t counts[WORLD_RANKS_MAX][WORLD_RANKS_MAX];
    size_t element_bytes;
    size_t send_bytes[WORLD_RANKS_MAX];
    size_t recv_bytes[WORLD_RANKS_MAX];
    uint8_t *inputs[WORLD_RANKS_MAX]; /* of send, and where that is a part of recv or the same, of the whole */
    uint8_t *send[WORLD_RANKS_MAX];
    uint8_t *recv[WORLD_RANKS_MAX];
    uint8_t *own_send[WORLD_RANKS_MAX]; /* to be freed: NULL where it is a part of recv, and so on */
    uint8_t *own_recv[WORLD_RANKS_MAX];
} job;

/* All elements come from the root. */
static int is_from_root(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_BROADCAST || shape->collective == PCCL_SEND;
}

static int has_root(const pccl_op_shape *shape)
{
    return is_from_root(shape) || shape->collective == PCCL_GATHER || shape->collective == PCCL_SCATTER ||
           shape->collective == PCCL_REDUCE;
}

static int is_exchange(uint8_t collective)
{
    return collective == PCCL_ALL_TO_ALL || collective == PCCL_GATHER || collective == PCCL_SCATTER;
}

/* `count` elements of each rank, or for each. */
static pccl_op_shape shape_of(
    uint8_t collective, uint64_t count, uint32_t dtype, uint32_t segment_bytes, uint32_t world)
{
    int is_of_parts = collective == PCCL_ALL_GATHER || is_exchange(collective);
    pccl_op_shape shape = plain_shape(is_of_parts ? count * world : count, dtype, 0, segment_bytes, world);
    shape.collective = collective;
    return shape;
}

static size_t chunk_elements(const pccl_op_shape *shape, uint32_t chunk)
{
    return (size_t)(shape->count / shape->world_size) + (chunk < shape->count % shape->world_size);
}

/* Elements that one rank gives another in an all-to-all. */
static uint64_t part_elements(const job *j, uint32_t from, uint32_t to)
{
    return j->is_uneven ? j->counts[from][to] : j->shape.count / j->shape.world_size;
}

static void job_measure(job *j, uint32_t rank)
{
    const pccl_op_shape *shape = &j->shape;
    size_t bytes = (size_t)shape->count * j->element_bytes;
    int is_root = rank == shape->root;
    size_t *send = &j->send_bytes[rank];
    size_t *recv = &j->recv_bytes[rank];
    *send = *recv = bytes;
    switch (shape->collective) {
    case PCCL_ALL_GATHER: *send = bytes / shape->world_size; break;
    case PCCL_REDUCE_SCATTER: *recv = chunk_elements(shape, rank) * j->element_bytes; break;
    case PCCL_BROADCAST:
    case PCCL_SEND: *(is_root ? recv : send) = 0; break;
    case PCCL_REDUCE: *recv = is_root ? bytes : 0; break;
    case PCCL_GATHER:
        *send = bytes / shape->world_size;
        *recv = is_root ? bytes : 0;
        break;
    case PCCL_SCATTER:
        *send = is_root ? bytes : 0;
        *recv = bytes / shape->world_size;
        break;
    case PCCL_ALL_TO_ALL:
        *send = *recv = 0;
        for (uint32_t other = 0; other < shape->world_size; other++) {
            *send += (size_t)part_elements(j, rank, other) * j->element_bytes;
            *recv += (size_t)part_elements(j, other, rank) * j->element_bytes;
        }
        break;
    default: break;
    }
}

/* Makes one buffer of a rank the other, or a part of it, where the collective may work in place. */
static void job_put_in_place(job *j, uint32_t rank)
{
    const pccl_op_shape *shape = &j->shape;
    int is_root = rank == shape->root;
    int is_row = shape->collective == PCCL_ALL_GATHER || (shape->collective == PCCL_GATHER && is_root);
    if (is_row || (is_from_root(shape) && !is_root) || (shape->collective == PCCL_REDUCE && is_root)) {
        free(j->own_send[rank]);
        j->own_send[rank] = NULL;
        j->send[rank] = j->recv[rank] + (is_row ? rank * j->send_bytes[rank] : 0);
    } else if (shape->collective == PCCL_SCATTER && is_root) {
        free(j->own_recv[rank]);
        j->own_recv[rank] = NULL;
        j->recv[rank] = j->send[rank] + rank * j->recv_bytes[rank];
    }
}

static void job_open_buffers(job *j)
{
    for (uint32_t rank = 0; rank < j->shape.world_size; rank++) {
        job_measure(j, rank);
        j->own_recv[rank] = j->recv[rank] = allocate(j->recv_bytes[rank]);
        memset(j->recv[rank], 0xee, j->recv_bytes[rank]);
        j->own_send[rank] = j->send[rank] = allocate(j->send_bytes[rank]);
        if (j->in_place)
            job_put_in_place(j, rank);
        size_t bytes = j->send_bytes[rank] > j->recv_bytes[rank] ? j->send_bytes[rank] : j->recv_bytes[rank];
        j->inputs[rank] = allocate(bytes);
        fill_random(j->inputs[rank], j->shape.dtype, bytes / j->element_bytes);
        memcpy(j->send[rank], j->inputs[rank], j->send_bytes[rank]);
        if (j->send[rank] == j->recv[rank] && is_from_root(&j->shape))
            memcpy(j->recv[rank], j->inputs[rank], j->recv_bytes[rank]);
    }
}

static void job_init(job *j, const pccl_op_shape *shape, int in_place)
{
    memset(j, 0, sizeof *j);
    j->number = next_number++;
    j->shape = *shape;
    j->in_place = in_place;
    j->element_bytes = pccl_dtype_bytes(shape->dtype);
}

/* Parts of any lengths, many of them empty. */
static void job_make_uneven(job *j)
{
    uint64_t most = 2 * j->shape.count / j->shape.world_size + 1;
    j->is_uneven = 1;
    for (uint32_t from = 0; from < j->shape.world_size; from++)
        for (uint32_t to = 0; to < j->shape.world_size; to++)
            j->counts[from][to] = random_below(3) == 0 ? 0 : random_below((uint32_t)most);
}

static void job_open(job *j, const pccl_op_shape *shape, int in_place)
{
    job_init(j, shape, in_place);
    if (shape->collective == PCCL_ALL_TO_ALL && in_place)
        job_make_uneven(j);
    job_open_buffers(j);
}

static void job_close(job *j)
{
    for (uint32_t rank = 0; rank < j->shape.world_size; rank++) {
        free(j->own_send[rank]);
        free(j->own_recv[rank]);
        free(j->inputs[rank]);
    }
}

/* What goes with a request, until it is submitted. */
typedef struct {
    uint64_t recv_counts[WORLD_RANKS_MAX];
    const void *send_parts[WORLD_RANKS_MAX];
    void *recv_parts[WORLD_RANKS_MAX];
} job_lists;

/* Names the parts one by one, though they lie one after the other: those in other places are the same to the engine. */
static void job_name_parts(const job *j, uint32_t rank, pccl_op_request *request, job_lists *lists)
{
    const uint8_t *at = j->send[rank];
    for (uint32_t to = 0; to < j->shape.world_size; to++) {
        size_t bytes = (size_t)part_elements(j, rank, to) * j->element_bytes;
        lists->send_parts[to] = bytes > 0 ? at : NULL;
        at += bytes;
    }
    request->send_parts = lists->send_parts;
}

static void job_name_recv_parts(const job *j, uint32_t rank, pccl_op_request *request, job_lists *lists)
{
    uint8_t *at = j->recv[rank];
    for (uint32_t from = 0; from < j->shape.world_size; from++) {
        size_t bytes = (size_t)part_elements(j, from, rank) * j->element_bytes;
        lists->recv_parts[from] = bytes > 0 ? at : NULL;
        at += bytes;
    }
    request->recv_parts = lists->recv_parts;
}

static pccl_op_request job_request(const job *j, const world *w, uint32_t rank, job_lists *lists)
{
    uint64_t *recv_counts = lists->recv_counts;
    pccl_op_request request = request_for(w, rank, j->number, &j->shape);
    request.send = j->send[rank];
    request.recv = j->recv[rank];
    if (j->is_uneven) {
        size_t larger_bytes = j->send_bytes[rank] > j->recv_bytes[rank] ? j->send_bytes[rank] : j->recv_bytes[rank];
        for (uint32_t from = 0; from < w->size; from++)
            recv_counts[from] = j->counts[from][rank];
        request.shape.count = larger_bytes / j->element_bytes;
        request.send_counts = j->counts[rank];
        request.recv_counts = recv_counts;
    }
    int has_parts =
        j->shape.collective == PCCL_ALL_TO_ALL || (j->shape.collective == PCCL_SCATTER && rank == j->shape.root);
    if (has_parts && j->shape.world_size > 1 && j->send_bytes[rank] > 0 && random_below(2))
        job_name_parts(j, rank, &request, lists);
    int has_recv_parts =
        j->shape.collective == PCCL_ALL_TO_ALL || (j->shape.collective == PCCL_GATHER && rank == j->shape.root);
    if (has_recv_parts && j->shape.world_size > 1 && j->recv_bytes[rank] > 0 && random_below(2))
        job_name_recv_parts(j, rank, &request, lists);
    return request;
}

static void job_submit(const job *j, world *w, uint32_t rank)
{
    job_lists lists;
    pccl_op_request request = job_request(j, w, rank, &lists);
    CHECK(pccl_engine_submit(w->nodes[rank].engine, &request) == 0);
}

static void job_submit_all(const job *j, world *w)
{
    uint32_t first = random_below(w->size);
    for (uint32_t i = 0; i < w->size; i++)
        job_submit(j, w, (first + i) % w->size);
}

static void job_await_done(const job *j, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        node_wait_done(&w->nodes[rank], j->number);
}

static pccl_event job_end(const job *j, world *w, uint32_t rank, int verdict)
{
    CHECK(pccl_engine_end(w->nodes[rank].engine, j->number, verdict) == 0);
    return node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, j->number);
}

static void job_check_inputs_kept(const job *j, uint32_t rank)
{
    CHECK(memcmp(j->send[rank], j->inputs[rank], j->send_bytes[rank]) == 0);
    if (j->in_place && is_from_root(&j->shape) && rank != j->shape.root)
        CHECK(memcmp(j->recv[rank], j->inputs[rank], j->recv_bytes[rank]) == 0);
}

/* A part of what an all-reduce would give. */
static int is_of_the_reduced(const job *j, uint32_t rank)
{
    trial t;
    memset(&t, 0, sizeof t);
    t.shape = j->shape;
    t.bytes = (size_t)j->shape.count * j->element_bytes;
    memcpy(t.inputs, j->inputs, sizeof t.inputs);
    uint8_t *expected = trial_expected(&t);
    size_t first = 0;
    for (uint32_t chunk = 0; chunk < rank && j->shape.collective == PCCL_REDUCE_SCATTER; chunk++)
        first += chunk_elements(&j->shape, chunk) * j->element_bytes;
    int is_right = memcmp(j->recv[rank], expected + first, j->recv_bytes[rank]) == 0;
    free(expected);
    return is_right;
}

/* Where the elements begin that one rank has for another. */
static size_t part_at(const job *j, uint32_t from, uint32_t to)
{
    size_t at = 0;
    if (j->shape.collective == PCCL_SCATTER)
        return to * j->recv_bytes[to];
    for (uint32_t other = 0; j->shape.collective == PCCL_ALL_TO_ALL && other < to; other++)
        at += (size_t)part_elements(j, from, other) * j->element_bytes;
    return at;
}

/* Every part is there, one after the other. */
static int is_exchanged(const job *j, uint32_t rank)
{
    const pccl_op_shape *shape = &j->shape;
    int is_right = 1;
    size_t at = 0;
    for (uint32_t from = 0; from < shape->world_size && at < j->recv_bytes[rank]; from++) {
        if (shape->collective == PCCL_SCATTER && from != shape->root)
            continue;
        size_t bytes = (size_t)part_elements(j, from, rank) * j->element_bytes;
        is_right &= memcmp(j->recv[rank] + at, j->inputs[from] + part_at(j, from, rank), bytes) == 0;
        at += bytes;
    }
    return is_right && at == j->recv_bytes[rank];
}

static void job_check_result(const job *j, uint32_t rank)
{
    const pccl_op_shape *shape = &j->shape;
    int is_right = 1;
    if (shape->collective == PCCL_REDUCE_SCATTER || (shape->collective == PCCL_REDUCE && rank == shape->root))
        is_right = is_of_the_reduced(j, rank);
    if (is_exchange(shape->collective))
        is_right = is_exchanged(j, rank);
    if (shape->collective == PCCL_ALL_GATHER)
        for (uint32_t from = 0; from < shape->world_size; from++)
            is_right &= memcmp(j->recv[rank] + from * j->send_bytes[from], j->inputs[from], j->send_bytes[from]) == 0;
    else if (is_from_root(shape) && rank != shape->root)
        is_right = memcmp(j->recv[rank], j->inputs[shape->root], j->recv_bytes[rank]) == 0;
    CHECK_MSG(is_right, "collective %u, algorithm %u, rank %u of %u, root %u, %llu elements of type %u, segments of %u",
        shape->collective, shape->algorithm, rank, shape->world_size, shape->root, (unsigned long long)shape->count,
        shape->dtype, shape->segment_bytes);
    int is_overwritten = (is_from_root(shape) && rank != shape->root) ||
                         (shape->collective == PCCL_REDUCE && j->send[rank] == j->recv[rank]);
    if (!is_overwritten)
        CHECK(memcmp(j->send[rank], j->inputs[rank], j->send_bytes[rank]) == 0);
}

static void job_run(world *w, const pccl_op_shape *shape, int in_place)
{
    job j;
    job_open(&j, shape, in_place);
    job_submit_all(&j, w);
    job_await_done(&j, w);
    for (uint32_t rank = 0; rank < w->size; rank++) {
        job_end(&j, w, rank, PCCL_COMMIT);
        job_check_result(&j, rank);
    }
    job_close(&j);
}

/* Any op of so many elements a rank, at most. */
static pccl_op_shape random_shape(uint32_t world, uint32_t count_max)
{
    static const uint8_t kinds[] = {PCCL_ALL_GATHER, PCCL_BROADCAST, PCCL_REDUCE_SCATTER, PCCL_ALL_TO_ALL, PCCL_GATHER,
        PCCL_SCATTER, PCCL_REDUCE, PCCL_SEND};
    uint8_t collective = kinds[random_below(world == 2 ? 8 : 7)];
    uint32_t dtype = random_below(PCCL_DTYPE_COUNT);
    uint32_t count = random_below(count_max + 1);
    uint32_t segment_bytes = pccl_dtype_bytes(dtype) * (1 + random_below(count / 3 + 2));
    pccl_op_shape shape = shape_of(collective, count, dtype, segment_bytes, world);
    shape.algorithm = (uint8_t)random_below(PCCL_ALGORITHM_COUNT);
    shape.root = has_root(&shape) ? random_below(world) : 0;
    if (collective == PCCL_REDUCE_SCATTER || collective == PCCL_REDUCE)
        shape.reduce_op = (uint8_t)random_below(PCCL_REDUCE_OP_COUNT);
    return shape;
}

static void all_worlds_counts_and_segments(void)
{
    for (uint32_t size = 1; size <= 6; size++)
        for (unsigned connections = 1; connections <= 3; connections++) {
            world w;
            world_open(&w, size, connections, (int)(size % 2), size == 4);
            for (int run = 0; run < RANDOM_RUNS; run++) {
                pccl_op_shape shape = random_shape(size, run % 8 ? 300 : 30000);
                job_run(&w, &shape, (int)random_below(2));
            }
            world_close(&w);
        }
}

/* With room for one segment of a chunk at a time, and for some: finals open the window, but are no payload. */
static void little_scratch_is_enough(void)
{
    for (uint32_t scratch_bytes = 0; scratch_bytes <= 2048; scratch_bytes += 1024) {
        tested_op_scratch_bytes_max = scratch_bytes;
        for (uint32_t size = 2; size <= 6; size++) {
            world w;
            world_open(&w, size, 2, 1, 0);
            for (int run = 0; run < RANDOM_RUNS; run++) {
                pccl_op_shape shape = random_shape(size, 2000);
                shape.segment_bytes = pccl_dtype_bytes(shape.dtype) * (1 + random_below(20));
                job_run(&w, &shape, 0);
            }
            pccl_engine_stats stats;
            pccl_engine_get_stats(w.nodes[0].engine, &stats);
            CHECK(stats.scratch_bytes == 0);
            uint64_t chunk_bytes = 2000 / size * 8 + 8; /* which a rank of a reduce finishes */
            CHECK(stats.scratch_bytes_max <= scratch_bytes + 2 * size * (20 * 8 + 16) + chunk_bytes);
            world_close(&w);
        }
    }
    tested_op_scratch_bytes_max = UINT32_MAX;
}

/* Ranks that launch the same ops in different orders, of all kinds, in flight together. */
static void many_at_once_in_any_order(void)
{
    enum { JOBS = 40 };
    static job jobs[JOBS];
    for (uint32_t size = 2; size <= 5; size++) {
        world w;
        world_open(&w, size, 2, 1, 0);
        for (int i = 0; i < JOBS; i++) {
            pccl_op_shape shape = random_shape(size, i % 5 ? 200 : 20000);
            job_open(&jobs[i], &shape, (int)random_below(2));
        }
        for (uint32_t rank = 0; rank < size; rank++)
            for (int i = 0; i < JOBS; i++)
                job_submit(&jobs[(i * 7 + (int)rank * 11) % JOBS], &w, rank);
        for (int i = 0; i < JOBS; i++) {
            job_await_done(&jobs[i], &w);
            for (uint32_t rank = 0; rank < size; rank++) {
                job_end(&jobs[i], &w, rank, PCCL_COMMIT);
                job_check_result(&jobs[i], rank);
            }
            job_close(&jobs[i]);
        }
        world_close(&w);
    }
}

/* Wherever an abort finds an op, its inputs are as they were, and what was to be overwritten in place too. */
static void an_abort_anywhere_leaves_the_inputs(void)
{
    for (int run = 0; run < RANDOM_RUNS; run++) {
        world w;
        job j;
        uint32_t size = 2 + random_below(3);
        world_open(&w, size, 1 + random_below(2), 1, 0);
        pccl_op_shape shape = random_shape(size, 60000);
        job_open(&j, &shape, run % 2);
        uint32_t silent = random_below(3) == 0 ? random_below(size) : size;
        for (uint32_t rank = 0; rank < size; rank++)
            if (rank != silent)
                job_submit(&j, &w, rank);
        if (silent == size && random_below(2))
            job_await_done(&j, &w);
        for (uint32_t rank = 0; rank < size; rank++) {
            if (rank == silent)
                continue;
            job_end(&j, &w, rank, PCCL_ABORT);
            job_check_inputs_kept(&j, rank);
        }
        job_close(&j);
        world_close(&w);
    }
}

/* All connections of every link but one break, at any byte. */
static void lost_connections_are_healed(void)
{
    for (int run = 0; run < RUNS(15); run++) {
        enum { JOBS = 3 };
        proxied p;
        job jobs[JOBS];
        uint32_t size = 2 + random_below(3);
        unsigned connections = 2;
        proxied_open(&p, size, connections, (int)random_below(2), STALL_MS);
        proxied_doom_spares(&p, connections, 60000);
        for (int i = 0; i < JOBS; i++) {
            pccl_op_shape shape = random_shape(size, 40000);
            job_open(&jobs[i], &shape, (int)random_below(2));
        }
        proxied_start(&p);
        for (int i = 0; i < JOBS; i++)
            job_submit_all(&jobs[i], &p.w);
        for (int i = 0; i < JOBS; i++) {
            job_await_done(&jobs[i], &p.w);
            for (uint32_t rank = 0; rank < size; rank++) {
                job_end(&jobs[i], &p.w, rank, PCCL_COMMIT);
                job_check_result(&jobs[i], rank);
            }
            job_close(&jobs[i]);
        }
        proxied_close(&p);
    }
}

/* Nobody is done with an op that somebody has not come to, where there are links to all. */
static void done_needs_everybody(void)
{
    for (uint8_t collective = 0; collective < PCCL_COLLECTIVE_COUNT; collective++)
        for (uint8_t algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++)
            for (uint32_t count = 0; count < 40; count += 13)
                for (uint32_t size = 2; size <= 4; size++) {
                    world w;
                    job j;
                    pccl_op_shape shape =
                        shape_of(collective, collective == PCCL_BARRIER ? 0 : count, PCCL_UINT8, 4, size);
                    if (collective == PCCL_SEND && size > 2)
                        continue;
                    world_open(&w, size, 1, 1, 0);
                    shape.algorithm = algorithm;
                    shape.root = has_root(&shape) ? random_below(size) : 0;
                    job_open(&j, &shape, 0);
                    for (uint32_t rank = 0; rank + 1 < size; rank++)
                        job_submit(&j, &w, rank);
                    pccl_event event;
                    for (uint32_t rank = 0; rank + 1 < size; rank++)
                        CHECK_MSG(!node_wait_for(&w.nodes[rank], PCCL_EVENT_OP_DONE, j.number, &event, 3),
                            "rank %u of %u is done with %u elements of collective %u, algorithm %u", rank, size, count,
                            collective, algorithm);
                    job_submit(&j, &w, size - 1);
                    job_await_done(&j, &w);
                    for (uint32_t rank = 0; rank < size; rank++) {
                        job_end(&j, &w, rank, PCCL_COMMIT);
                        job_check_result(&j, rank);
                    }
                    job_close(&j);
                    world_close(&w);
                }
}

/* What callers have who know of no links but those of the ring. */
static void a_ring_needs_no_other_links(void)
{
    world w;
    world_open(&w, 4, 1, 1, 0);
    for (int run = 0; run < RANDOM_RUNS; run++) {
        job j;
        pccl_op_shape shape = random_shape(4, 3000);
        shape.algorithm = PCCL_RING;
        job_open(&j, &shape, run % 2);
        for (uint32_t rank = 0; rank < 4; rank++) {
            job_lists lists;
            pccl_op_request request = job_request(&j, &w, rank, &lists);
            request.rank_links = NULL;
            request.awaits_completion = 0;
            CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
        }
        for (uint32_t rank = 0; rank < 4; rank++)
            node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, j.number);
        for (uint32_t rank = 0; rank < 4; rank++) {
            job_end(&j, &w, rank, PCCL_COMMIT);
            job_check_result(&j, rank);
        }
        job_close(&j);
    }
    world_close(&w);
}

static void done_tells_payload_bytes(void)
{
    static const struct {
        uint8_t collective, algorithm;
        uint64_t tx[4], rx[4];
    } cases[] = {
        {PCCL_ALL_GATHER, PCCL_DIRECT, {2400, 2400, 2400, 2400}, {2400, 2400, 2400, 2400}},
        {PCCL_ALL_GATHER, PCCL_RING, {2400, 2400, 2400, 2400}, {2400, 2400, 2400, 2400}},
        {PCCL_REDUCE_SCATTER, PCCL_DIRECT, {600, 600, 600, 600}, {600, 600, 600, 600}},
        {PCCL_REDUCE_SCATTER, PCCL_RING, {600, 600, 600, 600}, {600, 600, 600, 600}},
        {PCCL_BROADCAST, PCCL_DIRECT, {0, 2400, 0, 0}, {800, 0, 800, 800}},
        {PCCL_BROADCAST, PCCL_RING, {0, 800, 800, 800}, {800, 0, 800, 800}},
        {PCCL_ALL_TO_ALL, PCCL_DIRECT, {2400, 2400, 2400, 2400}, {2400, 2400, 2400, 2400}},
        {PCCL_GATHER, PCCL_DIRECT, {800, 0, 800, 800}, {0, 2400, 0, 0}},
        {PCCL_SCATTER, PCCL_DIRECT, {0, 2400, 0, 0}, {800, 0, 800, 800}},
        {PCCL_ALL_TO_ALL, PCCL_RING, {2400, 2400, 2400, 2400}, {4800, 4800, 4800, 4800}},
        {PCCL_GATHER, PCCL_RING, {800, 0, 800, 800}, {1600, 2400, 0, 800}},
        {PCCL_SCATTER, PCCL_RING, {0, 2400, 0, 0}, {800, 0, 2400, 1600}},
        {PCCL_REDUCE, PCCL_DIRECT, {800, 600, 800, 800}, {600, 1200, 600, 600}},
        {PCCL_REDUCE, PCCL_RING, {1200, 600, 800, 1000}, {1000, 1200, 600, 800}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        job j;
        world_open(&w, 4, 1, 1, 0);
        pccl_op_shape shape = shape_of(cases[i].collective, 100, PCCL_FLOAT64, 64, 4);
        shape.algorithm = cases[i].algorithm;
        shape.root = has_root(&shape) ? 1 : 0;
        job_open(&j, &shape, shape.collective != PCCL_ALL_TO_ALL);
        job_submit_all(&j, &w);
        for (uint32_t rank = 0; rank < 4; rank++)
            CHECK(node_wait(&w.nodes[rank], PCCL_EVENT_OP_DONE, j.number).tx_bytes == cases[i].tx[rank]);
        for (uint32_t rank = 0; rank < 4; rank++)
            CHECK(job_end(&j, &w, rank, PCCL_COMMIT).rx_bytes == cases[i].rx[rank]);
        job_close(&j);
        world_close(&w);
    }
}

/* Rank 0 calls one thing, all others another: somebody finds out, and is told both. */
static void check_mismatch(const pccl_op_shape *mine, const pccl_op_shape *theirs)
{
    static float buffers[4][2][4000];
    world w;
    uint32_t size = mine->world_size;
    world_open(&w, size, 1, 1, 0);
    int found = 0;
    for (uint32_t rank = 0; rank < size; rank++) {
        pccl_op_request request = request_for(&w, rank, 1, rank == 0 ? mine : theirs);
        request.send = buffers[rank][0];
        request.recv = buffers[rank][1];
        CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
    }
    int64_t deadline_ms = now_ms() + WAIT_MS;
    for (uint32_t rank = 0; !found && now_ms() < deadline_ms; rank = (rank + 1) % size) {
        pccl_event event;
        found = node_wait_for(&w.nodes[rank], PCCL_EVENT_OP_MISMATCH, 1, &event, 5);
        if (found)
            CHECK(memcmp(&event.mine, &event.theirs, sizeof event.mine) != 0);
    }
    CHECK_MSG(found, "collectives %u and %u of %u ranks, roots %u and %u, algorithms %u and %u", mine->collective,
        theirs->collective, size, mine->root, theirs->root, mine->algorithm, theirs->algorithm);
    world_close(&w);
}

static void differing_calls_are_told(void)
{
    static const uint32_t counts[] = {0, 3, 400};
    for (uint32_t size = 2; size <= 4; size++)
        for (uint8_t a = 0; a < PCCL_COLLECTIVE_COUNT; a++)
            for (uint8_t b = 0; b < PCCL_COLLECTIVE_COUNT; b++)
                for (uint8_t algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++)
                    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                        if (size > 2 && (a == PCCL_SEND || b == PCCL_SEND))
                            continue;
                        pccl_op_shape mine = shape_of(a, a == PCCL_BARRIER ? 0 : counts[i], PCCL_FLOAT32, 64, size);
                        pccl_op_shape theirs = shape_of(b, b == PCCL_BARRIER ? 0 : counts[i], PCCL_FLOAT32, 64, size);
                        mine.algorithm = theirs.algorithm = algorithm;
                        if (a != b)
                            check_mismatch(&mine, &theirs);
                        if (a == b) {
                            pccl_op_shape other = theirs;
                            other.dimensions = 1;
                            check_mismatch(&mine, &other);
                        }
                        if (a == b && has_root(&mine))
                            for (uint32_t root = 1; root < size; root++) {
                                theirs.root = root;
                                check_mismatch(&mine, &theirs);
                                check_mismatch(&theirs, &mine);
                            }
                    }
}

/* A rank gives another a different number of elements than that one takes: somebody finds out, and is told both. */
static void parts_that_differ_are_told(void)
{
    for (uint32_t size = 2; size <= 4; size++)
        for (int run = 0; run < RANDOM_RUNS / 4; run++) {
            world w;
            job j;
            world_open(&w, size, 1, 1, 0);
            pccl_op_shape shape = shape_of(PCCL_ALL_TO_ALL, random_below(2) ? 5 : 500, PCCL_FLOAT32, 64, size);
            shape.algorithm = PCCL_DIRECT;
            job_open(&j, &shape, 1);
            uint32_t giver = random_below(size);
            uint32_t taker = (giver + 1 + random_below(size - 1)) % size;
            for (uint32_t rank = 0; rank < size; rank++) {
                job odd = j; /* its buffers are large enough: the sizes only shrink, or stay */
                if (rank == taker && odd.counts[giver][taker] > 0) {
                    odd.counts[giver][taker]--;
                    odd.recv_bytes[rank] -= odd.element_bytes;
                }
                job_submit(&odd, &w, rank);
            }
            if (j.counts[giver][taker] == 0) {
                job_await_done(&j, &w);
            } else {
                pccl_event at_taker = node_wait(&w.nodes[taker], PCCL_EVENT_OP_MISMATCH, j.number);
                pccl_event at_giver = node_wait(&w.nodes[giver], PCCL_EVENT_OP_MISMATCH, j.number);
                CHECK(at_taker.theirs.count == j.counts[giver][taker]);
                CHECK(at_taker.mine.count == j.counts[giver][taker] - 1);
                CHECK(at_giver.mine.root == j.counts[giver][taker]);
                CHECK(at_giver.theirs.root == j.counts[giver][taker] - 1);
            }
            for (uint32_t rank = 0; rank < size; rank++) {
                job_end(&j, &w, rank, PCCL_ABORT);
                job_check_inputs_kept(&j, rank);
            }
            job_close(&j);
            world_close(&w);
        }
}

static int submit_status(const pccl_op_request *request)
{
    node n;
    node_open(&n, 0);
    int status = pccl_engine_submit(n.engine, request);
    node_close(&n);
    return status;
}

static void invalid_requests_are_refused(void)
{
    static float buffer[400];
    world w;
    world_init(&w, 2);
    pccl_op_shape shape = shape_of(PCCL_ALL_GATHER, 100, PCCL_FLOAT32, 64, 2);
    pccl_op_request gather = request_for(&w, 1, 1, &shape);
    gather.send = buffer + 200;
    gather.recv = buffer;
    shape = shape_of(PCCL_BROADCAST, 100, PCCL_FLOAT32, 64, 2);
    pccl_op_request cast = request_for(&w, 1, 1, &shape);
    cast.send = cast.recv = buffer;
    CHECK(submit_status(&gather) == 0 && submit_status(&cast) == 0);
    pccl_op_request changed;
#define GIVES(status, good, change) \
    do { \
        changed = good; \
        change; \
        CHECK(submit_status(&changed) == (status)); \
    } while (0)
    GIVES(PCCL_E_INVALID, gather, changed.shape.count = 101);
    GIVES(PCCL_E_INVALID, gather, changed.shape.reduce_op = PCCL_AVG);
    GIVES(PCCL_E_INVALID, gather, changed.shape.root = 1);
    GIVES(PCCL_E_INVALID, gather, changed.send = NULL);
    GIVES(PCCL_E_INVALID, gather, changed.send = buffer);
    GIVES(PCCL_E_INVALID, gather, changed.send = buffer + 199);
    GIVES(PCCL_E_INVALID, gather, changed.shape.collective = PCCL_BARRIER);
    GIVES(PCCL_OK, gather, changed.send = buffer + 100);
    GIVES(PCCL_OK, gather, changed.shape.collective = PCCL_REDUCE_SCATTER);
    GIVES(PCCL_E_INVALID, gather, (changed.shape.collective = PCCL_REDUCE_SCATTER, changed.recv = buffer + 250));
    GIVES(PCCL_E_INVALID, gather,
        (changed.shape.collective = PCCL_REDUCE_SCATTER, changed.shape.quantization = PCCL_QUANT_MIN_MAX,
            changed.shape.quantized_dtype = PCCL_UINT8, changed.shape.quantization_block = 64));
    GIVES(PCCL_E_INVALID, cast, changed.shape.root = 2);
    GIVES(PCCL_E_INVALID, cast, changed.recv = NULL);
    GIVES(PCCL_E_INVALID, cast, (changed.rank = 0, changed.send = NULL));
    GIVES(PCCL_E_INVALID, cast, (changed.shape.collective = PCCL_SEND, changed.shape.world_size = 3));
    static const uint64_t counts[] = {60, 40};
    static const uint64_t others[] = {60, 41};
    shape = shape_of(PCCL_ALL_TO_ALL, 50, PCCL_FLOAT32, 64, 2);
    shape.algorithm = PCCL_DIRECT;
    pccl_op_request exchange = request_for(&w, 1, 1, &shape);
    exchange.send = buffer + 200;
    exchange.recv = buffer;
    GIVES(PCCL_OK, exchange, changed.op = 1);
    GIVES(PCCL_OK, exchange, changed.send_counts = changed.recv_counts = counts);
    GIVES(PCCL_OK, exchange, changed.shape.collective = PCCL_GATHER);
    GIVES(PCCL_OK, exchange, changed.shape.collective = PCCL_SCATTER);
    GIVES(PCCL_OK, exchange, changed.shape.collective = PCCL_REDUCE);
    static const void *const parts[] = {buffer + 200, buffer + 300};
    static const void *const lacking[] = {buffer + 200, NULL};
    static const void *const overlapping[] = {buffer + 200, buffer + 49};
    GIVES(PCCL_OK, exchange, changed.send_parts = parts);
    GIVES(PCCL_E_INVALID, exchange, changed.send_parts = lacking);
    GIVES(PCCL_E_INVALID, exchange, changed.send_parts = overlapping);
    GIVES(PCCL_E_INVALID, exchange, (changed.send_parts = parts, changed.shape.collective = PCCL_GATHER));
    GIVES(PCCL_E_INVALID, exchange, (changed.send_parts = parts, changed.shape.collective = PCCL_SCATTER));
    GIVES(PCCL_OK, exchange, (changed.send_parts = parts, changed.shape.collective = PCCL_SCATTER, changed.rank = 0));
    static void *const to[] = {buffer, buffer + 100};
    static void *const to_nowhere[] = {buffer, NULL};
    static void *const to_sent[] = {buffer, buffer + 200};
    static void *const to_own[] = {buffer + 200, buffer};
    GIVES(PCCL_OK, exchange, changed.recv_parts = to);
    GIVES(PCCL_OK, exchange, (changed.recv_parts = to, changed.send_parts = parts));
    GIVES(PCCL_E_INVALID, exchange, changed.recv_parts = to_nowhere);
    GIVES(PCCL_E_INVALID, exchange, changed.recv_parts = to_sent);
    GIVES(PCCL_E_INVALID, exchange, (changed.recv_parts = to_sent, changed.send_parts = parts));
    GIVES(PCCL_E_INVALID, exchange, (changed.recv_parts = to, changed.shape.collective = PCCL_SCATTER));
    GIVES(PCCL_E_INVALID, exchange, (changed.recv_parts = to, changed.shape.collective = PCCL_GATHER));
    GIVES(PCCL_OK, exchange, (changed.recv_parts = to, changed.shape.collective = PCCL_GATHER, changed.rank = 0));
    GIVES(PCCL_OK, exchange, (changed.recv_parts = to_own, changed.shape.collective = PCCL_GATHER, changed.rank = 0));
    GIVES(PCCL_E_INVALID, exchange,
        (changed.recv_parts = to_sent, changed.shape.collective = PCCL_GATHER, changed.rank = 0));
    GIVES(PCCL_E_INVALID, exchange, changed.send_counts = counts);
    GIVES(PCCL_E_INVALID, exchange, (changed.send_counts = changed.recv_counts = counts, changed.shape.count = 101));
    GIVES(PCCL_E_INVALID, exchange, (changed.send_counts = others, changed.recv_counts = counts));
    GIVES(PCCL_E_INVALID, exchange,
        (changed.send_counts = changed.recv_counts = counts, changed.shape.collective = PCCL_ALL_GATHER));
    GIVES(PCCL_E_INVALID, exchange, changed.shape.count = 101);
    GIVES(PCCL_E_INVALID, exchange, changed.shape.root = 1);
    GIVES(PCCL_E_INVALID, exchange, changed.send = buffer + 99);
    GIVES(PCCL_E_INVALID, exchange, (changed.shape.collective = PCCL_GATHER, changed.shape.root = 2));
    GIVES(PCCL_E_INVALID, exchange, (changed.shape.collective = PCCL_REDUCE, changed.shape.root = 2));
    GIVES(PCCL_E_INVALID, exchange, (changed.shape.collective = PCCL_SCATTER, changed.recv = NULL));
    GIVES(PCCL_OK, cast, changed.send = NULL);
    GIVES(PCCL_OK, cast, (changed.rank = 0, changed.recv = NULL));
    GIVES(PCCL_OK, cast, changed.shape.root = 1);
    GIVES(PCCL_OK, cast, changed.shape.collective = PCCL_SEND);
#undef GIVES
}

/* Parts in several places are the caller's again. */
static void stops_when_taken_back(int names_what_comes)
{
    world w;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = shape_of(PCCL_ALL_TO_ALL, 5000, PCCL_FLOAT32, 4096, 2);
    job j;
    job_open(&j, &shape, 0);
    job_lists lists;
    pccl_op_request request = request_for(&w, 0, j.number, &j.shape);
    request.send = j.send[0];
    request.recv = j.recv[0];
    if (names_what_comes)
        job_name_recv_parts(&j, 0, &request, &lists);
    else
        job_name_parts(&j, 0, &request, &lists);
    CHECK(pccl_engine_submit(w.nodes[0].engine, &request) == 0);
    memset(&lists, 0, sizeof lists);
    CHECK(pccl_engine_detach(w.nodes[0].engine, j.number) == 0);
    CHECK(node_wait(&w.nodes[0], PCCL_EVENT_OP_DETACHED, j.number).system_error == 0);
    job_end(&j, &w, 0, PCCL_ABORT);
    job_check_inputs_kept(&j, 0);
    job_close(&j);
    world_close(&w);
}

static void named_parts_stop_when_taken_back(void)
{
    stops_when_taken_back(0);
    stops_when_taken_back(1);
}

int main(void)
{
    RUN(named_parts_stop_when_taken_back);
    RUN(all_worlds_counts_and_segments);
    RUN(little_scratch_is_enough);
    RUN(many_at_once_in_any_order);
    RUN(an_abort_anywhere_leaves_the_inputs);
    RUN(lost_connections_are_healed);
    RUN(done_needs_everybody);
    RUN(a_ring_needs_no_other_links);
    RUN(done_tells_payload_bytes);
    RUN(differing_calls_are_told);
    RUN(parts_that_differ_are_told);
    RUN(invalid_requests_are_refused);
    return check_summary();
}
