/* engine.c: the public functions, and the thread behind them.
 *
 * All state is the core's, and the core belongs to the thread that drives the engine (driver.h): its own one, or for
 * the time of an op the caller of that. A caller's call becomes a command in a queue, which the driver empties when
 * woken; the answers come back through the event queue. Whatever can fail for want of memory or for a wrong argument
 * does so in the call: ops, connections and events are allocated there, the driver only links them in.
 *
 * What the engine cannot go on without, its descriptors or memory for what a peer has sent, ends it: the driver says so
 * in an event, and leaves the commands to come, and all ops, to pccl_engine_destroy.
 *
 * Ops come from the thread that polls the events, or from any thread on the fast path: see fast_path.h. */
#include "pccl_native.h"

#include "completion.h"
#include "core.h"
#include "driver.h"
#include "event_queue.h"
#include "fd_registry.h"
#include "fpenv.h"
#include "fast_path.h"
#include "pool.h"
#include "os.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EVENTS_PER_BATCH_MAX = 64,
    NS_PER_MS = 1000000,
    IDLE_MS_MAX = 1000 /* the descriptor that wakes the thread may have been closed, too */
};

enum command_kind {
    COMMAND_LINK_ADD,
    COMMAND_LINK_CLOSE,
    COMMAND_LINK_COUNT,
    COMMAND_SUBMIT,
    COMMAND_FREEZE,
    COMMAND_FREEZE_OP,
    COMMAND_FORGET_OPS,
    COMMAND_DETACH,
    COMMAND_END,
    COMMAND_STOP
};

typedef struct command {
    struct command *next;
    enum command_kind kind;
    int verdict;
    uint32_t group;
    uint64_t id; /* link, op or epoch, or how many */
    pccl_op_key key;
    pccl_conn *conn;
    pccl_link *spare_link;
    pccl_group *spare_group;
    pccl_op *op;
} command;

struct pccl_engine {
    pthread_t thread;
    pccl_poller *poller;
    pccl_poll_entry wake_entry;
    pccl_wake wake;
    pccl_fd_registry *fds;
    pccl_event_queue *events;
    pccl_pool *pool;
    uint64_t op_scratch_bytes_max;
    pccl_core *core;
    pccl_fast_path *fast_path;

    pccl_driver driver; /* for what follows */
    int64_t looked_ms; /* for commands */
    int has_more; /* to send */
    int is_stopping;
    int is_over;

    pthread_mutex_t mutex; /* for what follows */
    command *first_command;
    command *last_command;
    int is_woken;
    int wake_error; /* 0: none */
    int has_failed; /* read by any thread */
    command stop; /* destroying must not need memory */
};

void pccl_engine_options_default(pccl_engine_options *options)
{
    memset(options, 0, sizeof *options);
    options->stall_ms = 5000;
    options->pool_bytes_max = 64 << 20;
    options->op_scratch_bytes_max = 16 << 20;
    options->eager_bytes_max = PCCL_WHOLE_CHUNK_BYTES;
    options->records = 4096;
}

uint32_t pccl_native_abi(void) { return PCCL_NATIVE_ABI; }

/* The driver */

static void command_run(pccl_engine *engine, command *todo)
{
    switch (todo->kind) {
    case COMMAND_LINK_ADD: pccl_core_link_add(engine->core, todo->conn, todo->spare_link); break;
    case COMMAND_LINK_CLOSE: pccl_core_link_close(engine->core, todo->id); break;
    case COMMAND_LINK_COUNT: pccl_core_link_count(engine->core, todo->id); break;
    case COMMAND_SUBMIT: pccl_core_submit(engine->core, todo->op, todo->spare_group); break;
    case COMMAND_FREEZE: pccl_core_freeze(engine->core, todo->group, todo->id, todo->spare_group); break;
    case COMMAND_FREEZE_OP: pccl_core_freeze_op(engine->core, todo->id); break;
    case COMMAND_FORGET_OPS: pccl_core_forget_ops(engine->core, todo->key, todo->id); break;
    case COMMAND_DETACH: pccl_core_detach(engine->core, todo->id); break;
    case COMMAND_END: pccl_core_end(engine->core, todo->id, todo->verdict); break;
    case COMMAND_STOP: break;
    }
}

