/* engine_wire.h: one engine whose peer is the test itself, byte by byte: frames to it and from it. */
#ifndef PCCL_ENGINE_WIRE_H
#define PCCL_ENGINE_WIRE_H

#include "wire.h"

enum { LINK = 5, COUNT = 40, SEGMENT_BYTES = 40 };

/* Rank 1 of two: chunk 0 starts here, elements 0..19; chunk 1 is owned here, elements 20..39; two segments
 * each. */
typedef struct {
    node n;
    int peer;
    uint32_t connections;
    pccl_op_request request;
    float *values;
} wire;

static inline pccl_op_request wire_request(uint64_t op, float *values, uint64_t count, uint32_t segment_bytes)
{
    pccl_op_request request;
    memset(&request, 0, sizeof request);
    request.op = op;
    request.key.epoch = 1;
    request.key.sequence = op;
    request.shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, segment_bytes, 2);
    request.rank = 1;
    request.link_prev = request.link_next = LINK;
    request.send = request.recv = values;
    return request;
}

static inline float *ramp(size_t count)
{
    float *values = malloc(count * sizeof *values);
    if (values == NULL)
        stop_test("memory");
    for (size_t i = 0; i < count; i++)
        values[i] = (float)i;
    return values;
}

static const float ones[COUNT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

/* With the checksum that its payload has if it is ones. */
static inline pccl_frame segment_for(
    const pccl_op_request *request, uint32_t chunk, uint32_t segment, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame = segment_frame(request, chunk, segment, hop, bytes);
    if (bytes <= sizeof ones)
        frame.payload_crc = pccl_crc32c(0, ones, bytes);
    return frame;
}

/* The engine's end of a further connection is made; both have greeted each other. */
static inline int wire_connect(wire *w)
{
    int fds[2];
    pair_unix(fds);
    if (pccl_engine_link_add(w->n.engine, LINK, fds[0], NULL) != 0)
        stop_test("link_add");
    w->connections++;
    greet(fds[1], w->connections);
    return fds[1];
}

static inline void wire_open_bare(wire *w)
{
    memset(w, 0, sizeof *w);
    node_open(&w->n, 0);
    w->peer = wire_connect(w);
}

static inline void wire_submit(wire *w, uint64_t count, uint32_t segment_bytes)
{
    w->values = ramp((size_t)count);
    w->request = wire_request(1, w->values, count, segment_bytes);
    if (pccl_engine_submit(w->n.engine, &w->request) != 0)
        stop_test("submit");
}

static inline void wire_open(wire *w)
{
    wire_open_bare(w);
    wire_submit(w, COUNT, SEGMENT_BYTES);
}

static inline void wire_close(wire *w)
{
    node_close(&w->n);
    close(w->peer);
    free(w->values);
}

static inline void expect_lost(wire *w, const char *why)
{
    expect_link_lost(&w->n, LINK, why);
    CHECK(pccl_engine_end(w->n.engine, 1, 0) == 0);
    if (w->values != NULL) {
        node_wait(&w->n, PCCL_EVENT_OP_ENDED, 1);
        for (int i = 0; i < COUNT; i++)
            CHECK(w->values[i] == (float)i);
    }
}

/* Says this twice, and loses the link. */
static inline void repeat(wire *w, pccl_frame frame, const void *payload, const char *why)
{
    write_frame(w->peer, &frame, payload);
    write_frame(w->peer, &frame, payload);
    expect_lost(w, why);
    wire_close(w);
}

static inline void write_lost(int fd, uint32_t connection, uint32_t peer_connection, uint32_t frames)
{
    pccl_frame frame = frame_of(PCCL_FRAME_LOST);
    frame.connection = connection;
    frame.peer_connection = peer_connection;
    frame.frames = frames;
    write_frame(fd, &frame, NULL);
}

#endif
