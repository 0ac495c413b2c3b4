/* conn_rx.c: the receiving half of a connection; conn.h has the theory of operation. */
#include "conn.h"

#include "crc32c.h"

#include <errno.h>
#include <string.h>

enum { RECEIVE_BYTES_MAX = PCCL_SIZE(1 << 20, 1024) }; /* per wake, so that no connection keeps the others waiting */

void pccl_conn_rx_expect_header(pccl_conn *conn)
{
    conn->rx_state = RX_HEADER;
    conn->rx_op = NULL;
    conn->rx_buffered = NULL;
    conn->rx_eager_bytes = 0;
    conn->rx_is_eager = 0;
    conn->rx_keys = 0;
}

/* A frame that counts is all there. */
static void rx_count_frame(pccl_conn *conn, uint32_t frames)
{
    conn->rx_frames += frames;
    conn->link->host->wants_tick = 1;
    if (conn->rx_frames - conn->rx_frames_acked >= PCCL_ACK_FRAMES ||
        conn->rx_bytes - conn->rx_bytes_acked >= PCCL_ACK_BYTES)
        pccl_conn_note_ack_due(conn);
}

void pccl_conn_expect_segment(pccl_conn *conn, pccl_op *op, const pccl_op_inbound *inbound)
{
    PCCL_ASSERT(conn->rx_state == RX_HEADER && inbound->payload_bytes > 0);
    conn->rx_state = inbound->store != NULL ? RX_STORE : RX_REDUCE;
    conn->rx_op = op;
    conn->rx_inbound = *inbound;
    conn->rx_left_bytes = inbound->payload_bytes;
    conn->rx_reduced = 0;
    conn->rx_carry_bytes = 0;
}

void pccl_conn_expect_buffered(
    pccl_conn *conn, struct pccl_unexpected_op *buffered, uint8_t *store, uint32_t payload_bytes)
{
    PCCL_ASSERT(conn->rx_state == RX_HEADER && payload_bytes > 0);
    conn->rx_state = RX_STORE;
    conn->rx_buffered = buffered;
    conn->rx_inbound.store = store;
    conn->rx_inbound.payload_bytes = payload_bytes;
    conn->rx_left_bytes = payload_bytes;
}

void pccl_conn_expect_nothing_of_use(pccl_conn *conn, uint32_t payload_bytes)
{
    PCCL_ASSERT(conn->rx_state == RX_HEADER && payload_bytes > 0);
    conn->rx_state = RX_DISCARD;
    conn->rx_left_bytes = payload_bytes;
}

/* Keys that are in the header's place for one and in the payload. */
static void rx_expect_keys(pccl_conn *conn, const pccl_frame *frame)
{
    PCCL_ASSERT(conn->rx_state == RX_HEADER && frame->payload_bytes <= PCCL_DONE_PAYLOAD_MAX);
    conn->rx_state = RX_STORE;
    conn->rx_keys = pccl_frame_keys(frame);
    pccl_op_key_encode(&frame->key, conn->rx_key_bytes);
    conn->rx_inbound.store = conn->rx_key_bytes + PCCL_KEY_BYTES;
    conn->rx_inbound.payload_bytes = conn->rx_left_bytes = frame->payload_bytes;
}

/* Returns where the next payload bytes go, and how many at most. */
static struct iovec rx_target(pccl_conn *conn)
{
    struct iovec target;
    size_t left_bytes = conn->rx_left_bytes;
    uint8_t *staging = conn->link->host->staging;
    switch (conn->rx_state) {
    case RX_STORE:
        target.iov_base = conn->rx_inbound.store + (conn->rx_inbound.payload_bytes - left_bytes);
        target.iov_len = left_bytes;
        break;
    case RX_REDUCE:
        memcpy(staging, conn->rx_carry, conn->rx_carry_bytes);
        target.iov_base = staging + conn->rx_carry_bytes;
        target.iov_len = pccl_min_size(left_bytes, PCCL_STAGING_BYTES - conn->rx_carry_bytes);
        break;
    default:
        target.iov_base = staging;
        target.iov_len = pccl_min_size(left_bytes, PCCL_STAGING_BYTES);
        break;
    }
    return target;
}