/* With the mutex. */
static void engine_note_wake(pccl_engine *engine, int error)
{
    if (engine->wake_error == 0)
        engine->wake_error = error;
}

/* Returns the failure of this machine, if there is one. */
static int engine_find_fault(pccl_engine *engine, pccl_host_fault *fault)
{
    const pccl_host_fault *of_core = pccl_core_fault(engine->core);
    memset(fault, 0, sizeof *fault);
    if (of_core != NULL) {
        *fault = *of_core;
        return 1;
    }
    const char *call = pccl_poller_failed_call(engine->poller, &fault->system_error);
    if (call == NULL) {
        call = "waking threads";
        fault->system_error = pccl_event_queue_error(engine->events);
    }
    if (fault->system_error == 0) {
        pthread_mutex_lock(&engine->mutex);
        fault->system_error = engine->wake_error;
        pthread_mutex_unlock(&engine->mutex);
    }
    snprintf(fault->detail, sizeof fault->detail, "%s", call);
    return fault->system_error != 0;
}

/* Nonzero if the engine has to end, of which it posts an event once. */
static int engine_is_over(pccl_engine *engine)
{
    pccl_host_fault fault;
    if (!engine_find_fault(engine, &fault))
        return 0;
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_ENGINE_FAILED;
    event.system_error = fault.system_error;
    memcpy(event.detail, fault.detail, sizeof event.detail);
    __atomic_store_n(&engine->has_failed, 1, __ATOMIC_RELEASE);
    pccl_event_queue_post(engine->events, &event);
    pccl_fast_path_close(engine->fast_path);
    return 1;
}

/* Takes and does the commands that wait. Nonzero if one of them was to stop. `is_readable`: the poller has reported the
 * wake descriptor, which has to be read then even if the engine did not write to it, because it may have failed. */
static int engine_run_commands(pccl_engine *engine, int is_readable)
{
    int is_stopping = 0;
    pthread_mutex_lock(&engine->mutex);
    command *todo = engine->first_command;
    engine->first_command = engine->last_command = NULL;
    if (engine->is_woken || is_readable)
        engine_note_wake(engine, pccl_wake_clear(&engine->wake));
    engine->is_woken = 0;
    pthread_mutex_unlock(&engine->mutex);
    while (todo != NULL) {
        command *next = todo->next;
        if (todo->kind == COMMAND_STOP) {
            is_stopping = 1;
        } else {
            command_run(engine, todo);
            free(todo);
        }
        todo = next;
    }
    return is_stopping;
}

/* Deals with what has happened, and sends what can be sent. */
static void engine_work(pccl_engine *engine, const pccl_poll_event *events, int count, int has_commands)
{
    int64_t now_ns = pccl_now_ns();
    int is_readable = 0;
    pccl_core_set_clock(engine->core, now_ns);
    for (int i = 0; i < count; i++) {
        if (events[i].entry == &engine->wake_entry)
            is_readable = 1;
        else
            pccl_core_on_poll(engine->core, &events[i]);
    }
    if (has_commands || is_readable) {
        engine->looked_ms = now_ns / NS_PER_MS;
        engine->is_stopping |= engine_run_commands(engine, is_readable);
    }
    pccl_core_tick(engine->core, now_ns / NS_PER_MS);
    engine->is_over = engine_is_over(engine); /* before peers are blamed for what follows from it */
    if (!engine->is_over)
        engine->has_more = pccl_core_settle(engine->core);
}

