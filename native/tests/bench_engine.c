/* bench_engine.c: an all-reduce between processes on loopback TCP beside a raw ring that only sends, receives and
 * adds.
 *
 *     build/bench/bench_engine [ranks] [bytes] [repeats] [connections] [in_place] [concurrent]
 */
#include "engine_world.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/wait.h>

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
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
static void raw_step(int next, int prev, const uint8_t *out, size_t out_bytes, float *in, size_t in_bytes, int adds,
                     uint8_t *staging, size_t staging_bytes)
{
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
                    pccl_kernel_reduce(PCCL_FLOAT32, PCCL_SUM, in + added / 4, in + added / 4, staging, elements);
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
    static uint8_t staging[1 << 18];
    for (uint32_t step = 0; step < 2 * (ranks - 1); step++) {
        uint32_t out = (rank + 2 * ranks - step) % ranks, in = (rank + 2 * ranks - step - 1) % ranks;
        size_t out_first = count * out / ranks, out_end = count * (out + 1) / ranks;
        size_t in_first = count * in / ranks, in_end = count * (in + 1) / ranks;
        raw_step(next, prev, (const uint8_t *)(values + out_first), (out_end - out_first) * 4, values + in_first,
                 (in_end - in_first) * 4, step < ranks - 1, staging, sizeof staging);
    }
}

typedef struct {
    int to_next[WORLD_RANKS_MAX][16], from_prev[WORLD_RANKS_MAX][16];
    int raw_next[WORLD_RANKS_MAX], raw_prev[WORLD_RANKS_MAX];
} sockets;

static void run_rank(const sockets *s, uint32_t rank, uint32_t ranks, size_t bytes, int repeats, unsigned connections,
                     int in_place, int concurrent)
{
    size_t count = bytes / 4;
    float *send = malloc(bytes), *recv = in_place ? send : malloc(bytes);
    double raw[256], ours[256];
    for (size_t i = 0; i < count; i++)
        send[i] = recv[i] = 1.0f;
    for (int i = 0; i < repeats; i++) {
        double before = now_s();
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, ranks, recv, count);
        raw[i] = now_s() - before;
    }
    node n;
    node_open(&n, 0);
    world w = {.size = ranks};
    for (unsigned i = 0; i < connections; i++) {
        pccl_engine_link_add(n.engine, link_to_next(&w, rank), s->to_next[rank][i]);
        pccl_engine_link_add(n.engine, link_to_prev(&w, rank), s->from_prev[rank][i]);
    }
    uint64_t op = 1;
    size_t part = count / (size_t)concurrent;
    uint32_t segment_bytes = pccl_segment_bytes_default(part, PCCL_FLOAT32, ranks);
    if (getenv("SEGMENT_BYTES"))
        segment_bytes = (uint32_t)atoi(getenv("SEGMENT_BYTES"));
    for (int i = 0; i < repeats; i++) {
        double before = now_s();
        pccl_op_shape shape = plain_shape(part, PCCL_FLOAT32, PCCL_SUM, segment_bytes, ranks);
        for (int k = 0; k < concurrent; k++) {
            pccl_op_request request = request_for(&w, rank, op + (uint64_t)k, &shape);
            request.send = send + part * (size_t)k;
            request.recv = recv + part * (size_t)k;
            if (pccl_engine_submit(n.engine, &request) != 0)
                abort();
        }
        for (int k = 0; k < concurrent; k++)
            node_wait(&n, PCCL_EVENT_OP_DONE, op + (uint64_t)k);
        ours[i] = now_s() - before;
        /* What agreeing on the verdict does for real: nobody ends an op that others still need. */
        raw_all_reduce(s->raw_next[rank], s->raw_prev[rank], rank, ranks, (float[8]){0}, 8);
        for (int k = 0; k < concurrent; k++)
            pccl_engine_end(n.engine, op + (uint64_t)k, 1);
        op += (uint64_t)concurrent;
    }
    double m_raw = median(raw, repeats), m_ours = median(ours, repeats);
    if (rank == 0)
        printf("%u ranks, %zu bytes, %u connections, %s, %d ops: raw %.3f ms, engine %.3f ms (best %.3f), ratio %.2f\n",
               ranks, bytes, connections, in_place ? "in place" : "out of place", concurrent, m_raw * 1e3,
               m_ours * 1e3, ours[0] * 1e3, m_ours / m_raw);
    fflush(stdout);
    _exit(0);
}

int main(int argc, char **argv)
{
    uint32_t ranks = argc > 1 ? (uint32_t)atoi(argv[1]) : 2;
    size_t bytes = argc > 2 ? (size_t)atoll(argv[2]) : (size_t)64 << 20;
    int repeats = argc > 3 ? atoi(argv[3]) : 11;
    unsigned connections = argc > 4 ? (unsigned)atoi(argv[4]) : 1;
    int in_place = argc > 5 ? atoi(argv[5]) : 0;
    int concurrent = argc > 6 ? atoi(argv[6]) : 1;
    sockets s;
    int one = 1;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        uint32_t next = (rank + 1) % ranks;
        for (unsigned i = 0; i <= connections; i++) {
            int fds[2];
            pair_tcp(fds);
            setsockopt(fds[0], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            setsockopt(fds[1], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            if (i < connections) {
                s.to_next[rank][i] = fds[0];
                s.from_prev[next][i] = fds[1];
            } else {
                s.raw_next[rank] = fds[0];
                s.raw_prev[next] = fds[1];
            }
        }
    }
    for (uint32_t rank = 0; rank < ranks; rank++)
        if (fork() == 0)
            run_rank(&s, rank, ranks, bytes, repeats, connections, in_place, concurrent);
    while (wait(NULL) > 0)
        continue;
    return 0;
}
