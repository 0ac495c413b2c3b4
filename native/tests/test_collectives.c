/* The collectives besides all-reduce on whole engines in one process, beside what their names say: a reduce-scatter
 * beside the model of the all-reduce, of which it is a part. */
#include "trial.h"

#include "proxy.h"

enum { STALL_MS = 60000, RANDOM_RUNS = 60 * THOROUGHNESS };

/* One op on all ranks. Buffers of ranks that have none are empty. */
typedef struct {
    uint64_t number;
    pccl_op_shape shape;
    int in_place;
    size_t element_bytes;
    size_t send_bytes[WORLD_RANKS_MAX];
    size_t recv_bytes[WORLD_RANKS_MAX];
    uint8_t *inputs[WORLD_RANKS_MAX]; /* of send, and where that is a part of recv or the same, of the whole */
    uint8_t *send[WORLD_RANKS_MAX];
    uint8_t *recv[WORLD_RANKS_MAX];
} job;

static int has_root(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_BROADCAST || shape->collective == PCCL_SEND;
}

/* `count` elements of each rank. */
static pccl_op_shape shape_of(
    uint8_t collective, uint64_t count, uint32_t dtype, uint32_t segment_bytes, uint32_t world)
{
    int is_gathered = collective == PCCL_ALL_GATHER;
    pccl_op_shape shape = plain_shape(is_gathered ? count * world : count, dtype, 0, segment_bytes, world);
    shape.collective = collective;
    return shape;
}

static size_t chunk_elements(const pccl_op_shape *shape, uint32_t chunk)
{
    return (size_t)(shape->count / shape->world_size) + (chunk < shape->count % shape->world_size);
}

static void job_open(job *j, const pccl_op_shape *shape, int in_place)
{
    memset(j, 0, sizeof *j);
    j->number = next_number++;
    j->shape = *shape;
    j->in_place = in_place;
    j->element_bytes = pccl_dtype_bytes(shape->dtype);
    size_t bytes = (size_t)shape->count * j->element_bytes;
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        int is_root = rank == shape->root;
        j->send_bytes[rank] = j->recv_bytes[rank] = bytes;
        if (shape->collective == PCCL_ALL_GATHER)
            j->send_bytes[rank] = bytes / shape->world_size;
        else if (shape->collective == PCCL_REDUCE_SCATTER)
            j->recv_bytes[rank] = chunk_elements(shape, rank) * j->element_bytes;
        else if (has_root(shape))
            *(is_root ? &j->recv_bytes[rank] : &j->send_bytes[rank]) = 0;
        j->recv[rank] = allocate(j->recv_bytes[rank]);
        memset(j->recv[rank], 0xee, j->recv_bytes[rank]);
        j->send[rank] = allocate(j->send_bytes[rank]);
        if (in_place && shape->collective == PCCL_ALL_GATHER) {
            free(j->send[rank]);
            j->send[rank] = j->recv[rank] + rank * j->send_bytes[rank];
        } else if (in_place && has_root(shape) && !is_root) {
            free(j->send[rank]);
            j->send[rank] = j->recv[rank];
        }
        j->inputs[rank] = allocate(bytes);
        fill_random(j->inputs[rank], shape->dtype, bytes / j->element_bytes);
        memcpy(j->send[rank], j->inputs[rank], j->send_bytes[rank]);
        if (j->send[rank] == j->recv[rank] && has_root(shape))
            memcpy(j->recv[rank], j->inputs[rank], j->recv_bytes[rank]);
    }
}

static void job_close(job *j)
{
    for (uint32_t rank = 0; rank < j->shape.world_size; rank++) {
        int is_apart = !j->in_place || (has_root(&j->shape) && rank == j->shape.root) ||
                       (!has_root(&j->shape) && j->shape.collective != PCCL_ALL_GATHER);
        if (is_apart)
            free(j->send[rank]);
        free(j->recv[rank]);
        free(j->inputs[rank]);
    }
}

static void job_submit(const job *j, world *w, uint32_t rank)
{
    pccl_op_request request = request_for(w, rank, j->number, &j->shape);
    request.send = j->send[rank];
    request.recv = j->recv[rank];
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
    if (j->in_place && has_root(&j->shape) && rank != j->shape.root)
        CHECK(memcmp(j->recv[rank], j->inputs[rank], j->recv_bytes[rank]) == 0);
}