/* Waits until something happens, for so long at most, and deals with it. A caller that drives may poll busily. */
static void engine_turn(pccl_engine *engine, int timeout_ms_max, int is_caller)
{
    pccl_poll_event events[EVENTS_PER_BATCH_MAX];
    int64_t begin_ms = pccl_now_ms();
    int has_commands = begin_ms - engine->looked_ms >= IDLE_MS_MAX;
    int timeout_ms = pccl_core_timeout_ms(engine->core, begin_ms);
    int expiry_ms = pccl_fast_path_expire(engine->fast_path);
    if (timeout_ms < 0 || timeout_ms > timeout_ms_max)
        timeout_ms = timeout_ms_max;
    if (expiry_ms >= 0 && expiry_ms < timeout_ms)
        timeout_ms = expiry_ms;
    if (engine->has_more)
        timeout_ms = 0;
    int count = is_caller ? pccl_poller_wait_busily(engine->poller, events, EVENTS_PER_BATCH_MAX, timeout_ms,
                                pccl_core_local_links(engine->core))
                          : pccl_poller_wait(engine->poller, events, EVENTS_PER_BATCH_MAX, timeout_ms);
    engine_work(engine, events, count, has_commands);
}

static int engine_has_ended(const pccl_engine *engine) { return engine->is_stopping || engine->is_over; }

static int engine_is_idle(const pccl_engine *engine)
{
    return !engine->has_more && !engine_has_ended(engine) && pccl_core_is_idle(engine->core);
}

static void *engine_main(void *argument)
{
    pccl_engine *engine = argument;
    (void)pccl_fpenv_enter();
    engine->looked_ms = pccl_now_ms();
    while (!engine_has_ended(engine)) {
        engine_turn(engine, IDLE_MS_MAX, 0);
        if (engine_is_idle(engine))
            pccl_driver_rest(&engine->driver);
    }
    return NULL;
}

/* The first turn of a caller that drives. What has come is dealt with before its op begins, and most often the others
 * have announced theirs: the op is then done with what it sends at once, and says so in the same breath. */
static void engine_begin(pccl_engine *engine)
{
    pccl_poll_event events[EVENTS_PER_BATCH_MAX];
    engine_work(engine, events, pccl_poller_wait(engine->poller, events, EVENTS_PER_BATCH_MAX, 0), 1);
}

static int engine_take(void *engine) { return pccl_driver_take(&((pccl_engine *)engine)->driver); }

/* A caller drives while it waits, until that clock shows end_ns; or, if that is 0, without waiting. It then comes back
 * to wait as a rule, so the thread may go on resting for its time unless there is something to be sent. */
static void engine_drive(void *argument, const pccl_fast_path_call *call, int64_t end_ns)
{
    pccl_engine *engine = argument;
    uint64_t fpenv = pccl_fpenv_enter();
    int64_t left_ns = 1;
    engine_begin(engine);
    while (!pccl_fast_path_call_is_over(call) && !engine_has_ended(engine) && left_ns > 0) {
        left_ns = end_ns - pccl_now_ns();
        engine_turn(engine, left_ns > 0 ? (int)((left_ns + NS_PER_MS - 1) / NS_PER_MS) : 0, 1);
    }
    pccl_fpenv_leave(fpenv);
    int may_rest = end_ns == 0 ? !engine->has_more && !engine_has_ended(engine) && pccl_core_is_drained(engine->core)
                               : engine_is_idle(engine);
    pccl_driver_leave(&engine->driver, may_rest);
}

/* Commands from the callers */

static command *command_create(enum command_kind kind)
{
    command *made = calloc(1, sizeof *made);
    if (made != NULL)
        made->kind = kind;
    return made;
}

static void engine_queue(pccl_engine *engine, command *todo, int wakes)
{
    pthread_mutex_lock(&engine->mutex);
    if (engine->last_command != NULL)
        engine->last_command->next = todo;
    else
        engine->first_command = todo;
    engine->last_command = todo;
    if (wakes && !engine->is_woken) {
        engine->is_woken = 1;
        engine_note_wake(engine, pccl_wake_signal(&engine->wake));
    }
    pthread_mutex_unlock(&engine->mutex);
}

