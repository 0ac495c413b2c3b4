#include "conn.h"

#include "crc32c.h"
#include "link.h"
#include "thread.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <linux/sockios.h>
#include <sys/ioctl.h>
#endif
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* SO_NOSIGPIPE does it */
#endif

enum {
    RECEIVE_BYTES_MAX = 1 << 20, /* per wake, so that no connection keeps the others waiting */
    NOT_SENT_LOW_WATER_BYTES = 256 << 10,
    RETRY_DELAY_MS_MAX = 100,
    RETRY_MS_MAX = 10000,
    LOCAL_SEND_BUFFER_BYTES = 256 << 10 /* 64 MiB between two ranks and four took a tenth less than with 4 MiB */
};

static void count(uint64_t *counter, uint64_t bytes)
{
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + bytes, __ATOMIC_RELAXED);
}

int pccl_conn_prepare_socket(int fd)
{
    int on = 1;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return -1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* fails on what is not TCP */
#ifdef TCP_NOTSENT_LOWAT
    int low_water_bytes = NOT_SENT_LOW_WATER_BYTES;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &low_water_bytes, sizeof low_water_bytes);
#endif
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    return 0;
}

static int socket_is_local(int fd)
{
    struct sockaddr_storage ends[2];
    socklen_t sizes[2] = {sizeof ends[0], sizeof ends[1]};
    if (getsockname(fd, (struct sockaddr *)&ends[0], &sizes[0]) != 0 ||
        getpeername(fd, (struct sockaddr *)&ends[1], &sizes[1]) != 0)
        return 0;
    if (ends[0].ss_family == AF_INET)
        return memcmp(&((struct sockaddr_in *)&ends[0])->sin_addr, &((struct sockaddr_in *)&ends[1])->sin_addr,
                      sizeof(struct in_addr)) == 0;
    if (ends[0].ss_family == AF_INET6)
        return memcmp(&((struct sockaddr_in6 *)&ends[0])->sin6_addr, &((struct sockaddr_in6 *)&ends[1])->sin6_addr,
                      sizeof(struct in6_addr)) == 0;
    return ends[0].ss_family == AF_UNIX;
}

