/* Ops whose buffers are taken from them, wherever they are: the caller has its input back at once and may write what it
 * likes there, and the op stops. */
#include "trial.h"

#include "proxy.h"

#include <errno.h>

enum { STALL_MS = 60000, CANARY = 0xa5 };

/* An op's buffers on one rank; `recv` may be `send`, or hold it. */
typedef struct {
    uint8_t *send;
    uint8_t *recv;
} buffers;

typedef struct {
    uint64_t number;
    pccl_op_shape shape;
    int in_place;
    size_t send_bytes[WORLD_RANKS_MAX];
    size_t recv_bytes[WORLD_RANKS_MAX];
    uint8_t *inputs[WORLD_RANKS_MAX]; /* as much as the larger one of the two */
    buffers callers[WORLD_RANKS_MAX];
    int is_detached[WORLD_RANKS_MAX];
} work;

static int has_root(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_BROADCAST || shape->collective == PCCL_SEND;
}

static size_t element_bytes(const work *o) { return pccl_dtype_bytes(o->shape.dtype); }

static size_t chunk_elements(const pccl_op_shape *shape, uint32_t chunk)
{
    return (size_t)(shape->count / shape->world_size) + (chunk < shape->count % shape->world_size);
}

static buffers buffers_make(const work *o, uint32_t rank)
{
    buffers made;
    int is_one = o->in_place && (o->shape.collective == PCCL_ALL_REDUCE || has_root(&o->shape) ||
                                    (o->shape.collective == PCCL_REDUCE && rank == o->shape.root));
    made.recv = allocate(is_one && o->recv_bytes[rank] == 0 ? o->send_bytes[rank] : o->recv_bytes[rank]);
    if (is_one)
        made.send = made.recv;
    else if (o->in_place && o->shape.collective == PCCL_ALL_GATHER)
        made.send = made.recv + rank * o->send_bytes[rank];
    else
        made.send = allocate(o->send_bytes[rank]);
    return made;
}

static void buffers_free(const work *o, uint32_t rank, buffers b)
{
    if (b.send < b.recv || b.send > b.recv + o->recv_bytes[rank] || !o->in_place ||
        o->shape.collective == PCCL_REDUCE_SCATTER)
        free(b.send);
    free(b.recv);
}

static void work_open(work *o, const pccl_op_shape *shape, int in_place)
{
    memset(o, 0, sizeof *o);
    o->number = next_number++;
    o->shape = *shape;
    o->in_place = in_place;
    size_t bytes = (size_t)shape->count * element_bytes(o);
    for (uint32_t rank = 0; rank < shape->world_size; rank++) {
        o->send_bytes[rank] = o->recv_bytes[rank] = bytes;
        if (shape->collective == PCCL_ALL_GATHER)
            o->send_bytes[rank] = bytes / shape->world_size;
        else if (shape->collective == PCCL_REDUCE_SCATTER)
            o->recv_bytes[rank] = chunk_elements(shape, rank) * element_bytes(o);
        else if (has_root(shape))
            *(rank == shape->root ? &o->recv_bytes[rank] : &o->send_bytes[rank]) = 0;
        else if (shape->collective == PCCL_GATHER || shape->collective == PCCL_SCATTER) {
            int is_gather = shape->collective == PCCL_GATHER;
            *(is_gather ? &o->send_bytes[rank] : &o->recv_bytes[rank]) = bytes / shape->world_size;
            if (rank != shape->root)
                *(is_gather ? &o->recv_bytes[rank] : &o->send_bytes[rank]) = 0;
        } else if (shape->collective == PCCL_REDUCE && rank != shape->root)
            o->recv_bytes[rank] = 0;
        o->inputs[rank] = allocate(bytes);
        fill_random(o->inputs[rank], shape->dtype, (size_t)shape->count);
        o->callers[rank] = buffers_make(o, rank);
        memset(o->callers[rank].recv, 0xee, o->recv_bytes[rank]);
        memcpy(o->callers[rank].send, o->inputs[rank], o->send_bytes[rank]);
        if (in_place && has_root(shape)) /* what is overwritten has to come back */
            memcpy(o->callers[rank].recv, o->inputs[rank], bytes);
    }
}

static void work_close(work *o)
{
    for (uint32_t rank = 0; rank < o->shape.world_size; rank++) {
        buffers_free(o, rank, o->callers[rank]);
        free(o->inputs[rank]);
    }
}

static void work_submit(const work *o, world *w, uint32_t rank)
{
    pccl_op_request request = request_for(w, rank, o->number, &o->shape);
    request.send = o->callers[rank].send;
    request.recv = o->callers[rank].recv;
    CHECK(pccl_engine_submit(w->nodes[rank].engine, &request) == 0);
}

static int is_filled(const uint8_t *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != CANARY)
            return 0;
    return 1;
}

