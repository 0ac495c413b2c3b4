/* link_watch.h: what a link is seen to carry, asked every now and then: whether a connection stands still, whether more
 * connections would carry more, whether the link is the limit, and whether anything gets across at all. */
#ifndef PCCL_LINK_WATCH_H
#define PCCL_LINK_WATCH_H

#include "conn.h"
#include "link.h"

/* Gives up a connection that has stood still for longer than stall_ms, if another one has moved since. Nonzero if there
 * is anything to come back for. */
int pccl_link_tick(pccl_link *link, int64_t now_ms, int64_t stall_ms);

/* Asks the system about all connections. Returns what more of them would help against. */
enum pccl_limit pccl_link_look(pccl_link *link, int64_t now_ms);

/* Counts for how long the link has been the limit. To be called after a look at all links; the look before it was at
 * `since_ms`. */
void pccl_link_count_full(pccl_link *link, int is_only_full, int64_t since_ms);

/* Fails the link when bytes have been in flight on it for longer than timeout_ms and nothing has got across, or come
 * in, on any of its connections. `starts_anew`: forget the time before. Nonzero if there is anything to come back
 * for. */
int pccl_link_watch(pccl_link *link, int64_t now_ms, int64_t timeout_ms, int starts_anew);

/* Asks what is under way on all connections, and returns how much. */
uint64_t pccl_link_look_under_way(pccl_link *link);

/* Adds what has happened since the last time. Nonzero if anything was delivered. */
int pccl_link_add_to_round(pccl_link *link, pccl_pacer_round *round);

#endif
