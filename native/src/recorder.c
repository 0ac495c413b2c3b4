#include "recorder.h"

#include "base.h"

#include <stdlib.h>
#include <string.h>

enum { RECORD_WORDS = sizeof(pccl_op_record) / sizeof(uint64_t) };

PCCL_STATIC_ASSERT(sizeof(pccl_op_record) % sizeof(uint64_t) == 0, records_are_words);

typedef union {
    pccl_op_record record;
    uint64_t words[RECORD_WORDS];
} record_words;

int pccl_recorder_init(pccl_recorder *recorder, uint32_t records)
{
    memset(recorder, 0, sizeof *recorder);
    if (records == 0)
        return 0;
    recorder->slots = calloc(records, sizeof *recorder->slots);
    if (recorder->slots == NULL)
        return PCCL_E_MEMORY;
    recorder->slots_count = records;
    return 0;
}

void pccl_recorder_free(pccl_recorder *recorder)
{
    free(recorder->slots);
    recorder->slots = NULL;
}

static int slot_is_open(const pccl_recorder_slot *slot) { return slot->version != 0 && slot->record.ended_ns == 0; }

/* Returns the slot that has waited longest since its op ended, or NULL. */
static pccl_recorder_slot *recorder_next(pccl_recorder *recorder)
{
    enum { OPEN_SKIPPED_MAX = 64 }; /* at a time, so that thousands of open ops do not make each other slow */
    for (uint32_t skipped = 0; skipped < OPEN_SKIPPED_MAX && recorder->slots_count > 0; skipped++) {
        pccl_recorder_slot *slot = &recorder->slots[recorder->next];
        recorder->next = recorder->next + 1 < recorder->slots_count ? recorder->next + 1 : 0;
        if (!slot_is_open(slot))
            return slot;
    }
    return NULL;
}

pccl_op_record *pccl_recorder_begin(
    pccl_recorder *recorder, const pccl_op_request *request, int64_t launched_ns, uint64_t caller)
{
    pccl_recorder_slot *slot = recorder_next(recorder);
    if (slot == NULL)
        return NULL;
    record_words made;
    memset(&made, 0, sizeof made);
    pccl_op_record *record = &made.record;
    record->op = request->op;
    record->key = request->key;
    record->caller = caller;
    record->count = request->shape.count;
    record->launched_ns = launched_ns;
    record->world_size = request->shape.world_size;
    record->rank = record->awaits = request->rank;
    record->collective = request->shape.collective;
    record->dtype = request->shape.dtype;
    record->reduce_op = request->shape.reduce_op;
    record->quantization = request->shape.quantization;
    record->algorithm = request->shape.algorithm;
    record->slice = request->shape.slice;
    record->last_slice = request->shape.last_slice;
    uint64_t version = slot->version;
    uint64_t *words = (uint64_t *)(void *)&slot->record;
    __atomic_store_n(&slot->version, version + 1, __ATOMIC_RELAXED);
    for (int i = 0; i < RECORD_WORDS; i++) /* a reader of one of these finds that version, or a later one */
        __atomic_store_n(&words[i], made.words[i], __ATOMIC_RELEASE);
    __atomic_store_n(&slot->version, version + 2, __ATOMIC_RELEASE);
    return &slot->record;
}

void pccl_recorder_end(
    const pccl_recorder *recorder, pccl_op_record *record, uint64_t tx_bytes, uint64_t rx_bytes, int is_committed)
{
    if (record == NULL)
        return;
    uint8_t outcome = is_committed ? PCCL_RECORD_COMMITTED : PCCL_RECORD_ABORTED;
    __atomic_store_n(&record->tx_bytes, tx_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&record->rx_bytes, rx_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&record->outcome, outcome, __ATOMIC_RELAXED);
    __atomic_store_n(&record->ended_ns, recorder->now_ns, __ATOMIC_RELEASE);
}

/* Nonzero if a copy was made of an entry that belonged to its op throughout. */
static int slot_copy(const pccl_recorder_slot *slot, record_words *copy)
{
    const uint64_t *words = (const uint64_t *)(const void *)&slot->record;
    uint64_t before = __atomic_load_n(&slot->version, __ATOMIC_ACQUIRE);
    if (before == 0 || before % 2 != 0)
        return 0;
    for (int i = 0; i < RECORD_WORDS; i++)
        copy->words[i] = __atomic_load_n(&words[i], __ATOMIC_ACQUIRE);
    return __atomic_load_n(&slot->version, __ATOMIC_RELAXED) == before;
}

int pccl_recorder_read(const pccl_recorder *recorder, int64_t since_ns, pccl_op_record *records, int records_max)
{
    int count = 0;
    for (uint32_t i = 0; i < recorder->slots_count && count < records_max; i++) {
        record_words copy;
        if (!slot_copy(&recorder->slots[i], &copy))
            continue;
        if (copy.record.ended_ns == 0 || copy.record.ended_ns > since_ns)
            records[count++] = copy.record;
    }
    return count;
}
