/* uplink.h: the links that lead far away, as far as they share what this machine can send.
 *
 * As long as there is no limit (pacer.h), a link sends whenever it has something to send and a connection is free.
 * With a limit, all but segments still goes like that. A link that has segments, and a connection free for them, waits
 * for its turns. Whenever the limit allows, the one that has least under way gets the next, on the connection that has
 * least under way, unless the system has not even sent what it was given before. So what is under way is divided
 * evenly, and neither a receiver nor a stream that is slower than others fills the window that they share.
 *
 * That is only for links that lead far away, where there are several: on shorter ones than a few milliseconds the
 * system's clock is too coarse, and there is little to gain. What waits is come back for every millisecond, and so is
 * what has been acknowledged meanwhile, since no descriptor tells of that. */
#ifndef PCCL_UPLINK_H
#define PCCL_UPLINK_H

#include "list.h"
#include "pacer.h"

struct pccl_link;

typedef struct {
    pccl_pacer pacer;
    pccl_list waiting; /* pccl_link.in_waiting */
    uint8_t is_fixed; /* the limit was given: it holds for all links, and nothing is measured */
    uint8_t is_watched; /* several links lead far away, or that */
} pccl_uplink;

/* fixed_rate: bytes per second; 0: what is measured counts. */
void pccl_uplink_init(pccl_uplink *uplink, uint64_t fixed_rate);

/* Whether the link's segments wait for turns. */
int pccl_uplink_is_limiting(const pccl_uplink *uplink, const struct pccl_link *link);

/* Every now and then, after all links (pccl_link.in_links) were looked at. */
void pccl_uplink_tick(pccl_uplink *uplink, const pccl_list *links);

/* Whenever something may have gone on: measures, and gives turns. */
void pccl_uplink_send(pccl_uplink *uplink, const pccl_list *links);

/* Whether there is anything to come back for in a millisecond. */
static inline int pccl_uplink_is_waiting(const pccl_uplink *uplink) { return !pccl_list_is_empty(&uplink->waiting); }

#endif
