/* bench_wire.c: wires (wire.h) between two hosts of a WAN lab: both send the same number of bytes at the same time, with
 * pauses between, as an all_reduce of two peers does.
 *
 *     make -C native build/plain-O3/bench_wire OPTIMIZE=-O3
 *     sudo python -m tests.wan --hosts 2 --delay-ms 50 --rate-mbit 500 --loss 0.1% --congestion-control cubic -- \
 *         native/build/plain-O3/bench_wire udp [bytes] [ops] [pause_ms] [connections] [least_ms]
 *
 * The kind is udp or tcp; with `both`, a UDP wire and a TCP connection share the path, and a line tells of each. PCCL_HOST
 * is 0 or 1, and the hosts' addresses are the lab's. */
#include "base.h"
#include "os.h"
#include "../src/wire.h" /* tests/ has one, too */

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORT = 48200, WIRES_MAX = 64, CHUNK_BYTES = 256 << 10, BATCH = 16, GREETING_BYTES = 64 };

typedef struct {
    pccl_wire *wire;
    uint64_t to_send;
    uint64_t sent;
    uint64_t received;
    uint8_t waits;
    uint8_t is_udp;
} end;

static uint8_t chunk[CHUNK_BYTES];
static uint8_t sink[CHUNK_BYTES];

static struct sockaddr_in address_of(int host, int port)
{
    struct sockaddr_in address;
    char text[32];
    memset(&address, 0, sizeof address);
    snprintf(text, sizeof text, "198.18.0.%d", host + 1);
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    inet_pton(AF_INET, text, &address.sin_addr);
    return address;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int socket_at(int kind, int host, int port)
{
    int fd = socket(AF_INET, kind, 0);
    int on = 1;
    struct sockaddr_in own = address_of(host, port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, (struct sockaddr *)&own, sizeof own) != 0)
        fail("bind");
    return fd;
}

static int connected_tcp(int host, int listener)
{
    int fd;
    if (host == 0)
        return accept(listener, NULL, NULL);
    struct sockaddr_in other = address_of(0, PORT);
    do {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&other, sizeof other) == 0)
            return fd;
        close(fd);
        usleep(20000);
    } while (1);
}

static void pump_out(end *e)
{
    while (e->to_send > 0) {
        struct iovec iov = {chunk, e->to_send < sizeof chunk ? (size_t)e->to_send : sizeof chunk};
        ssize_t n = e->wire->type->send(e->wire, &iov, 1);
        if (n < 0) {
            fprintf(stderr, "send: %s\n", e->wire->broken != NULL ? e->wire->broken : strerror((int)-n));
            exit(1);
        }
        e->to_send -= (uint64_t)n;
        e->sent += (uint64_t)n;
        if (n == 0)
            break;
    }
    e->wire->type->want(e->wire, PCCL_POLL_IN | (e->to_send > 0 ? PCCL_POLL_OUT : 0u));
}

static void pump_in(end *e)
{
    for (;;) {
        struct iovec iov = {sink, sizeof sink};
        const uint8_t *at;
        ssize_t n = e->wire->type->view != NULL ? e->wire->type->view(e->wire, &at, 1)
                                                : e->wire->type->receive(e->wire, &iov, 1);
        if (n > 0)
            e->received += (uint64_t)n;
        else if (n == -EAGAIN)
            return;
        else {
            fprintf(stderr, "receive: %s\n",
                e->wire->broken != NULL ? e->wire->broken
                : n == 0                ? "end"
                                        : strerror((int)-n));
            exit(n == 0 ? 0 : 1);
        }
    }
}

static double cpu_s(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           ((double)usage.ru_utime.tv_usec + (double)usage.ru_stime.tv_usec) / 1e6;
}

