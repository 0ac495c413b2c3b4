/* recorder.h: the flight recorder of an engine: what its last ops did when.
 *
 * Every op has an entry, a pccl_op_record, from its submission on. Its milestones are written there as they come, so an
 * op that never ends can be read like any other. An entry is kept until its op has ended and all others have been given
 * away since.
 *
 * Cost. An op takes a slot and writes some thirty words: less than 0.1 us (tests/bench_recorder.c), of a small op that
 * takes tens of them. The clock is not read for that: the engine thread reads it once for each batch of events, and
 * everything that a batch brings about has that time. The caller's thread reads it once, when it submits.
 *
 * Threads. The engine thread alone writes, and takes no lock. A reader copies an entry and looks at its version
 * before and after: it is odd while the slot changes hands, and another one afterwards. All words are written and read
 * atomically, milestones with no order among them: a copy of an op under way may have a later one without an
 * earlier. */
#ifndef PCCL_RECORDER_H
#define PCCL_RECORDER_H

#include "pccl_native.h"

typedef struct {
    uint64_t version;
    pccl_op_record record;
} pccl_recorder_slot;

typedef struct {
    int64_t now_ns; /* the engine thread's clock, as last read */
    pccl_recorder_slot *slots; /* NULL: nothing is recorded */
    uint32_t slots_count;
    uint32_t next;
} pccl_recorder;

int pccl_recorder_init(pccl_recorder *recorder, uint32_t records); /* 0, or PCCL_E_MEMORY */
void pccl_recorder_free(pccl_recorder *recorder);

/* Begins an entry for a request. NULL if nothing is recorded, or all entries belong to ops that have not ended. */
pccl_op_record *pccl_recorder_begin(
    pccl_recorder *recorder, const pccl_op_request *request, int64_t launched_ns, uint64_t caller);

/* The op is over. `record` may be NULL, as in what follows. */
void pccl_recorder_end(
    const pccl_recorder *recorder, pccl_op_record *record, uint64_t tx_bytes, uint64_t rx_bytes, int is_committed);

/* Something of the op's was sent. */
static inline void pccl_record_sent(pccl_op_record *record, int64_t now_ns)
{
    if (record == NULL)
        return;
    if (record->first_tx_ns == 0)
        __atomic_store_n(&record->first_tx_ns, now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&record->last_tx_ns, now_ns, __ATOMIC_RELAXED);
}

/* Something has come from this rank, all of it. */
static inline void pccl_record_received(pccl_op_record *record, int64_t now_ns, uint32_t from)
{
    if (record == NULL)
        return;
    if (record->first_rx_ns == 0)
        __atomic_store_n(&record->first_rx_ns, now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&record->last_rx_ns, now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&record->last_from, from, __ATOMIC_RELAXED);
}

/* Another rank is known to have submitted the op. */
static inline void pccl_record_heard(pccl_op_record *record, int64_t now_ns, uint32_t rank)
{
    if (record == NULL)
        return;
    __atomic_store_n(&record->heard_ns, now_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&record->heard_from, rank, __ATOMIC_RELAXED);
}

/* From now on the op waits for this rank above all. */
static inline void pccl_record_awaits(pccl_op_record *record, uint32_t rank)
{
    if (record != NULL)
        __atomic_store_n(&record->awaits, rank, __ATOMIC_RELAXED);
}

/* This rank is done with the op. */
static inline void pccl_record_done(pccl_op_record *record, int64_t now_ns)
{
    if (record != NULL)
        __atomic_store_n(&record->done_ns, now_ns, __ATOMIC_RELAXED);
}

/* All ranks are: its caller may go on, and look at the record, before it has ended. */
static inline void pccl_record_completed(pccl_op_record *record, int64_t now_ns, uint64_t tx_bytes, uint64_t rx_bytes)
{
    if (record == NULL)
        return;
    __atomic_store_n(&record->tx_bytes, tx_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&record->rx_bytes, rx_bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&record->completed_ns, now_ns, __ATOMIC_RELAXED);
}

/* See pccl_engine_read_records. Any thread. */
int pccl_recorder_read(const pccl_recorder *recorder, int64_t since_ns, pccl_op_record *records, int records_max);

#endif
