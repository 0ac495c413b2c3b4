#include "links.h"

#include <string.h>

void pccl_links_init(pccl_links *links, pccl_conn_host *host, pccl_event_queue *events)
{
    pccl_table_init(&links->by_id);
    pccl_list_init(&links->all);
    links->host = host;
    links->events = events;
}

void pccl_links_free(pccl_links *links, pccl_open_ops *ops)
{
    while (!pccl_list_is_empty(&links->all))
        pccl_links_remove(links, ops, PCCL_CONTAINER_OF(links->all.next, pccl_link, in_links));
    pccl_table_free(&links->by_id);
}

pccl_link *pccl_links_find(const pccl_links *links, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&links->by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, by_id);
        if (link->id == id)
            return link;
    }
    return NULL;
}

static void conn_close(pccl_links *links, pccl_conn *conn)
{
    pccl_conn_close(conn);
    __atomic_fetch_sub(&links->connections, 1, __ATOMIC_RELAXED);
}

static void conn_destroy(pccl_conn *conn)
{
    pccl_list_remove(&conn->in_conns);
    pccl_list_remove(&conn->in_free);
    pccl_list_remove(&conn->in_talk);
    pccl_list_remove(&conn->in_lost_frames);
    pccl_list_remove(&conn->in_resend);
    pccl_list_remove(&conn->in_nomem);
    pccl_list_remove(&conn->in_ending);
    pccl_conn_destroy(conn);
}

void pccl_links_post(pccl_links *links, pccl_link *link, const pccl_event *event)
{
    PCCL_ASSERT(link->events_promised > 0);
    link->events_promised--;
    pccl_event_queue_post(links->events, event);
}

/* A lost connection of a link that has others. */
static void conn_close_lost(pccl_links *links, pccl_conn *conn)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_CONNECTION_LOST;
    event.is_udp = conn->wire->takes_over;
    event.id = event.link = conn->link->id;
    event.system_error = conn->system_error;
    memcpy(event.detail, conn->detail, sizeof event.detail);
    conn_close(links, conn);
    pccl_list_remove(&conn->in_lost);
    pccl_list_remove(&conn->in_conns);
    conn->link->conns_count--;
    pccl_links_post(links, conn->link, &event);
    pccl_conn_note_closed(conn);
}

/* Takes all connections from a link, and the link from all that know it but the table of links. */
static void link_strip(pccl_links *links, pccl_open_ops *ops, pccl_link *link)
{
    pccl_open_ops_lose_link(ops, link);
    while (!pccl_list_is_empty(&link->conns)) {
        pccl_conn *conn = PCCL_CONTAINER_OF(link->conns.next, pccl_conn, in_conns);
        conn_close(links, conn);
        pccl_list_remove(&conn->in_lost);
        conn_destroy(conn);
    }
    while (!pccl_list_is_empty(&link->lost_conns))
        conn_destroy(PCCL_CONTAINER_OF(link->lost_conns.next, pccl_conn, in_conns));
    pccl_list_remove(&link->in_pending);
    pccl_list_remove(&link->in_waiting);
    pccl_list_remove(&link->in_failed);
}

static void link_close_failed(pccl_links *links, pccl_open_ops *ops, pccl_link *link)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_LINK_LOST;
    event.id = event.link = link->id;
    event.system_error = link->system_error;
    memcpy(event.detail, link->detail, sizeof event.detail);
    link_strip(links, ops, link);
    pccl_links_post(links, link, &event);
    link->conns_count = 0;
}

void pccl_links_remove(pccl_links *links, pccl_open_ops *ops, pccl_link *link)
{
    link_strip(links, ops, link);
    pccl_event_queue_release(links->events, link->events_promised);
    pccl_table_remove(&links->by_id, &link->by_id);
    pccl_list_remove(&link->in_links);
    pccl_link_destroy(link);
}

void pccl_links_close_lost(pccl_links *links, pccl_open_ops *ops)
{
    pccl_list *next;
    for (pccl_list *node = links->host->lost_conns.next; node != &links->host->lost_conns; node = next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_lost);
        next = node->next;
        if (!conn->link->is_failed)
            conn_close_lost(links, conn);
    }
    while (!pccl_list_is_empty(&links->host->failed_links))
        link_close_failed(links, ops, PCCL_CONTAINER_OF(links->host->failed_links.next, pccl_link, in_failed));
}
