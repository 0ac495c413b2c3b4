#include "conn.h"

#include "os.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { UNSENT_BYTES_MIN = 16 << 10, RETRY_DELAY_MS_MAX = 100, RETRY_MS_MAX = 10000 };

pccl_conn *pccl_conn_create(pccl_wire *wire)
{
    pccl_conn *conn = calloc(1, sizeof *conn);
    if (conn == NULL)
        return NULL;
    conn->wire = wire;
    conn->waits_for = PCCL_POLL_IN;
    conn->progress_ms = -1;
    pccl_list_init(&conn->in_conns);
    pccl_list_init(&conn->in_free);
    pccl_list_init(&conn->in_talk);
    pccl_list_init(&conn->in_lost_frames);
    pccl_list_init(&conn->in_resend);
    pccl_list_init(&conn->in_lost);
    pccl_list_init(&conn->in_nomem);
    pccl_list_init(&conn->in_ending);
    return conn;
}

void pccl_conn_destroy(pccl_conn *conn)
{
    pccl_conn_tx_drop(conn);
    pccl_conn_close(conn);
    free(conn);
}

void pccl_conn_close(pccl_conn *conn)
{
    if (conn->wire != NULL)
        conn->wire->type->close(conn->wire);
    conn->wire = NULL;
}

/* What a slow connection has been given, faster ones cannot take over: the more connections, the less for each. */
static void link_bound_unsent(const pccl_link *link)
{
    int bytes = (int)pccl_max_size(UNSENT_BYTES_MIN, 2 * PCCL_WIRE_UNSENT_BYTES_MAX / link->live_count);
    if (link->is_local || bytes >= PCCL_WIRE_UNSENT_BYTES_MAX)
        return;
    for (const pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_wire *wire = PCCL_CONTAINER_OF(node, const pccl_conn, in_conns)->wire;
        if (!wire->takes_over)
            wire->type->bound_unsent(wire, bytes);
    }
}

void pccl_conn_join(pccl_conn *conn, pccl_link *link)
{
    conn->link = link;
    conn->number = ++link->conns_added;
    link->conns_count++;
    link->live_count++;
    link->over_count += conn->wire->takes_over;
    pccl_list_append(&link->conns, &conn->in_conns);
    link_bound_unsent(link);
    conn->is_hello_due = 1;
    link->host->wants_tick = 1;
    pccl_conn_offer(conn);
}

void pccl_conn_offer(pccl_conn *conn)
{
    pccl_link *link = conn->link;
    if (conn->is_lost || link->is_failed)
        return;
    if ((conn->is_hello_due || conn->is_ack_due) && pccl_conn_is_drained(conn) &&
        !pccl_list_is_member(&conn->in_talk)) {
        pccl_list_append(&link->talk_conns, &conn->in_talk);
        pccl_link_note_pending(link);
    }
    int is_chosen = link->first_choice == NULL || link->first_choice == conn;
    if (is_chosen && pccl_conn_is_open(conn) && !pccl_list_is_member(&conn->in_free)) {
        pccl_list_append(&link->free_conns, &conn->in_free);
        pccl_link_note_pending(link);
    }
}

/* Chooses the connection that carries the link's frames from now on, if one of them takes over. */
static void link_choose(pccl_link *link)
{
    link->first_choice = NULL;
    for (pccl_list *node = link->conns.next; node != &link->conns && link->first_choice == NULL; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->wire->takes_over && !conn->is_lost && conn->peer_number != 0)
            link->first_choice = conn;
    }
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        pccl_list_remove(&conn->in_free);
        pccl_conn_offer(conn);
    }
}

void pccl_conn_note_hello(pccl_conn *conn, uint32_t peer_number)
{
    conn->peer_number = peer_number;
    if (conn->wire->takes_over)
        link_choose(conn->link);
    else
        pccl_conn_offer(conn);
}

