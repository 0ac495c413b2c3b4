/* The unexpected queue: keys that a peer chooses must not all fall into one chain, and nothing stays for ever. */
#include "unexpected.h"
#include "check.h"
#include "siphash.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { KEYS = 4096, CHAIN_MAX = 32 /* among as many buckets; 4096 random keys have one of 8 or so */ };

/* Calls of getentropy come through here (the Makefile's --wrap). */
int __wrap_getentropy(void *bytes, size_t count);
int __wrap_getentropy(void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)(i * 37 + 1);
    return 0;
}

static uint64_t random_state = 1;

static uint64_t random_u64(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return random_state ^ random_state >> 32;
}

/* A mixing of the key that anybody can compute, as tables without a key have it. */
static uint64_t public_hash(const pccl_op_key *key, uint64_t link)
{
    uint64_t hash = pccl_hash_u64(key->group, key->epoch);
    hash = pccl_hash_u64(pccl_hash_u64(hash, key->tag), key->sequence);
    return link == 0 ? hash : pccl_hash_u64(hash, link);
}

static size_t longest_chain(const pccl_table *table)
{
    size_t longest = 0;
    for (size_t i = 0; i <= table->mask; i++) {
        size_t length = 0;
        for (const pccl_table_node *node = table->buckets[i]; node != NULL; node = node->next)
            length++;
        longest = length > longest ? length : longest;
    }
    return longest;
}

static pccl_op_key colliding_key(uint64_t link)
{
    pccl_op_key key;
    memset(&key, 0, sizeof key);
    key.epoch = 1;
    do
        key.tag = random_u64();
    while (public_hash(&key, link) % 256 != 0);
    return key;
}

static void chosen_names_do_not_collide(void)
{
    enum { LINK = 7 };
    pccl_unexpected_queue queue;
    pccl_conn conn;
    pccl_link *link = pccl_link_create(LINK);
    REQUIRE(link != NULL);
    memset(&conn, 0, sizeof conn);
    conn.link = link;
    pccl_unexpected_init(&queue);
    for (int i = 0; i < KEYS; i++) {
        pccl_frame frame;
        memset(&frame, 0, sizeof frame);
        frame.type = PCCL_FRAME_READY;
        frame.key = colliding_key(LINK);
        REQUIRE(pccl_unexpected_add(&queue, &conn, &frame) == NULL);
        CHECK(pccl_unexpected_find(&queue, link, &frame.key) != NULL);
    }
    CHECK(queue.by_key.count == KEYS);
    CHECK_MSG(longest_chain(&queue.by_key) <= CHAIN_MAX, "%zu", longest_chain(&queue.by_key));
    pccl_unexpected_forget_link(&queue, link);
    pccl_unexpected_free(&queue);
    pccl_link_destroy(link);
}

static void an_op_that_will_not_be_submitted_is_forgotten(void)
{
    pccl_unexpected_queue queue;
    pccl_conn conn;
    pccl_link *link = pccl_link_create(7);
    REQUIRE(link != NULL);
    memset(&conn, 0, sizeof conn);
    conn.link = link;
    pccl_unexpected_init(&queue);
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_READY;
    for (uint64_t use = 0; use < 2 * (uint64_t)PCCL_UNEXPECTED_PER_LINK_MAX; use++) {
        frame.key.sequence = use;
        REQUIRE(pccl_unexpected_add(&queue, &conn, &frame) == NULL);
        pccl_unexpected_refuse_op(&queue, link, &frame.key);
    }
    CHECK_MSG(queue.by_key.count == 0, "%zu", (size_t)queue.by_key.count);
    CHECK(link->unexpected_count == 0);
    pccl_unexpected_free(&queue);
    pccl_link_destroy(link);
}

typedef struct {
    pccl_unexpected_queue queue;
    pccl_conn conn;
    pccl_link *link;
    pccl_frame ready;
} announcements;

static int announcements_open(announcements *a)
{
    memset(a, 0, sizeof *a);
    a->link = a->conn.link = pccl_link_create(7);
    a->ready.type = PCCL_FRAME_READY;
    a->ready.key.epoch = 1;
    a->ready.shape.count = 10;
    pccl_unexpected_init(&a->queue);
    return a->link != NULL;
}

static void announcements_close(announcements *a)
{
    pccl_unexpected_forget_link(&a->queue, a->link);
    pccl_unexpected_free(&a->queue);
    pccl_link_destroy(a->link);
}

