/* engine_world.h: several engines in one process, each linked with each other, and waiting for their events. Shared by
 * the engine's tests, fuzzer and benchmark. */
#ifndef PCCL_ENGINE_WORLD_H
#define PCCL_ENGINE_WORLD_H

#include "pccl_native.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { WORLD_RANKS_MAX = 8, WAIT_MS = 60000 };

typedef struct {
    pccl_engine *engine;
    pccl_event *events; /* collected, not yet looked for */
    int events_count;
    int events_capacity;
} node;

typedef struct {
    uint32_t size;
    node nodes[WORLD_RANKS_MAX];
    uint64_t rank_links[WORLD_RANKS_MAX][WORLD_RANKS_MAX];
} world;

static inline int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline void stop_test(const char *what)
{
    fprintf(stderr, "cannot go on: %s\n", what);
    abort();
}

static inline void pair_unix(int fds[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0)
        stop_test("socketpair");
}

static inline void node_await_counter(node *n, size_t offset, uint64_t at_least, const char *name)
{
    int64_t deadline_ms = now_ms() + WAIT_MS;
    for (;;) {
        pccl_engine_stats stats;
        uint64_t value;
        pccl_engine_get_stats(n->engine, &stats);
        memcpy(&value, (const char *)&stats + offset, sizeof value);
        if (value >= at_least)
            return;
        if (now_ms() > deadline_ms)
            stop_test(name);
        poll(NULL, 0, 1);
    }
}

/* Waits until a counter of the engine's statistics is at least so much. */
#define node_await_stat(n, counter, at_least) \
    node_await_counter(n, offsetof(pccl_engine_stats, counter), at_least, #counter)

/* TCP connections made from here on are between different addresses, as if between machines. */
static int tested_far;

static inline void pair_tcp(int fds[2])
{
    struct sockaddr_in address;
    socklen_t address_bytes = sizeof address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (tested_far) {
        struct sockaddr_in other = address;
        other.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
        if (bind(fds[0], (struct sockaddr *)&other, sizeof other) != 0)
            stop_test("another loopback address");
    }
    if (listener < 0 || fds[0] < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 1) != 0 || getsockname(listener, (struct sockaddr *)&address, &address_bytes) != 0 ||
        connect(fds[0], (struct sockaddr *)&address, sizeof address) != 0)
        stop_test("loopback TCP");
    fds[1] = accept(listener, NULL, NULL);
    if (fds[1] < 0)
        stop_test("accept");
    close(listener);
}

/* Of the engines made from here on; UINT32_MAX: the default. */
static uint32_t tested_eager_bytes_max = UINT32_MAX;
static uint32_t tested_op_scratch_bytes_max = UINT32_MAX; /* 0: one segment of a chunk at a time */

static uint32_t tested_pace_bytes_per_s;

static inline pccl_engine_options tested_options(void)
{
    pccl_engine_options options;
    pccl_engine_options_default(&options);
    if (tested_eager_bytes_max != UINT32_MAX)
        options.eager_bytes_max = tested_eager_bytes_max;
    if (tested_op_scratch_bytes_max != UINT32_MAX)
        options.op_scratch_bytes_max = tested_op_scratch_bytes_max;
    options.pace_bytes_per_s = tested_pace_bytes_per_s;
    return options;
}

static inline void node_open(node *n, int force_poll)
{
    pccl_engine_options options = tested_options();
    char error[128];
    memset(n, 0, sizeof *n);
    options.force_poll = (uint32_t)force_poll;
    n->engine = pccl_engine_create(&options, error, sizeof error);
    if (n->engine == NULL)
        stop_test(error);
}

static inline void node_close(node *n)
{
    pccl_engine_destroy(n->engine);
    free(n->events);
    memset(n, 0, sizeof *n);
}

/* The link between two ranks has the same number on both. */
static inline uint64_t link_number(uint32_t a, uint32_t b) { return a < b ? 1000 + a * 100 + b : 1000 + b * 100 + a; }

static inline uint64_t link_to_next(const world *w, uint32_t rank) { return link_number(rank, (rank + 1) % w->size); }

static inline uint64_t link_to_prev(const world *w, uint32_t rank)
{
    return link_number(rank, (rank + w->size - 1) % w->size);
}

static inline void world_init(world *w, uint32_t size)
{
    memset(w, 0, sizeof *w);
    w->size = size;
    for (uint32_t a = 0; a < size; a++)
        for (uint32_t b = 0; b < size; b++)
            w->rank_links[a][b] = a == b ? 0 : link_number(a, b);
}

/* Connections made from here on are encrypted. */
static int tested_encryption;

/* Fresh ones for both ends of a connection. */
typedef struct {
    pccl_link_keys ends[2];
} key_pair;

static inline void key_pair_make(key_pair *keys)
{
    static uint64_t made;
    memset(keys, 0, sizeof *keys);
    made++;
    memcpy(keys->ends[0].tx, &made, sizeof made);
    memcpy(keys->ends[0].rx, &made, sizeof made);
    keys->ends[0].rx[31] = 1;
    memcpy(keys->ends[1].rx, keys->ends[0].tx, sizeof keys->ends[0].tx);
    memcpy(keys->ends[1].tx, keys->ends[0].rx, sizeof keys->ends[0].rx);
}

/* Those between them share memory instead. */
static int tested_memory;

static inline void world_add_memory(world *w, uint32_t a, int a_fd, uint32_t b, int b_fd)
{
    uint8_t offer[PCCL_MEMORY_OFFER_BYTES];
    pccl_memory *ends[2];
    if (pccl_memory_create(&ends[0], offer) != 0 || pccl_memory_open(offer, &ends[1]) != 0 ||
        pccl_engine_link_add_memory(w->nodes[a].engine, link_number(a, b), a_fd, ends[0]) != 0 ||
        pccl_engine_link_add_memory(w->nodes[b].engine, link_number(a, b), b_fd, ends[1]) != 0)
        stop_test("link_add_memory");
}