void pccl_conn_note_ack_due(pccl_conn *conn)
{
    conn->is_ack_due = 1;
    pccl_conn_offer(conn);
}

void pccl_conn_lose(pccl_conn *conn, int system_error, const char *format, ...)
{
    if (pccl_conn_is_over(conn))
        return;
    va_list args;
    va_start(args, format);
    int length = snprintf(conn->detail, sizeof conn->detail, "connection %u: ", conn->number);
    vsnprintf(conn->detail + length, sizeof conn->detail - (size_t)length, format, args);
    va_end(args);
    conn->system_error = system_error;
    unsigned others = conn->link->live_count - 1;
    if (!conn->wire->takes_over)
        others -= conn->link->over_count;
    if (others == 0) {
        pccl_link_fail(conn->link, system_error, "%s", conn->detail);
        return;
    }
    conn->is_lost = 1;
    pccl_list_remove(&conn->in_nomem);
    pccl_list_remove(&conn->in_ending);
    conn->link->host->on_retract(conn->link->host, conn);
    pccl_conn_rx_expect_header(conn);
    pccl_conn_tx_drop(conn);
    pccl_conn_note_lost(conn);
}

void pccl_conn_watch(pccl_conn *conn)
{
    unsigned waits_for = PCCL_POLL_IN | (pccl_conn_is_drained(conn) ? 0u : (unsigned)PCCL_POLL_OUT);
    waits_for &= ~conn->nomem;
    if (waits_for == conn->waits_for)
        return;
    conn->waits_for = waits_for;
    conn->wire->type->want(conn->wire, waits_for);
}

/* Without memory */

/* The system may have memory again: puts the connection among those that are tried again. */
static void conn_retry_later(pccl_conn *conn, unsigned direction)
{
    int64_t now_ms = pccl_now_ms();
    if (conn->nomem == 0 && conn->retry_delay_ms == 0)
        conn->nomem_ms = now_ms;
    conn->nomem |= direction;
    if (pccl_list_is_member(&conn->in_nomem))
        return;
    conn->retry_delay_ms = pccl_min_u32(RETRY_DELAY_MS_MAX, pccl_max_u32(1, 2 * conn->retry_delay_ms));
    conn->retry_ms = now_ms + conn->retry_delay_ms;
    pccl_list_append(&conn->link->host->nomem_conns, &conn->in_nomem);
}

int64_t pccl_host_retry_ms(const pccl_conn_host *host)
{
    int64_t first_ms = INT64_MAX;
    for (const pccl_list *node = host->nomem_conns.next; node != &host->nomem_conns; node = node->next) {
        const pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_nomem);
        first_ms = conn->retry_ms < first_ms ? conn->retry_ms : first_ms;
    }
    return first_ms;
}

void pccl_host_retry(pccl_conn_host *host, int64_t now_ms)
{
    pccl_list due; /* what is done with one may take another from it */
    pccl_list *next;
    pccl_list_init(&due);
    for (pccl_list *node = host->nomem_conns.next; node != &host->nomem_conns; node = next) {
        next = node->next;
        if (PCCL_CONTAINER_OF(node, pccl_conn, in_nomem)->retry_ms > now_ms)
            continue;
        pccl_list_remove(node);
        pccl_list_append(&due, node);
    }
    while (!pccl_list_is_empty(&due)) {
        pccl_conn *conn = PCCL_CONTAINER_OF(due.next, pccl_conn, in_nomem);
        unsigned nomem = conn->nomem;
        pccl_list_remove(&conn->in_nomem);
        conn->nomem = 0;
        if (nomem & PCCL_POLL_OUT && !pccl_conn_is_over(conn) && pccl_conn_flush(conn))
            pccl_conn_offer(conn);
        if (nomem & PCCL_POLL_IN && !pccl_conn_is_over(conn))
            pccl_conn_receive(conn);
        if (!pccl_conn_is_over(conn))
            pccl_conn_watch(conn);
    }
}

