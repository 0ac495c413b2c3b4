/* direct_wire.h: one engine, rank 1 of three, whose peers are the test itself: frames to it and from it. */
#ifndef PCCL_DIRECT_WIRE_H
#define PCCL_DIRECT_WIRE_H

#include "link.h"
#include "wire.h"

enum {
    RANK = 1,
    WORLD = 3,
    CHUNK = 10, /* elements */
    COUNT = WORLD * CHUNK,
    SEGMENT_BYTES = 20, /* two a chunk */
    WHOLE_BYTES = CHUNK * 4 /* as segment_bytes: one a chunk, and so eager */
};

typedef struct {
    node n;
    uint64_t links[WORLD];
    int peers[WORLD];
    pccl_op_request request;
    float values[COUNT];
} wire;

static uint64_t next_link = 1;

static inline float input(int i) { return (float)(i % 7) - 2.0f; }

static inline void wire_prepare(wire *w, uint32_t segment_bytes)
{
    memset(&w->request, 0, sizeof w->request);
    w->request.op = w->request.key.sequence = 1;
    w->request.key.epoch = 1;
    w->request.shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, segment_bytes, WORLD);
    w->request.shape.algorithm = PCCL_DIRECT;
    w->request.rank = RANK;
    w->request.rank_links = w->links;
    w->request.send = w->request.recv = w->values;
    for (int i = 0; i < COUNT; i++)
        w->values[i] = input(i);
}

static unsigned frames_beside; /* greetings and acknowledgements that the engine of the test has been sent */

static inline void greet_engine(int fd)
{
    frames_beside++;
    greet(fd, 1);
}

static inline void acknowledge(int fd, uint32_t frames)
{
    frames_beside++;
    write_ack(fd, frames);
}

static inline void wire_connect(wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        int fds[2];
        w->links[rank] = next_link++;
        w->peers[rank] = -1;
        if (rank == RANK)
            continue;
        pair_unix(fds);
        if (pccl_engine_link_add(w->n.engine, w->links[rank], fds[0], NULL) != 0)
            stop_test("link_add");
        w->peers[rank] = fds[1];
        greet_engine(fds[1]);
    }
}

static inline void wire_disconnect(wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank++)
        if (rank != RANK)
            close(w->peers[rank]);
}

static inline void wire_submit(wire *w)
{
    if (pccl_engine_submit(w->n.engine, &w->request) != 0)
        stop_test("submit");
}

static inline void wire_open_bare(wire *w, uint32_t segment_bytes)
{
    memset(w, 0, sizeof *w);
    frames_beside = 0;
    node_open(&w->n, 0);
    wire_connect(w);
    wire_prepare(w, segment_bytes);
}

static inline void wire_close(wire *w)
{
    node_close(&w->n);
    wire_disconnect(w);
}

/* What has been announced is open: a segment for it is not taken for one that comes too late. */
static inline void wire_await_announcements(const wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        pccl_frame frame;
        float payload[CHUNK];
        read_frame(w->peers[rank], &frame, payload, sizeof payload);
        CHECK(frame.type == PCCL_FRAME_READY || frame.type == PCCL_FRAME_EAGER);
    }
}

static inline void wire_open(wire *w, uint32_t segment_bytes)
{
    wire_open_bare(w, segment_bytes);
    wire_submit(w);
    wire_await_announcements(w);
}

static const float ones[CHUNK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* READY, EAGER or DONE, of whose payload the first `sent_bytes` follow. */
static inline void write_op_frame(
    const wire *w, uint32_t rank, enum pccl_frame_type type, uint32_t bytes, const void *payload, size_t sent_bytes)
{
    pccl_frame frame = op_frame(&w->request, type, bytes);
    write_frame_part(w->peers[rank], &frame, payload, sent_bytes);
}

static inline void write_ready(const wire *w, uint32_t rank) { write_op_frame(w, rank, PCCL_FRAME_READY, 0, NULL, 0); }

static inline void write_segment(
    const wire *w, uint32_t rank, uint32_t chunk, uint32_t index, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame = segment_frame(&w->request, chunk, index, hop, bytes);
    write_frame(w->peers[rank], &frame, ones);
}

static const float many_ones[COUNT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static inline void write_eager(const wire *w, uint32_t rank, uint32_t bytes)
{
    write_op_frame(w, rank, PCCL_FRAME_EAGER, bytes, ones, bytes);
}

static inline void wait_for_wire(node *n, uint64_t bytes)
{
    node_await_stat(n, rx_wire_bytes, (uint64_t)frames_beside * PCCL_FRAME_BYTES + bytes);
}

static inline void expect_inputs(const wire *w)
{
    for (int i = 0; i < COUNT; i++)
        CHECK(w->values[i] == input(i));
}

static inline void end_op(wire *w)
{
    CHECK(pccl_engine_end(w->n.engine, w->request.op, 0) == 0);
    node_wait(&w->n, PCCL_EVENT_OP_ENDED, w->request.op);
    expect_inputs(w);
}

static inline void expect_lost(wire *w, uint32_t rank, const char *why)
{
    expect_link_lost(&w->n, w->links[rank], why);
}

#endif