static void engine_command(pccl_engine *engine, command *todo)
{
    engine_queue(engine, todo, 1);
    pccl_driver_need(&engine->driver);
}

/* Makes an op, and the command that submits it. 0 or an error. */
static int engine_prepare(
    pccl_engine *engine, const pccl_op_request *request, unsigned events_promised, command **prepared)
{
    pccl_op *op;
    int status = pccl_op_create(request, engine->pool, engine->op_scratch_bytes_max, &op);
    if (status != 0)
        return status;
    command *todo = command_create(COMMAND_SUBMIT);
    pccl_group *spare = calloc(1, sizeof *spare);
    status = PCCL_E_MEMORY;
    if (request->awaits_completion)
        op->completion = pccl_completion_create(request);
    op->events_promised = events_promised;
    op->launched_ns = pccl_now_ns();
    op->caller = pccl_thread_id();
    if (todo != NULL && spare != NULL && (!request->awaits_completion || op->completion != NULL))
        status = pccl_event_queue_promise(engine->events, op->events_promised);
    if (status != 0) {
        free(todo);
        free(spare);
        free(op->completion);
        pccl_op_destroy(op);
        return status;
    }
    todo->op = op;
    todo->spare_group = spare;
    *prepared = todo;
    return 0;
}

/* The fast path's */

static int engine_prepare_fast(void *engine, const pccl_op_request *request, void **prepared)
{
    command *todo;
    int status = engine_prepare(engine, request, PCCL_EVENTS_PER_FAST_OP, &todo);
    if (status == 0)
        *prepared = todo;
    return status;
}

static void engine_discard_fast(void *engine, void *prepared)
{
    command *todo = prepared;
    pccl_event_queue_release(((pccl_engine *)engine)->events, todo->op->events_promised);
    free(todo->op->completion);
    pccl_op_destroy(todo->op);
    free(todo->spare_group);
    free(todo);
}

static void engine_submit_fast(void *argument, void *prepared, uint64_t sequence, pccl_fast_path_call *call)
{
    pccl_engine *engine = argument;
    command *todo = prepared;
    pccl_op *op = todo->op;
    op->request.key.sequence = op->completion->key.sequence = sequence;
    op->fast_path = engine->fast_path;
    op->call = call;
    call->op = op;
    call->launched_ns = op->launched_ns;
    call->drives = call->may_drive && pccl_driver_take(&engine->driver);
    if (call->drives)
        engine_queue(engine, todo, 0);
    else
        engine_command(engine, todo);
}