static void a_peer_does_not_contradict_itself(void)
{
    announcements a;
    REQUIRE(announcements_open(&a));
    CHECK(pccl_unexpected_add(&a.queue, &a.conn, &a.ready) == NULL);
    const char *broken_rule = pccl_unexpected_add(&a.queue, &a.conn, &a.ready);
    CHECK(broken_rule != NULL && strstr(broken_rule, "announced twice") != NULL);
    a.ready.shape.count++;
    broken_rule = pccl_unexpected_add(&a.queue, &a.conn, &a.ready);
    CHECK(broken_rule != NULL && strstr(broken_rule, "described in two ways") != NULL);
    CHECK(a.link->unexpected_count == 1);
    announcements_close(&a);
}

static void what_is_announced_without_being_called_is_bounded(void)
{
    announcements a;
    REQUIRE(announcements_open(&a));
    for (; a.ready.key.sequence < PCCL_UNEXPECTED_PER_LINK_MAX; a.ready.key.sequence++)
        REQUIRE(pccl_unexpected_add(&a.queue, &a.conn, &a.ready) == NULL);
    const char *broken_rule = pccl_unexpected_add(&a.queue, &a.conn, &a.ready);
    CHECK(broken_rule != NULL && strstr(broken_rule, "too many") != NULL);
    announcements_close(&a);
}

static void later_epochs_are_kept(void)
{
    announcements a;
    REQUIRE(announcements_open(&a));
    for (uint64_t epoch = 1; epoch <= 4; epoch++) {
        a.ready.key.epoch = epoch;
        REQUIRE(pccl_unexpected_add(&a.queue, &a.conn, &a.ready) == NULL);
    }
    pccl_unexpected_forget_epochs(&a.queue, a.link, 0, 2);
    for (uint64_t epoch = 1; epoch <= 4; epoch++) {
        a.ready.key.epoch = epoch;
        CHECK((pccl_unexpected_find(&a.queue, a.link, &a.ready.key) != NULL) == (epoch > 2));
    }
    announcements_close(&a);
}

/* Frames of ops name them, too. */
static void chosen_names_of_ops_do_not_collide(void)
{
    static pccl_table_node nodes[KEYS];
    pccl_table table;
    pccl_table_init(&table);
    for (int i = 0; i < KEYS; i++) {
        pccl_op_key key = colliding_key(0);
        pccl_table_insert(&table, &nodes[i], pccl_op_key_hash(&key));
    }
    CHECK_MSG(longest_chain(&table) <= CHAIN_MAX, "%zu", longest_chain(&table));
    pccl_table_free(&table);
}

static void the_hash_is_siphash_1_3(void)
{
    uint64_t words[5];
    uint8_t *bytes = (uint8_t *)words;
    for (size_t i = 0; i < sizeof words; i++)
        bytes[i] = (uint8_t)i;
    /* The last three are CPython's, of bytes(range(n)) where PYTHONHASHSEED is 0. */
    CHECK(pccl_siphash_1_3(words[0], words[1], NULL, 0) == UINT64_C(0xabac0158050fc4dc));
    CHECK(pccl_siphash_1_3(0, 0, words, 1) == UINT64_C(0xead411e67ebe2eea));
    CHECK(pccl_siphash_1_3(0, 0, words, 2) == UINT64_C(0x8972188433a5c5b7));
    CHECK(pccl_siphash_1_3(0, 0, words, 5) == UINT64_C(0x95bc321ab41d8206));
    CHECK(pccl_keyed_hash(words, 5) == pccl_keyed_hash(words, 5));
    CHECK(pccl_keyed_hash(words, 5) != pccl_siphash_1_3(0, 0, words, 5));
}

/* Descriptors may have run out: no file is read for it. */
static void the_key_is_the_systems(void)
{
    uint64_t key[2];
    uint64_t word = 5;
    REQUIRE(__wrap_getentropy(key, sizeof key) == 0);
    CHECK(pccl_keyed_hash(&word, 1) == pccl_siphash_1_3(key[0], key[1], &word, 1));
}

int main(void)
{
    RUN(chosen_names_do_not_collide);
    RUN(an_op_that_will_not_be_submitted_is_forgotten);
    RUN(a_peer_does_not_contradict_itself);
    RUN(what_is_announced_without_being_called_is_bounded);
    RUN(later_epochs_are_kept);
    RUN(chosen_names_of_ops_do_not_collide);
    RUN(the_hash_is_siphash_1_3);
    RUN(the_key_is_the_systems);
    return check_summary();
}
