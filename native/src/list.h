/* list.h: an intrusive doubly linked list. A node that is in no list points to itself, so removal is
 * idempotent. */
#ifndef PCCL_LIST_H
#define PCCL_LIST_H

#include "base.h"

typedef struct pccl_list {
    struct pccl_list *previous;
    struct pccl_list *next;
} pccl_list;

#define PCCL_CONTAINER_OF(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

static inline void pccl_list_init(pccl_list *node) { node->previous = node->next = node; }

static inline int pccl_list_is_empty(const pccl_list *list) { return list->next == list; }

static inline int pccl_list_is_member(const pccl_list *node) { return node->next != node; }

static inline void pccl_list_append(pccl_list *list, pccl_list *node)
{
    PCCL_ASSERT(!pccl_list_is_member(node));
    node->previous = list->previous;
    node->next = list;
    list->previous->next = node;
    list->previous = node;
}

static inline void pccl_list_remove(pccl_list *node)
{
    node->previous->next = node->next;
    node->next->previous = node->previous;
    pccl_list_init(node);
}

#endif