/* Datagrams that this host has dropped since they found the socket's buffer full. */
static long overflows(void)
{
    char line[512];
    long seen = 0;
    FILE *file = fopen("/proc/self/net/snmp", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        (void)sscanf(line, "Udp: %*d %*d %*d %*d %ld", &seen);
    if (file != NULL)
        fclose(file);
    return seen;
}

/* Until all has been received; or for so long. */
static void turn(pccl_poller *poller, end *ends, int count, uint64_t received, int64_t until_ns)
{
    for (;;) {
        uint64_t have = 0;
        for (int i = 0; i < count; i++)
            have += ends[i].received;
        int64_t left_ns = until_ns - pccl_now_ns();
        if (have >= received || left_ns <= 0)
            return;
        pccl_poll_event events[BATCH];
        int n = pccl_poller_wait(poller, events, BATCH, (int)(left_ns / 1000000) + 1);
        for (int i = 0; i < n; i++) {
            end *e = events[i].entry->owner;
            if (events[i].ready & PCCL_POLL_IN)
                pump_in(e);
            if (events[i].ready & PCCL_POLL_OUT)
                pump_out(e);
        }
    }
}

/* Waits for the other host. Meanwhile wires send again what it lacks. */
static void meet(pccl_poller *poller, end *ends, int count, int control)
{
    uint8_t byte = 0;
    if (send(control, &byte, 1, MSG_NOSIGNAL) != 1)
        fail("control");
    while (recv(control, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN)
        turn(poller, ends, count, UINT64_MAX, pccl_now_ns() + 1000000);
}

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "udp";
    uint64_t bytes = argc > 2 ? strtoull(argv[2], NULL, 0) : 32 << 20;
    int ops = argc > 3 ? atoi(argv[3]) : 6;
    int pause_ms = argc > 4 ? atoi(argv[4]) : 5000;
    int connections = argc > 5 ? atoi(argv[5]) : 1;
    int least_ms = argc > 6 ? atoi(argv[6]) : 0;
    int host = atoi(getenv("PCCL_HOST"));
    int is_both = strcmp(kind, "both") == 0;
    int count = is_both ? 2 : strcmp(kind, "udp") == 0 ? 1 : connections;
    static end ends[WIRES_MAX];
    static const uint8_t secret[PCCL_UDP_SECRET_BYTES] = "of a benchmark, so it is known";
    pccl_fd_registry *fds = pccl_fd_registry_create();
    pccl_poller *poller = pccl_poller_open(0);
    int listener = host == 0 ? socket_at(SOCK_STREAM, 0, PORT) : -1;
    if (host == 0 && listen(listener, WIRES_MAX) != 0)
        fail("listen");
    int control = connected_tcp(host, listener); /* both are there */
    for (int i = 0; i < count; i++) {
        int status;
        ends[i].is_udp = strcmp(kind, "udp") == 0 || (is_both && i == 0);
        if (ends[i].is_udp) {
            int fd = socket_at(SOCK_DGRAM, host, PORT);
            struct sockaddr_in other = address_of(1 - host, PORT);
            if (connect(fd, (struct sockaddr *)&other, sizeof other) != 0)
                fail("connect");
            status = pccl_wire_udp_open(fds, fd, secret, host == 1, &ends[i].wire);
        } else {
            status = pccl_wire_tcp_open(fds, connected_tcp(host, listener), &ends[i].wire);
        }
        if (status != 0 || ends[i].wire->type->watch(ends[i].wire, poller, &ends[i]) != 0)
            fail("wire");
    }
    uint64_t received = 0;
    for (int op = 0; op < ops; op++) {
        meet(poller, ends, count, control);
        int64_t began_ns = pccl_now_ns();
        double began_cpu_s = cpu_s();
        uint64_t before[2] = {ends[0].received, ends[1].received};
        for (int i = 0; i < count; i++) {
            ends[i].to_send += bytes / (uint64_t)count;
            pump_out(&ends[i]);
        }
        received += bytes / (uint64_t)count * (uint64_t)count;
        turn(poller, ends, count, received, least_ms > 0 ? began_ns + (int64_t)least_ms * 1000000 : INT64_MAX);
        double s = (double)(pccl_now_ns() - began_ns) / 1e9;
        if (host == 0) {
            printf("op %d: %.3f s, %.0f Mbit/s, cpu %.3f s", op, s, (double)bytes * 8e-6 / s, cpu_s() - began_cpu_s);
            for (int i = 0; i < count && i < 2; i++) {
                pccl_wire_limits limits;
                memset(&limits, 0, sizeof limits);
                ends[i].wire->type->read_limits(ends[i].wire, &limits);
                printf("; %s %.1f Mbit/s, %u packets, %u lost, rtt %.1f ms, least %.1f", ends[i].is_udp ? "udp" : "tcp",
                    (double)(ends[i].received - before[i]) * 8e-6 / s, limits.delivered, limits.resent,
                    (double)limits.round_trip_us / 1e3, (double)limits.round_trip_us_min / 1e3);
            }
            printf("; %ld overflows\n", overflows());
            fflush(stdout);
        }
        turn(poller, ends, count, UINT64_MAX, pccl_now_ns() + (int64_t)(op < ops / 2 ? pause_ms : 0) * 1000000);
    }
    turn(poller, ends, count, UINT64_MAX, pccl_now_ns() + (host + 1) * INT64_C(1000000000));
    close(control);
    return 0;
}