void pccl_conn_fail_call(pccl_conn *conn, const char *what, int system_error, unsigned direction)
{
    if (conn->wire->broken != NULL) {
        pccl_conn_lose(conn, 0, "%s", conn->wire->broken);
        return;
    }
    int is_nomem = system_error == ENOBUFS || system_error == ENOMEM;
    int is_patient = conn->retry_delay_ms == 0 || pccl_now_ms() - conn->nomem_ms < RETRY_MS_MAX;
    if (is_nomem && is_patient) {
        conn_retry_later(conn, direction);
        return;
    }
    if (system_error == EBADF || system_error == ENOTSOCK) { /* the other side cannot have done that */
        pccl_host_fail(conn->link->host, system_error, what);
        return;
    }
    if (direction == PCCL_POLL_OUT) {
        conn->send_error = system_error;
        if (!pccl_list_is_member(&conn->in_ending))
            pccl_list_append(&conn->link->host->ending_conns, &conn->in_ending);
        return;
    }
    pccl_conn_lose(conn, system_error, "%s: %s", what, strerror(system_error));
}

int pccl_host_read_rest(pccl_conn_host *host)
{
    int has_read = 0;
    while (!pccl_list_is_empty(&host->ending_conns) && !host->fault.is_set) {
        pccl_conn *conn = PCCL_CONTAINER_OF(host->ending_conns.next, pccl_conn, in_ending);
        pccl_list_remove(&conn->in_ending);
        has_read = 1;
        uint64_t before;
        do {
            before = host->counters.rx_wire_bytes;
            pccl_conn_receive(conn);
        } while (!pccl_conn_is_over(conn) && host->counters.rx_wire_bytes != before);
        pccl_conn_lose(conn, conn->send_error, "send: %s", strerror(conn->send_error));
    }
    return has_read;
}

/* What is under way */

/* Returns the bytes that were added, and not taken by the wire. */
static size_t tx_left_bytes(const pccl_conn *conn)
{
    size_t bytes = 0;
    for (unsigned i = conn->tx_first; i < conn->tx_count; i++)
        bytes += PCCL_FRAME_BYTES + (size_t)conn->tx_frames[i].payload_bytes;
    return bytes - conn->tx_offset;
}

/* Where systems do not tell, frames that the other engine has not acknowledged count as bytes in flight. */
static void conn_look_at_wire(const pccl_conn *conn, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    if (conn->wire->type->under_way(conn->wire, in_flight_bytes, unsent_bytes) != 0) {
        *in_flight_bytes = conn->tx_counted - conn->tx_acked;
        *unsent_bytes = 0;
    }
}

void pccl_conn_look_under_way(pccl_conn *conn)
{
    size_t left_bytes = tx_left_bytes(conn) + conn->wire->held_bytes;
    conn_look_at_wire(conn, &conn->under_way_bytes, &conn->unsent_bytes);
    conn->under_way_bytes += left_bytes;
    conn->unsent_bytes += left_bytes;
}

int pccl_conn_has_carried(pccl_conn *conn)
{
    uint64_t in_flight_bytes;
    uint64_t unsent_bytes;
    conn_look_at_wire(conn, &in_flight_bytes, &unsent_bytes);
    uint64_t in_flight_max_bytes = conn->in_flight_bytes + (conn->wire->sent_bytes - conn->looked_at_bytes);
    int has_carried = conn->has_received || in_flight_bytes < in_flight_max_bytes;
    conn->has_received = 0;
    conn->looked_at_bytes = conn->wire->sent_bytes;
    conn->in_flight_bytes = in_flight_bytes;
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
    if (conn->rx_frames == conn->rx_frames_acked && conn->rx_bytes == conn->rx_bytes_acked)
        return is_waiting;
    pccl_conn_note_ack_due(conn);
    return 1;
}

