#include "link.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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

static pccl_op *link_next_announcement(pccl_link *link)
{
    if (pccl_list_is_empty(&link->ready_ops))
        return NULL;
    pccl_op *op = PCCL_CONTAINER_OF(link->ready_ops.next, pccl_op, in_ready);
    pccl_list_remove(&op->in_ready);
    return op;
}

static pccl_op *link_next_active(pccl_link *link)
{
    if (pccl_list_is_empty(&link->active_ops))
        return NULL;
    pccl_op *op = PCCL_CONTAINER_OF(link->active_ops.next, pccl_op, in_active);
    pccl_list_remove(&op->in_active);
    return op;
}

static int link_has_work(const pccl_link *link)
{
    return !pccl_list_is_empty(&link->ready_ops) || !pccl_list_is_empty(&link->active_ops);
}

/* Where there are several connections they had better share what there is: each has a window of its own. */
static void link_fill(pccl_link *link, pccl_conn *conn)
{
    enum { BATCH_BYTES_MAX = 256 << 10, BATCH_BYTES_MIN = 32 << 10 };
    size_t batch_bytes_max = pccl_max_size(BATCH_BYTES_MIN, BATCH_BYTES_MAX / link->conns_count);
    while (pccl_conn_has_room(conn, batch_bytes_max)) {
        pccl_frame frame;
        pccl_op *op = link_next_announcement(link);
        if (op != NULL) {
            frame.type = PCCL_FRAME_READY;
            frame.payload_bytes = 0;
            frame.key = op->request.key;
            frame.shape = op->request.shape;
            pccl_conn_add(conn, &frame, NULL, NULL, 0);
            continue;
        }
        op = link_next_active(link);
        if (op == NULL)
            return;
        uint32_t index;
        const uint8_t *payload = pccl_op_take_sendable(op, &frame, &index);
        pccl_conn_add(conn, &frame, payload, op, index);
        if (pccl_op_has_sendable(op))
            pccl_list_append(&link->active_ops, &op->in_active);
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
