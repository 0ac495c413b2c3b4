/* fibers.c: the threads and the clock of the simulation, in the place of os.c; simulated.h says how they run. */
#include "sim.h"

#include "os.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

enum {
    STACK_BYTES = 256 << 10,
    IDLE_MS = 1000, /* an engine that waits for so long looks for commands only */
    MOMENT_MS = 1, /* between any two turns of threads, as far as these can tell */
    NS_PER_MS = 1000000,
    WAKES_ALL_ONE_IN = 8,
    PREEMPTED_ONE_IN = 16,
    TURNS_MAX = 1 << 16 /* of all threads at one point of time */
};

/* What a fiber calls: that of the fast path, or what an engine runs as a thread. */
enum fiber_role { FIBER_OF_ENGINE, FIBER_RUNS, FIBER_STARTS, FIBER_JOINS };

enum fiber_state { FIBER_READY, FIBER_POLLING, FIBER_WAITING, FIBER_LOCKING, FIBER_OVER };

typedef struct {
    pccl_fast_path *path;
    uint64_t number;
    pccl_op_request request;
    uint64_t sequence;
    uint32_t wait_ms;
    pccl_fast_path_call *started;
    pccl_fast_path_result result;
    int outcome;
} fiber_call;

typedef struct {
    ucontext_t context;
    uint8_t *stack; /* NULL: it is over */
    void *(*run)(void *);
    void *argument;
    enum fiber_role role;
    enum fiber_state state;
    int is_frozen;
    int is_idle; /* polling, for commands only */
    int64_t due_ms; /* of polling and waiting; INT64_MAX: never */
    pccl_poller *poller;
    const void *awaits; /* the condition, or the mutex */
    int is_signaled;
    fiber_call call;
} fiber;

/* A mutex is the number of the fiber that holds it, plus 1, in the memory of the system's. */
typedef struct {
    int holder;
} sim_mutex;

static fiber **fibers;
static int fibers_count;
static int fibers_capacity;
static int current; /* 0: none */
static ucontext_t main_context;
static int64_t now_ms;
static int drives; /* turns of pollers in callers */
static uint8_t **spare_stacks;
static int spare_stacks_count;
#if defined(__SANITIZE_ADDRESS__)
static const void *main_stack;
static size_t main_stack_bytes;
#endif

static void run_or_holder(int thread);
static void fiber_yield(fiber *self);

static fiber *fiber_at(int thread)
{
    PCCL_ASSERT(thread >= 1 && thread <= fibers_count);
    return fibers[thread - 1];
}

/* The clock */

void pccl_sim_set_now_ms(int64_t ms)
{
    PCCL_ASSERT(ms >= now_ms);
    now_ms = ms;
}

int64_t pccl_sim_now_ms(void) { return now_ms; }

int64_t pccl_now_ms(void) { return now_ms; }

uint64_t pccl_thread_id(void) { return 1; }

int64_t pccl_now_ns(void) { return now_ms * NS_PER_MS; }

void pccl_say_system_error(char *error, size_t error_bytes, const char *what, int system_error)
{
    snprintf(error, error_bytes, "%s: %s", what, strerror(system_error));
}

/* Broken invariants */

static char failure[256];

const char *pccl_sim_failure(void) { return failure; }

void pccl_assert_failed(const char *condition, const char *file, int line, const char *function)
{
    snprintf(failure, sizeof failure, "%s:%d: %s: broken invariant: %s", file, line, function, condition);
    if (current == 0) {
        fprintf(stderr, "%s\n", failure);
        abort();
    }
    fiber_at(current)->state = FIBER_OVER;
    for (;;)
        fiber_yield(fiber_at(current));
}

/* Turns */

static void fiber_main(void)
{
    fiber *self = fiber_at(current);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &main_stack, &main_stack_bytes);
#endif
    self->run(self->argument);
    self->state = FIBER_OVER;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(NULL, main_stack, main_stack_bytes);
#endif
    setcontext(&main_context);
}

static void fiber_yield(fiber *self)
{
#if defined(__SANITIZE_ADDRESS__)
    void *fake_stack = NULL;
    __sanitizer_start_switch_fiber(&fake_stack, main_stack, main_stack_bytes);
#endif
    swapcontext(&self->context, &main_context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, &main_stack, &main_stack_bytes);
#endif
}

