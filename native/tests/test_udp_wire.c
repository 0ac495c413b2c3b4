/* The UDP wire over real sockets of this machine: bytes, ends, refusals, and a path where nothing gets through. */
#include "../src/wire.h" /* tests/ has one, too */
#include "check.h"
#include "os.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#if defined(__linux__)

enum { EVENTS = 16, DEADLINE_MS = 60000, MIB = 1 << 20 };

static const uint8_t secret[PCCL_UDP_SECRET_BYTES] = "thirty-two bytes that two share";

typedef struct {
    pccl_wire *wire;
    uint64_t to_send;
    uint64_t sent;
    uint64_t received;
    uint64_t wrong_bytes;
    ssize_t answer; /* of the last receive */
    uint8_t is_deaf; /* does not read */
} end;

typedef struct {
    pccl_fd_registry *fds;
    pccl_poller *poller;
    end ends[2];
} pair;

static uint8_t byte_at(uint64_t offset) { return (uint8_t)((offset * UINT64_C(0x9e3779b97f4a7c15)) >> 56); }

/* Two sockets, connected to each other. */
static int open_sockets(int family, int sockets[2])
{
    struct sockaddr_storage addresses[2];
    socklen_t bytes[2];
    memset(addresses, 0, sizeof addresses);
    for (int i = 0; i < 2; i++) {
        struct sockaddr_in *v4 = (struct sockaddr_in *)&addresses[i];
        struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&addresses[i];
        sockets[i] = socket(family, SOCK_DGRAM, 0);
        addresses[i].ss_family = (sa_family_t)family;
        if (family == AF_INET)
            v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        else
            v6->sin6_addr = in6addr_loopback;
        bytes[i] = family == AF_INET ? sizeof *v4 : sizeof *v6;
        if (sockets[i] < 0 || bind(sockets[i], (struct sockaddr *)&addresses[i], bytes[i]) != 0 ||
            getsockname(sockets[i], (struct sockaddr *)&addresses[i], &bytes[i]) != 0)
            return -1;
    }
    for (int i = 0; i < 2; i++)
        if (connect(sockets[i], (struct sockaddr *)&addresses[1 - i], bytes[1 - i]) != 0)
            return -1;
    return 0;
}

static int pair_open(pair *p, int family, int force_poll)
{
    int sockets[2];
    memset(p, 0, sizeof *p);
    if (open_sockets(family, sockets) != 0)
        return -1;
    p->fds = pccl_fd_registry_create();
    p->poller = pccl_poller_open(force_poll);
    for (int i = 0; i < 2; i++) {
        end *e = &p->ends[i];
        if (pccl_wire_udp_open(p->fds, sockets[i], secret, i == 0, &e->wire) != 0 ||
            e->wire->type->watch(e->wire, p->poller, e) != 0)
            return -1;
        e->answer = -EAGAIN;
    }
    return 0;
}

static void end_close(end *e)
{
    if (e->wire != NULL)
        e->wire->type->close(e->wire);
    e->wire = NULL;
}

static void pair_close(pair *p)
{
    end_close(&p->ends[0]);
    end_close(&p->ends[1]);
    pccl_poller_close(p->poller);
    pccl_fd_registry_destroy(p->fds);
}

static void end_send(end *e)
{
    static uint8_t bytes[100000];
    while (e->to_send > 0) {
        size_t count = e->to_send < sizeof bytes ? (size_t)e->to_send : sizeof bytes;
        for (size_t i = 0; i < count; i++)
            bytes[i] = byte_at(e->sent + i);
        struct iovec iov[2] = {{bytes, count / 3}, {bytes + count / 3, count - count / 3}};
        ssize_t n = e->wire->type->send(e->wire, iov, 2);
        CHECK(n >= 0 && (size_t)n <= count);
        if (n <= 0)
            break;
        memset(bytes, 0, sizeof bytes); /* what was taken may be overwritten */
        e->sent += (uint64_t)n;
        e->to_send -= (uint64_t)n;
    }
    unsigned interest = (e->is_deaf ? 0 : PCCL_POLL_IN) | (e->to_send > 0 ? PCCL_POLL_OUT : 0u);
    e->wire->type->want(e->wire, interest);
}

