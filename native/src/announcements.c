#include "announcements.h"

#include "keyed_hash.h"

#include <stdlib.h>

uint64_t pccl_op_key_hash(const pccl_op_key *key)
{
    uint64_t words[] = {key->group, key->epoch, key->tag, key->sequence};
    return pccl_keyed_hash(words, PCCL_COUNT_OF(words));
}

void pccl_announcements_init(pccl_announcements *announcements) { pccl_table_init(&announcements->by_key); }

void pccl_announcements_free(pccl_announcements *announcements)
{
    PCCL_ASSERT(announcements->by_key.count == 0);
    pccl_table_free(&announcements->by_key);
}

static uint64_t announcement_hash(const pccl_link *link, const pccl_op_key *key)
{
    uint64_t words[] = {key->group, key->epoch, key->tag, key->sequence, link->id};
    return pccl_keyed_hash(words, PCCL_COUNT_OF(words));
}

pccl_announcement *pccl_announcements_find(
    const pccl_announcements *announcements, const pccl_link *link, const pccl_op_key *key)
{
    pccl_table_node *node = pccl_table_first(&announcements->by_key, announcement_hash(link, key));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_announcement *found = PCCL_CONTAINER_OF(node, pccl_announcement, by_key);
        if (found->link == link && pccl_op_key_equal(&found->key, key))
            return found;
    }
    return NULL;
}

static void announcement_drop_payload(pccl_announcement *kept)
{
    if (kept->payload == NULL)
        return;
    if (kept->conn != NULL)
        pccl_conn_release_kept(kept->conn); /* and lets go of it when all has come */
    else
        pccl_link_let_go(kept->link, kept->payload_bytes);
    free(kept->payload);
    kept->payload = NULL;
    kept->conn = NULL;
}

static void announcement_remove(pccl_announcements *announcements, pccl_announcement *gone)
{
    announcement_drop_payload(gone);
    gone->link->announced_count--;
    pccl_list_remove(&gone->in_link);
    pccl_table_remove(&announcements->by_key, &gone->by_key);
    free(gone);
}

static void announcement_remove_if_empty(pccl_announcements *announcements, pccl_announcement *kept)
{
    if (!kept->is_ready && kept->payload == NULL)
        announcement_remove(announcements, kept);
}

void pccl_announcements_drop_payload(pccl_announcements *announcements, pccl_announcement *kept)
{
    announcement_drop_payload(kept);
    announcement_remove_if_empty(announcements, kept);
}

void pccl_announcements_retract(pccl_announcements *announcements, pccl_announcement *kept)
{
    PCCL_ASSERT(kept->conn != NULL);
    if (kept->shape.algorithm == PCCL_DIRECT)
        kept->is_ready = 0;
    free(kept->payload);
    kept->payload = NULL;
    kept->conn = NULL;
    announcement_remove_if_empty(announcements, kept);
}

void pccl_announcements_drop_ready(pccl_announcements *announcements, pccl_announcement *kept)
{
    kept->is_ready = 0;
    announcement_remove_if_empty(announcements, kept);
}

static const char *announcement_add(
    pccl_announcements *announcements, pccl_link *link, const pccl_frame *frame, pccl_announcement **added)
{
    if (link->announced_count == PCCL_ANNOUNCEMENTS_PER_LINK_MAX)
        return "too many ops announced";
    pccl_announcement *kept = calloc(1, sizeof *kept);
    if (kept == NULL)
        return pccl_out_of_memory;
    kept->link = link;
    kept->key = frame->key;
    kept->shape = frame->shape;
    pccl_list_init(&kept->in_link);
    pccl_list_append(&link->announced, &kept->in_link);
    pccl_table_insert(&announcements->by_key, &kept->by_key, announcement_hash(link, &frame->key));
    link->announced_count++;
    *added = kept;
    return NULL;
}

const char *pccl_announcements_keep(
    pccl_announcements *announcements, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_announcement *kept = pccl_announcements_find(announcements, conn->link, &frame->key);
    int is_eager = frame->type == PCCL_FRAME_EAGER;
    int is_ready = !is_eager || frame->shape.algorithm == PCCL_DIRECT;
    uint8_t *payload = NULL;
    if (kept != NULL) {
        if (!pccl_op_shape_equal(&kept->shape, &frame->shape))
            return "one op described in two ways";
        if ((is_ready && kept->is_ready) || (is_eager && kept->payload != NULL))
            return "the same op announced twice";
    }
    if (is_eager) {
        payload = malloc(frame->payload_bytes);
        if (payload == NULL)
            return pccl_out_of_memory;
    }
    if (kept == NULL) {
        const char *broken_rule = announcement_add(announcements, conn->link, frame, &kept);
        if (broken_rule != NULL) {
            free(payload);
            return broken_rule;
        }
    }
    kept->is_ready |= (uint8_t)is_ready;
    if (is_eager) {
        kept->payload = payload;
        kept->payload_bytes = frame->payload_bytes;
        kept->conn = conn;
        pccl_conn_expect_kept(conn, kept, payload, frame->payload_bytes);
    }
    return NULL;
}

void pccl_announcements_forget_link(pccl_announcements *announcements, pccl_link *link)
{
    while (!pccl_list_is_empty(&link->announced))
        announcement_remove(
            announcements, PCCL_CONTAINER_OF(link->announced.next, pccl_announcement, in_link));
}

void pccl_announcements_forget_op(pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key)
{
    pccl_announcement *kept = pccl_announcements_find(announcements, link, key);
    if (kept != NULL)
        announcement_remove(announcements, kept);
}

void pccl_announcements_forget_epochs(
    pccl_announcements *announcements, pccl_link *link, uint32_t group, uint64_t epoch)
{
    pccl_list *next;
    for (pccl_list *node = link->announced.next; node != &link->announced; node = next) {
        next = node->next;
        pccl_announcement *kept = PCCL_CONTAINER_OF(node, pccl_announcement, in_link);
        if (kept->key.group == group && kept->key.epoch <= epoch)
            announcement_remove(announcements, kept);
    }
}
