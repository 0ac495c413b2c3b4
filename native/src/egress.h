/* egress.h: which link may send next, where links to other machines share what this one can send.
 *
 * As long as there is no limit (pacer.h), a link sends whenever it has something to send and a connection is free.
 * With a limit, all but segments still goes like that. A link that has segments, and a connection free for them, waits
 * for its turns. Whenever the limit allows, the one that has least under way gets the next, on the connection that has
 * least under way, unless the system has not even sent what it was given before. So what is under way is divided
 * evenly, and neither a receiver nor a stream that is slower than others fills the window that they share. Where the
 * limit is so low that all has been acknowledged before the next turn, links take turns: one that always has something
 * to send would keep the others waiting for good.
 *
 * That is only for links that lead far away, where there are several: on shorter ones than a few milliseconds the
 * system's clock is too coarse, and there is little to gain. What waits is come back for every millisecond, and so is
 * what has been acknowledged, since no descriptor shows that. */
#ifndef PCCL_EGRESS_H
#define PCCL_EGRESS_H

#include "host.h"

/* fixed_rate: bytes per second; 0: what is measured counts. */
void pccl_egress_init(pccl_egress *egress, uint64_t fixed_rate);

/* Nonzero if there is anything to come back for in a millisecond. */
static inline int pccl_egress_is_waiting(const pccl_egress *egress) { return !pccl_list_is_empty(&egress->waiting); }

/* Every now and then, after all links (pccl_link.in_links) were looked at. */
void pccl_egress_tick(pccl_egress *egress, const pccl_list *links);

/* Measures, and gives turns; to be called whenever something may have changed. */
void pccl_egress_send(pccl_egress *egress, const pccl_list *links);

#endif
