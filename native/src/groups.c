#include "groups.h"

#include "list.h"

#include <stdlib.h>

void pccl_groups_init(pccl_groups *groups) { pccl_table_init(&groups->by_number); }

pccl_group *pccl_groups_find(const pccl_groups *groups, uint32_t number)
{
    pccl_table_node *node = pccl_table_first(&groups->by_number, pccl_hash_u64(0, number));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_group *group = PCCL_CONTAINER_OF(node, pccl_group, by_number);
        if (group->number == number)
            return group;
    }
    return NULL;
}

pccl_group *pccl_groups_find_or_add(pccl_groups *groups, uint32_t number, pccl_group *spare)
{
    pccl_group *group = pccl_groups_find(groups, number);
    if (group != NULL) {
        free(spare);
        return group;
    }
    spare->number = number;
    pccl_table_insert(&groups->by_number, &spare->by_number, pccl_hash_u64(0, number));
    return spare;
}

int pccl_group_has_frozen(const pccl_group *group, uint64_t epoch)
{
    return group->is_frozen && epoch <= group->frozen_epoch;
}

void pccl_groups_free(pccl_groups *groups)
{
    for (size_t i = 0; i <= groups->by_number.mask; i++) {
        pccl_table_node *next;
        for (pccl_table_node *node = groups->by_number.buckets[i]; node != NULL; node = next) {
            next = node->next;
            free(PCCL_CONTAINER_OF(node, pccl_group, by_number));
        }
    }
    pccl_table_free(&groups->by_number);
}
