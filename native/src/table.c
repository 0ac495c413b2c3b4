#include "table.h"

#include "base.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

void pccl_table_init(pccl_table *table)
{
    memset(table, 0, sizeof *table);
    table->buckets = table->first_bucket;
    table->mask = PCCL_COUNT_OF(table->first_bucket) - 1;
}

void pccl_table_free(pccl_table *table)
{
    if (table->buckets != table->first_bucket)
        free(table->buckets);
    pccl_table_init(table);
}

static void table_grow(pccl_table *table)
{
    size_t mask = table->mask * 2 + 1;
    pccl_table_node **buckets = calloc(mask + 1, sizeof *buckets);
    if (buckets == NULL)
        return;
    for (size_t i = 0; i <= table->mask; i++) {
        pccl_table_node *next;
        for (pccl_table_node *node = table->buckets[i]; node != NULL; node = next) {
            next = node->next;
            node->next = buckets[node->hash & mask];
            buckets[node->hash & mask] = node;
        }
    }
    if (table->buckets != table->first_bucket)
        free(table->buckets);
    table->buckets = buckets;
    table->mask = mask;
}

void pccl_table_insert(pccl_table *table, pccl_table_node *node, uint64_t hash)
{
    if (table->count > table->mask)
        table_grow(table);
    node->hash = hash;
    node->next = table->buckets[hash & table->mask];
    table->buckets[hash & table->mask] = node;
    table->count++;
}

void pccl_table_remove(pccl_table *table, pccl_table_node *node)
{
    pccl_table_node **at = &table->buckets[node->hash & table->mask];
    while (*at != NULL && *at != node)
        at = &(*at)->next;
    PCCL_ASSERT(*at == node);
    *at = node->next;
    table->count--;
}

static pccl_table_node *table_skip(pccl_table_node *node, uint64_t hash)
{
    while (node != NULL && node->hash != hash)
        node = node->next;
    return node;
}

pccl_table_node *pccl_table_first(const pccl_table *table, uint64_t hash)
{
    return table_skip(table->buckets[hash & table->mask], hash);
}

pccl_table_node *pccl_table_next(const pccl_table_node *node) { return table_skip(node->next, node->hash); }

typedef struct {
    uint64_t v0, v1, v2, v3;
} sip_state;

static uint64_t rotate(uint64_t x, unsigned bits) { return x << bits | x >> (64 - bits); }

static void sip_round(sip_state *s)
{
    s->v0 += s->v1;
    s->v1 = rotate(s->v1, 13) ^ s->v0;
    s->v0 = rotate(s->v0, 32);
    s->v2 += s->v3;
    s->v3 = rotate(s->v3, 16) ^ s->v2;
    s->v0 += s->v3;
    s->v3 = rotate(s->v3, 21) ^ s->v0;
    s->v2 += s->v1;
    s->v1 = rotate(s->v1, 17) ^ s->v2;
    s->v2 = rotate(s->v2, 32);
}

static void sip_take(sip_state *s, uint64_t word)
{
    s->v3 ^= word;
    sip_round(s);
    s->v0 ^= word;
}

uint64_t pccl_siphash_1_3(uint64_t key_0, uint64_t key_1, const uint64_t *words, size_t count)
{
    sip_state s = {key_0 ^ UINT64_C(0x736f6d6570736575), key_1 ^ UINT64_C(0x646f72616e646f6d),
        key_0 ^ UINT64_C(0x6c7967656e657261), key_1 ^ UINT64_C(0x7465646279746573)};
    for (size_t i = 0; i < count; i++)
        sip_take(&s, words[i]);
    sip_take(&s, (uint64_t)count * sizeof *words << 56);
    s.v2 ^= 0xff;
    for (int i = 0; i < 3; i++)
        sip_round(&s);
    return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

static uint64_t process_key[2];
static int key_error; /* 0: none */
static pthread_once_t key_once = PTHREAD_ONCE_INIT;

static void draw_key(void) { key_error = getentropy(process_key, sizeof process_key) == 0 ? 0 : errno; }

int pccl_keyed_hash_prepare(void)
{
    (void)pthread_once(&key_once, draw_key);
    return key_error;
}

uint64_t pccl_keyed_hash(const uint64_t *words, size_t count)
{
    (void)pccl_keyed_hash_prepare();
    return pccl_siphash_1_3(process_key[0], process_key[1], words, count);
}