static void rx_check(pccl_conn *conn, const uint8_t *payload, size_t bytes)
{
    if (!conn->wire->is_authentic)
        conn->rx_crc = pccl_crc32c(conn->rx_crc, payload, bytes);
}

/* `bytes` of payload lie there, after what was carried. */
static void rx_reduce(pccl_conn *conn, const uint8_t *payload, size_t bytes)
{
    const uint8_t *held = payload - conn->rx_carry_bytes;
    size_t held_bytes = conn->rx_carry_bytes + bytes;
    size_t elements = held_bytes / conn->rx_op->element_bytes;
    size_t used_bytes = elements * conn->rx_op->element_bytes;
    pccl_op_reduce(conn->rx_op, &conn->rx_inbound, conn->rx_reduced, held, elements,
        conn->wire->is_authentic ? NULL : &conn->rx_crc);
    conn->rx_reduced += (uint32_t)elements;
    conn->rx_carry_bytes = (uint32_t)(held_bytes - used_bytes);
    memcpy(conn->rx_carry, held + used_bytes, conn->rx_carry_bytes);
}

static void rx_blame(pccl_conn *conn, const char *broken_rule)
{
    if (broken_rule == pccl_out_of_memory) {
        pccl_host_fail(conn->link->host, ENOMEM, "there is no memory to keep what another peer has announced");
        return;
    }
    pccl_link_fail(conn->link, 0, "connection %u: protocol error: %s", conn->number, broken_rule);
}

/* All of them are there. */
static void rx_hear_keys(pccl_conn *conn, uint32_t count)
{
    pccl_conn_host *host = conn->link->host;
    for (uint32_t i = 0; i < count && !pccl_conn_is_over(conn); i++) {
        pccl_op_key key = pccl_op_key_decode(conn->rx_key_bytes + i * PCCL_KEY_BYTES);
        const char *broken_rule = host->on_done(host, conn, &key);
        if (broken_rule != NULL)
            rx_blame(conn, broken_rule);
    }
}

/* `bytes` of payload lie where rx_target said, or where rx_reduces_at has allowed. */
static void rx_advance(pccl_conn *conn, const uint8_t *payload, size_t bytes)
{
    pccl_conn_host *host = conn->link->host;
    conn->rx_left_bytes -= (uint32_t)bytes;
    conn->rx_bytes += bytes;
    host->wants_tick = 1;
    if (conn->rx_keys == 0) {
        pccl_count(&host->counters.rx_payload_bytes, bytes);
        conn->link->rx_payload_bytes += bytes;
    }
    if (conn->rx_state == RX_REDUCE)
        rx_reduce(conn, payload, bytes);
    else
        rx_check(conn, payload, bytes);
    if (conn->rx_left_bytes == 0) {
        if (!conn->wire->is_authentic && conn->rx_crc != conn->rx_expected_crc) {
            pccl_conn_lose(conn, 0, "wrong payload checksum");
            return;
        }
        pccl_op *op = conn->rx_op;
        struct pccl_unexpected_op *buffered = conn->rx_buffered;
        uint32_t keys = conn->rx_keys;
        PCCL_ASSERT(conn->rx_state != RX_REDUCE || conn->rx_carry_bytes == 0);
        if (conn->rx_eager_bytes > 0 && buffered == NULL)
            pccl_link_release_eager(conn->link, conn->rx_eager_bytes);
        pccl_conn_rx_expect_header(conn);
        rx_count_frame(conn, keys > 0 ? keys : 1);
        if (keys > 0)
            rx_hear_keys(conn, keys);
        else if (op != NULL)
            host->on_arrived(host, op, &conn->rx_inbound);
        else if (buffered != NULL)
            host->on_buffered(host, buffered);
    }
}

