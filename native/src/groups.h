/* groups.h: which epochs of a group are over.
 *
 * A group's number and epochs come from the caller; a group is known from the first op or freeze that names it, and for
 * ever. An epoch is over when it is frozen, or when an op of a later one has been submitted: what peers announce of it
 * after that is of no use to anybody. */
#ifndef PCCL_GROUPS_H
#define PCCL_GROUPS_H

#include "table.h"

typedef struct pccl_group {
    pccl_table_node by_number;
    uint32_t number;
    uint8_t is_frozen;
    uint64_t frozen_epoch;
    uint64_t newest_epoch;
} pccl_group;

typedef struct {
    pccl_table by_number;
} pccl_groups;

void pccl_groups_init(pccl_groups *groups);
void pccl_groups_free(pccl_groups *groups);

pccl_group *pccl_groups_find(const pccl_groups *groups, uint32_t number); /* NULL: none */

/* `spare`, all zeros, becomes the group or is freed. */
pccl_group *pccl_groups_find_or_add(pccl_groups *groups, uint32_t number, pccl_group *spare);

int pccl_group_has_frozen(const pccl_group *group, uint64_t epoch);

#endif
