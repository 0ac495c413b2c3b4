#include "table.h"

#include "base.h"
#include "siphash.h"

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