/* Leaves bytes in the wire now and then, as a connection does that has read enough for once. */
static void end_receive(end *e)
{
    uint8_t first[7000];
    uint8_t second[3001];
    struct iovec iov[2] = {{first, sizeof first}, {second, sizeof second}};
    for (int i = 0; i < 50; i++) {
        e->answer = e->wire->type->receive(e->wire, iov, 2);
        for (ssize_t at = 0; at < e->answer; at++) {
            uint8_t byte = (size_t)at < sizeof first ? first[at] : second[(size_t)at - sizeof first];
            e->wrong_bytes += byte != byte_at(e->received + (uint64_t)at);
        }
        if (e->answer <= 0)
            return;
        e->received += (uint64_t)e->answer;
    }
    e->answer = -EAGAIN;
}

/* Until both have received so much, or one of them gets another answer than bytes. */
static int pair_turn(pair *p, uint64_t received_0, uint64_t received_1)
{
    int64_t deadline_ms = pccl_now_ms() + DEADLINE_MS;
    while (p->ends[0].received < received_0 || p->ends[1].received < received_1) {
        pccl_poll_event events[EVENTS];
        int count = pccl_poller_wait(p->poller, events, EVENTS, 1000);
        for (int i = 0; i < count; i++) {
            end *e = events[i].entry->owner;
            if (e->wire == NULL)
                continue;
            if (events[i].ready & PCCL_POLL_IN)
                end_receive(e);
            if (e->answer != -EAGAIN)
                return -1;
            if (events[i].ready & PCCL_POLL_OUT)
                end_send(e);
        }
        if (pccl_now_ms() > deadline_ms)
            return -1;
    }
    return 0;
}

static void check_bytes_get_across(int family, int force_poll)
{
    pair p;
    REQUIRE(pair_open(&p, family, force_poll) == 0);
    p.ends[0].to_send = 8 * MIB + 17;
    p.ends[1].to_send = 3 * MIB;
    end_send(&p.ends[0]);
    end_send(&p.ends[1]);
    CHECK(pair_turn(&p, 3 * MIB, 8 * MIB + 17) == 0);
    for (int i = 0; i < 2; i++) {
        pccl_wire *wire = p.ends[i].wire;
        CHECK(p.ends[i].wrong_bytes == 0);
        CHECK(wire->sent_bytes == p.ends[i].sent);
        CHECK(wire->received_bytes > p.ends[i].received); /* headers, too */
        pccl_wire_limits limits;
        memset(&limits, 0, sizeof limits);
        CHECK(wire->type->read_limits(wire, &limits) == 0);
        CHECK(limits.delivered > 0 && limits.round_trip_us_min > 0 && limits.round_trip_us > 0);
    }
    pair_close(&p);
}

static void bytes_get_across(void) { check_bytes_get_across(AF_INET, 0); }

static void bytes_get_across_without_epoll(void) { check_bytes_get_across(AF_INET, 1); }

static void bytes_get_across_ipv6(void)
{
    int fd = socket(AF_INET6, SOCK_DGRAM, 0);
    struct sockaddr_in6 own;
    memset(&own, 0, sizeof own);
    own.sin6_family = AF_INET6;
    own.sin6_addr = in6addr_loopback;
    int is_there = fd >= 0 && bind(fd, (struct sockaddr *)&own, sizeof own) == 0;
    if (fd >= 0)
        close(fd);
    if (is_there)
        check_bytes_get_across(AF_INET6, 0);
}