static void rx_header(pccl_conn *conn, const uint8_t *header)
{
    pccl_frame frame;
    const char *damage = pccl_frame_verify(header);
    if (damage != NULL) {
        pccl_conn_lose(conn, 0, "%s", damage);
        return;
    }
    const char *broken_rule = pccl_frame_decode(header, &frame);
    if (broken_rule == NULL && (frame.type == PCCL_FRAME_HELLO) != (conn->peer_number == 0))
        broken_rule = "HELLO has to come first and once";
    if (broken_rule == NULL && pccl_conn_acked(conn, frame.received_frames) != 0)
        broken_rule = "more received than was sent";
    if (broken_rule == NULL && frame.type == PCCL_FRAME_HELLO) {
        pccl_conn_note_hello(conn, frame.connection);
        return;
    }
    if (broken_rule == NULL && frame.type == PCCL_FRAME_ACK) {
        conn->has_moved |= frame.received_bytes != conn->peer_received_bytes;
        conn->peer_received_bytes = frame.received_bytes;
        return;
    }
    if (broken_rule == NULL) {
        conn->rx_crc = 0;
        conn->rx_expected_crc = frame.payload_crc;
        frame.has_payload_crc = !conn->wire->is_authentic;
        conn->rx_is_eager = frame.type == PCCL_FRAME_EAGER;
        if (frame.type != PCCL_FRAME_DONE)
            broken_rule = conn->link->host->on_header(conn->link->host, conn, &frame);
        else if (frame.payload_bytes > 0)
            rx_expect_keys(conn, &frame);
        else
            broken_rule = conn->link->host->on_done(conn->link->host, conn, &frame.key);
        if (broken_rule == NULL && frame.payload_bytes == 0)
            rx_count_frame(conn, 1);
    }
    if (broken_rule != NULL)
        rx_blame(conn, broken_rule);
}

/* Handles what was read ahead; what remains is less than a header. */
static void rx_consume_ahead(pccl_conn *conn)
{
    while (!pccl_conn_is_over(conn)) {
        size_t bytes = conn->rx_ahead_end - conn->rx_ahead_begin;
        const uint8_t *at = conn->rx_ahead + conn->rx_ahead_begin;
        if (conn->rx_state == RX_HEADER) {
            if (bytes < PCCL_FRAME_BYTES)
                break;
            conn->rx_ahead_begin += PCCL_FRAME_BYTES;
            rx_header(conn, at);
        } else {
            if (bytes == 0)
                break;
            struct iovec target = rx_target(conn);
            size_t n = pccl_min_size(bytes, target.iov_len);
            memcpy(target.iov_base, at, n);
            conn->rx_ahead_begin += (uint32_t)n;
            rx_advance(conn, target.iov_base, n);
        }
    }
    size_t rest = conn->rx_ahead_end - conn->rx_ahead_begin;
    if (rest < PCCL_FRAME_BYTES) {
        memmove(conn->rx_ahead, conn->rx_ahead + conn->rx_ahead_begin, rest);
        conn->rx_ahead_begin = 0;
        conn->rx_ahead_end = (uint32_t)rest;
    }
}

/* The wire has received so many more bytes, and answered with `n`. */
static void rx_note_received(pccl_conn *conn, ssize_t n, uint64_t bytes)
{
    if (bytes > 0) {
        if (conn->nomem == 0)
            conn->retry_delay_ms = 0;
        pccl_count(&conn->link->host->counters.rx_wire_bytes, bytes);
        conn->has_received = 1;
    }
    if (n == 0)
        pccl_conn_lose(conn, 0, "closed by the other side");
    else if (n < 0 && n != -EAGAIN)
        pccl_conn_fail_call(conn, "receive", (int)-n, PCCL_POLL_IN);
}

/* Nonzero if payload that lies there is reduced from there, and need not be copied to the staging buffer. */
static int rx_reduces_at(const pccl_conn *conn, const uint8_t *at)
{
    return conn->rx_state == RX_REDUCE && conn->rx_carry_bytes == 0 && (uintptr_t)at % conn->rx_op->element_bytes == 0;
}

