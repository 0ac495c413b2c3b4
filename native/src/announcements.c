#include "announcements.h"

#include <stdlib.h>

typedef struct {
    pccl_table_node by_key;
    pccl_list in_link;
    pccl_link *link;
    pccl_op_key key;
    pccl_op_shape shape;
} announcement;

uint64_t pccl_op_key_hash(const pccl_op_key *key)
{
    uint64_t hash = pccl_hash_u64(key->group, key->epoch);
    return pccl_hash_u64(pccl_hash_u64(hash, key->tag), key->sequence);
}

void pccl_announcements_init(pccl_announcements *announcements) { pccl_table_init(&announcements->by_key); }

void pccl_announcements_free(pccl_announcements *announcements)
{
    PCCL_ASSERT(announcements->by_key.count == 0);
    pccl_table_free(&announcements->by_key);
}

static uint64_t announcement_hash(const pccl_link *link, const pccl_op_key *key)
{
    return pccl_hash_u64(pccl_op_key_hash(key), link->id);
}

static announcement *announcement_find(
    const pccl_announcements *announcements, const pccl_link *link, const pccl_op_key *key)
{
    pccl_table_node *node = pccl_table_first(&announcements->by_key, announcement_hash(link, key));
    for (; node != NULL; node = pccl_table_next(node)) {
        announcement *found = PCCL_CONTAINER_OF(node, announcement, by_key);
        if (found->link == link && pccl_op_key_equal(&found->key, key))
            return found;
    }
    return NULL;
}

static void announcement_remove(pccl_announcements *announcements, announcement *gone)
{
    gone->link->announced_count--;
    pccl_list_remove(&gone->in_link);
    pccl_table_remove(&announcements->by_key, &gone->by_key);
    free(gone);
}

const char *pccl_announcements_keep(
    pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key, const pccl_op_shape *shape)
{
    if (announcement_find(announcements, link, key) != NULL)
        return "the same op announced twice";
    if (link->announced_count == PCCL_ANNOUNCEMENTS_PER_LINK_MAX)
        return "too many ops announced";
    announcement *kept = calloc(1, sizeof *kept);
    if (kept == NULL)
        return "no memory for an announcement";
    kept->link = link;
    kept->key = *key;
    kept->shape = *shape;
    pccl_list_init(&kept->in_link);
    pccl_list_append(&link->announced, &kept->in_link);
    pccl_table_insert(&announcements->by_key, &kept->by_key, announcement_hash(link, key));
    link->announced_count++;
    return NULL;
}

int pccl_announcements_take(
    pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key, pccl_op_shape *shape)
{
    announcement *found = announcement_find(announcements, link, key);
    if (found == NULL)
        return 0;
    *shape = found->shape;
    announcement_remove(announcements, found);
    return 1;
}

void pccl_announcements_forget_link(pccl_announcements *announcements, pccl_link *link)
{
    while (!pccl_list_is_empty(&link->announced))
        announcement_remove(announcements, PCCL_CONTAINER_OF(link->announced.next, announcement, in_link));
}

void pccl_announcements_forget_epochs(
    pccl_announcements *announcements, pccl_link *link, uint32_t group, uint64_t epoch)
{
    pccl_list *next;
    for (pccl_list *node = link->announced.next; node != &link->announced; node = next) {
        next = node->next;
        announcement *kept = PCCL_CONTAINER_OF(node, announcement, in_link);
        if (kept->key.group == group && kept->key.epoch <= epoch)
            announcement_remove(announcements, kept);
    }
}
