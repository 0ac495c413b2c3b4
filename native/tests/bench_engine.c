/* bench_engine.c: an all-reduce between processes on loopback TCP beside a raw ring that only sends, receives
 * and adds.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O3 -ffp-contract=off -pthread -Iinclude -Isrc \
 *         tests/bench_engine.c src/[a-z]*.c -lm -o build/bench_engine
 *     build/bench_engine [ranks] [bytes] [repeats] [connections] [in_place] [concurrent] [quantization]
 */
#include "engine_world.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/wait.h>

static double now_s(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[count / 2];
}

/* One step of the raw ring: out and in at the same time, adding what came piece by piece. */
static void raw_step(
    int next, int prev, const uint8_t *out, size_t out_bytes, float *in, size_t in_bytes, int adds)
{
    static uint8_t staging[1 << 18];
    size_t staging_bytes = sizeof staging;
    size_t sent = 0, received = 0, added = 0;
    while (sent < out_bytes || received < in_bytes) {
        struct pollfd fds[2] = {{next, (short)(sent < out_bytes ? POLLOUT : 0), 0},
                                {prev, (short)(received < in_bytes ? POLLIN : 0), 0}};
        poll(fds, 2, -1);
        if (fds[1].revents & POLLIN) {
            uint8_t *at = adds ? staging + (received - added) : (uint8_t *)in + received;
            size_t room = adds ? staging_bytes - (received - added) : in_bytes - received;
            if (room > in_bytes - received)
                room = in_bytes - received;
            ssize_t n = recv(prev, at, room, MSG_DONTWAIT);
            if (n > 0) {
                received += (size_t)n;
                if (adds) {
                    size_t elements = (received - added) / 4;
                    float *at_in = in + added / 4;
                    pccl_kernel_reduce(PCCL_FLOAT32, PCCL_SUM, at_in, at_in, staging, elements);
                    added += elements * 4;
                    memmove(staging, staging + elements * 4, received - added);
                }
            }
        }
        if (fds[0].revents & POLLOUT) {
            size_t want = out_bytes - sent < 262144 ? out_bytes - sent : 262144;
            ssize_t n = send(next, out + sent, want, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (n > 0)
                sent += (size_t)n;
        }
    }
}

static void raw_all_reduce(int next, int prev, uint32_t rank, uint32_t ranks, float *values, size_t count)
{
    for (uint32_t step = 0; step < 2 * (ranks - 1); step++) {
        uint32_t out = (rank + 2 * ranks - step) % ranks, in = (rank + 2 * ranks - step - 1) % ranks;
        size_t out_first = count * out / ranks, out_end = count * (out + 1) / ranks;
        size_t in_first = count * in / ranks, in_end = count * (in + 1) / ranks;
        raw_step(next, prev, (const uint8_t *)(values + out_first), (out_end - out_first) * 4,
                 values + in_first, (in_end - in_first) * 4, step < ranks - 1);
    }
}

typedef struct {
    uint32_t ranks;
    size_t bytes;
    int repeats;
    int connections; /* two ranks have twice as many: they are neighbours on both sides */
    int in_place;
    int concurrent; /* ops that share the bytes */
    int quantization;
} arguments;

enum { CONNECTIONS_MAX = 32, REPEATS_MAX = 1001 };

typedef struct {
    int to_next[WORLD_RANKS_MAX][CONNECTIONS_MAX], from_prev[WORLD_RANKS_MAX][CONNECTIONS_MAX];
    int raw_next[WORLD_RANKS_MAX], raw_prev[WORLD_RANKS_MAX];
} sockets;

typedef struct {
    double wall_s[REPEATS_MAX];
    double cpu_s; /* of this process, all repeats */
} timing;

static void timing_begin(timing *t, int i)
{
    t->wall_s[i] = -now_s(CLOCK_MONOTONIC);
    t->cpu_s -= now_s(CLOCK_PROCESS_CPUTIME_ID);
}

static void timing_end(timing *t, int i)
{
    t->wall_s[i] += now_s(CLOCK_MONOTONIC);
    t->cpu_s += now_s(CLOCK_PROCESS_CPUTIME_ID);
}

static void engine_all_reduce(node *n, const world *w, uint32_t rank, uint64_t first_op, const arguments *a,
                              const float *send, float *recv)
{
    size_t part = a->bytes / 4 / (size_t)a->concurrent;
    uint32_t segment_bytes = pccl_segment_bytes_default(part, PCCL_FLOAT32, a->ranks);
    if (getenv("SEGMENT_BYTES"))
        segment_bytes = (uint32_t)atoi(getenv("SEGMENT_BYTES"));
    pccl_op_shape shape = plain_shape(part, PCCL_FLOAT32, PCCL_SUM, segment_bytes, a->ranks);
    if (a->quantization != PCCL_QUANT_NONE) {
        shape.quantization = (uint8_t)a->quantization;
        shape.quantized_dtype = PCCL_UINT8;
        shape.quantization_block = 1024;
    }
    for (int k = 0; k < a->concurrent; k++) {
        pccl_op_request request = request_for(w, rank, first_op + (uint64_t)k, &shape);
        request.send = send + part * (size_t)k;
        request.recv = recv + part * (size_t)k;
        if (pccl_engine_submit(n->engine, &request) != 0)
            stop_test("submit");
    }
    for (int k = 0; k < a->concurrent; k++)
        node_wait(n, PCCL_EVENT_OP_DONE, first_op + (uint64_t)k);
}

/* The two take turns, so that what else the machine does disturbs both alike. */
static void run_rank(const sockets *s, uint32_t rank, const arguments *a)
{
    size_t count = a->bytes / 4;
    float *send = malloc(a->bytes);
    float *recv = a->in_place ? send : malloc(a->bytes);
    static timing raw, ours;
    node n;
    world w = {.size = a->ranks};
    uint64_t op = 1;
    node_open(&n, 0);
    for (int i = 0; i < a->connections; i++) {
        pccl_engine_link_add(n.engine, link_to_next(&w, rank), s->to_next[rank][i]);
        pccl_engine_link_add(n.engine, link_to_prev(&w, rank), s->from_prev[rank][i]);
    }
    memset(send, 0, a->bytes);
    memset(recv, 0, a->bytes);
    for (int i = 0; i < a->repeats; i++) {
        float agreement[WORLD_RANKS_MAX] = {0};
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, agreement, WORLD_RANKS_MAX);
        timing_begin(&raw, i);
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, recv, count);
        timing_end(&raw, i);
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, agreement, WORLD_RANKS_MAX);
        timing_begin(&ours, i);
        engine_all_reduce(&n, &w, rank, op, a, send, recv);
        timing_end(&ours, i);
        /* In place of the verdict: nobody ends an op that others still need. */
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, agreement, WORLD_RANKS_MAX);
        for (int k = 0; k < a->concurrent; k++)
            pccl_engine_end(n.engine, op + (uint64_t)k, 1);
        op += (uint64_t)a->concurrent;
    }
    if (rank == 0) {
        double raw_s = median(raw.wall_s, a->repeats);
        double ours_s = median(ours.wall_s, a->repeats);
        double raw_cpu_s = raw.cpu_s / a->repeats;
        double ours_cpu_s = ours.cpu_s / a->repeats;
        printf("%u ranks, %zu bytes, %d connections, %s, %d ops: raw %.3f ms (best %.3f, cpu %.3f), "
               "engine %.3f ms (best %.3f, cpu %.3f), ratio %.2f (best %.2f, cpu %.2f)\n",
               a->ranks, a->bytes, a->connections, a->in_place ? "in place" : "out of place", a->concurrent,
               raw_s * 1e3, raw.wall_s[0] * 1e3, raw_cpu_s * 1e3, ours_s * 1e3, ours.wall_s[0] * 1e3,
               ours_cpu_s * 1e3, ours_s / raw_s, ours.wall_s[0] / raw.wall_s[0], ours_cpu_s / raw_cpu_s);
        fflush(stdout);
    }
    _exit(0);
}

