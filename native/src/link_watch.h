/* link_watch.h: periodic looks at a link: stalled connections, the number of connections, health counters, and dead
 * links. */
#ifndef PCCL_LINK_WATCH_H
#define PCCL_LINK_WATCH_H

#include "conn.h"
#include "link.h"

/* Gives up a connection that has stood still for longer than stall_ms, if another one has moved since. Nonzero if the
 * link needs another look. */
int pccl_link_tick(pccl_link *link, int64_t now_ms, int64_t stall_ms);

/* Reads TCP_INFO of all connections. Returns the limit that more connections would lift. */
enum pccl_limit pccl_link_look(pccl_link *link, int64_t now_ms);

/* Counts the time for which the link was the limit, after a look at all links; the look before it was at `since_ms`. */
void pccl_link_count_full(pccl_link *link, int is_only_full, int64_t since_ms);

/* Fails the link when bytes have been in flight for longer than timeout_ms without an acknowledgement or an arrival on
 * any of its connections. `starts_anew`: forget the time before. Nonzero if the link needs another look. */
int pccl_link_watch(pccl_link *link, int64_t now_ms, int64_t timeout_ms, int starts_anew);

/* Returns the bytes in flight on all connections. */
uint64_t pccl_link_look_under_way(pccl_link *link);

/* Adds the counters since the last call to `round`. Nonzero if bytes were delivered. */
int pccl_link_add_to_round(pccl_link *link, pccl_pacer_round *round);

#endif
