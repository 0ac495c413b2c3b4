/* One connection without an engine: what it reports as under way, and how much of it may be unacknowledged. */
#include "check.h"
#include "conn.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/sockios.h>
#endif

enum { PAYLOAD_BYTES = 24 << 10, FRAMES = 8 };

typedef struct {
    pccl_conn_host host;
    pccl_link *link;
    pccl_conn *conn;
    pccl_fd_registry *fds;
    int fd;
    int peer;
} wire;

static int wire_open(wire *w, int send_buffer_bytes)
{
    int fds[2];
    memset(w, 0, sizeof *w);
    pccl_list_init(&w->host.failed_links);
    pccl_list_init(&w->host.lost_conns);
    pccl_list_init(&w->host.pending_links);
    w->link = pccl_link_create(1);
    if (w->link == NULL || socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0)
        return 0;
    (void)setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &send_buffer_bytes, sizeof send_buffer_bytes);
    w->link->host = &w->host;
    w->fd = fds[0];
    w->peer = fds[1];
    w->fds = pccl_fd_registry_create();
    pccl_wire *bytes;
    if (w->fds == NULL || pccl_wire_tcp_open(w->fds, w->fd, &bytes) != 0)
        return 0;
    w->conn = pccl_conn_create(bytes);
    if (w->conn == NULL)
        return 0;
    pccl_conn_join(w->conn, w->link);
    w->conn->peer_number = 1; /* as a HELLO says */
    return 1;
}

static void wire_close(wire *w)
{
    close(w->peer);
    pccl_list_remove(&w->conn->in_conns);
    pccl_list_remove(&w->conn->in_free);
    pccl_list_remove(&w->conn->in_talk);
    pccl_list_remove(&w->link->in_pending);
    pccl_conn_destroy(w->conn);
    pccl_link_destroy(w->link);
    pccl_fd_registry_destroy(w->fds);
}

#if defined(SIOCOUTQ)

/* Of a batch of which the socket has taken some frames and a part of the next, each byte is under way once. */
static void what_is_under_way_is_counted_once(void)
{
    static uint8_t payload[PAYLOAD_BYTES];
    static uint8_t received[4 << 10];
    wire w;
    int partial_batches = 0;
    REQUIRE(wire_open(&w, 2 * PAYLOAD_BYTES));
    size_t added_bytes = 0;
    for (int i = 0; i < FRAMES; i++) {
        pccl_frame frame;
        memset(&frame, 0, sizeof frame);
        frame.type = PCCL_FRAME_SEGMENT;
        frame.payload_bytes = PAYLOAD_BYTES;
        pccl_conn_add(w.conn, &frame, payload, NULL, 0);
        added_bytes += PCCL_FRAME_BYTES + PAYLOAD_BYTES;
    }
    size_t left_bytes = added_bytes;
    while (left_bytes > 0) {
        int is_out = pccl_conn_flush(w.conn);
        int in_flight_bytes;
        REQUIRE(!w.link->is_failed && ioctl(w.fd, SIOCOUTQ, &in_flight_bytes) == 0);
        pccl_conn_look_under_way(w.conn);
        left_bytes = added_bytes - (size_t)w.conn->wire->sent_bytes;
        CHECK(is_out == (left_bytes == 0));
        CHECK_MSG(w.conn->under_way_bytes == (uint64_t)in_flight_bytes + left_bytes, "%zu", left_bytes);
        partial_batches += w.conn->tx_first > 0 && left_bytes > 0;
        REQUIRE(read(w.peer, received, sizeof received) > 0);
    }
    CHECK(partial_batches > 0);
    wire_close(&w);
}

#endif

static void no_more_than_the_window_is_unacknowledged(void)
{
    static uint8_t payload[8];
    static uint8_t received[64 << 10];
    wire w;
    uint32_t sent = 0;
    REQUIRE(wire_open(&w, sizeof received));
    while (pccl_conn_is_open(w.conn) && sent < 2 * PCCL_CONN_WINDOW) {
        pccl_frame frame;
        memset(&frame, 0, sizeof frame);
        frame.type = PCCL_FRAME_SEGMENT;
        frame.payload_bytes = sizeof payload;
        pccl_conn_add(w.conn, &frame, payload, NULL, 0);
        sent++;
        REQUIRE(pccl_conn_flush(w.conn) && read(w.peer, received, sizeof received) > 0);
    }
    CHECK(sent == PCCL_CONN_WINDOW);
    CHECK(pccl_conn_acked(w.conn, sent + 1) != 0 && !pccl_conn_is_open(w.conn));
    CHECK(pccl_conn_acked(w.conn, 1) == 0 && pccl_conn_is_open(w.conn));
    wire_close(&w);
}

int main(void)
{
#if defined(SIOCOUTQ)
    RUN(what_is_under_way_is_counted_once);
#endif
    RUN(no_more_than_the_window_is_unacknowledged);
    return check_summary();
}