static inline void world_add_connection(world *w, uint32_t a, int a_fd, uint32_t b, int b_fd)
{
    key_pair keys;
    if (tested_memory) {
        world_add_memory(w, a, a_fd, b, b_fd);
        return;
    }
    key_pair_make(&keys);
    const pccl_link_keys *ends = tested_encryption ? keys.ends : NULL;
    if (pccl_engine_link_add(w->nodes[a].engine, link_number(a, b), a_fd, ends) != 0 ||
        pccl_engine_link_add(w->nodes[b].engine, link_number(a, b), b_fd, ends != NULL ? &ends[1] : NULL) != 0)
        stop_test("link_add");
}

static inline void world_link(world *w, uint32_t a, uint32_t b, int is_tcp)
{
    int fds[2];
    if (is_tcp)
        pair_tcp(fds);
    else
        pair_unix(fds);
    world_add_connection(w, a, fds[0], b, fds[1]);
}

static inline void world_open(world *w, uint32_t size, unsigned connections, int is_tcp, int force_poll)
{
    world_init(w, size);
    for (uint32_t rank = 0; rank < size; rank++)
        node_open(&w->nodes[rank], force_poll);
    for (uint32_t a = 0; a < size; a++)
        for (uint32_t b = a + 1; b < size; b++)
            for (unsigned i = 0; i < connections; i++)
                world_link(w, a, b, is_tcp);
}

static inline void world_close(world *w)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        node_close(&w->nodes[rank]);
}

/* Removes and returns the first collected event of this kind and id. */
static inline int node_take_collected(node *n, uint32_t kind, uint64_t id, pccl_event *event)
{
    for (int i = 0; i < n->events_count; i++) {
        if (n->events[i].kind != kind || n->events[i].id != id)
            continue;
        *event = n->events[i];
        n->events_count--;
        memmove(&n->events[i], &n->events[i + 1], (size_t)(n->events_count - i) * sizeof *n->events);
        return 1;
    }
    return 0;
}

static inline void node_collect(node *n)
{
    for (;;) {
        if (n->events_count + 16 > n->events_capacity) {
            n->events_capacity = n->events_capacity * 2 + 64;
            n->events = realloc(n->events, (size_t)n->events_capacity * sizeof *n->events);
            if (n->events == NULL)
                stop_test("memory");
        }
        int count = pccl_engine_poll_events(n->engine, n->events + n->events_count, 16);
        if (count == 0)
            return;
        n->events_count += count;
    }
}

/* Has this happened by now? Takes the event. */
static inline int node_has_event(node *n, uint32_t kind, uint64_t id)
{
    pccl_event event;
    node_collect(n);
    return node_take_collected(n, kind, id, &event);
}

/* 0 when it does not come in time. */
static inline int node_wait_for(node *n, uint32_t kind, uint64_t id, pccl_event *event, int timeout_ms)
{
    int64_t deadline_ms = now_ms() + timeout_ms;
    for (;;) {
        if (node_take_collected(n, kind, id, event))
            return 1;
        struct pollfd pfd = {.fd = pccl_engine_event_fd(n->engine), .events = POLLIN};
        int64_t left_ms = deadline_ms - now_ms();
        int is_late = left_ms < 0 || poll(&pfd, 1, (int)left_ms) == 0;
        node_collect(n);
        if (is_late) /* there may be what nobody had to be woken for */
            return node_take_collected(n, kind, id, event);
    }
}

static inline pccl_event node_wait(node *n, uint32_t kind, uint64_t id)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    if (!node_wait_for(n, kind, id, &event, WAIT_MS)) {
        fprintf(stderr, "no event of kind %u and id %llu\n", kind, (unsigned long long)id);
        abort();
    }
    return event;
}

/* Of every other op the ranks tell each other when they are done. */
static inline int op_awaits_completion(uint64_t op) { return op % 2 == 1; }

/* All of them are: so it is where none waits for more. */
static inline void node_wait_done(node *n, uint64_t op)
{
    node_wait(n, op_awaits_completion(op) ? PCCL_EVENT_OP_COMPLETED : PCCL_EVENT_OP_DONE, op);
    if (op_awaits_completion(op))
        node_wait(n, PCCL_EVENT_OP_DONE, op);
}

static inline pccl_op_request request_for(const world *w, uint32_t rank, uint64_t op, const pccl_op_shape *shape)
{
    pccl_op_request request;
    memset(&request, 0, sizeof request);
    request.op = op;
    request.key.epoch = 1;
    request.key.sequence = op;
    request.shape = *shape;
    request.rank = rank;
    request.link_prev = link_to_prev(w, rank);
    request.link_next = link_to_next(w, rank);
    request.rank_links = w->rank_links[rank];
    request.awaits_completion = op_awaits_completion(op);
    return request;
}

/* Of the shapes made from here on. */
static uint8_t tested_algorithm = PCCL_RING;

static inline pccl_op_shape plain_shape(
    uint64_t count, uint32_t dtype, uint32_t reduce_op, uint32_t segment_bytes, uint32_t world_size)
{
    pccl_op_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.count = count;
    shape.dtype = (uint8_t)dtype;
    shape.reduce_op = (uint8_t)reduce_op;
    shape.segment_bytes = segment_bytes;
    shape.world_size = world_size;
    shape.algorithm = tested_algorithm;
    return shape;
}

#endif
