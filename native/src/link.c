#include "link.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pccl_link *pccl_link_create(uint64_t id)
{
    pccl_link *link = calloc(1, sizeof *link);
    if (link == NULL)
        return NULL;
    link->id = id;
    pccl_list_init(&link->in_links);
    pccl_list_init(&link->in_failed);
    pccl_list_init(&link->in_pending);
    pccl_list_init(&link->conns);
    pccl_list_init(&link->free_conns);
    pccl_list_init(&link->ready_ops);
    pccl_list_init(&link->active_ops);
    pccl_list_init(&link->announced);
    return link;
}

void pccl_link_destroy(pccl_link *link)
{
    PCCL_ASSERT(pccl_list_is_empty(&link->conns) && pccl_list_is_empty(&link->announced));
    free(link);
}

void pccl_link_adopt(pccl_link *link, pccl_conn *conn)
{
    conn->link = link;
    conn->number = ++link->conns_added;
    link->conns_count++;
    pccl_list_append(&link->conns, &conn->in_conns);
    pccl_list_append(&link->free_conns, &conn->in_free);
}

void pccl_link_fail(pccl_link *link, int system_error, const char *format, ...)
{
    if (link->is_failed)
        return;
    link->is_failed = 1;
    link->system_error = system_error;
    va_list args;
    va_start(args, format);
    vsnprintf(link->detail, sizeof link->detail, format, args);
    va_end(args);
    pccl_list_append(&link->host->failed_links, &link->in_failed);
}

void pccl_link_note_pending(pccl_link *link)
{
    if (!link->is_failed && !pccl_list_is_member(&link->in_pending))
        pccl_list_append(&link->host->pending_links, &link->in_pending);
}

/* Eager payload */

static uint64_t eager_charge(uint32_t payload_bytes)
{
    return (uint64_t)payload_bytes + PCCL_EAGER_OVERHEAD_BYTES;
}

int pccl_link_reserve_eager(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    uint64_t reserved_bytes = eager->reserved_bytes + eager_charge(payload_bytes);
    if (reserved_bytes - eager->credited_bytes > PCCL_EAGER_WINDOW_BYTES)
        return 0;
    eager->reserved_bytes = reserved_bytes;
    return 1;
}

void pccl_link_cancel_eager(pccl_link *link, uint32_t payload_bytes)
{
    link->eager.reserved_bytes -= eager_charge(payload_bytes);
    PCCL_ASSERT(link->eager.reserved_bytes >= link->eager.sent_bytes);
}

const char *pccl_link_on_credit(pccl_link *link, uint64_t eager_bytes)
{
    if (eager_bytes > link->eager.sent_bytes)
        return "credit for what was not sent";
    /* Frames of one link may arrive in any order. */
    link->eager.credited_bytes = pccl_max_u64(link->eager.credited_bytes, eager_bytes);
    return NULL;
}

const char *pccl_link_on_eager(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    eager->received_bytes += eager_charge(payload_bytes);
    if (eager->received_bytes - eager->reported_bytes > PCCL_EAGER_WINDOW_BYTES)
        return "more eager payload than allowed";
    return NULL;
}

void pccl_link_let_go(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    eager->let_go_bytes += eager_charge(payload_bytes);
    PCCL_ASSERT(eager->let_go_bytes <= eager->received_bytes);
    if (eager->let_go_bytes - eager->reported_bytes < PCCL_EAGER_WINDOW_BYTES / 4)
        return;
    eager->is_credit_due = 1;
    pccl_link_note_pending(link);
}

static void link_add_credit(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_CREDIT;
    frame.eager_bytes = link->eager.reported_bytes = link->eager.let_go_bytes;
    link->eager.is_credit_due = 0;
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
}

/* What is to be sent */

static void link_add_announcement(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->ready_ops.next, pccl_op_peer, in_ready);
    pccl_list_remove(&peer->in_ready);
    int is_eager = peer->announcement == PCCL_ANNOUNCE_EAGER;
    PCCL_ASSERT(peer->announcement != PCCL_ANNOUNCE_NOTHING);
    peer->announcement = PCCL_ANNOUNCE_NOTHING;
    if (is_eager) {
        uint32_t index;
        const uint8_t *payload = pccl_op_take_eager(peer, &frame, &index);
        link->eager.sent_bytes += eager_charge(frame.payload_bytes);
        pccl_conn_add(conn, &frame, payload, peer->op, index);
        if (peer->is_heard && pccl_op_has_sendable(peer))
            pccl_list_append(&link->active_ops, &peer->in_active);
        return;
    }
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_READY;
    frame.key = peer->op->request.key;
    frame.shape = peer->op->request.shape;
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
}

static void link_add_segment(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    uint32_t index;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->active_ops.next, pccl_op_peer, in_active);
    pccl_list_remove(&peer->in_active);
    const uint8_t *payload = pccl_op_take_sendable(peer, &frame, &index);
    pccl_conn_add(conn, &frame, payload, peer->op, index);
    if (pccl_op_has_sendable(peer))
        pccl_list_append(&link->active_ops, &peer->in_active);
}

static int link_has_work(const pccl_link *link)
{
    return link->eager.is_credit_due || !pccl_list_is_empty(&link->ready_ops) ||
           !pccl_list_is_empty(&link->active_ops);
}

/* Where there are several connections they had better share what there is: each has a window of its own. */
static void link_fill(pccl_link *link, pccl_conn *conn)
{
    enum { BATCH_BYTES_MAX = 256 << 10, BATCH_BYTES_MIN = 32 << 10 };
    size_t batch_bytes_max = pccl_max_size(BATCH_BYTES_MIN, BATCH_BYTES_MAX / link->conns_count);
    while (link_has_work(link) && pccl_conn_has_room(conn, batch_bytes_max)) {
        if (link->eager.is_credit_due)
            link_add_credit(link, conn);
        else if (!pccl_list_is_empty(&link->ready_ops))
            link_add_announcement(link, conn);
        else
            link_add_segment(link, conn);
    }
}

int pccl_link_send(pccl_link *link, size_t bytes_max)
{
    size_t sent_bytes = 0;
    while (!link->is_failed && link_has_work(link) && !pccl_list_is_empty(&link->free_conns)) {
        if (sent_bytes >= bytes_max)
            return 1;
        pccl_conn *conn = PCCL_CONTAINER_OF(link->free_conns.next, pccl_conn, in_free);
        pccl_list_remove(&conn->in_free);
        link_fill(link, conn);
        sent_bytes += conn->tx_batch_bytes;
        if (pccl_conn_flush(conn))
            pccl_list_append(&link->free_conns, &conn->in_free);
        else if (!link->is_failed)
            pccl_poller_change(link->host->poller, &conn->poll, PCCL_POLL_IN | PCCL_POLL_OUT);
    }
    return 0;
}
