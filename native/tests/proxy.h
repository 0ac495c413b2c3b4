/* proxy.h: a world whose connections pass through the test, which damages, cuts or holds them at chosen
 * bytes. */
#ifndef PCCL_PROXY_H
#define PCCL_PROXY_H

#include "trial.h"

#include <pthread.h>

enum fault { FAULT_NONE, FAULT_FLIP, FAULT_CUT, FAULT_RESET, FAULT_HOLD };

/* One direction of a connection. */
typedef struct {
    uint32_t a; /* of the first direction: between which ranks */
    uint32_t b;
    int from;
    int to;
    enum fault fault;
    uint64_t at_byte; /* of this direction; the fault happens there */
    unsigned bit;
    uint64_t passed_bytes;
    int is_faulty; /* it has happened */
    int is_released; /* held no longer */
    pthread_t thread;
} pump;

enum { PUMPS_MAX = 64 };

typedef struct {
    world w;
    unsigned pumps_count;
    unsigned pumps_started;
    pump pumps[PUMPS_MAX]; /* by twos: the directions of a connection */
} proxied;

static inline void set_fault(pump *p, enum fault fault, uint64_t at_byte, unsigned bit)
{
    p->fault = fault;
    p->at_byte = at_byte;
    p->bit = bit;
}

static void pump_reset(int fd)
{
    struct linger linger = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
}

static void *pump_main(void *argument)
{
    static const int one_ms = 1;
    pump *p = argument;
    uint8_t bytes[32 << 10];
    for (;;) {
        size_t room = sizeof bytes;
        uint64_t left = p->at_byte - p->passed_bytes;
        if (p->fault != FAULT_NONE && !p->is_faulty && left < room && p->fault != FAULT_FLIP)
            room = (size_t)left;
        if (room == 0) {
            __atomic_store_n(&p->is_faulty, 1, __ATOMIC_SEQ_CST);
            if (p->fault == FAULT_HOLD) {
                while (!__atomic_load_n(&p->is_released, __ATOMIC_SEQ_CST))
                    poll(NULL, 0, one_ms);
                continue;
            }
            if (p->fault == FAULT_RESET) {
                pump_reset(p->from);
                pump_reset(p->to);
            }
            break;
        }
        ssize_t n = recv(p->from, bytes, room, 0);
        if (n <= 0)
            break;
        if (p->fault == FAULT_FLIP && !p->is_faulty && left < (uint64_t)n) {
            bytes[left] ^= (uint8_t)(1u << p->bit);
            __atomic_store_n(&p->is_faulty, 1, __ATOMIC_SEQ_CST);
        }
        p->passed_bytes += (uint64_t)n;
        for (ssize_t done = 0; done < n;) {
            ssize_t sent = send(p->to, bytes + done, (size_t)(n - done), MSG_NOSIGNAL);
            if (sent <= 0)
                break;
            done += sent;
        }
    }
    shutdown(p->from, SHUT_RDWR);
    shutdown(p->to, SHUT_RDWR);
    return NULL;
}

/* a -> b is the first direction. */
static inline void proxied_connect(proxied *p, uint32_t a, uint32_t b, int is_tcp)
{
    int near[2], far[2];
    if (p->pumps_count + 2 > PUMPS_MAX)
        stop_test("too many connections");
    (is_tcp ? pair_tcp : pair_unix)(near);
    (is_tcp ? pair_tcp : pair_unix)(far);
    pump *forth = &p->pumps[p->pumps_count++];
    forth->a = a;
    forth->b = b;
    pump *back = &p->pumps[p->pumps_count++];
    forth->from = back->to = near[1];
    forth->to = back->from = far[1];
    world_add_connection(&p->w, a, near[0], b, far[0]);
}

static inline void proxied_node_open(node *n, uint32_t stall_ms)
{
    pccl_engine_options options = tested_options();
    char error[128];
    memset(n, 0, sizeof *n);
    options.stall_ms = stall_ms;
    n->engine = pccl_engine_create(&options, error, sizeof error);
    if (n->engine == NULL)
        stop_test(error);
}

/* Every rank is linked with every other. Nothing passes until proxied_start: faults are set in between. */
static inline void proxied_open(proxied *p, uint32_t size, unsigned connections, int is_tcp, uint32_t stall_ms)
{
    memset(p, 0, sizeof *p);
    world_init(&p->w, size);
    for (uint32_t rank = 0; rank < size; rank++)
        proxied_node_open(&p->w.nodes[rank], stall_ms);
    for (uint32_t a = 0; a < size; a++)
        for (uint32_t b = a + 1; b < size; b++)
            for (unsigned i = 0; i < connections; i++)
                proxied_connect(p, a, b, is_tcp);
}

/* A fault that the connection does not survive, within so many bytes. */
static inline void set_deadly_fault(pump *p, uint32_t bytes_max)
{
    static const enum fault deadly[] = {FAULT_CUT, FAULT_RESET, FAULT_FLIP};
    set_fault(p, deadly[random_below(3)], random_below(bytes_max), random_below(8));
}

/* Each link keeps its first connection only. */
static inline void proxied_doom_spares(proxied *p, unsigned connections, uint32_t bytes_max)
{
    for (unsigned i = 0; i < p->pumps_count; i += 2)
        if (i / 2 % connections != 0)
            set_deadly_fault(&p->pumps[i + random_below(2)], bytes_max);
}

static inline void proxied_start(proxied *p)
{
    for (unsigned i = p->pumps_started; i < p->pumps_count; i++)
        if (pthread_create(&p->pumps[i].thread, NULL, pump_main, &p->pumps[i]) != 0)
            stop_test("pthread_create");
    p->pumps_started = p->pumps_count;
}

static inline void proxied_close(proxied *p)
{
    for (unsigned i = 0; i < p->pumps_count; i++) {
        __atomic_store_n(&p->pumps[i].is_released, 1, __ATOMIC_SEQ_CST);
        shutdown(p->pumps[i].from, SHUT_RDWR);
    }
    for (unsigned i = 0; i < p->pumps_count; i++)
        pthread_join(p->pumps[i].thread, NULL);
    for (unsigned i = 0; i < p->pumps_count; i++)
        close(p->pumps[i].from);
    for (uint32_t rank = 0; rank < p->w.size; rank++)
        node_close(&p->w.nodes[rank]);
}

#endif
