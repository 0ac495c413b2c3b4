/* simulated.h: the engine that ships, in one thread, under the command of its test.
 *
 * All of native/src is built as it is but for the few files that talk to the system, which are here: the clock, threads
 * and wake-ups (os.c), the poller (poller.c), and sockets (wire_tcp.c). redirect.h leads locks here.
 *
 * Threads. Each thread of an engine, and each caller on its fast path, is a fiber with a stack of its own. It runs when
 * it is given a turn, until it waits: in the poller, for a condition, or for a mutex. Where chance is at work it may
 * also stop before any mutex that it takes, so that what others do comes between. The program that drives the
 * simulation is none of them, and what it calls of pccl_native.h happens at once; if that takes a mutex that a fiber
 * holds, the fiber gets turns until it gives it back.
 *
 * Sockets come in pairs. What one end sends is under way until it is carried to the other end, in pieces of any size;
 * there it waits to be read. Sending and reading take any part of what there is room for. A pair may be broken, at any
 * byte, and a byte under way may be damaged.
 *
 * Time is a number, and nothing here looks at another clock. All chance comes from one seed, so that a run is the same
 * each time it is played.
 *
 * This file is also what the Python binding parses, like pccl_native.h. One thread only. */
#ifndef PCCL_SIMULATED_H
#define PCCL_SIMULATED_H

#include "pccl_native.h"

/* Resets the simulation. No engine may be left. `is_random` 0: nothing is left to chance. */
void pccl_sim_reset(uint64_t seed, int is_random);

/* Returns the invariant that an engine has broken, or an empty string. Its thread is over then, the others may be
 * anything, and only pccl_sim_reset may follow. */
const char *pccl_sim_failure(void);

/* Time. */
void pccl_sim_set_now_ms(int64_t now_ms);
int64_t pccl_sim_now_ms(void);

/* Threads, which are numbered from 1 in the order in which they began. */
int pccl_sim_threads(void);
int pccl_sim_is_over(int thread);
void pccl_sim_freeze(int thread, int is_frozen); /* it gets no turns, as after SIGSTOP */
void pccl_sim_run(int thread); /* a turn, whether it has waited for it or not */

/* Lists threads that would do something with a turn; returns how many. */
int pccl_sim_ready(int32_t *threads, int threads_max);

/* Lists threads that wait for no longer than a moment: any time may pass between two turns. Returns how many. */
int pccl_sim_resting(int32_t *threads, int threads_max);
void pccl_sim_wake(int thread); /* has that moment pass, and gives it a turn */

/* Returns when a thread has something to do if nothing happens before, other than to look for commands; -1: never. */
int64_t pccl_sim_due_ms(void);

/* Lets time pass until `until_ms` with all that is due in it. All threads that are not frozen get the turns they want;
 * with `is_carrying` the network carries what is not blocked. Returns how many turns there were; -1: no end is seen of
 * them. */
int pccl_sim_pass(int64_t until_ms, int is_carrying);

/* Threads that call pccl_fast_path_run, _start and _wait, up to where they wait: for others, or, driving an engine, in
 * its poller. Each returns its number. What a thread has started is known when it is over. */
int pccl_sim_call(
    pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t sequence, uint32_t wait_ms);
int pccl_sim_start(
    pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t sequence, uint32_t wait_ms);
pccl_fast_path_call *pccl_sim_started(int thread);
int pccl_sim_join_call(pccl_fast_path *path, pccl_fast_path_call *started);
int pccl_sim_call_outcome(int thread, pccl_fast_path_result *result); /* it is over */
void pccl_sim_finish(int thread); /* gives it turns until it is over, and lets time pass where it waits */
int pccl_sim_drives(void); /* how often callers have polled for an engine since the last reset */

/* Nonzero if a descriptor that wakes is readable, such as that of an engine's events. */
int pccl_sim_is_readable(int fd);

/* Makes a pair of sockets, whose directions hold this many bytes each, sent and not read. */
void pccl_sim_connect(int capacity_bytes, int32_t fds[2]);

/* Lists sockets from which something is under way: bytes, or the news that it is closed. Returns how many. */
int pccl_sim_sending(int32_t *fds, int fds_max);
int pccl_sim_under_way(int fd); /* bytes */
int pccl_sim_carry(int fd, int bytes); /* at most `bytes`; returns how many */
void pccl_sim_block(int fd, int is_blocked); /* pccl_sim_pass does not carry what it sends */
void pccl_sim_damage(int fd, int at, int bit); /* flips a bit of a byte under way */

/* Breaks a pair: at each end the connection is reset after this many more bytes. */
void pccl_sim_break(int fd, int bytes, int bytes_back);

/* Closes one end as the system does when its process dies, and this many of its bytes under way do not arrive. */
void pccl_sim_abandon(int fd, int lost_bytes);
int pccl_sim_is_closed(int fd);

/* From now on a connection is held back by its window, as its system sees it. */
void pccl_sim_limit(int fd, int is_limited);

/* Lists ops that have become done since the last call, with the threads in which; returns how many. */
int pccl_sim_done(uint64_t *ops, int32_t *threads, int ops_max);

/* Memory of exactly this size, so that a sanitizer sees accesses outside it. */
void *pccl_sim_allocate(size_t bytes);
void pccl_sim_free(void *memory);
void pccl_sim_forbid(void *memory, size_t bytes, int is_forbidden); /* has a sanitizer report accesses */
int pccl_sim_is_sanitized(void);

#endif
