/* driver.h: which thread drives an engine, that is polls its descriptors and does what is to be done.
 *
 * The problem: an engine with a thread of its own costs a small op two switches between threads, from its caller to
 * the engine's thread and back, which take longer than the op. A caller that does nothing but wait may as well do the
 * engine's work. So the engine's state belongs to the thread that drives it, and there is one driver at a time:
 *
 *   1. The engine's thread drives, unless it rests or a caller drives. It rests when nothing is under way and a caller
 *      has been there lately (REST_MS): then another one may come soon.
 *   2. A caller drives if no thread does when it comes, from there until its op is over. All other callers, and all
 *      commands, ask for a driver (pccl_driver_need), which ends the thread's rest: at once, or when the caller that
 *      drives leaves. That one also says whether it leaves anything that has to be attended to.
 *      One that has started an op and goes on leaves it behind, if it is small and all there is to send is sent: it
 *      comes back to wait for it as a rule, and drives then.
 *   3. If no caller has come for REST_MS, the thread goes on. So input that arrives in between waits no longer than
 *      that.
 *   4. The next driver sees all that the last driver has written: both hold the mutex at the change.
 *
 * Resting is of use only where the next caller comes within that time, and in that case the thread sleeps all along: it
 * looks up once in REST_MS. A longer time would cost less for this, and more for what arrives while no thread drives.
 * */
#ifndef PCCL_DRIVER_H
#define PCCL_DRIVER_H

#include <pthread.h>
#include <stdint.h>

enum pccl_driving { PCCL_DRIVEN_BY_THREAD, PCCL_DRIVEN_BY_CALLER, PCCL_DRIVEN_BY_NOBODY };

typedef struct {
    pthread_mutex_t mutex; /* for what follows */
    pthread_cond_t changed;
    enum pccl_driving driving;
    int is_needed; /* a caller has asked since the thread last drove */
    int64_t called_ns; /* when a caller was last there */
} pccl_driver;

/* Begins with the engine's thread. 0 or an error number. */
int pccl_driver_init(pccl_driver *driver);
void pccl_driver_free(pccl_driver *driver);

/* Something has to be attended to. Any thread. */
void pccl_driver_need(pccl_driver *driver);

/* A caller has come. Nonzero if it drives from now on, until it leaves. */
int pccl_driver_take(pccl_driver *driver);

/* The caller that drives leaves. `is_idle`: nothing is under way. */
void pccl_driver_leave(pccl_driver *driver, int is_idle);

/* For the engine's thread, when nothing is under way: rests, if there is reason to. It drives when this returns. */
void pccl_driver_rest(pccl_driver *driver);

#endif
