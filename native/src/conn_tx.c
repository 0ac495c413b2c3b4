/* conn_tx.c: the sending half of a connection; conn.h has the theory of operation. */
#include "conn.h"

#include "crc32c.h"
#include "op_exchange.h"
#include "recorder.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint32_t tx_window(const pccl_conn *conn) { return PCCL_CONN_WINDOW - (conn->tx_counted - conn->tx_acked); }

static int tx_window_is_full(const pccl_conn *conn) { return tx_window(conn) == 0; }

int pccl_conn_is_drained(const pccl_conn *conn) { return !conn->tx_is_under_way; }

int pccl_conn_is_open(const pccl_conn *conn)
{
    return !pccl_conn_is_over(conn) && conn->peer_number != 0 && pccl_conn_is_drained(conn) && !tx_window_is_full(conn);
}

int pccl_conn_has_room(const pccl_conn *conn, size_t batch_bytes_max)
{
    return conn->tx_count < TX_FRAMES_MAX && conn->tx_batch_bytes < batch_bytes_max && !tx_window_is_full(conn);
}

/* Nonzero if a frame with this payload is in the batch yet. */
static int tx_is_left(const pccl_conn *conn, const uint8_t *payload)
{
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++)
        if (conn->tx_frames[i].payload == payload)
            return 1;
    return 0;
}

int pccl_conn_acked(pccl_conn *conn, uint32_t frames)
{
    uint32_t more = frames - conn->tx_acked;
    if (more > conn->tx_counted - conn->tx_acked)
        return -1;
    for (; conn->tx_acked != frames; conn->tx_acked++) {
        const pccl_conn_unacked *unacked = &conn->unacked[conn->tx_acked % PCCL_CONN_WINDOW];
        if (unacked->type == PCCL_FRAME_LOST && unacked->of.lost != NULL)
            pccl_conn_note_lost_frame_acked(unacked->of.lost);
        if (unacked->type != PCCL_FRAME_SEGMENT || unacked->payload_bytes == 0 || unacked->op == NULL ||
            !pccl_relay_passes(unacked->op, unacked->of.segment.chunk))
            continue;
        if (tx_is_left(conn, unacked->of.segment.payload))
            return -1;
        pccl_relay_acknowledged(unacked->of.segment.payload);
    }
    if (more > 0) {
        conn->has_moved = 1;
        pccl_conn_offer(conn);
    }
    return 0;
}

static pccl_conn_unacked *tx_note_unacked(pccl_conn *conn, const pccl_frame *frame)
{
    PCCL_ASSERT(!tx_window_is_full(conn) && conn->peer_number != 0);
    if (conn->tx_counted == conn->tx_acked)
        conn->progress_ms = -1;
    pccl_conn_unacked *unacked = &conn->unacked[conn->tx_counted++ % PCCL_CONN_WINDOW];
    memset(unacked, 0, sizeof *unacked);
    unacked->type = (uint8_t)frame->type;
    if (frame->type == PCCL_FRAME_DONE) {
        unacked->of.key = frame->key;
    } else if (frame->type != PCCL_FRAME_LOST) {
        unacked->payload_bytes = frame->payload_bytes;
        unacked->of.segment.chunk = frame->chunk;
        unacked->of.segment.segment = frame->segment;
        unacked->of.segment.hop = frame->hop;
        unacked->of.segment.destination = frame->destination;
        unacked->of.segment.part_elements = frame->part_elements;
    }
    conn->link->host->wants_tick = 1;
    return unacked;
}

static void tx_add(pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(conn->tx_count < TX_FRAMES_MAX && conn->tx_first == 0 && conn->tx_offset == 0);
    conn->link->host->undrained += pccl_conn_is_drained(conn) ? 1 : 0;
    conn->tx_is_under_way = 1;
    pccl_conn_tx_frame *tx = &conn->tx_frames[conn->tx_count++];
    frame->received_frames = conn->rx_frames_acked = conn->rx_frames;
    conn->rx_bytes_acked = conn->rx_bytes;
    conn->is_ack_due = 0;
    if (!frame->has_payload_crc && !conn->wire->is_authentic)
        frame->payload_crc = pccl_crc32c(0, payload, frame->payload_bytes);
    pccl_frame_encode(frame, tx->header);
    tx->payload = payload;
    tx->payload_bytes = frame->payload_bytes;
    tx->spill = NULL;
    tx->op = payload != NULL ? op : NULL;
    tx->index = index;
    tx->is_done = frame->type == PCCL_FRAME_DONE;
    conn->tx_batch_bytes += PCCL_FRAME_BYTES + frame->payload_bytes;
}

void pccl_conn_add(pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(frame->type != PCCL_FRAME_DONE);
    if (frame->type != PCCL_FRAME_HELLO && frame->type != PCCL_FRAME_ACK) {
        pccl_conn_unacked *unacked = tx_note_unacked(conn, frame);
        unacked->op = op;
        if (op != NULL) {
            unacked->of.segment.payload = payload;
            unacked->of.segment.index = index;
        }
    }
    tx_add(conn, frame, payload, op, index);
}

uint32_t pccl_conn_done_room(const pccl_conn *conn)
{
    uint32_t further = (PCCL_DONE_PAYLOAD_MAX - conn->tx_keys_bytes) / PCCL_KEY_BYTES;
    return (uint32_t)pccl_min_size(tx_window(conn), 1 + further);
}

