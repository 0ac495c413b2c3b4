#include "unexpected.h"

#include "table.h"
#include "list.h"

#include <stdlib.h>
#include <string.h>

uint64_t pccl_op_key_hash(const pccl_op_key *key)
{
    uint64_t words[] = {key->group, key->epoch, key->tag, key->sequence};
    return pccl_keyed_hash(words, PCCL_COUNT_OF(words));
}

void pccl_unexpected_init(pccl_unexpected_queue *queue)
{
    pccl_table_init(&queue->by_key);
    memset(queue->refused, 0, sizeof queue->refused);
}

void pccl_unexpected_free(pccl_unexpected_queue *queue)
{
    PCCL_ASSERT(queue->by_key.count == 0);
    pccl_table_free(&queue->by_key);
}

static uint64_t unexpected_hash(const pccl_link *link, const pccl_op_key *key)
{
    uint64_t words[] = {key->group, key->epoch, key->tag, key->sequence, link->id};
    return pccl_keyed_hash(words, PCCL_COUNT_OF(words));
}

pccl_unexpected_op *pccl_unexpected_find(
    const pccl_unexpected_queue *queue, const pccl_link *link, const pccl_op_key *key)
{
    pccl_table_node *node = pccl_table_first(&queue->by_key, unexpected_hash(link, key));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_unexpected_op *found = PCCL_CONTAINER_OF(node, pccl_unexpected_op, by_key);
        if (found->link == link && pccl_op_key_equal(&found->key, key))
            return found;
    }
    return NULL;
}

int pccl_unexpected_is_refused(const pccl_unexpected_queue *queue, const pccl_link *link, const pccl_op_key *key)
{
    uint64_t hash = unexpected_hash(link, key);
    return queue->refused[hash % PCCL_COUNT_OF(queue->refused)] == hash;
}

static void unexpected_drop_payload(pccl_unexpected_op *buffered)
{
    if (buffered->payload == NULL)
        return;
    if (buffered->conn != NULL)
        pccl_conn_release_buffered(buffered->conn); /* and lets go of it when all has come */
    else
        pccl_link_release_eager(buffered->link, buffered->payload_bytes);
    free(buffered->payload);
    buffered->payload = NULL;
    buffered->conn = NULL;
}

static void unexpected_remove(pccl_unexpected_queue *queue, pccl_unexpected_op *gone)
{
    unexpected_drop_payload(gone);
    gone->link->unexpected_count--;
    pccl_list_remove(&gone->in_link);
    pccl_table_remove(&queue->by_key, &gone->by_key);
    free(gone);
}

static void unexpected_remove_if_empty(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered)
{
    if (!buffered->is_ready && buffered->payload == NULL)
        unexpected_remove(queue, buffered);
}

void pccl_unexpected_drop_payload(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered)
{
    unexpected_drop_payload(buffered);
    unexpected_remove_if_empty(queue, buffered);
}

void pccl_unexpected_retract(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered)
{
    PCCL_ASSERT(buffered->conn != NULL);
    if (buffered->shape.algorithm == PCCL_DIRECT)
        buffered->is_ready = 0;
    free(buffered->payload);
    buffered->payload = NULL;
    buffered->conn = NULL;
    unexpected_remove_if_empty(queue, buffered);
}

void pccl_unexpected_drop_ready(pccl_unexpected_queue *queue, pccl_unexpected_op *buffered)
{
    buffered->is_ready = 0;
    unexpected_remove_if_empty(queue, buffered);
}

static const char *unexpected_add(
    pccl_unexpected_queue *queue, pccl_link *link, const pccl_frame *frame, pccl_unexpected_op **added)
{
    if (link->unexpected_count == PCCL_UNEXPECTED_PER_LINK_MAX)
        return "too many ops announced";
    pccl_unexpected_op *buffered = calloc(1, sizeof *buffered);
    if (buffered == NULL)
        return pccl_out_of_memory;
    buffered->link = link;
    buffered->key = frame->key;
    buffered->shape = frame->shape;
    pccl_list_init(&buffered->in_link);
    pccl_list_append(&link->unexpected, &buffered->in_link);
    pccl_table_insert(&queue->by_key, &buffered->by_key, unexpected_hash(link, &frame->key));
    link->unexpected_count++;
    *added = buffered;
    return NULL;
}

const char *pccl_unexpected_add(pccl_unexpected_queue *queue, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_unexpected_op *buffered = pccl_unexpected_find(queue, conn->link, &frame->key);
    int is_eager = frame->type == PCCL_FRAME_EAGER;
    int is_ready = !is_eager || frame->shape.algorithm == PCCL_DIRECT;
    uint8_t *payload = NULL;
    if (buffered != NULL) {
        if (!pccl_op_shape_equal(&buffered->shape, &frame->shape))
            return "one op described in two ways";
        if ((is_ready && buffered->is_ready) || (is_eager && buffered->payload != NULL))
            return "the same op announced twice";
    }
    if (is_eager) {
        payload = malloc(frame->payload_bytes);
        if (payload == NULL)
            return pccl_out_of_memory;
    }
    if (buffered == NULL) {
        const char *broken_rule = unexpected_add(queue, conn->link, frame, &buffered);
        if (broken_rule != NULL) {
            free(payload);
            return broken_rule;
        }
    }
    buffered->is_ready |= (uint8_t)is_ready;
    if (is_eager) {
        buffered->payload = payload;
        buffered->payload_bytes = frame->payload_bytes;
        buffered->conn = conn;
        pccl_conn_expect_buffered(conn, buffered, payload, frame->payload_bytes);
    }
    return NULL;
}

void pccl_unexpected_forget_link(pccl_unexpected_queue *queue, pccl_link *link)
{
    while (!pccl_list_is_empty(&link->unexpected))
        unexpected_remove(queue, PCCL_CONTAINER_OF(link->unexpected.next, pccl_unexpected_op, in_link));
}

void pccl_unexpected_refuse_op(pccl_unexpected_queue *queue, pccl_link *link, const pccl_op_key *key)
{
    pccl_unexpected_op *buffered = pccl_unexpected_find(queue, link, key);
    uint64_t hash = unexpected_hash(link, key);
    queue->refused[hash % PCCL_COUNT_OF(queue->refused)] = hash;
    if (buffered != NULL)
        unexpected_remove(queue, buffered);
}

void pccl_unexpected_forget_epochs(pccl_unexpected_queue *queue, pccl_link *link, uint32_t group, uint64_t epoch)
{
    pccl_list *next;
    for (pccl_list *node = link->unexpected.next; node != &link->unexpected; node = next) {
        next = node->next;
        pccl_unexpected_op *buffered = PCCL_CONTAINER_OF(node, pccl_unexpected_op, in_link);
        if (buffered->key.group == group && buffered->key.epoch <= epoch)
            unexpected_remove(queue, buffered);
    }
}

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