static void an_end_is_seen_after_the_bytes_before_it(void)
{
    pair p;
    REQUIRE(pair_open(&p, AF_INET, 0) == 0);
    p.ends[0].to_send = 100;
    end_send(&p.ends[0]);
    CHECK(pair_turn(&p, 0, 100) == 0);
    end_close(&p.ends[0]);
    CHECK(pair_turn(&p, 0, 101) == -1);
    CHECK(p.ends[1].answer == 0 && p.ends[1].received == 100);
    pair_close(&p);
}

static void a_path_that_carries_nothing_breaks_the_wire(void)
{
    pair p;
    REQUIRE(pair_open(&p, AF_INET, 0) == 0);
    /* Nothing gets through: the other end has another key. */
    int sockets[2];
    REQUIRE(open_sockets(AF_INET, sockets) == 0);
    end_close(&p.ends[0]);
    end_close(&p.ends[1]);
    static const uint8_t other[PCCL_UDP_SECRET_BYTES] = "another secret";
    REQUIRE(pccl_wire_udp_open(p.fds, sockets[0], secret, 1, &p.ends[0].wire) == 0);
    REQUIRE(pccl_wire_udp_open(p.fds, sockets[1], other, 0, &p.ends[1].wire) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(p.ends[i].wire->type->watch(p.ends[i].wire, p.poller, &p.ends[i]) == 0);
    CHECK(pair_turn(&p, 1, 1) == -1);
    end *broken = p.ends[0].answer == -EPROTO ? &p.ends[0] : &p.ends[1];
    CHECK(broken->answer == -EPROTO);
    CHECK(broken->wire->broken != NULL && strcmp(broken->wire->broken, "UDP does not get through") == 0);
    CHECK(p.ends[0].wire->received_bytes == 0 && p.ends[1].wire->received_bytes == 0);
    pair_close(&p);
}

static void a_reader_that_stops_stops_the_sender(void)
{
    pair p;
    REQUIRE(pair_open(&p, AF_INET, 0) == 0);
    p.ends[0].to_send = MIB;
    end_send(&p.ends[0]);
    CHECK(pair_turn(&p, 0, MIB) == 0);
    p.ends[1].is_deaf = 1;
    p.ends[0].to_send = UINT64_MAX;
    end_send(&p.ends[1]);
    end_send(&p.ends[0]);
    /* Fills the buffers: at last nothing is taken any more. */
    uint64_t before;
    do {
        before = p.ends[0].sent;
        pccl_poll_event events[EVENTS];
        while (pccl_poller_wait(p.poller, events, EVENTS, 200) > 0) {
            end_receive(&p.ends[0]);
            end_send(&p.ends[0]);
            if (p.ends[0].sent != before)
                break;
        }
    } while (p.ends[0].sent != before && p.ends[0].sent < 200 * (uint64_t)MIB);
    CHECK(p.ends[0].sent <= (uint64_t)PCCL_UDP_BUFFER_BYTES_MAX + 2 * MIB);
    uint64_t in_flight;
    uint64_t unsent;
    CHECK(p.ends[0].wire->type->under_way(p.ends[0].wire, &in_flight, &unsent) == 0);
    CHECK(in_flight >= unsent && in_flight > 0);
    p.ends[1].is_deaf = 0;
    p.ends[0].to_send = 0;
    end_send(&p.ends[0]);
    end_send(&p.ends[1]);
    CHECK(pair_turn(&p, 0, p.ends[0].sent) == 0);
    CHECK(p.ends[1].wrong_bytes == 0);
    pair_close(&p);
}

static void unsent_bytes_are_bounded(void)
{
    pair p;
    REQUIRE(pair_open(&p, AF_INET, 0) == 0);
    p.ends[0].wire->type->bound_unsent(p.ends[0].wire, 5000);
    p.ends[0].to_send = MIB;
    end_send(&p.ends[0]);
    uint64_t in_flight;
    uint64_t unsent;
    CHECK(p.ends[0].wire->type->under_way(p.ends[0].wire, &in_flight, &unsent) == 0);
    CHECK(unsent <= 5000);
    CHECK(pair_turn(&p, 0, MIB) == 0);
    CHECK(p.ends[1].wrong_bytes == 0);
    pair_close(&p);
}

static void silence_counts_from_the_first_byte_after_a_pause(void)
{
    pair p;
    REQUIRE(pair_open(&p, AF_INET, 0) == 0);
    p.ends[0].to_send = 1000;
    end_send(&p.ends[0]);
    CHECK(pair_turn(&p, 0, 1000) == 0);
    uint64_t in_flight = 1;
    uint64_t unsent;
    for (int64_t end_ms = pccl_now_ms() + 1500; pccl_now_ms() < end_ms;) { /* a pause longer than the limit */
        pccl_poll_event events[EVENTS];
        if (pccl_poller_wait(p.poller, events, EVENTS, 100) > 0)
            for (int i = 0; i < 2; i++)
                end_receive(&p.ends[i]);
    }
    CHECK(p.ends[0].wire->type->under_way(p.ends[0].wire, &in_flight, &unsent) == 0 && in_flight == 0);
    p.ends[0].to_send = 1000;
    end_send(&p.ends[0]);
    end_receive(&p.ends[0]); /* before the other end can answer */
    CHECK(p.ends[0].answer == -EAGAIN && p.ends[0].wire->broken == NULL);
    CHECK(pair_turn(&p, 0, 2000) == 0);
    pair_close(&p);
}

/* Before the other end is there its port refuses datagrams. */
static void an_end_that_opens_later_is_waited_for(void)
{
    pair p;
    memset(&p, 0, sizeof p);
    int sockets[2];
    REQUIRE(open_sockets(AF_INET, sockets) == 0);
    p.fds = pccl_fd_registry_create();
    p.poller = pccl_poller_open(0);
    struct sockaddr_in own;
    socklen_t bytes = sizeof own;
    REQUIRE(getsockname(sockets[1], (struct sockaddr *)&own, &bytes) == 0);
    /* The port stays taken, by a socket that gets nothing. */
    struct sockaddr_in nobody = own;
    nobody.sin_port = htons(9);
    REQUIRE(connect(sockets[1], (struct sockaddr *)&nobody, sizeof nobody) == 0);
    REQUIRE(pccl_wire_udp_open(p.fds, sockets[0], secret, 1, &p.ends[0].wire) == 0);
    REQUIRE(p.ends[0].wire->type->watch(p.ends[0].wire, p.poller, &p.ends[0]) == 0);
    p.ends[0].to_send = 1000;
    end_send(&p.ends[0]);
    struct sockaddr_in dialer;
    bytes = sizeof dialer;
    REQUIRE(getsockname(sockets[0], (struct sockaddr *)&dialer, &bytes) == 0);
    REQUIRE(connect(sockets[1], (struct sockaddr *)&dialer, sizeof dialer) == 0);
    REQUIRE(pccl_wire_udp_open(p.fds, sockets[1], secret, 0, &p.ends[1].wire) == 0);
    REQUIRE(p.ends[1].wire->type->watch(p.ends[1].wire, p.poller, &p.ends[1]) == 0);
    p.ends[0].answer = p.ends[1].answer = -EAGAIN;
    CHECK(pair_turn(&p, 0, 1000) == 0);
    pair_close(&p);
}

int main(void)
{
    RUN(bytes_get_across);
    RUN(bytes_get_across_without_epoll);
    RUN(bytes_get_across_ipv6);
    RUN(an_end_is_seen_after_the_bytes_before_it);
    RUN(a_path_that_carries_nothing_breaks_the_wire);
    RUN(a_reader_that_stops_stops_the_sender);
    RUN(unsent_bytes_are_bounded);
    RUN(silence_counts_from_the_first_byte_after_a_pause);
    RUN(an_end_that_opens_later_is_waited_for);
    return check_summary();
}

#else

int main(void) { return check_summary(); }

#endif
