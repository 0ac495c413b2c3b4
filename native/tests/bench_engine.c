/* bench_engine.c: an all-reduce between processes on loopback TCP, with either algorithm, beside a raw ring
 * that only sends, receives and adds. Without arguments: some sizes with two ranks and four.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O3 -ffp-contract=off -pthread -Iinclude -Isrc \
 *         tests/bench_engine.c src/[a-z]*.c -lm -ldl -o build/bench_engine
 *     build/bench_engine [ranks] [bytes] [repeats] [connections] [in_place] [concurrent] [quantization]
 *
 * SEGMENT_BYTES and EAGER_BYTES in the environment replace the defaults; ENCRYPT has the engine's connections
 * encrypted, and MEMORY has them in shared memory.
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
static void raw_step(int next, int prev, const uint8_t *out, size_t out_bytes, float *in, size_t in_bytes, int adds)
{
    static uint8_t staging[1 << 18];
    size_t staging_bytes = sizeof staging;
    size_t sent = 0, received = 0, added = 0;
    while (sent < out_bytes || received < in_bytes) {
        struct pollfd fds[2] = {
            {next, (short)(sent < out_bytes ? POLLOUT : 0), 0}, {prev, (short)(received < in_bytes ? POLLIN : 0), 0}};
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
        raw_step(next, prev, (const uint8_t *)(values + out_first), (out_end - out_first) * 4, values + in_first,
            (in_end - in_first) * 4, step < ranks - 1);
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
    int across[WORLD_RANKS_MAX][WORLD_RANKS_MAX][CONNECTIONS_MAX]; /* of ranks that are no neighbours */
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
    int algorithm, const float *send, float *recv)
{
    size_t part = a->bytes / 4 / (size_t)a->concurrent;
    uint32_t segment_bytes = pccl_segment_bytes_default(part, PCCL_FLOAT32, a->ranks, 1);
    if (getenv("SEGMENT_BYTES"))
        segment_bytes = (uint32_t)atoi(getenv("SEGMENT_BYTES"));
    pccl_op_shape shape = plain_shape(part, PCCL_FLOAT32, PCCL_SUM, segment_bytes, a->ranks);
    shape.algorithm = (uint8_t)algorithm;
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

static void timing_print(const char *name, timing *t, const arguments *a)
{
    double wall_s = median(t->wall_s, a->repeats);
    printf("  %s %.3f ms (best %.3f, cpu %.3f)", name, wall_s * 1e3, t->wall_s[0] * 1e3, t->cpu_s / a->repeats * 1e3);
}

static int are_across(uint32_t ranks, uint32_t a, uint32_t b)
{
    return a != b && (a + 1) % ranks != b && (b + 1) % ranks != a;
}

/* The lower rank offers, the other one opens and says so. `step` counts from 0 to 2. */
static void add_memory(node *n, uint64_t link, int fd, uint32_t rank, uint32_t other, int step)
{
    static pccl_memory *offered[1024];
    uint8_t offer[PCCL_MEMORY_OFFER_BYTES];
    pccl_memory *memory = NULL;
    if (step == 0 && rank < other) {
        if (pccl_memory_create(&offered[fd], offer) != 0 || write(fd, offer, sizeof offer) != sizeof offer)
            stop_test("offer");
    } else if (step == 1 && rank > other) {
        if (read(fd, offer, sizeof offer) != sizeof offer || pccl_memory_open(offer, &memory) != 0 ||
            write(fd, "", 1) != 1)
            stop_test("memory");
    } else if (step == 2 && rank < other) {
        if (read(fd, offer, 1) != 1)
            stop_test("answer");
        memory = offered[fd];
    }
    if (memory != NULL && pccl_engine_link_add_memory(n->engine, link, fd, memory) != 0)
        stop_test("link_add_memory");
}

static void add_connection(node *n, uint64_t link, int fd, uint32_t rank, uint32_t other, int step)
{
    pccl_link_keys keys;
    if (getenv("MEMORY")) {
        add_memory(n, link, fd, rank, other, step);
        return;
    }
    if (step > 0)
        return;
    memset(&keys, 0, sizeof keys);
    keys.tx[0] = keys.rx[1] = (uint8_t)rank;
    keys.tx[1] = keys.rx[0] = (uint8_t)other;
    if (pccl_engine_link_add(n->engine, link, fd, getenv("ENCRYPT") ? &keys : NULL) != 0)
        stop_test("link_add");
}

/* All take turns, so that what else the machine does disturbs both alike. */
static void run_rank(const sockets *s, uint32_t rank, const arguments *a)
{
    size_t count = a->bytes / 4;
    float *send = malloc(a->bytes);
    float *recv = a->in_place ? send : malloc(a->bytes);
    static timing raw, ours[PCCL_ALGORITHM_COUNT];
    node n;
    world w;
    uint64_t op = 1;
    world_init(&w, a->ranks);
    if (getenv("EAGER_BYTES"))
        tested_eager_bytes_max = (uint32_t)atoi(getenv("EAGER_BYTES"));
    node_open(&n, 0);
    for (int step = 0; step < 3; step++)
        for (int i = 0; i < a->connections; i++) {
            uint32_t next = (rank + 1) % a->ranks, previous = (rank + a->ranks - 1) % a->ranks;
            add_connection(&n, link_to_next(&w, rank), s->to_next[rank][i], rank, next, step);
            add_connection(&n, link_to_prev(&w, rank), s->from_prev[rank][i], rank, previous, step);
            for (uint32_t other = 0; other < a->ranks; other++)
                if (are_across(a->ranks, rank, other))
                    add_connection(&n, link_number(rank, other), s->across[rank][other][i], rank, other, step);
        }
    memset(send, 0, a->bytes);
    memset(recv, 0, a->bytes);
    for (int i = 0; i < a->repeats; i++) {
        float barrier[WORLD_RANKS_MAX] = {0};
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, barrier, WORLD_RANKS_MAX);
        timing_begin(&raw, i);
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, recv, count);
        timing_end(&raw, i);
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, barrier, WORLD_RANKS_MAX);
        for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
            timing_begin(&ours[algorithm], i);
            engine_all_reduce(&n, &w, rank, op, a, algorithm, send, recv);
            timing_end(&ours[algorithm], i);
            /* In place of the verdict: nobody ends an op that others still need. */
            raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, a->ranks, barrier, WORLD_RANKS_MAX);
            for (int k = 0; k < a->concurrent; k++)
                pccl_engine_end(n.engine, op + (uint64_t)k, 1);
            op += (uint64_t)a->concurrent;
        }
    }
    if (rank == 0) {
        printf("%u ranks, %9zu bytes, %d connections, %s, %d ops, quantization %d:", a->ranks, a->bytes, a->connections,
            a->in_place ? "in place" : "out of place", a->concurrent, a->quantization);
        timing_print("raw", &raw, a);
        timing_print("ring", &ours[PCCL_RING], a);
        timing_print("direct", &ours[PCCL_DIRECT], a);
        printf("\n");
        fflush(stdout);
    }
    _exit(0);
}