static int is_chunk_of_the_reduced(const job *j, uint32_t rank)
{
    trial t;
    memset(&t, 0, sizeof t);
    t.shape = j->shape;
    t.bytes = (size_t)j->shape.count * j->element_bytes;
    memcpy(t.inputs, j->inputs, sizeof t.inputs);
    uint8_t *expected = trial_expected(&t);
    size_t first = 0;
    for (uint32_t chunk = 0; chunk < rank; chunk++)
        first += chunk_elements(&j->shape, chunk) * j->element_bytes;
    int is_right = memcmp(j->recv[rank], expected + first, j->recv_bytes[rank]) == 0;
    free(expected);
    return is_right;
}

static void job_check_result(const job *j, uint32_t rank)
{
    const pccl_op_shape *shape = &j->shape;
    int is_right = 1;
    if (shape->collective == PCCL_REDUCE_SCATTER)
        is_right = is_chunk_of_the_reduced(j, rank);
    if (shape->collective == PCCL_ALL_GATHER)
        for (uint32_t from = 0; from < shape->world_size; from++)
            is_right &= memcmp(j->recv[rank] + from * j->send_bytes[from], j->inputs[from], j->send_bytes[from]) == 0;
    else if (has_root(shape) && rank != shape->root)
        is_right = memcmp(j->recv[rank], j->inputs[shape->root], j->recv_bytes[rank]) == 0;
    CHECK_MSG(is_right, "collective %u, algorithm %u, rank %u of %u, root %u, %llu elements of type %u, segments of %u",
        shape->collective, shape->algorithm, rank, shape->world_size, shape->root, (unsigned long long)shape->count,
        shape->dtype, shape->segment_bytes);
    if (!(has_root(shape) && rank != shape->root))
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
    static const uint8_t kinds[] = {PCCL_ALL_GATHER, PCCL_BROADCAST, PCCL_REDUCE_SCATTER, PCCL_SEND};
    uint8_t collective = kinds[random_below(world == 2 ? 4 : 3)];
    uint32_t dtype = random_below(PCCL_DTYPE_COUNT);
    uint32_t count = random_below(count_max + 1);
    uint32_t segment_bytes = pccl_dtype_bytes(dtype) * (1 + random_below(count / 3 + 2));
    pccl_op_shape shape = shape_of(collective, count, dtype, segment_bytes, world);
    shape.algorithm = (uint8_t)random_below(PCCL_ALGORITHM_COUNT);
    shape.root = has_root(&shape) ? random_below(world) : 0;
    shape.reduce_op = collective == PCCL_REDUCE_SCATTER ? (uint8_t)random_below(PCCL_REDUCE_OP_COUNT) : 0;
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
            CHECK(stats.scratch_bytes_max <= scratch_bytes + 2 * size * (20 * 8 + 16));
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
    for (int run = 0; run < 15 * THOROUGHNESS; run++) {
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
        job_open(&j, &shape, 0);
        for (uint32_t rank = 0; rank < 4; rank++) {
            pccl_op_request request = request_for(&w, rank, j.number, &shape);
            request.send = j.send[rank];
            request.recv = j.recv[rank];
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
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        job j;
        world_open(&w, 4, 1, 1, 0);
        pccl_op_shape shape = shape_of(cases[i].collective, 100, PCCL_FLOAT64, 64, 4);
        shape.algorithm = cases[i].algorithm;
        shape.root = has_root(&shape) ? 1 : 0;
        job_open(&j, &shape, 1);
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
    GIVES(PCCL_OK, cast, changed.send = NULL);
    GIVES(PCCL_OK, cast, (changed.rank = 0, changed.recv = NULL));
    GIVES(PCCL_OK, cast, changed.shape.root = 1);
    GIVES(PCCL_OK, cast, changed.shape.collective = PCCL_SEND);
#undef GIVES
}

int main(void)
{
    RUN(all_worlds_counts_and_segments);
    RUN(little_scratch_is_enough);
    RUN(many_at_once_in_any_order);
    RUN(an_abort_anywhere_leaves_the_inputs);
    RUN(lost_connections_are_healed);
    RUN(done_needs_everybody);
    RUN(a_ring_needs_no_other_links);
    RUN(done_tells_payload_bytes);
    RUN(differing_calls_are_told);
    RUN(invalid_requests_are_refused);
    return check_summary();
}
