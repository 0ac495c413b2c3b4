/* core.h: everything that an engine's driver owns: links, ops, groups. It has no threads; engine.c calls it from one
 * at a time. Here are its commands and its loop; its parts are
 *
 *     links.h      links and their connections, and how they are taken away
 *     open_ops.h   ops, and how they stop, become done and end
 *     matching.h   how an op finds the same one of other ranks
 *     receiver.h   what frames do to ops
 *
 * Ops never touch each other, and a lost link ends no op: it makes no more progress, and the caller,
 * which learns of the loss, decides. */
#ifndef PCCL_CORE_H
#define PCCL_CORE_H

#include "conn.h"
#include "event_queue.h"
#include "unexpected.h"
#include "link.h"
#include "op.h"
#include "poller.h"

/* Promised to the event queue by the thread that hands these over; an op says how many. */
enum {
    PCCL_EVENTS_PER_OP = 4,
    PCCL_EVENTS_PER_FAST_OP = 5,
    PCCL_EVENTS_PER_CONN = 5,
    PCCL_EVENTS_PER_FREEZE = 1,
    PCCL_EVENTS_PER_DETACH = 1
};

typedef struct pccl_core pccl_core;

/* NULL without memory. */
pccl_core *pccl_core_create(pccl_poller *poller, pccl_event_queue *events, uint32_t eager_bytes_max, uint32_t stall_ms,
    uint64_t pace_bytes_per_s, uint32_t records);

void pccl_core_destroy(pccl_core *core); /* ends all ops as aborted */

/* Sets the time that the flight recorder gives to what happens from now on: any clock in nanoseconds that does not go
 * back. */
void pccl_core_set_clock(pccl_core *core, int64_t now_ns);

/* The commands. They take ownership of what they are given; `spare` is for a group not seen before. */
void pccl_core_link_add(pccl_core *core, pccl_conn *conn, pccl_link *spare);
void pccl_core_link_close(pccl_core *core, uint64_t link);
void pccl_core_link_count(pccl_core *core, uint64_t link); /* an event was promised */
void pccl_core_submit(pccl_core *core, pccl_op *op, pccl_group *spare);
void pccl_core_freeze(pccl_core *core, uint32_t group, uint64_t epoch, pccl_group *spare);
void pccl_core_freeze_op(pccl_core *core, uint64_t op); /* an event was promised */
void pccl_core_forget_ops(pccl_core *core, pccl_op_key last, uint64_t count);
void pccl_core_detach(pccl_core *core, uint64_t op); /* an event was promised */
void pccl_core_end(pccl_core *core, uint64_t op, int verdict);

/* A connection's descriptor is ready. Frees nothing, so that a batch of events stays valid. */
void pccl_core_on_poll(pccl_core *core, const pccl_poll_event *event);

/* Between batches: closes failed links, sends what can be sent. Nonzero if more can be sent at once. */
int pccl_core_settle(pccl_core *core);

/* Nonzero if nothing is under way: no op is open, and nothing waits to be sent. */
int pccl_core_is_idle(const pccl_core *core);
int pccl_core_is_drained(const pccl_core *core); /* the latter alone */

/* Returns how many links lead to processes of this machine. */
unsigned pccl_core_local_links(const pccl_core *core);

/* Returns what this machine has failed with; NULL: nothing. After that nothing is read or sent any more. */
const pccl_host_fault *pccl_core_fault(const pccl_core *core);

/* Returns for how long there is nothing to do without an event; -1: for ever. Time is any clock that does not jump. */
int pccl_core_timeout_ms(pccl_core *core, int64_t now_ms);
void pccl_core_tick(pccl_core *core, int64_t now_ms);

/* These may be called from any thread. */
void pccl_core_set_link_timeout(pccl_core *core, uint32_t timeout_ms);
void pccl_core_count(const pccl_core *core, pccl_engine_stats *stats);

/* Returns the time in whole ops, or in slices, by now. Any thread. */
uint64_t pccl_core_in_ops_ns(const pccl_core *core, int of_slices);
int pccl_core_read_records(const pccl_core *core, int64_t since_ns, pccl_op_record *records, int records_max);

#endif