static void check_canaries(const work *o)
{
    for (uint32_t rank = 0; rank < o->shape.world_size; rank++)
        if (o->is_detached[rank])
            CHECK_MSG(is_filled(o->callers[rank].send, o->send_bytes[rank]) &&
                          is_filled(o->callers[rank].recv, o->recv_bytes[rank]),
                "rank %u of %u wrote where it may not: collective %u, algorithm %u", rank, o->shape.world_size,
                o->shape.collective, o->shape.algorithm);
}

static void check_input_kept(const work *o, uint32_t rank)
{
    CHECK_MSG(memcmp(o->callers[rank].send, o->inputs[rank], o->send_bytes[rank]) == 0,
        "rank %u of %u lost its input: collective %u, algorithm %u, quantization %u", rank, o->shape.world_size,
        o->shape.collective, o->shape.algorithm, o->shape.quantization);
    if (o->in_place && has_root(&o->shape))
        CHECK(memcmp(o->callers[rank].recv, o->inputs[rank], o->recv_bytes[rank]) == 0);
}

/* Has the caller take its buffers back and use them for something else. */
static void work_detach(work *o, world *w, uint32_t rank)
{
    CHECK(pccl_engine_detach(w->nodes[rank].engine, o->number) == 0);
    pccl_event detached = node_wait(&w->nodes[rank], PCCL_EVENT_OP_DETACHED, o->number);
    CHECK(detached.system_error == 0);
    check_input_kept(o, rank);
    memset(o->callers[rank].send, CANARY, o->send_bytes[rank]);
    memset(o->callers[rank].recv, CANARY, o->recv_bytes[rank]);
    o->is_detached[rank] = 1;
}

static pccl_op_shape random_shape(uint32_t world, uint32_t count_max)
{
    uint8_t collective = (uint8_t)random_below(PCCL_COLLECTIVE_COUNT);
    if (collective == PCCL_SEND && world != 2)
        collective = PCCL_ALL_REDUCE;
    uint32_t dtype = random_below(PCCL_DTYPE_COUNT);
    uint32_t count = collective == PCCL_BARRIER ? 0 : random_below(count_max + 1);
    int is_quantized = collective == PCCL_ALL_REDUCE && random_below(3) == 0;
    if (is_quantized)
        dtype = PCCL_FLOAT32;
    uint32_t segment_bytes = pccl_dtype_bytes(dtype) * (1 + random_below(count / 3 + 2));
    int is_of_parts = collective == PCCL_ALL_GATHER || collective == PCCL_ALL_TO_ALL || collective == PCCL_GATHER ||
                      collective == PCCL_SCATTER;
    int reduces = collective == PCCL_ALL_REDUCE || collective == PCCL_REDUCE_SCATTER || collective == PCCL_REDUCE;
    pccl_op_shape shape = plain_shape(is_of_parts ? (uint64_t)count * world : count, dtype, 0, segment_bytes, world);
    shape.collective = collective;
    shape.algorithm = (uint8_t)random_below(PCCL_ALGORITHM_COUNT);
    if (has_root(&shape) || collective == PCCL_GATHER || collective == PCCL_SCATTER || collective == PCCL_REDUCE)
        shape.root = random_below(world);
    if (reduces)
        shape.reduce_op = (uint8_t)random_below(PCCL_REDUCE_OP_COUNT);
    if (is_quantized) {
        shape.quantization = PCCL_QUANT_MIN_MAX;
        shape.quantized_dtype = PCCL_UINT8;
        shape.quantization_block = 64;
    }
    return shape;
}

static void await_payload(world *w, uint32_t rank, uint64_t before, uint64_t bytes)
{
    pccl_engine_stats stats;
    int64_t end_ms = now_ms() + 2; /* what comes may be less: then that is where it is found */
    do
        pccl_engine_get_stats(w->nodes[rank].engine, &stats);
    while (stats.rx_payload_bytes - before < bytes && now_ms() < end_ms);
}

/* Wherever it finds them: nothing has come, something has, or all. */
static void detach_some(work *o, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++) {
        if (random_below(2))
            continue;
        pccl_engine_stats stats;
        pccl_engine_get_stats(w->nodes[rank].engine, &stats);
        if (random_below(3))
            await_payload(w, rank, stats.rx_payload_bytes, random_below((uint32_t)o->recv_bytes[rank] + 1));
        work_detach(o, w, rank);
    }
}

static void abort_all(work *o, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++) {
        CHECK(pccl_engine_end(w->nodes[rank].engine, o->number, PCCL_ABORT) == 0);
        node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, o->number);
        if (!o->is_detached[rank])
            check_input_kept(o, rank);
    }
    check_canaries(o);
    work_close(o);
}

static void await_all_done(const work *o, world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        node_wait(&w->nodes[rank], PCCL_EVENT_OP_DONE, o->number);
}