void pccl_conn_add_done(pccl_conn *conn, const pccl_op_key *keys, uint32_t count)
{
    PCCL_ASSERT(count > 0 && count <= pccl_conn_done_room(conn));
    uint8_t *payload = conn->tx_keys + conn->tx_keys_bytes;
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_DONE;
    for (uint32_t i = 0; i < count; i++) {
        frame.key = keys[i];
        tx_note_unacked(conn, &frame);
        if (i > 0)
            pccl_op_key_encode(&keys[i], payload + (i - 1) * PCCL_KEY_BYTES);
    }
    frame.key = keys[0];
    frame.payload_bytes = (count - 1) * PCCL_KEY_BYTES;
    conn->tx_keys_bytes += frame.payload_bytes;
    tx_add(conn, &frame, payload, NULL, 0);
}

void pccl_conn_add_lost(pccl_conn *conn, pccl_conn *lost)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_LOST;
    frame.connection = lost->number;
    frame.peer_connection = lost->peer_number;
    frame.frames = lost->rx_frames;
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
    conn->unacked[(conn->tx_counted - 1) % PCCL_CONN_WINDOW].of.lost = lost;
}

static void tx_frame_sent(pccl_conn *conn, pccl_conn_tx_frame *tx)
{
    if (!tx->is_done) {
        pccl_count(&conn->link->host->counters.tx_payload_bytes, tx->payload_bytes);
        conn->link->tx_payload_bytes += tx->payload_bytes;
    }
    if (tx->op != NULL) {
        pccl_record_sent(tx->op->record, conn->link->host->now_ns);
        if (pccl_op_sent(tx->op, tx->index, tx->payload_bytes))
            conn->link->host->on_sent(conn->link->host, tx->op);
    }
    free(tx->spill);
    tx->spill = NULL;
}

static void tx_advance(pccl_conn *conn, size_t bytes)
{
    conn->tx_offset += bytes;
    while (conn->tx_first < conn->tx_count) {
        pccl_conn_tx_frame *tx = &conn->tx_frames[conn->tx_first];
        size_t frame_bytes = PCCL_FRAME_BYTES + (size_t)tx->payload_bytes;
        if (conn->tx_offset < frame_bytes)
            return;
        conn->tx_offset -= frame_bytes;
        conn->tx_first++;
        tx_frame_sent(conn, tx);
    }
    PCCL_ASSERT(conn->tx_offset == 0);
    conn->tx_count = conn->tx_first = 0;
    conn->tx_batch_bytes = 0;
    conn->tx_keys_bytes = 0;
}

static int tx_gather(pccl_conn *conn, struct iovec *iov)
{
    int iov_count = 0;
    size_t skip = conn->tx_offset;
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        pccl_conn_tx_frame *tx = &conn->tx_frames[i];
        size_t skip_header = pccl_min_size(skip, PCCL_FRAME_BYTES);
        size_t skip_payload = skip - skip_header;
        if (skip_header < PCCL_FRAME_BYTES) {
            iov[iov_count].iov_base = tx->header + skip_header;
            iov[iov_count++].iov_len = PCCL_FRAME_BYTES - skip_header;
        }
        if (skip_payload < tx->payload_bytes) {
            iov[iov_count].iov_base = (void *)(uintptr_t)(tx->payload + skip_payload);
            iov[iov_count++].iov_len = tx->payload_bytes - skip_payload;
        }
        skip = 0;
    }
    return iov_count;
}

void pccl_conn_tx_drop(pccl_conn *conn)
{
    if (pccl_conn_is_drained(conn))
        return;
    conn->link->host->undrained--;
    conn->tx_is_under_way = 0;
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        free(conn->tx_frames[i].spill);
        conn->tx_frames[i].spill = NULL;
    }
    conn->tx_count = conn->tx_first = 0;
    conn->tx_offset = conn->tx_batch_bytes = 0;
    conn->tx_keys_bytes = 0;
}

PCCL_STATIC_ASSERT(2 * TX_FRAMES_MAX <= (int)PCCL_WIRE_IOV_MAX, batch_in_one_send);

int pccl_conn_flush(pccl_conn *conn)
{
    if (conn->nomem & PCCL_POLL_OUT || conn->send_error != 0)
        return 0;
    if (pccl_conn_is_drained(conn))
        return 1;
    struct iovec iov[2 * TX_FRAMES_MAX];
    pccl_wire *wire = conn->wire;
    uint64_t sent_before = wire->sent_bytes;
    int iov_count = tx_gather(conn, iov);
    ssize_t n = wire->type->send(wire, iov, iov_count);
    pccl_count(&conn->link->host->counters.tx_wire_bytes, wire->sent_bytes - sent_before);
    if (n < 0) {
        pccl_conn_fail_call(conn, "send", (int)-n, PCCL_POLL_OUT);
        return 0;
    }
    if (conn->nomem == 0 && wire->sent_bytes != sent_before)
        conn->retry_delay_ms = 0;
    tx_advance(conn, (size_t)n);
    if (conn->tx_count > 0 || wire->held_bytes > 0)
        return 0;
    conn->tx_is_under_way = 0;
    conn->link->host->undrained--;
    return 1;
}

void pccl_conn_release_tx(pccl_conn *conn, const pccl_op *op)
{
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_unacked *unacked = &conn->unacked[i % PCCL_CONN_WINDOW];
        if (unacked->op == op)
            unacked->op = NULL;
    }
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        pccl_conn_tx_frame *tx = &conn->tx_frames[i];
        if (tx->op != op)
            continue;
        tx->spill = malloc(tx->payload_bytes);
        if (tx->spill != NULL)
            memcpy(tx->spill, tx->payload, tx->payload_bytes);
        else
            pccl_host_fail(conn->link->host, ENOMEM, "there is no memory for the rest of a half-sent frame");
        tx->payload = tx->spill;
        tx->op = NULL;
    }
}