/* Handles bytes of the stream that are in a buffer of the wire. */
static void rx_unpack(pccl_conn *conn, const uint8_t *at, size_t bytes)
{
    while (bytes > 0 && !pccl_conn_is_over(conn)) {
        size_t n;
        if (conn->rx_state == RX_HEADER) {
            n = pccl_min_size(bytes, PCCL_FRAME_BYTES - conn->rx_ahead_end);
            memcpy(conn->rx_ahead + conn->rx_ahead_end, at, n);
            conn->rx_ahead_end += (uint32_t)n;
            if (conn->rx_ahead_end == PCCL_FRAME_BYTES) {
                conn->rx_ahead_end = 0;
                rx_header(conn, conn->rx_ahead);
            }
        } else {
            struct iovec target = rx_target(conn);
            n = pccl_min_size(bytes, target.iov_len);
            if (rx_reduces_at(conn, at)) {
                rx_advance(conn, at, n);
            } else {
                memcpy(target.iov_base, at, n);
                rx_advance(conn, target.iov_base, n);
            }
        }
        at += n;
        bytes -= n;
    }
}

static void rx_receive_views(pccl_conn *conn)
{
    pccl_wire *wire = conn->wire;
    uint64_t begin = wire->received_bytes;
    ssize_t n = 1;
    while (n > 0 && !pccl_conn_is_over(conn)) {
        const uint8_t *at;
        uint64_t before = wire->received_bytes;
        n = wire->type->view(wire, &at, before - begin < RECEIVE_BYTES_MAX);
        rx_note_received(conn, n, wire->received_bytes - before);
        if (n > 0)
            rx_unpack(conn, at, (size_t)n);
    }
}

void pccl_conn_receive(pccl_conn *conn)
{
    pccl_wire *wire = conn->wire;
    if (wire->type->view != NULL) {
        rx_receive_views(conn);
        return;
    }
    size_t received_bytes = 0;
    while (!pccl_conn_is_over(conn) && received_bytes < RECEIVE_BYTES_MAX) {
        struct iovec iov[2];
        int iov_count = 0;
        size_t payload_bytes = 0;
        if (conn->rx_state != RX_HEADER) {
            iov[0] = rx_target(conn);
            payload_bytes = iov[0].iov_len;
            iov_count = 1;
        }
        size_t wanted_bytes = payload_bytes;
        if (payload_bytes == conn->rx_left_bytes || conn->rx_state == RX_HEADER) {
            iov[iov_count].iov_base = conn->rx_ahead + conn->rx_ahead_end;
            iov[iov_count].iov_len = READ_AHEAD_BYTES - conn->rx_ahead_end;
            wanted_bytes += iov[iov_count].iov_len;
            iov_count++;
        }
        ssize_t received = wire->type->receive(wire, iov, iov_count);
        size_t n = received > 0 ? (size_t)received : 0;
        rx_note_received(conn, received, n);
        if (n == 0)
            return;
        received_bytes += n;
        size_t direct_bytes = pccl_min_size(n, payload_bytes);
        conn->rx_ahead_end += (uint32_t)(n - direct_bytes);
        if (direct_bytes > 0)
            rx_advance(conn, iov[0].iov_base, direct_bytes);
        rx_consume_ahead(conn);
        if (n < wanted_bytes)
            return;
    }
}

void pccl_conn_release_rx(pccl_conn *conn, const pccl_op *op)
{
    if (conn->rx_op != op)
        return;
    if (conn->rx_state == RX_REDUCE) /* what waits there is checksummed with the rest of its element */
        rx_check(conn, conn->rx_carry, conn->rx_carry_bytes);
    conn->rx_op = NULL;
    conn->rx_state = RX_DISCARD;
}

void pccl_conn_release_buffered(pccl_conn *conn)
{
    PCCL_ASSERT(conn->rx_buffered != NULL && conn->rx_eager_bytes > 0);
    conn->rx_buffered = NULL;
    conn->rx_state = RX_DISCARD;
}
