/* link.h: all connections to one peer, and what is to be sent over them.
 *
 * A link has two queues: ops to be announced (READY), and active ops, which have segments to send.
 * Announcements go first; active ops take turns segment by segment, so that a large op does not hold up a
 * small one. Whichever connection is free, that is drained and between frames, takes the next frames. A slow
 * connection is seldom free and so carries less.
 *
 * A link fails as a whole: a lost connection has taken frames with it. Failing is noted at once
 * (pccl_link_fail) and carried out by the host when nothing points to the connections any more. */
#ifndef PCCL_LINK_H
#define PCCL_LINK_H

#include "conn.h"
#include "list.h"
#include "op.h"
#include "pccl_native.h"
#include "table.h"

typedef struct pccl_link {
    uint64_t id;
    pccl_conn_host *host;
    pccl_table_node by_id;
    pccl_list in_links;
    pccl_list in_failed; /* of the core */
    pccl_list in_pending; /* of the core: may have something to send */
    pccl_list conns;
    pccl_list free_conns;
    pccl_list ready_ops; /* pccl_op.in_ready */
    pccl_list active_ops; /* pccl_op.in_active */
    pccl_list announced; /* announcements.h */
    size_t announced_count;
    unsigned conns_count;
    unsigned conns_added;
    uint8_t is_failed; /* stays known, without connections, until it is closed */
    int system_error;
    char detail[sizeof((pccl_event *)0)->detail];
} pccl_link;

pccl_link *pccl_link_create(uint64_t id); /* NULL without memory */
void pccl_link_destroy(pccl_link *link); /* which has no connections left */

void pccl_link_adopt(pccl_link *link, pccl_conn *conn);

/* system_error: an errno, or 0 where the other side is to blame. Only the first failure counts. */
void pccl_link_fail(pccl_link *link, int system_error, const char *format, ...) PCCL_PRINTF(3, 4);

/* Sends up to bytes_max or until no connection is free. Nonzero if there is more to do now. */
int pccl_link_send(pccl_link *link, size_t bytes_max);

#endif