static void engine_free(pccl_engine *engine)
{
    if (engine->core != NULL)
        pccl_core_destroy(engine->core);
    pccl_fast_path_release(engine->fast_path);
    pccl_pool_destroy(engine->pool);
    pccl_poller_close(engine->poller);
    pccl_wake_close(&engine->wake);
    pccl_event_queue_destroy(engine->events);
    pccl_fd_registry_destroy(engine->fds);
    pccl_driver_free(&engine->driver);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

static pccl_engine *engine_create_failed(
    pccl_engine *engine, const char *what, int system_error, char *error, size_t error_bytes)
{
    pccl_say_system_error(error, error_bytes, what, system_error);
    if (engine != NULL)
        engine_free(engine);
    return NULL;
}

pccl_engine *pccl_engine_create(const pccl_engine_options *options, char *error, size_t error_bytes)
{
    pccl_engine_options defaults;
    if (options == NULL) {
        pccl_engine_options_default(&defaults);
        options = &defaults;
    }
    pccl_engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return engine_create_failed(NULL, "engine", ENOMEM, error, error_bytes);
    engine->wake.read_fd = engine->wake.write_fd = -1;
    int rc = pccl_keyed_hash_prepare();
    if (rc != 0) {
        free(engine);
        return engine_create_failed(NULL, "getentropy", rc, error, error_bytes);
    }
    rc = pthread_mutex_init(&engine->mutex, NULL);
    if (rc != 0) {
        free(engine);
        return engine_create_failed(NULL, "pthread_mutex_init", rc, error, error_bytes);
    }
    rc = pccl_driver_init(&engine->driver);
    if (rc != 0) {
        pthread_mutex_destroy(&engine->mutex);
        free(engine);
        return engine_create_failed(NULL, "pthread_cond_init", rc, error, error_bytes);
    }
    engine->fds = pccl_fd_registry_create();
    engine->pool = pccl_pool_create(options->pool_bytes_max);
    engine->op_scratch_bytes_max = options->op_scratch_bytes_max;
    if (engine->fds == NULL || engine->pool == NULL)
        return engine_create_failed(engine, "engine", ENOMEM, error, error_bytes);
    engine->events = pccl_event_queue_create();
    if (engine->events == NULL)
        return engine_create_failed(engine, "event queue", errno, error, error_bytes);
    if (pccl_wake_open(&engine->wake) != 0)
        return engine_create_failed(engine, "eventfd or pipe", errno, error, error_bytes);
    engine->poller = pccl_poller_open(options->force_poll != 0);
    if (engine->poller == NULL)
        return engine_create_failed(engine, "epoll_create1", errno, error, error_bytes);
    if (pccl_poller_add(engine->poller, &engine->wake_entry, engine->wake.read_fd, PCCL_POLL_IN) != 0)
        return engine_create_failed(engine, "epoll_ctl", errno, error, error_bytes);
    engine->core = pccl_core_create(engine->poller, engine->events, options->eager_bytes_max, options->stall_ms,
        options->pace_bytes_per_s, options->records);
    if (engine->core == NULL)
        return engine_create_failed(engine, "engine", ENOMEM, error, error_bytes);
    if (pccl_event_queue_promise(engine->events, 1) != 0) /* ENGINE_FAILED */
        return engine_create_failed(engine, "engine", ENOMEM, error, error_bytes);
    const pccl_fast_path_engine calls = {
        engine_prepare_fast, engine_discard_fast, engine_submit_fast, engine_take, engine_drive};
    engine->fast_path = pccl_fast_path_create(engine, &calls, engine->events);
    if (engine->fast_path == NULL)
        return engine_create_failed(engine, "fast path", errno, error, error_bytes);
    rc = pccl_thread_start(&engine->thread, "pccl-engine", engine_main, engine);
    if (rc != 0)
        return engine_create_failed(engine, "pthread_create", rc, error, error_bytes);
    return engine;
}

void pccl_engine_destroy(pccl_engine *engine)
{
    if (engine == NULL)
        return;
    pccl_fast_path_shut(engine->fast_path);
    engine->stop.kind = COMMAND_STOP;
    engine_command(engine, &engine->stop);
    pthread_join(engine->thread, NULL);
    if (engine->has_failed)
        (void)engine_run_commands(engine, 0); /* which it has left */
    engine_free(engine);
}

void pccl_engine_forget_after_fork(pccl_engine *engine)
{
    pccl_fd_registry_forget(engine->fds);
    pccl_poller_forget_after_fork(engine->poller);
    pccl_wake_close(&engine->wake);
    pccl_event_queue_forget_after_fork(engine->events);
}

int pccl_engine_has_failed(const pccl_engine *engine) { return __atomic_load_n(&engine->has_failed, __ATOMIC_ACQUIRE); }

int pccl_engine_event_fd(const pccl_engine *engine) { return pccl_event_queue_fd(engine->events); }

int pccl_engine_poll_events(pccl_engine *engine, pccl_event *events, int events_max)
{
    return pccl_event_queue_poll(engine->events, events, events_max);
}

void pccl_engine_get_stats(pccl_engine *engine, pccl_engine_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    pccl_core_count(engine->core, stats);
    pccl_pool_usage usage = pccl_pool_get_usage(engine->pool);
    stats->pool_bytes = usage.idle_bytes;
    stats->scratch_bytes = usage.used_bytes;
    stats->scratch_bytes_max = usage.used_bytes_max;
}

int pccl_fast_path_get_stats(pccl_fast_path *path, pccl_engine_stats *stats)
{
    pccl_engine *engine = pccl_fast_path_hold_engine(path);
    if (engine == NULL)
        return 0;
    pccl_engine_get_stats(engine, stats);
    pccl_fast_path_release_engine(path);
    return 1;
}

void pccl_fast_path_wake_owner(pccl_fast_path *path)
{
    pccl_engine *engine = pccl_fast_path_hold_engine(path);
    if (engine == NULL)
        return;
    pccl_event_queue_interrupt(engine->events);
    pccl_fast_path_release_engine(path);
}

uint64_t pccl_fast_path_in_ops_ns(pccl_fast_path *path, int of_slices)
{
    pccl_engine *engine = pccl_fast_path_hold_engine(path);
    if (engine == NULL)
        return 0;
    uint64_t ns = pccl_core_in_ops_ns(engine->core, of_slices);
    pccl_fast_path_release_engine(path);
    return ns;
}

int pccl_fast_path_read_records(pccl_fast_path *path, int64_t since_ns, pccl_op_record *records, int records_max)
{
    pccl_engine *engine = pccl_fast_path_hold_engine(path);
    if (engine == NULL)
        return 0;
    int count = pccl_engine_read_records(engine, since_ns, records, records_max);
    pccl_fast_path_release_engine(path);
    return count;
}

int pccl_engine_read_records(pccl_engine *engine, int64_t since_ns, pccl_op_record *records, int records_max)
{
    return pccl_core_read_records(engine->core, since_ns, records, records_max);
}

/* Takes the wire, also on failure. */
static int engine_link_add(pccl_engine *engine, uint64_t link, pccl_wire *wire)
{
    command *todo = command_create(COMMAND_LINK_ADD);
    int status = PCCL_E_MEMORY;
    if (todo != NULL) {
        todo->conn = pccl_conn_create(wire);
        if (todo->conn != NULL)
            wire = NULL;
        todo->spare_link = pccl_link_create(link);
        if (todo->conn != NULL && todo->spare_link != NULL)
            status = pccl_event_queue_promise(engine->events, PCCL_EVENTS_PER_CONN);
    }
    if (status == 0) {
        engine_command(engine, todo);
        return 0;
    }
    if (wire != NULL)
        wire->type->close(wire);
    if (todo != NULL) {
        if (todo->conn != NULL)
            pccl_conn_destroy(todo->conn);
        free(todo->spare_link);
        free(todo);
    }
    return status;
}

static int engine_link_add_keyed(pccl_engine *engine, uint64_t link, pccl_wire *wire, const pccl_link_keys *keys)
{
    int status = keys != NULL ? pccl_wire_seal(&wire, keys) : 0;
    if (status == 0)
        return engine_link_add(engine, link, wire);
    wire->type->close(wire);
    return status;
}

int pccl_engine_link_add(pccl_engine *engine, uint64_t link, int fd, const pccl_link_keys *keys)
{
    if (fd < 0)
        return PCCL_E_INVALID;
    pccl_wire *wire;
    int status = pccl_wire_tcp_open(engine->fds, fd, &wire);
    return status != 0 ? status : engine_link_add_keyed(engine, link, wire, keys);
}

int pccl_engine_link_add_udp(
    pccl_engine *engine, uint64_t link, int fd, const uint8_t *secret, int is_dialer, const pccl_link_keys *keys)
{
    pccl_wire *wire;
    int status = pccl_wire_udp_open(engine->fds, fd, secret, is_dialer, &wire);
    return status != 0 ? status : engine_link_add_keyed(engine, link, wire, keys);
}

int pccl_engine_link_add_memory(pccl_engine *engine, uint64_t link, int fd, pccl_memory *memory)
{
    pccl_wire *wire;
    int status = pccl_wire_shm_open(engine->fds, fd, memory, &wire);
    return status != 0 ? status : engine_link_add(engine, link, wire);
}

void pccl_engine_set_link_timeout(pccl_engine *engine, uint32_t timeout_ms)
{
    pccl_core_set_link_timeout(engine->core, timeout_ms);
}

int pccl_engine_link_close(pccl_engine *engine, uint64_t link)
{
    command *todo = command_create(COMMAND_LINK_CLOSE);
    if (todo == NULL)
        return PCCL_E_MEMORY;
    todo->id = link;
    engine_command(engine, todo);
    return 0;
}

/* Makes a command about one id, which `events` events answer at most. 0 with the command, or a status. */
static int command_prepare(
    pccl_engine *engine, enum command_kind kind, uint64_t id, unsigned events, command **prepared)
{
    command *todo = command_create(kind);
    int status = todo == NULL ? PCCL_E_MEMORY : pccl_event_queue_promise(engine->events, events);
    if (status != 0) {
        free(todo);
        return status;
    }
    todo->id = id;
    *prepared = todo;
    return 0;
}

static int engine_command_id(pccl_engine *engine, enum command_kind kind, uint64_t id, unsigned events)
{
    command *todo;
    int status = command_prepare(engine, kind, id, events, &todo);
    if (status == 0)
        engine_command(engine, todo);
    return status;
}

int pccl_engine_request_link_metrics(pccl_engine *engine, uint64_t link)
{
    return engine_command_id(engine, COMMAND_LINK_COUNT, link, 1);
}

int pccl_engine_submit(pccl_engine *engine, const pccl_op_request *request)
{
    command *todo;
    int status = engine_prepare(engine, request, PCCL_EVENTS_PER_OP, &todo);
    if (status == 0)
        engine_command(engine, todo);
    return status;
}

pccl_fast_path *pccl_engine_fast_path(pccl_engine *engine)
{
    pccl_fast_path_retain(engine->fast_path);
    return engine->fast_path;
}

int pccl_engine_freeze(pccl_engine *engine, uint32_t group, uint64_t epoch)
{
    pccl_fast_path_close(engine->fast_path);
    command *todo = command_create(COMMAND_FREEZE);
    pccl_group *spare = calloc(1, sizeof *spare);
    int status = PCCL_E_MEMORY;
    if (todo != NULL && spare != NULL)
        status = pccl_event_queue_promise(engine->events, PCCL_EVENTS_PER_FREEZE);
    if (status != 0) {
        free(todo);
        free(spare);
        return status;
    }
    todo->group = group;
    todo->id = epoch;
    todo->spare_group = spare;
    engine_command(engine, todo);
    return 0;
}

int pccl_engine_freeze_op(pccl_engine *engine, uint64_t op)
{
    return engine_command_id(engine, COMMAND_FREEZE_OP, op, PCCL_EVENTS_PER_FREEZE);
}

int pccl_engine_forget_ops(pccl_engine *engine, const pccl_op_key *last, uint32_t count)
{
    command *todo;
    int status = command_prepare(engine, COMMAND_FORGET_OPS, count, 0, &todo);
    if (status != 0)
        return status;
    todo->key = *last;
    engine_command(engine, todo);
    return 0;
}

int pccl_engine_detach(pccl_engine *engine, uint64_t op)
{
    return engine_command_id(engine, COMMAND_DETACH, op, PCCL_EVENTS_PER_DETACH);
}

int pccl_engine_end(pccl_engine *engine, uint64_t op, int verdict)
{
    command *todo = command_create(COMMAND_END);
    if (todo == NULL)
        return PCCL_E_MEMORY;
    todo->id = op;
    todo->verdict = verdict;
    engine_command(engine, todo);
    return 0;
}