static int argument(int argc, char **argv, int at, int otherwise) { return argc > at ? atoi(argv[at]) : otherwise; }

static void pair_for_speed(int fds[2])
{
    int one = 1;
    pair_tcp(fds);
    for (int end = 0; end < 2; end++)
        setsockopt(fds[end], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void close_pair(int *a, int *b)
{
    close(*a);
    close(*b);
}

static void run(const arguments *a)
{
    static sockets s;
    for (uint32_t rank = 0; rank < a->ranks; rank++) {
        uint32_t next = (rank + 1) % a->ranks;
        for (int i = 0; i <= a->connections; i++) {
            int fds[2];
            pair_for_speed(fds);
            *(i < a->connections ? &s.to_next[rank][i] : &s.raw_next[rank]) = fds[0];
            *(i < a->connections ? &s.from_prev[next][i] : &s.raw_prev[next]) = fds[1];
        }
        for (uint32_t other = 0; other < rank; other++)
            for (int i = 0; i < a->connections && are_across(a->ranks, rank, other); i++) {
                int fds[2];
                pair_for_speed(fds);
                s.across[rank][other][i] = fds[0];
                s.across[other][rank][i] = fds[1];
            }
    }
    for (uint32_t rank = 0; rank < a->ranks; rank++)
        if (fork() == 0)
            run_rank(&s, rank, a);
    while (wait(NULL) > 0)
        continue;
    for (uint32_t rank = 0; rank < a->ranks; rank++) {
        close_pair(&s.raw_next[rank], &s.raw_prev[rank]);
        for (int i = 0; i < a->connections; i++) {
            close_pair(&s.to_next[rank][i], &s.from_prev[rank][i]);
            for (uint32_t other = 0; other < rank; other++)
                if (are_across(a->ranks, rank, other))
                    close_pair(&s.across[rank][other][i], &s.across[other][rank][i]);
        }
    }
}

int main(int argc, char **argv)
{
    arguments a;
    memset(&a, 0, sizeof a);
    a.ranks = (uint32_t)argument(argc, argv, 1, 2);
    a.bytes = (size_t)argument(argc, argv, 2, 64 << 20);
    a.repeats = argument(argc, argv, 3, 15);
    a.connections = argument(argc, argv, 4, 1);
    a.in_place = argument(argc, argv, 5, 0);
    a.concurrent = argument(argc, argv, 6, 1);
    a.quantization = argument(argc, argv, 7, PCCL_QUANT_NONE);
    if (a.ranks < 2 || a.ranks > WORLD_RANKS_MAX || a.repeats > REPEATS_MAX || a.connections > CONNECTIONS_MAX)
        stop_test("arguments");
    if (argc > 1) {
        run(&a);
        return 0;
    }
    static const size_t sizes[] = {4 << 10, 64 << 10, 1 << 20, 64 << 20};
    for (a.ranks = 2; a.ranks <= 4; a.ranks += 2)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            a.bytes = sizes[i];
            a.repeats = sizes[i] > 1 << 20 ? 7 : 201;
            run(&a);
        }
    return 0;
}