static int fiber_start(void *(*run)(void *), void *argument)
{
    fiber *made = calloc(1, sizeof *made);
    PCCL_ASSERT(made != NULL);
    made->stack = spare_stacks_count > 0 ? spare_stacks[--spare_stacks_count] : malloc(STACK_BYTES);
    PCCL_ASSERT(made->stack != NULL);
    made->run = run;
    made->argument = argument;
    getcontext(&made->context);
    made->context.uc_stack.ss_sp = made->stack;
    made->context.uc_stack.ss_size = STACK_BYTES;
    made->context.uc_link = NULL;
    makecontext(&made->context, fiber_main, 0);
    if (fibers_count == fibers_capacity) {
        fibers_capacity = fibers_capacity == 0 ? 64 : 2 * fibers_capacity;
        fibers = realloc(fibers, (size_t)fibers_capacity * sizeof *fibers);
        spare_stacks = realloc(spare_stacks, (size_t)fibers_capacity * sizeof *spare_stacks);
        PCCL_ASSERT(fibers != NULL && spare_stacks != NULL);
    }
    fibers[fibers_count++] = made;
    return fibers_count;
}

void pccl_sim_run(int thread)
{
    fiber *next = fiber_at(thread);
    PCCL_ASSERT(current == 0);
    if (next->state == FIBER_OVER)
        return;
    current = thread;
#if defined(__SANITIZE_ADDRESS__)
    void *fake_stack = NULL;
    __sanitizer_start_switch_fiber(&fake_stack, next->stack, STACK_BYTES);
#endif
    swapcontext(&main_context, &next->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, NULL, NULL);
#endif
    current = 0;
    if (next->state == FIBER_OVER) {
        spare_stacks[spare_stacks_count++] = next->stack;
        next->stack = NULL;
    }
}

static int mutex_is_free(const void *mutex) { return ((const sim_mutex *)mutex)->holder == 0; }

static int fiber_is_ready(const fiber *of)
{
    switch (of->state) {
    case FIBER_READY: return 1;
    case FIBER_POLLING: return of->due_ms <= now_ms || sim_has_ready(of->poller);
    case FIBER_WAITING: return of->is_signaled || of->due_ms <= now_ms;
    case FIBER_LOCKING: return mutex_is_free(of->awaits);
    case FIBER_OVER: break;
    }
    return 0;
}

/* Has the moment pass after which a wait ends by itself. */
static void fiber_await_due(const fiber *of)
{
    int has_due = of->state == FIBER_POLLING || of->state == FIBER_WAITING;
    if (has_due && !fiber_is_ready(of) && of->due_ms != INT64_MAX)
        now_ms = of->due_ms;
}

int pccl_sim_threads(void) { return fibers_count; }

int pccl_sim_is_over(int thread) { return fiber_at(thread)->state == FIBER_OVER; }

void pccl_sim_freeze(int thread, int is_frozen) { fiber_at(thread)->is_frozen = is_frozen; }

int sim_current(void) { return current; }

int pccl_sim_ready(int32_t *threads, int threads_max)
{
    int count = 0;
    for (int thread = 1; thread <= fibers_count && count < threads_max; thread++)
        if (!fibers[thread - 1]->is_frozen && fiber_is_ready(fibers[thread - 1]))
            threads[count++] = thread;
    return count;
}

int pccl_sim_resting(int32_t *threads, int threads_max)
{
    int count = 0;
    for (int thread = 1; thread <= fibers_count && count < threads_max; thread++) {
        const fiber *of = fibers[thread - 1];
        int is_resting = of->state == FIBER_WAITING && of->due_ms <= now_ms + MOMENT_MS && !fiber_is_ready(of);
        if (is_resting && !of->is_frozen)
            threads[count++] = thread;
    }
    return count;
}

void pccl_sim_wake(int thread)
{
    fiber_await_due(fiber_at(thread));
    pccl_sim_run(thread);
}

