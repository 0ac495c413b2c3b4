/* One op in several engines of each rank, a slice in each: what it leaves in the buffers. */
#include "check.h"
#include "engine_world.h"

enum { WORLD = 3, SLICES = 2, COUNT = 10007, SEGMENT_BYTES = 256 };

static float sliced_buffers[WORLD][COUNT];
static float whole_buffers[WORLD][COUNT];

static float value(uint32_t rank, uint32_t i) { return (float)(i % 977) / 7.0f + (float)rank * 0.3f; }

static void fill(float buffers[WORLD][COUNT])
{
    for (uint32_t rank = 0; rank < WORLD; rank++)
        for (uint32_t i = 0; i < COUNT; i++)
            buffers[rank][i] = value(rank, i);
}

/* In place. */
static void submit(world *w, uint32_t rank, uint64_t op, float buffers[WORLD][COUNT], uint8_t slice, uint8_t last)
{
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, WORLD);
    shape.slice = slice;
    shape.last_slice = last;
    pccl_op_request request = request_for(w, rank, op, &shape);
    request.send = request.recv = buffers[rank];
    CHECK(pccl_engine_submit(w->nodes[rank].engine, &request) == 0);
}

static void end(world *w, uint32_t rank, uint64_t op, int verdict)
{
    CHECK(pccl_engine_end(w->nodes[rank].engine, op, verdict) == 0);
    node_wait(&w->nodes[rank], PCCL_EVENT_OP_ENDED, op);
}

static void open_all(world *engines)
{
    for (int i = 0; i < SLICES; i++)
        world_open(&engines[i], WORLD, 2, 1, 0);
}

static void close_all(world *engines)
{
    for (int i = 0; i < SLICES; i++)
        world_close(&engines[i]);
}

static void slices_make_the_same_bits_as_the_whole_with(uint8_t algorithm)
{
    world engines[SLICES];
    tested_algorithm = algorithm;
    open_all(engines);
    fill(sliced_buffers);
    fill(whole_buffers);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        for (uint8_t i = 0; i < SLICES; i++)
            submit(&engines[i], rank, 1, sliced_buffers, i, SLICES - 1);
        submit(&engines[0], rank, 2, whole_buffers, 0, 0);
    }
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        pccl_event whole = node_wait(&engines[0].nodes[rank], PCCL_EVENT_OP_DONE, 2);
        uint64_t tx_bytes = 0;
        uint64_t rx_bytes = 0;
        for (int i = 0; i < SLICES; i++) {
            pccl_event slice = node_wait(&engines[i].nodes[rank], PCCL_EVENT_OP_DONE, 1);
            CHECK(slice.tx_bytes > 0 && slice.tx_bytes < whole.tx_bytes);
            tx_bytes += slice.tx_bytes;
            rx_bytes += slice.rx_bytes;
        }
        CHECK(tx_bytes == whole.tx_bytes && rx_bytes == whole.rx_bytes);
    }
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        for (int i = 0; i < SLICES; i++)
            end(&engines[i], rank, 1, PCCL_COMMIT);
        end(&engines[0], rank, 2, PCCL_COMMIT);
        CHECK(memcmp(sliced_buffers[rank], whole_buffers[0], sizeof whole_buffers[0]) == 0);
    }
    close_all(engines);
    tested_algorithm = PCCL_RING;
}

static void slices_make_the_same_bits_as_the_whole(void)
{
    slices_make_the_same_bits_as_the_whole_with(PCCL_RING);
    slices_make_the_same_bits_as_the_whole_with(PCCL_DIRECT);
}

/* One slice is done everywhere, the other lacks a rank. */
static void aborted_slices_restore_all(void)
{
    world engines[SLICES];
    open_all(engines);
    fill(sliced_buffers);
    fill(whole_buffers);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        submit(&engines[0], rank, 1, sliced_buffers, 0, SLICES - 1);
        if (rank > 0)
            submit(&engines[1], rank, 1, sliced_buffers, 1, SLICES - 1);
    }
    for (uint32_t rank = 0; rank < WORLD; rank++)
        node_wait(&engines[0].nodes[rank], PCCL_EVENT_OP_DONE, 1);
    CHECK(memcmp(sliced_buffers[0], whole_buffers[0], sizeof whole_buffers[0]) != 0);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        end(&engines[0], rank, 1, PCCL_ABORT);
        if (rank > 0)
            end(&engines[1], rank, 1, PCCL_ABORT);
        CHECK(memcmp(sliced_buffers[rank], whole_buffers[rank], sizeof whole_buffers[rank]) == 0);
    }
    close_all(engines);
}

static void different_slices_are_a_mismatch(void)
{
    world w;
    world_open(&w, 2, 1, 1, 0);
    static float buffers[WORLD][COUNT];
    pccl_op_shape shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, 2);
    shape.last_slice = 1;
    for (uint32_t rank = 0; rank < 2; rank++) {
        shape.slice = (uint8_t)rank;
        pccl_op_request request = request_for(&w, rank, 1, &shape);
        request.send = request.recv = buffers[rank];
        CHECK(pccl_engine_submit(w.nodes[rank].engine, &request) == 0);
    }
    pccl_event event = node_wait(&w.nodes[0], PCCL_EVENT_OP_MISMATCH, 1);
    CHECK(event.mine.slice == 0 && event.theirs.slice == 1 && event.theirs.last_slice == 1);
    for (uint32_t rank = 0; rank < 2; rank++)
        end(&w, rank, 1, PCCL_ABORT);
    world_close(&w);
}

int main(void)
{
    RUN(slices_make_the_same_bits_as_the_whole);
    RUN(aborted_slices_restore_all);
    RUN(different_slices_are_a_mismatch);
    return check_summary();
}
