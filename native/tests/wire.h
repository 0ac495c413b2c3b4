/* wire.h: frames to and from an engine, for tests that are its peer themselves, byte by byte. */
#ifndef PCCL_TESTS_WIRE_H
#define PCCL_TESTS_WIRE_H

#include "check.h"
#include "crc32c.h"
#include "engine_world.h"
#include "frame.h"

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

static inline pccl_frame frame_of(enum pccl_frame_type type)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    return frame;
}

/* READY, EAGER or DONE. */
static inline pccl_frame op_frame(const pccl_op_request *request, enum pccl_frame_type type, uint32_t payload_bytes)
{
    pccl_frame frame = frame_of(type);
    frame.key = request->key;
    frame.shape = request->shape;
    frame.payload_bytes = payload_bytes;
    return frame;
}

static inline pccl_frame segment_frame(
    const pccl_op_request *request, uint32_t chunk, uint32_t segment, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame = frame_of(PCCL_FRAME_SEGMENT);
    frame.key = request->key;
    frame.chunk = chunk;
    frame.segment = segment;
    frame.hop = hop;
    frame.payload_bytes = bytes;
    return frame;
}

/* Writes the header, with the checksum of the payload unless that is NULL, and the payload's first `sent_bytes`. */
static inline void write_frame_part(int fd, const pccl_frame *frame, const void *payload, size_t sent_bytes)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame sent = *frame;
    if (payload != NULL)
        sent.payload_crc = pccl_crc32c(0, payload, frame->payload_bytes);
    pccl_frame_encode(&sent, header);
    write_all(fd, header, sizeof header);
    write_all(fd, payload, sent_bytes);
}

static inline void write_frame(int fd, const pccl_frame *frame, const void *payload)
{
    write_frame_part(fd, frame, payload, payload != NULL ? frame->payload_bytes : 0);
}

static inline void write_hello(int fd, uint32_t connection)
{
    pccl_frame frame = frame_of(PCCL_FRAME_HELLO);
    frame.connection = connection;
    write_frame(fd, &frame, NULL);
}

static inline void write_ack(int fd, uint32_t received_frames)
{
    pccl_frame frame = frame_of(PCCL_FRAME_ACK);
    frame.received_frames = received_frames;
    write_frame(fd, &frame, NULL);
}

/* Reads the header of the next frame that is not an ACK: those come when they like. Zero if there is none. */
static inline int read_header_to(int fd, pccl_frame *frame)
{
    uint8_t header[PCCL_FRAME_BYTES];
    memset(frame, 0, sizeof *frame);
    do {
        int is_read = read_all(fd, header, sizeof header);
        CHECK(is_read);
        if (!is_read)
            return 0;
        CHECK(pccl_frame_verify(header) == NULL && pccl_frame_decode(header, frame) == NULL);
    } while (frame->type == PCCL_FRAME_ACK);
    return 1;
}

static inline pccl_frame read_header(int fd)
{
    pccl_frame frame;
    read_header_to(fd, &frame);
    return frame;
}

static inline void read_frame(int fd, pccl_frame *frame, void *payload, size_t payload_bytes_max)
{
    REQUIRE(read_header_to(fd, frame));
    REQUIRE(frame->payload_bytes <= payload_bytes_max);
    CHECK(read_all(fd, payload, frame->payload_bytes));
}

/* Exchanges what begins every connection. */
static inline void greet(int fd, uint32_t connection)
{
    write_hello(fd, connection);
    pccl_frame frame = read_header(fd);
    CHECK(frame.type == PCCL_FRAME_HELLO && frame.connection == connection);
}

static inline void expect_link_lost(node *n, uint64_t link, const char *why)
{
    pccl_event event = node_wait(n, PCCL_EVENT_LINK_LOST, link);
    CHECK_MSG(strstr(event.detail, why) != NULL, "'%s' instead of '%s'", event.detail, why);
}

#endif
