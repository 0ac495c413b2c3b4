/* egress.h: the state of the egress scheduler (egress_scheduler.h): the limit that links to other machines share, and
 * the links that wait for their turns. */
#ifndef PCCL_EGRESS_H
#define PCCL_EGRESS_H

#include "list.h"
#include "pacer.h"

typedef struct {
    pccl_pacer pacer;
    pccl_list waiting; /* pccl_link.in_waiting */
    uint8_t is_fixed; /* the limit was given: it holds for all links, and nothing is measured */
    uint8_t is_watched; /* several links lead far away, or the limit is fixed */
} pccl_egress;

/* fixed_rate: bytes per second; 0: what is measured counts. */
void pccl_egress_init(pccl_egress *egress, uint64_t fixed_rate);

/* Nonzero if a link like this one is among those that share the limit, if there is one. */
int pccl_egress_carries(const pccl_egress *egress, int is_local, uint64_t round_trip_us);

/* Nonzero if segments of such a link wait for turns. */
int pccl_egress_is_limiting(const pccl_egress *egress, int is_local, uint64_t round_trip_us);

/* Nonzero if there is anything to come back for in a millisecond. */
static inline int pccl_egress_is_waiting(const pccl_egress *egress) { return !pccl_list_is_empty(&egress->waiting); }

#endif
