/* table.h: an intrusive chained hash table. It knows hashes only; what equal keys are is its user's business:
 *
 *     for (node = pccl_table_first(&t, hash); node != NULL; node = pccl_table_next(node))
 *         if (same key) ...
 *
 * Insertion never fails: where the bucket array cannot grow, chains do. */
#ifndef PCCL_TABLE_H
#define PCCL_TABLE_H

#include "base.h"

typedef struct pccl_table_node {
    struct pccl_table_node *next;
    uint64_t hash;
} pccl_table_node;

typedef struct {
    pccl_table_node **buckets;
    size_t mask;
    size_t count;
    pccl_table_node *first_bucket[8];
} pccl_table;

void pccl_table_init(pccl_table *table);
void pccl_table_free(pccl_table *table); /* its nodes are the user's */
void pccl_table_insert(pccl_table *table, pccl_table_node *node, uint64_t hash);
void pccl_table_remove(pccl_table *table, pccl_table_node *node); /* which must be in it */

/* The nodes with exactly this hash, in no order. */
pccl_table_node *pccl_table_first(const pccl_table *table, uint64_t hash);
pccl_table_node *pccl_table_next(const pccl_table_node *node);

static inline uint64_t pccl_hash_u64(uint64_t seed, uint64_t value)
{
    uint64_t x = (seed ^ value) + 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Hashes numbers that others choose: SipHash-1-3 under a key that this process draws at random and keeps to itself, so
 * that these numbers cannot be chosen to collide. */
int pccl_keyed_hash_prepare(void); /* draws the key; 0, or an errno: there is none */
uint64_t pccl_keyed_hash(const uint64_t *words, size_t count);

#endif
