/* conn_loss.c: lost connections, and the frames that were on their way; conn.h has the rules. */
#include "conn.h"

#include "conn_inside.h"

static void conn_queue_notice(pccl_conn *lost)
{
    PCCL_ASSERT(lost->is_lost && !lost->is_notice_acked);
    if (lost->peer_number == 0 || pccl_list_is_member(&lost->in_notices))
        return;
    lost->is_notice_queued = 1;
    pccl_list_append(&lost->link->notices, &lost->in_notices);
    pccl_link_note_pending(lost->link);
}

static void conn_forget_if_settled(pccl_conn *lost)
{
    if (!lost->is_closed || !lost->has_peer_notice || !lost->is_notice_acked || lost->tx_acked != lost->tx_counted)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&lost->in_notices) && !pccl_list_is_member(&lost->in_resend));
    pccl_list_remove(&lost->in_conns);
    pccl_conn_destroy(lost);
}

void pccl_conn_note_lost(pccl_conn *conn)
{
    pccl_link *link = conn->link;
    PCCL_ASSERT(link->live_count > 1);
    link->live_count--;
    pccl_list_remove(&conn->in_free);
    pccl_list_remove(&conn->in_talk);
    pccl_list_append(&link->host->lost_conns, &conn->in_lost);
    conn_queue_notice(conn);
    /* Notices do not wait to be asked for again: two ends could wait for each other's. */
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_unacked *unacked = &conn->unacked[i % PCCL_CONN_WINDOW];
        if (unacked->type != PCCL_FRAME_LOST)
            continue;
        if (unacked->of.lost != NULL)
            conn_queue_notice(unacked->of.lost);
        unacked->of.lost = NULL;
    }
}

void pccl_conn_note_closed(pccl_conn *conn)
{
    conn->is_closed = 1;
    pccl_records_free(conn->records);
    conn->records = NULL;
    pccl_list_append(&conn->link->lost_conns, &conn->in_conns);
    conn_forget_if_settled(conn);
}

void pccl_conn_note_notice_acked(pccl_conn *lost)
{
    lost->is_notice_acked = 1;
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
    if (lost->has_peer_notice)
        return NULL;
    pccl_conn_lose(lost, 0, "given up by the other side");
    lost->peer_number = frame->connection;
    lost->has_peer_notice = 1;
    if (pccl_conn_acked(lost, frame->frames) != 0)
        return "more received than was sent";
    if (!lost->is_notice_queued)
        conn_queue_notice(lost);
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
