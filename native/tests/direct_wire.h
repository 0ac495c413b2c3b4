/* direct_wire.h: one engine, rank 1 of three, whose peers are the test itself: frames to it and from it. */
#ifndef PCCL_DIRECT_WIRE_H
#define PCCL_DIRECT_WIRE_H

#include "check.h"
#include "crc32c.h"
#include "engine_world.h"
#include "frame.h"
#include "link.h"

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

static inline void write_all(int fd, const void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = send(fd, (const uint8_t *)data + done, bytes - done, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the engine has hung up, which the test will see */
        done += (size_t)n;
    }
}

static inline int read_all(int fd, void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        struct pollfd pfd = {.fd = fd, .events = POLLIN};
        if (poll(&pfd, 1, WAIT_MS) != 1)
            return 0;
        ssize_t n = recv(fd, (uint8_t *)data + done, bytes - done, 0);
        if (n <= 0)
            return 0;
        done += (size_t)n;
    }
    return 1;
}

static unsigned greetings; /* and acknowledgements, sent to the engine of the test */

/* What begins every connection, in both directions. */
static inline void greet(int fd)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_HELLO;
    frame.connection = 1;
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    greetings++;
    REQUIRE(read_all(fd, header, sizeof header));
    REQUIRE(pccl_frame_verify(header) == NULL && pccl_frame_decode(header, &frame) == NULL);
    CHECK(frame.type == PCCL_FRAME_HELLO);
}

static inline void acknowledge(int fd, uint32_t frames)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_ACK;
    frame.received_frames = frames;
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    greetings++;
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
        greet(fds[1]);
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
    greetings = 0;
    node_open(&w->n, 0);
    wire_connect(w);
    wire_prepare(w, segment_bytes);
}

static inline void wire_close(wire *w)
{
    node_close(&w->n);
    wire_disconnect(w);
}

static inline void write_frame(int fd, pccl_frame frame, const void *payload, size_t payload_sent_bytes)
{
    uint8_t header[PCCL_FRAME_BYTES];
    if (payload != NULL)
        frame.payload_crc = pccl_crc32c(0, payload, frame.payload_bytes);
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    write_all(fd, payload, payload_sent_bytes);
}

static inline void read_frame(int fd, pccl_frame *frame, void *payload, size_t payload_bytes_max)
{
    uint8_t header[PCCL_FRAME_BYTES];
    memset(frame, 0, sizeof *frame);
    do { /* ACK frames come when they like */
        REQUIRE(read_all(fd, header, sizeof header));
        REQUIRE(pccl_frame_verify(header) == NULL && pccl_frame_decode(header, frame) == NULL);
    } while (frame->type == PCCL_FRAME_ACK);
    REQUIRE(frame->payload_bytes <= payload_bytes_max);
    CHECK(read_all(fd, payload, frame->payload_bytes));
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

static inline pccl_frame announcement(const pccl_op_request *request, enum pccl_frame_type type, uint32_t bytes)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    frame.key = request->key;
    frame.shape = request->shape;
    frame.payload_bytes = bytes;
    return frame;
}

static inline pccl_frame segment(
    const pccl_op_request *request, uint32_t chunk, uint32_t index, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_SEGMENT;
    frame.key = request->key;
    frame.chunk = chunk;
    frame.segment = index;
    frame.hop = hop;
    frame.payload_bytes = bytes;
    return frame;
}

static const float ones[CHUNK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static inline void write_ready(const wire *w, uint32_t rank)
{
    write_frame(w->peers[rank], announcement(&w->request, PCCL_FRAME_READY, 0), NULL, 0);
}

static inline void write_segment(
    const wire *w, uint32_t rank, uint32_t chunk, uint32_t index, uint32_t hop, uint32_t bytes)
{
    write_frame(w->peers[rank], segment(&w->request, chunk, index, hop, bytes), ones, bytes);
}

static const float many_ones[COUNT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static inline void write_eager(const wire *w, uint32_t rank, uint32_t bytes)
{
    write_frame(w->peers[rank], announcement(&w->request, PCCL_FRAME_EAGER, bytes), ones, bytes);
}

static inline void wait_for_wire(node *n, uint64_t bytes)
{
    int64_t deadline_ms = now_ms() + WAIT_MS;
    pccl_engine_stats stats;
    do {
        pccl_engine_get_stats(n->engine, &stats);
        if (now_ms() > deadline_ms)
            stop_test("bytes did not come");
    } while (stats.rx_wire_bytes < (uint64_t)greetings * PCCL_FRAME_BYTES + bytes);
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
    pccl_event event = node_wait(&w->n, PCCL_EVENT_LINK_LOST, w->links[rank]);
    CHECK_MSG(strstr(event.detail, why) != NULL, "'%s' instead of '%s'", event.detail, why);
}

#endif