static void work_run(world *w, const pccl_op_shape *shape, int in_place)
{
    enum { BEFORE_OTHERS, AFTER_DONE, ANYWHERE, STAGES };
    uint32_t stage = random_below(STAGES);
    uint32_t late = stage == BEFORE_OTHERS ? random_below(w->size) : w->size;
    work o;
    work_open(&o, shape, in_place);
    for (uint32_t rank = 0; rank < w->size; rank++)
        if (rank != late)
            work_submit(&o, w, rank);
    if (stage == BEFORE_OTHERS) {
        work_detach(&o, w, (late + 1) % w->size);
        work_submit(&o, w, late);
    } else if (stage == AFTER_DONE) {
        await_all_done(&o, w);
        work_detach(&o, w, random_below(w->size));
    } else {
        detach_some(&o, w);
    }
    abort_all(&o, w);
}

static void stopped_ops_leave_the_buffers_alone(void)
{
    for (uint32_t size = 2; size <= 4; size++)
        for (int is_encrypted = 0; is_encrypted < 2; is_encrypted++) {
            char reason[128];
            world w;
            if (is_encrypted && pccl_encryption_available(reason, sizeof reason) != 0)
                continue;
            tested_encryption = is_encrypted;
            world_open(&w, size, 1 + size % 3, (int)(size % 2), size == 4);
            for (int run = 0; run < RUNS(40); run++) {
                pccl_op_shape shape = random_shape(size, run % 4 ? 3000 : 200000);
                work_run(&w, &shape, run % 2);
            }
            world_close(&w);
            tested_encryption = 0;
        }
}

static void so_it_is_with_little_scratch_and_nothing_eager(void)
{
    tested_op_scratch_bytes_max = 2048;
    tested_eager_bytes_max = 0;
    stopped_ops_leave_the_buffers_alone();
    tested_op_scratch_bytes_max = tested_eager_bytes_max = UINT32_MAX;
}

static void lost_connections_are_healed(void)
{
    for (int run = 0; run < RUNS(20); run++) {
        proxied p;
        uint32_t size = 2 + random_below(3);
        unsigned connections = 2;
        proxied_open(&p, size, connections, (int)random_below(2), STALL_MS);
        proxied_doom_spares(&p, connections, 60000);
        proxied_start(&p);
        for (int k = 0; k < 3; k++) {
            pccl_op_shape shape = random_shape(size, 60000);
            work_run(&p.w, &shape, run % 2);
        }
        proxied_close(&p);
    }
}

/* A rank whose op is stopped is missed by the others, which are not disturbed in anything else. */
static void others_are_not_disturbed(void)
{
    for (uint8_t algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        world w;
        work stopped;
        tested_algorithm = algorithm;
        world_open(&w, 3, 2, 1, 0);
        pccl_op_shape shape = plain_shape(300000, PCCL_FLOAT32, PCCL_SUM, 4096, 3);
        work_open(&stopped, &shape, 1);
        for (uint32_t rank = 0; rank < 3; rank++)
            work_submit(&stopped, &w, rank);
        pccl_engine_stats stats;
        pccl_engine_get_stats(w.nodes[1].engine, &stats);
        await_payload(&w, 1, stats.rx_payload_bytes, 100000);
        work_detach(&stopped, &w, 1);
        for (int k = 0; k < 5; k++)
            trial_run(&w, &shape, k % 2);
        abort_all(&stopped, &w);
        world_close(&w);
    }
    tested_algorithm = PCCL_RING;
}

static void a_frozen_op_is_detached(void)
{
    world w;
    work o;
    world_open(&w, 2, 1, 1, 0);
    pccl_op_shape shape = plain_shape(1000, PCCL_FLOAT32, PCCL_SUM, 64, 2);
    work_open(&o, &shape, 1);
    work_submit(&o, &w, 0);
    CHECK(pccl_engine_freeze_op(w.nodes[0].engine, o.number) == 0);
    work_detach(&o, &w, 0);
    CHECK(pccl_engine_end(w.nodes[0].engine, o.number, PCCL_ABORT) == 0);
    node_wait(&w.nodes[0], PCCL_EVENT_OP_ENDED, o.number);
    check_canaries(&o);
    work_close(&o);
    world_close(&w);
}

static void an_op_that_has_ended_is_told_apart(void)
{
    world w;
    world_open(&w, 2, 1, 1, 0);
    CHECK(pccl_engine_detach(w.nodes[0].engine, 77) == 0);
    CHECK(node_wait(&w.nodes[0], PCCL_EVENT_OP_DETACHED, 77).system_error == ENOENT);
    world_close(&w);
}

int main(void)
{
    RUN(stopped_ops_leave_the_buffers_alone);
    RUN(so_it_is_with_little_scratch_and_nothing_eager);
    RUN(lost_connections_are_healed);
    RUN(others_are_not_disturbed);
    RUN(a_frozen_op_is_detached);
    RUN(an_op_that_has_ended_is_told_apart);
    return check_summary();
}
