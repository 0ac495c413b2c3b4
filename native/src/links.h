/* links.h: the links of an engine: how they are found, and how lost connections and failed links are taken away.
 *
 * pccl_conn_lose and pccl_link_fail only note a loss, since their callers may still point to the connection.
 * Between batches of events, when no caller does, pccl_links_close_lost closes descriptors and posts CONNECTION_LOST
 * and LINK_LOST. A failed link stays known, without connections, until the caller closes it: a link's number is never
 * used twice. */
#ifndef PCCL_LINKS_H
#define PCCL_LINKS_H

#include "conn.h"
#include "event_queue.h"
#include "link.h"
#include "open_ops.h"
#include "table.h"

typedef struct {
    pccl_table by_id;
    pccl_list all; /* pccl_link.in_links */
    uint64_t connections; /* read by any thread */
    pccl_conn_host *host;
    pccl_event_queue *events;
} pccl_links;

void pccl_links_init(pccl_links *links, pccl_conn_host *host, pccl_event_queue *events);
void pccl_links_free(pccl_links *links, pccl_open_ops *ops); /* removes all */

pccl_link *pccl_links_find(const pccl_links *links, uint64_t id); /* NULL: none */

/* Removes the link and all its connections, without an event. */
void pccl_links_remove(pccl_links *links, pccl_open_ops *ops, pccl_link *link);

/* Posts one of the events that were promised for the link. */
void pccl_links_post(pccl_links *links, pccl_link *link, const pccl_event *event);

/* Closes what was lost since the last call, and posts the events. */
void pccl_links_close_lost(pccl_links *links, pccl_open_ops *ops);

#endif