int64_t pccl_sim_due_ms(void)
{
    int64_t due_ms = INT64_MAX;
    for (int i = 0; i < fibers_count; i++) {
        const fiber *of = fibers[i];
        int has_due = of->state == FIBER_WAITING || (of->state == FIBER_POLLING && !of->is_idle);
        if (has_due && !of->is_frozen && of->due_ms < due_ms)
            due_ms = of->due_ms;
    }
    return due_ms == INT64_MAX ? -1 : due_ms;
}

int pccl_sim_pass(int64_t until_ms, int is_carrying)
{
    int turns = 0;
    for (;;) {
        int has_run = 1;
        for (int i = 0; has_run; i++) {
            if (i == TURNS_MAX)
                return -1;
            has_run = is_carrying && sim_carry_all();
            for (int thread = 1; thread <= fibers_count; thread++)
                if (!fibers[thread - 1]->is_frozen && fiber_is_ready(fibers[thread - 1])) {
                    pccl_sim_run(thread);
                    has_run = 1;
                    turns++;
                }
        }
        int64_t due_ms = pccl_sim_due_ms();
        if (due_ms < 0 || due_ms > until_ms) {
            now_ms = until_ms > now_ms ? until_ms : now_ms;
            return turns;
        }
        now_ms = due_ms > now_ms ? due_ms : now_ms;
    }
}

void sim_reset_fibers(void)
{
    PCCL_ASSERT(current == 0);
    for (int i = 0; i < fibers_count; i++) {
        PCCL_ASSERT(fibers[i]->state == FIBER_OVER || failure[0] != '\0');
        free(fibers[i]->stack);
        free(fibers[i]);
    }
    failure[0] = '\0';
    fibers_count = 0;
    now_ms = 0;
    drives = 0;
}

/* What the engine calls of os.h */

int pccl_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument)
{
    (void)name;
    *thread = (pthread_t)fiber_start(run, argument);
    return 0;
}

int pccl_sim_join(pthread_t thread)
{
    fiber *joined = fiber_at((int)thread);
    joined->is_frozen = 0;
    while (joined->state != FIBER_OVER) {
        /* Callers that drive the engine have to leave it before its thread goes on. */
        for (int other = 1; other <= fibers_count && joined->state == FIBER_WAITING; other++)
            if (fibers[other - 1]->role != FIBER_OF_ENGINE && fiber_is_ready(fibers[other - 1]))
                run_or_holder(other);
        fiber_await_due(joined);
        run_or_holder((int)thread);
    }
    return 0;
}

void sim_wait_for_poll(pccl_poller *poller, int timeout_ms)
{
    fiber *self = fiber_at(current);
    for (int i = 0; i < fibers_count; i++)
        PCCL_ASSERT(fibers[i]->state != FIBER_POLLING || fibers[i]->poller != poller); /* one drives at a time */
    drives += self->role != FIBER_OF_ENGINE;
    self->poller = poller;
    self->state = FIBER_POLLING;
    self->is_idle = timeout_ms >= IDLE_MS;
    self->due_ms = timeout_ms < 0 ? INT64_MAX : now_ms + timeout_ms;
    fiber_yield(self);
    self->state = FIBER_READY;
    self->poller = NULL;
}

int pccl_sim_mutex_init(pthread_mutex_t *mutex)
{
    ((sim_mutex *)mutex)->holder = 0;
    return 0;
}

int pccl_sim_mutex_lock(pthread_mutex_t *mutex)
{
    sim_mutex *taken = (sim_mutex *)mutex;
    if (current != 0 && sim_happens(PREEMPTED_ONE_IN))
        fiber_yield(fiber_at(current));
    while (taken->holder != 0) {
        if (current == 0) {
            run_or_holder(taken->holder - 1);
            continue;
        }
        fiber *self = fiber_at(current);
        self->state = FIBER_LOCKING;
        self->awaits = mutex;
        fiber_yield(self);
        self->state = FIBER_READY;
    }
    taken->holder = current + 1;
    return 0;
}

int pccl_sim_mutex_unlock(pthread_mutex_t *mutex)
{
    PCCL_ASSERT(((sim_mutex *)mutex)->holder == current + 1);
    ((sim_mutex *)mutex)->holder = 0;
    return 0;
}

int pccl_cond_init(pthread_cond_t *cond)
{
    (void)cond;
    return 0;
}