/* Only ever makes it smaller. */
static void socket_bound_send_buffer(int fd, int bytes)
{
    int present_bytes = 0;
    socklen_t size = sizeof present_bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &present_bytes, &size) == 0 && present_bytes > 2 * bytes)
        (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

pccl_conn *pccl_conn_create(int fd, pccl_boxes *boxes)
{
    pccl_conn *conn = calloc(1, sizeof *conn);
    if (conn == NULL)
        return NULL;
    conn->poll.fd = fd;
    conn->poll.owner = conn;
    conn->boxes = boxes;
    conn->is_local = (uint8_t)socket_is_local(fd);
    if (conn->is_local)
        socket_bound_send_buffer(fd, LOCAL_SEND_BUFFER_BYTES);
    conn->progress_ms = -1;
    pccl_list_init(&conn->in_conns);
    pccl_list_init(&conn->in_free);
    pccl_list_init(&conn->in_talk);
    pccl_list_init(&conn->in_notices);
    pccl_list_init(&conn->in_resend);
    pccl_list_init(&conn->in_lost);
    pccl_list_init(&conn->in_starved);
    return conn;
}

void pccl_conn_destroy(pccl_conn *conn)
{
    for (unsigned i = 0; i < conn->tx_count; i++)
        free(conn->tx_frames[i].spill);
    pccl_boxes_free(conn->boxes);
    free(conn);
}

static int conn_is_over(const pccl_conn *conn)
{
    return conn->is_lost || conn->link->is_failed || conn->link->host->fault.is_set;
}

static void rx_expect_header(pccl_conn *conn);
static void tx_drop(pccl_conn *conn);

void pccl_conn_lose(pccl_conn *conn, int system_error, const char *format, ...)
{
    if (conn_is_over(conn))
        return;
    va_list args;
    va_start(args, format);
    int length = snprintf(conn->detail, sizeof conn->detail, "connection %u: ", conn->number);
    vsnprintf(conn->detail + length, sizeof conn->detail - (size_t)length, format, args);
    va_end(args);
    conn->system_error = system_error;
    if (conn->link->live_count == 1) {
        pccl_link_fail(conn->link, system_error, "%s", conn->detail);
        return;
    }
    conn->is_lost = 1;
    pccl_list_remove(&conn->in_starved);
    conn->link->host->on_retract(conn->link->host, conn);
    rx_expect_header(conn);
    tx_drop(conn);
    pccl_link_note_lost(conn->link, conn);
}

const char pccl_out_of_memory[] = "out of memory";

void pccl_host_fail(pccl_conn_host *host, int system_error, const char *detail)
{
    if (host->fault.is_set)
        return;
    host->fault.is_set = 1;
    host->fault.system_error = system_error;
    snprintf(host->fault.detail, sizeof host->fault.detail, "%s", detail);
}

void pccl_conn_watch(pccl_conn *conn)
{
    unsigned waits_for = PCCL_POLL_IN | (pccl_conn_is_drained(conn) ? 0u : (unsigned)PCCL_POLL_OUT);
    pccl_poller_change(conn->link->host->poller, &conn->poll, waits_for & ~conn->starved);
}

/* The system may have memory again. */
static void conn_retry_later(pccl_conn *conn, unsigned direction)
{
    int64_t now_ms = pccl_now_ms();
    if (conn->starved == 0 && conn->retry_delay_ms == 0)
        conn->starved_ms = now_ms;
    conn->starved |= direction;
    if (pccl_list_is_member(&conn->in_starved))
        return;
    conn->retry_delay_ms = pccl_min_u32(RETRY_DELAY_MS_MAX, pccl_max_u32(1, 2 * conn->retry_delay_ms));
    conn->retry_ms = now_ms + conn->retry_delay_ms;
    pccl_list_append(&conn->link->host->starved_conns, &conn->in_starved);
}

int64_t pccl_host_retry_ms(const pccl_conn_host *host)
{
    int64_t first_ms = INT64_MAX;
    for (const pccl_list *node = host->starved_conns.next; node != &host->starved_conns; node = node->next) {
        const pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_starved);
        first_ms = conn->retry_ms < first_ms ? conn->retry_ms : first_ms;
    }
    return first_ms;
}

void pccl_host_retry(pccl_conn_host *host, int64_t now_ms)
{
    pccl_list due; /* what is done with one may take another from it */
    pccl_list *next;
    pccl_list_init(&due);
    for (pccl_list *node = host->starved_conns.next; node != &host->starved_conns; node = next) {
        next = node->next;
        if (PCCL_CONTAINER_OF(node, pccl_conn, in_starved)->retry_ms > now_ms)
            continue;
        pccl_list_remove(node);
        pccl_list_append(&due, node);
    }
    while (!pccl_list_is_empty(&due)) {
        pccl_conn *conn = PCCL_CONTAINER_OF(due.next, pccl_conn, in_starved);
        unsigned starved = conn->starved;
        pccl_list_remove(&conn->in_starved);
        conn->starved = 0;
        if (starved & PCCL_POLL_OUT && !conn_is_over(conn) && pccl_conn_flush(conn))
            pccl_link_offer(conn);
        if (starved & PCCL_POLL_IN && !conn_is_over(conn))
            pccl_conn_receive(conn);
        if (!conn_is_over(conn))
            pccl_conn_watch(conn);
    }
}