static void conn_queue_lost_frame(pccl_conn *lost)
{
    PCCL_ASSERT(lost->is_lost && !lost->is_lost_frame_acked);
    if (lost->peer_number == 0 || pccl_list_is_member(&lost->in_lost_frames))
        return;
    lost->is_lost_frame_queued = 1;
    pccl_list_append(&lost->link->lost_frames, &lost->in_lost_frames);
    pccl_link_note_pending(lost->link);
}

static void conn_forget_if_settled(pccl_conn *lost)
{
    if (lost->wire != NULL || !lost->has_peer_lost_frame || !lost->is_lost_frame_acked ||
        lost->tx_acked != lost->tx_counted)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&lost->in_lost_frames) && !pccl_list_is_member(&lost->in_resend));
    pccl_list_remove(&lost->in_conns);
    pccl_conn_destroy(lost);
}

void pccl_conn_note_lost(pccl_conn *conn)
{
    pccl_link *link = conn->link;
    PCCL_ASSERT(link->live_count > 1);
    link->live_count--;
    link->over_count -= conn->wire->takes_over;
    pccl_list_remove(&conn->in_free);
    pccl_list_remove(&conn->in_talk);
    if (link->first_choice == conn)
        link_choose(link);
    pccl_list_append(&link->host->lost_conns, &conn->in_lost);
    conn_queue_lost_frame(conn);
    /* Notices do not wait to be asked for again: two ends could wait for each other's. */
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_unacked *unacked = &conn->unacked[i % PCCL_CONN_WINDOW];
        if (unacked->type != PCCL_FRAME_LOST)
            continue;
        if (unacked->of.lost != NULL)
            conn_queue_lost_frame(unacked->of.lost);
        unacked->of.lost = NULL;
    }
}

void pccl_conn_note_closed(pccl_conn *conn)
{
    PCCL_ASSERT(conn->wire == NULL);
    pccl_list_append(&conn->link->lost_conns, &conn->in_conns);
    conn_forget_if_settled(conn);
}

void pccl_conn_note_lost_frame_acked(pccl_conn *lost)
{
    lost->is_lost_frame_acked = 1;
    conn_forget_if_settled(lost);
}

static pccl_conn *find_conn(const pccl_list *conns, uint32_t number)
{
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->number == number)
            return conn;
    }
    return NULL;
}

const char *pccl_conn_on_lost(pccl_conn *conn, const pccl_frame *frame)
{
    pccl_link *link = conn->link;
    pccl_conn *lost = find_conn(&link->conns, frame->peer_connection);
    if (lost == NULL)
        lost = find_conn(&link->lost_conns, frame->peer_connection);
    if (lost == NULL && frame->peer_connection <= link->conns_added)
        return NULL; /* settled, and said once more */
    if (lost == NULL || lost == conn || (lost->peer_number != 0 && lost->peer_number != frame->connection))
        return "the loss of an unknown connection";
    if (lost->has_peer_lost_frame)
        return NULL;
    pccl_conn_lose(lost, 0, "given up by the other side");
    if (link->is_failed)
        return NULL; /* the last one that does not take over */
    lost->peer_number = frame->connection;
    lost->has_peer_lost_frame = 1;
    if (pccl_conn_acked(lost, frame->frames) != 0)
        return "more received than was sent";
    if (!lost->is_lost_frame_queued)
        conn_queue_lost_frame(lost);
    if (lost->tx_acked != lost->tx_counted) {
        pccl_list_append(&link->resends, &lost->in_resend);
        pccl_link_note_pending(link);
    }
    conn_forget_if_settled(lost);
    return NULL;
}

pccl_conn_unacked pccl_conn_take_unacked(pccl_conn *lost)
{
    pccl_conn_unacked unacked = lost->unacked[lost->tx_acked++ % PCCL_CONN_WINDOW];
    if (lost->tx_acked == lost->tx_counted) {
        pccl_list_remove(&lost->in_resend);
        conn_forget_if_settled(lost);
    }
    return unacked;
}