int pccl_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t end_ns)
{
    fiber *self = fiber_at(current);
    self->state = FIBER_WAITING;
    self->awaits = cond;
    self->is_signaled = 0;
    self->due_ms = (end_ns + NS_PER_MS - 1) / NS_PER_MS;
    pccl_sim_mutex_unlock(mutex);
    fiber_yield(self);
    self->state = FIBER_READY;
    pccl_sim_mutex_lock(mutex);
    return self->is_signaled ? 0 : ETIMEDOUT;
}

int pccl_sim_cond_signal(pthread_cond_t *cond)
{
    int wakes_all = sim_happens(WAKES_ALL_ONE_IN);
    uint32_t waiting = 0;
    fiber *chosen = NULL;
    for (int i = 0; i < fibers_count; i++) {
        fiber *of = fibers[i];
        if (of->state != FIBER_WAITING || of->awaits != cond || of->is_signaled)
            continue;
        of->is_signaled = wakes_all;
        if (sim_draw(++waiting) == 0)
            chosen = of;
    }
    if (chosen != NULL)
        chosen->is_signaled = 1;
    return 0;
}

/* A turn for a fiber, or for the holder of the mutex that it waits for. */
static void run_or_holder(int thread)
{
    const fiber *of = fiber_at(thread);
    while (of->state == FIBER_LOCKING && !mutex_is_free(of->awaits)) {
        thread = ((const sim_mutex *)of->awaits)->holder - 1;
        of = fiber_at(thread);
    }
    pccl_sim_run(thread);
}

/* Callers on the fast path */

static void *call_run(void *argument)
{
    fiber_call *call = argument;
    call->outcome =
        pccl_fast_path_run(call->path, call->number, &call->request, &call->sequence, call->wait_ms, &call->result);
    return NULL;
}

static void *call_start(void *argument)
{
    fiber_call *call = argument;
    call->outcome =
        pccl_fast_path_start(call->path, call->number, &call->request, &call->sequence, call->wait_ms, &call->started);
    return NULL;
}

static void *call_join(void *argument)
{
    fiber_call *call = argument;
    call->outcome = pccl_fast_path_wait(call->path, call->started, &call->result);
    return NULL;
}

/* Begins a thread that does this, up to where it waits. */
static int caller_start(enum fiber_role role, void *(*run)(void *), const fiber_call *call)
{
    int thread = fiber_start(run, NULL);
    fiber *caller = fiber_at(thread);
    caller->role = role;
    caller->call = *call;
    caller->argument = &caller->call;
    while (caller->state == FIBER_READY || caller->state == FIBER_LOCKING)
        run_or_holder(thread);
    return thread;
}

int pccl_sim_call(
    pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t sequence, uint32_t wait_ms)
{
    const fiber_call call = {
        .path = path, .number = number, .request = *request, .sequence = sequence, .wait_ms = wait_ms};
    return caller_start(FIBER_RUNS, call_run, &call);
}

int pccl_sim_start(
    pccl_fast_path *path, uint64_t number, const pccl_op_request *request, uint64_t sequence, uint32_t wait_ms)
{
    const fiber_call call = {
        .path = path, .number = number, .request = *request, .sequence = sequence, .wait_ms = wait_ms};
    return caller_start(FIBER_STARTS, call_start, &call);
}

pccl_fast_path_call *pccl_sim_started(int thread)
{
    const fiber *caller = fiber_at(thread);
    PCCL_ASSERT(caller->state == FIBER_OVER && caller->role == FIBER_STARTS && caller->call.outcome == 0);
    return caller->call.started;
}

int pccl_sim_join_call(pccl_fast_path *path, pccl_fast_path_call *started)
{
    const fiber_call call = {.path = path, .started = started};
    return caller_start(FIBER_JOINS, call_join, &call);
}

void pccl_sim_finish(int thread)
{
    while (fiber_at(thread)->state != FIBER_OVER) {
        fiber_await_due(fiber_at(thread));
        run_or_holder(thread);
    }
}

int pccl_sim_call_outcome(int thread, pccl_fast_path_result *result)
{
    const fiber *caller = fiber_at(thread);
    PCCL_ASSERT(caller->state == FIBER_OVER);
    *result = caller->call.result;
    return caller->call.outcome;
}

int pccl_sim_drives(void) { return drives; }