/* What a system call has failed with, other than that it would block. */
static void conn_fail(pccl_conn *conn, const char *what, int system_error, unsigned direction)
{
    int is_starved = system_error == ENOBUFS || system_error == ENOMEM;
    int is_patient = conn->retry_delay_ms == 0 || pccl_now_ms() - conn->starved_ms < RETRY_MS_MAX;
    if (is_starved && is_patient) {
        conn_retry_later(conn, direction);
        return;
    }
    if (system_error == EBADF || system_error == ENOTSOCK) { /* the other side cannot have done that */
        pccl_host_fail(conn->link->host, system_error, what);
        return;
    }
    pccl_conn_lose(conn, system_error, "%s: %s", what, strerror(system_error));
}

/* In */

static void rx_expect_header(pccl_conn *conn)
{
    conn->rx_state = RX_HEADER;
    conn->rx_op = NULL;
    conn->rx_kept = NULL;
    conn->rx_eager_bytes = 0;
    conn->rx_is_eager = 0;
    conn->rx_keys = 0;
}

/* A frame that counts is all there. */
static void rx_count_frame(pccl_conn *conn, uint32_t frames)
{
    conn->rx_frames += frames;
    conn->link->host->wants_tick = 1;
    if (conn->rx_frames - conn->rx_frames_told >= PCCL_ACK_FRAMES ||
        conn->rx_bytes - conn->rx_bytes_told >= PCCL_ACK_BYTES)
        pccl_link_note_ack_due(conn);
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

void pccl_conn_expect_kept(
    pccl_conn *conn, struct pccl_announcement *kept, uint8_t *store, uint32_t payload_bytes)
{
    PCCL_ASSERT(conn->rx_state == RX_HEADER && payload_bytes > 0);
    conn->rx_state = RX_STORE;
    conn->rx_kept = kept;
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

/* Where the next payload bytes go, and how many at most. */
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

/* What comes out of boxes is authenticated already; its checksum would be one more pass over all bytes. */
static void rx_check(pccl_conn *conn, const uint8_t *payload, size_t bytes)
{
    if (conn->boxes == NULL)
        conn->rx_crc = pccl_crc32c(conn->rx_crc, payload, bytes);
}

/* `bytes` of payload lie in the staging buffer after what was carried. */
static void rx_reduce(pccl_conn *conn, size_t bytes)
{
    const uint8_t *staging = conn->link->host->staging;
    size_t held_bytes = conn->rx_carry_bytes + bytes;
    size_t elements = held_bytes / conn->rx_op->element_bytes;
    size_t used_bytes = elements * conn->rx_op->element_bytes;
    pccl_op_reduce(conn->rx_op, &conn->rx_inbound, conn->rx_reduced, staging, elements,
                   conn->boxes == NULL ? &conn->rx_crc : NULL);
    conn->rx_reduced += (uint32_t)elements;
    conn->rx_carry_bytes = (uint32_t)(held_bytes - used_bytes);
    memcpy(conn->rx_carry, staging + used_bytes, conn->rx_carry_bytes);
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
    for (uint32_t i = 0; i < count && !conn_is_over(conn); i++) {
        pccl_op_key key = pccl_op_key_decode(conn->rx_key_bytes + i * PCCL_KEY_BYTES);
        const char *broken_rule = host->on_done(host, conn, &key);
        if (broken_rule != NULL)
            rx_blame(conn, broken_rule);
    }
}

/* `bytes` of payload lie where rx_target said. */
static void rx_advance(pccl_conn *conn, const uint8_t *payload, size_t bytes)
{
    pccl_conn_host *host = conn->link->host;
    conn->rx_left_bytes -= (uint32_t)bytes;
    conn->rx_bytes += bytes;
    host->wants_tick = 1;
    if (conn->rx_keys == 0) {
        count(&host->counters.rx_payload_bytes, bytes);
        conn->link->rx_payload_bytes += bytes;
    }
    if (conn->rx_state == RX_REDUCE)
        rx_reduce(conn, bytes);
    else
        rx_check(conn, payload, bytes);
    if (conn->rx_left_bytes == 0) {
        if (conn->boxes == NULL && conn->rx_crc != conn->rx_expected_crc) {
            pccl_conn_lose(conn, 0, "wrong payload checksum");
            return;
        }
        pccl_op *op = conn->rx_op;
        struct pccl_announcement *kept = conn->rx_kept;
        uint32_t keys = conn->rx_keys;
        PCCL_ASSERT(conn->rx_state != RX_REDUCE || conn->rx_carry_bytes == 0);
        if (conn->rx_eager_bytes > 0 && kept == NULL)
            pccl_link_let_go(conn->link, conn->rx_eager_bytes);
        rx_expect_header(conn);
        rx_count_frame(conn, keys > 0 ? keys : 1);
        if (keys > 0)
            rx_hear_keys(conn, keys);
        else if (op != NULL)
            host->on_arrived(host, op, &conn->rx_inbound);
        else if (kept != NULL)
            host->on_kept(host, kept);
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
        conn->peer_number = frame.connection;
        pccl_link_offer(conn);
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
    while (!conn_is_over(conn)) {
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

/* How many bytes were read; 0 if there is nothing more to do. */
static size_t rx_read(pccl_conn *conn, const struct iovec *iov, int iov_count)
{
    ssize_t n;
    do
        n = readv(conn->poll.fd, iov, iov_count);
    while (n < 0 && errno == EINTR);
    if (n == 0)
        pccl_conn_lose(conn, 0, "closed by the other side");
    else if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        conn_fail(conn, "receive", errno, PCCL_POLL_IN);
    if (n <= 0)
        return 0;
    if (conn->starved == 0)
        conn->retry_delay_ms = 0;
    count(&conn->link->host->counters.rx_wire_bytes, (uint64_t)n);
    conn->has_received = 1;
    return (size_t)n;
}

/* What was in a box. */
static void rx_unpack(pccl_conn *conn, const uint8_t *plain, size_t bytes)
{
    while (bytes > 0 && !conn_is_over(conn)) {
        size_t n;
        if (conn->rx_state == RX_HEADER) {
            n = pccl_min_size(bytes, PCCL_FRAME_BYTES - conn->rx_ahead_end);
            memcpy(conn->rx_ahead + conn->rx_ahead_end, plain, n);
            conn->rx_ahead_end += (uint32_t)n;
            if (conn->rx_ahead_end == PCCL_FRAME_BYTES) {
                conn->rx_ahead_end = 0;
                rx_header(conn, conn->rx_ahead);
            }
        } else {
            struct iovec target = rx_target(conn);
            n = pccl_min_size(bytes, target.iov_len);
            memcpy(target.iov_base, plain, n);
            rx_advance(conn, target.iov_base, n);
        }
        plain += n;
        bytes -= n;
    }
}

static void rx_receive_boxes(pccl_conn *conn)
{
    size_t received_bytes = 0;
    while (!conn_is_over(conn) && received_bytes < RECEIVE_BYTES_MAX) {
        struct iovec target;
        target.iov_base = pccl_boxes_in(conn->boxes, &target.iov_len);
        size_t n = rx_read(conn, &target, 1);
        received_bytes += n;
        pccl_boxes_received(conn->boxes, n);
        const uint8_t *plain;
        size_t plain_bytes;
        int has_box = 0;
        while (!conn_is_over(conn) && (has_box = pccl_boxes_open(conn->boxes, &plain, &plain_bytes)) > 0)
            rx_unpack(conn, plain, plain_bytes);
        if (has_box < 0)
            pccl_conn_lose(conn, 0, "cannot be decrypted: changed on the way, or not from this peer");
        if (n < target.iov_len)
            return;
    }
}

void pccl_conn_receive(pccl_conn *conn)
{
    if (conn->boxes != NULL) {
        rx_receive_boxes(conn);
        return;
    }
    size_t received_bytes = 0;
    while (!conn_is_over(conn) && received_bytes < RECEIVE_BYTES_MAX) {
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
        size_t n = rx_read(conn, iov, iov_count);
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

void pccl_conn_release_kept(pccl_conn *conn)
{
    PCCL_ASSERT(conn->rx_kept != NULL && conn->rx_eager_bytes > 0);
    conn->rx_kept = NULL;
    conn->rx_state = RX_DISCARD;
}

/* Out */

static uint32_t tx_window(const pccl_conn *conn) { return PCCL_CONN_WINDOW - (conn->tx_counted - conn->tx_acked); }

static int tx_window_is_full(const pccl_conn *conn) { return tx_window(conn) == 0; }

int pccl_conn_is_drained(const pccl_conn *conn) { return conn->tx_count == 0 && conn->tx_boxed_bytes == 0; }

int pccl_conn_is_open(const pccl_conn *conn)
{
    return !conn_is_over(conn) && conn->peer_number != 0 && pccl_conn_is_drained(conn) && !tx_window_is_full(conn);
}

int pccl_conn_has_room(const pccl_conn *conn, size_t batch_bytes_max)
{
    return conn->tx_count < TX_FRAMES_MAX && conn->tx_batch_bytes < batch_bytes_max &&
           !tx_window_is_full(conn);
}

int pccl_conn_acked(pccl_conn *conn, uint32_t frames)
{
    uint32_t more = frames - conn->tx_acked;
    if (more > conn->tx_counted - conn->tx_acked)
        return -1;
    for (; conn->tx_acked != frames; conn->tx_acked++) {
        const pccl_conn_record *record = &conn->records[conn->tx_acked % PCCL_CONN_WINDOW];
        if (record->type == PCCL_FRAME_LOST && record->of.lost != NULL)
            pccl_link_note_notice_received(record->of.lost);
    }
    if (more > 0) {
        conn->has_moved = 1;
        pccl_link_offer(conn);
    }
    return 0;
}

static pccl_conn_record *tx_record(pccl_conn *conn, const pccl_frame *frame)
{
    PCCL_ASSERT(!tx_window_is_full(conn) && conn->peer_number != 0);
    if (conn->tx_counted == conn->tx_acked)
        conn->progress_ms = -1;
    pccl_conn_record *record = &conn->records[conn->tx_counted++ % PCCL_CONN_WINDOW];
    memset(record, 0, sizeof *record);
    record->type = (uint8_t)frame->type;
    if (frame->type == PCCL_FRAME_DONE) {
        record->of.key = frame->key;
    } else if (frame->type != PCCL_FRAME_LOST) {
        record->payload_bytes = frame->payload_bytes;
        record->of.segment.chunk = frame->chunk;
        record->of.segment.segment = frame->segment;
        record->of.segment.hop = frame->hop;
    }
    conn->link->host->wants_tick = 1;
    return record;
}

/* What was recorded, if it counts. */
static void tx_add(pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(conn->tx_count < TX_FRAMES_MAX && conn->tx_first == 0 && conn->tx_offset == 0);
    pccl_conn_tx_frame *tx = &conn->tx_frames[conn->tx_count++];
    frame->received_frames = conn->rx_frames_told = conn->rx_frames;
    conn->rx_bytes_told = conn->rx_bytes;
    conn->is_ack_due = 0;
    if (!frame->has_payload_crc)
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

void pccl_conn_add(
    pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index)
{
    PCCL_ASSERT(frame->type != PCCL_FRAME_DONE);
    if (frame->type != PCCL_FRAME_HELLO && frame->type != PCCL_FRAME_ACK) {
        pccl_conn_record *record = tx_record(conn, frame);
        record->op = op;
        if (op != NULL) {
            record->of.segment.payload = payload;
            record->of.segment.index = index;
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
        tx_record(conn, &frame);
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
    conn->records[(conn->tx_counted - 1) % PCCL_CONN_WINDOW].of.lost = lost;
}

static void tx_frame_sent(pccl_conn *conn, pccl_conn_tx_frame *tx)
{
    if (!tx->is_done) {
        count(&conn->link->host->counters.tx_payload_bytes, tx->payload_bytes);
        conn->link->tx_payload_bytes += tx->payload_bytes;
    }
    if (tx->op != NULL && pccl_op_sent(tx->op, tx->index, tx->payload_bytes))
        conn->link->host->on_sent(conn->link->host, tx->op);
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

static int tx_gather(pccl_conn *conn, struct iovec *iov, size_t *bytes)
{
    int iov_count = 0;
    size_t skip = conn->tx_offset;
    *bytes = 0;
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        pccl_conn_tx_frame *tx = &conn->tx_frames[i];
        size_t skip_header = pccl_min_size(skip, PCCL_FRAME_BYTES);
        size_t skip_payload = skip - skip_header;
        if (skip_header < PCCL_FRAME_BYTES) {
            iov[iov_count].iov_base = tx->header + skip_header;
            iov[iov_count].iov_len = PCCL_FRAME_BYTES - skip_header;
            *bytes += iov[iov_count++].iov_len;
        }
        if (skip_payload < tx->payload_bytes) {
            iov[iov_count].iov_base = (void *)(uintptr_t)(tx->payload + skip_payload);
            iov[iov_count].iov_len = tx->payload_bytes - skip_payload;
            *bytes += iov[iov_count++].iov_len;
        }
        skip = 0;
    }
    return iov_count;
}

/* What the batch still holds is in the records. */
static void tx_drop(pccl_conn *conn)
{
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        free(conn->tx_frames[i].spill);
        conn->tx_frames[i].spill = NULL;
    }
    conn->tx_count = conn->tx_first = 0;
    conn->tx_offset = conn->tx_batch_bytes = conn->tx_boxed_bytes = 0;
    conn->tx_keys_bytes = 0;
}

PCCL_STATIC_ASSERT((int)PCCL_CIPHER_PIECES_MAX >= 2 * TX_FRAMES_MAX, batch_in_a_box);

/* As tx_gather, of boxes: those that are left, or else new ones of as much of the batch as they hold. 0: it cannot be
 * sealed. */
static int tx_gather_boxes(pccl_conn *conn, struct iovec *iov, size_t *bytes)
{
    if (conn->tx_boxed_bytes == 0) {
        size_t plain_bytes;
        int iov_count = tx_gather(conn, iov, &plain_bytes);
        size_t sealed_bytes = pccl_boxes_seal_pieces(conn->boxes, iov, iov_count);
        if (sealed_bytes == 0)
            return 0;
        tx_advance(conn, sealed_bytes);
    }
    iov[0].iov_base = (void *)(uintptr_t)pccl_boxes_out(conn->boxes, bytes);
    iov[0].iov_len = conn->tx_boxed_bytes = *bytes;
    return 1;
}

int pccl_conn_flush(pccl_conn *conn)
{
    if (conn->starved & PCCL_POLL_OUT)
        return 0;
    while (!pccl_conn_is_drained(conn)) {
        struct iovec iov[2 * TX_FRAMES_MAX];
        struct msghdr message;
        size_t bytes;
        int iov_count = conn->boxes == NULL ? tx_gather(conn, iov, &bytes) : tx_gather_boxes(conn, iov, &bytes);
        if (iov_count == 0) {
            pccl_conn_lose(conn, 0, "OpenSSL cannot encrypt");
            return 0;
        }
        memset(&message, 0, sizeof message);
        message.msg_iov = iov;
        message.msg_iovlen = (size_t)iov_count;
        ssize_t n = sendmsg(conn->poll.fd, &message, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                conn_fail(conn, "send", errno, PCCL_POLL_OUT);
            return 0;
        }
        if (conn->starved == 0)
            conn->retry_delay_ms = 0;
        count(&conn->link->host->counters.tx_wire_bytes, (uint64_t)n);
        conn->sent_bytes += (uint64_t)n;
        if (conn->boxes == NULL) {
            tx_advance(conn, (size_t)n);
        } else {
            pccl_boxes_sent(conn->boxes, (size_t)n);
            conn->tx_boxed_bytes -= (size_t)n;
        }
        if ((size_t)n < bytes)
            return 0;
    }
    return 1;
}

void pccl_conn_release_tx(pccl_conn *conn, const pccl_op *op)
{
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_record *record = &conn->records[i % PCCL_CONN_WINDOW];
        if (record->op == op)
            record->op = NULL;
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

void pccl_conn_follow(pccl_conn *conn, const pccl_op *op, const pccl_op_move *move)
{
    if (conn->rx_op == op && conn->rx_state == RX_STORE)
        conn->rx_inbound.store = (uint8_t *)(uintptr_t)pccl_op_moved(move, conn->rx_inbound.store);
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_record *record = &conn->records[i % PCCL_CONN_WINDOW];
        if (record->op == op)
            record->of.segment.payload = pccl_op_moved(move, record->of.segment.payload);
    }
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++) {
        pccl_conn_tx_frame *tx = &conn->tx_frames[i];
        if (tx->op == op)
            tx->payload = pccl_op_moved(move, tx->payload);
    }
}

/* What the system has taken and the other side's system has not acknowledged. Where it does not tell: what the other
 * engine has not. */
static uint64_t conn_lying_bytes(const pccl_conn *conn)
{
#if defined(__linux__)
    int bytes;
    if (ioctl(conn->poll.fd, SIOCOUTQ, &bytes) == 0)
        return (uint64_t)bytes;
#elif defined(SO_NWRITE)
    int bytes;
    socklen_t size = sizeof bytes;
    if (getsockopt(conn->poll.fd, SOL_SOCKET, SO_NWRITE, &bytes, &size) == 0)
        return (uint64_t)bytes;
#endif
    return conn->tx_counted - conn->tx_acked;
}

static uint64_t conn_unsent_bytes(const pccl_conn *conn)
{
#if defined(__linux__)
    int bytes;
    if (ioctl(conn->poll.fd, SIOCOUTQNSD, &bytes) == 0)
        return (uint64_t)bytes;
#else
    (void)conn;
#endif
    return 0;
}

/* Added, and taken neither by the system nor by boxes. */
static size_t tx_left_bytes(const pccl_conn *conn)
{
    size_t bytes = 0;
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++)
        bytes += PCCL_FRAME_BYTES + (size_t)conn->tx_frames[i].payload_bytes;
    return bytes - conn->tx_offset;
}

void pccl_conn_look_under_way(pccl_conn *conn)
{
    size_t left_bytes = tx_left_bytes(conn) + conn->tx_boxed_bytes;
    conn->under_way_bytes = conn_lying_bytes(conn) + left_bytes;
    conn->unsent_bytes = conn_unsent_bytes(conn) + left_bytes;
}

int pccl_conn_has_carried(pccl_conn *conn)
{
    uint64_t lying_bytes = conn_lying_bytes(conn);
    uint64_t could_lie_bytes = conn->lying_bytes + (conn->sent_bytes - conn->looked_at_bytes);
    int has_carried = conn->has_received || lying_bytes < could_lie_bytes;
    conn->has_received = 0;
    conn->looked_at_bytes = conn->sent_bytes;
    conn->lying_bytes = lying_bytes;
    return has_carried;
}

int pccl_conn_tick(pccl_conn *conn, int64_t now_ms)
{
    int is_waiting = conn->tx_acked != conn->tx_counted;
    if (conn->has_moved || !is_waiting || conn->progress_ms < 0)
        conn->progress_ms = now_ms;
    if (conn->has_moved)
        conn->moved_ms = now_ms;
    conn->has_moved = 0;
    if (conn->rx_frames == conn->rx_frames_told && conn->rx_bytes == conn->rx_bytes_told)
        return is_waiting;
    pccl_link_note_ack_due(conn);
    return 1;
}