static int argument(int argc, char **argv, int at, int otherwise)
{
    return argc > at ? atoi(argv[at]) : otherwise;
}

int main(int argc, char **argv)
{
    arguments a;
    sockets s;
    int one = 1;
    a.ranks = (uint32_t)argument(argc, argv, 1, 2);
    a.bytes = (size_t)argument(argc, argv, 2, 64 << 20);
    a.repeats = argument(argc, argv, 3, 15);
    a.connections = argument(argc, argv, 4, 1);
    a.in_place = argument(argc, argv, 5, 0);
    a.concurrent = argument(argc, argv, 6, 1);
    a.quantization = argument(argc, argv, 7, PCCL_QUANT_NONE);
    if (a.ranks < 2 || a.ranks > WORLD_RANKS_MAX || a.repeats > REPEATS_MAX ||
        a.connections > CONNECTIONS_MAX)
        stop_test("arguments");
    for (uint32_t rank = 0; rank < a.ranks; rank++) {
        uint32_t next = (rank + 1) % a.ranks;
        for (int i = 0; i <= a.connections; i++) {
            int fds[2];
            pair_tcp(fds);
            for (int end = 0; end < 2; end++)
                setsockopt(fds[end], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            *(i < a.connections ? &s.to_next[rank][i] : &s.raw_next[rank]) = fds[0];
            *(i < a.connections ? &s.from_prev[next][i] : &s.raw_prev[next]) = fds[1];
        }
    }
    for (uint32_t rank = 0; rank < a.ranks; rank++)
        if (fork() == 0)
            run_rank(&s, rank, &a);
    while (wait(NULL) > 0)
        continue;
    return 0;
}
