/* Shared memory as a wire: its bytes alone, ops of whole engines, and a process at the other end that breaks the rules. */
#include "trial.h"

#include "conn.h"
#include "wire_shm.h"
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#if defined(__linux__)

/* Both ends of one wire in this process, and the memory as a third one sees it. */
typedef struct {
    uint8_t offer[PCCL_MEMORY_OFFER_BYTES];
    pccl_memory *memory[2];
    int fds[2];
    pccl_memory_header *seen;
    int wake_fd; /* of the first end: a copy */
} pair;

static void pair_open(pair *p)
{
    pair_tcp(p->fds);
    if (pccl_memory_create(&p->memory[0], p->offer) != 0)
        stop_test("pccl_memory_create");
    pccl_memory_offer offer;
    memcpy(&offer, p->offer, sizeof offer);
    p->seen = mmap(NULL, PCCL_MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, (int)offer.memory_fd, 0);
    p->wake_fd = dup((int)offer.wake_fds[0]);
    if (p->seen == MAP_FAILED || p->wake_fd < 0)
        stop_test("mmap");
    if (pccl_memory_open(p->offer, &p->memory[1]) != 0)
        stop_test("pccl_memory_open");
}

static void pair_forget(pair *p)
{
    munmap(p->seen, PCCL_MEMORY_BYTES);
    close(p->wake_fd);
}

static int open_fds(void)
{
    int count = 0;
    for (int fd = 0; fd < 1024; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* The wire alone */

typedef struct {
    pccl_fd_registry *fds;
    pccl_poller *pollers[2];
    pccl_wire *wires[2];
    uint64_t sent[2]; /* by that end */
    uint64_t received[2];
} stream;

static uint8_t byte_at(int end, uint64_t at) { return (uint8_t)(at * 2654435761u >> 13) ^ (uint8_t)end; }

static void stream_open(stream *s, pair *p, int force_poll)
{
    memset(s, 0, sizeof *s);
    pair_open(p);
    s->fds = pccl_fd_registry_create();
    for (int end = 0; end < 2; end++) {
        s->pollers[end] = pccl_poller_open(force_poll);
        if (s->pollers[end] == NULL || pccl_wire_shm_open(s->fds, p->fds[end], p->memory[end], &s->wires[end]) != 0 ||
            s->wires[end]->type->watch(s->wires[end], s->pollers[end], s) != 0)
            stop_test("pccl_wire_shm_open");
    }
}

static void end_close(stream *s, int end)
{
    if (s->wires[end] != NULL)
        s->wires[end]->type->close(s->wires[end]);
    s->wires[end] = NULL;
}

static void stream_close(stream *s, pair *p)
{
    for (int end = 0; end < 2; end++) {
        end_close(s, end);
        pccl_poller_close(s->pollers[end]);
    }
    pccl_fd_registry_destroy(s->fds);
    pair_forget(p);
}

/* Sends up to so many bytes in two parts: how many were taken, or -errno. */
static ssize_t end_send(stream *s, int end, size_t bytes)
{
    static uint8_t buffer[3 * PCCL_RING_BYTES];
    for (size_t i = 0; i < bytes; i++)
        buffer[i] = byte_at(end, s->sent[end] + i);
    struct iovec iov[2] = {{buffer, bytes / 3}, {buffer + bytes / 3, bytes - bytes / 3}};
    int first = iov[0].iov_len == 0;
    ssize_t n = s->wires[end]->type->send(s->wires[end], iov + first, 2 - first);
    s->sent[end] += n > 0 ? (uint64_t)n : 0;
    return n;
}

/* Receives until -EAGAIN, or up to a bound: what the last view returned. */
static ssize_t end_receive(stream *s, int end, uint64_t bytes_max)
{
    uint64_t begin = s->received[end];
    for (;;) {
        const uint8_t *at;
        ssize_t n = s->wires[end]->type->view(s->wires[end], &at, s->received[end] - begin < bytes_max);
        if (n <= 0)
            return n;
        int differing = 0;
        for (ssize_t i = 0; i < n; i++)
            differing += at[i] != byte_at(1 - end, s->received[end] + (uint64_t)i);
        CHECK(differing == 0);
        s->received[end] += (uint64_t)n;
    }
}

/* Waits for events of one end: what they mean. */
static unsigned end_await(stream *s, int end, int timeout_ms)
{
    pccl_poll_event events[4];
    unsigned ready = 0;
    int count = pccl_poller_wait(s->pollers[end], events, 4, timeout_ms);
    for (int i = 0; i < count; i++)
        ready |= s->wires[end]->type->ready(s->wires[end], &events[i]);
    return ready;
}

/* Each end sends and receives as its events say, and looks at nothing without one: so a lost one is a hang. */
static void bytes_arrive_in_order_in_both_directions(void)
{
    for (int run = 0; run < RUNS(12); run++) {
        pair p;
        stream s;
        uint64_t total = 4 * PCCL_RING_BYTES + random_below(PCCL_RING_BYTES);
        uint64_t bytes_max = run % 3 == 0 ? UINT64_MAX : 1 + random_below(PCCL_RING_BYTES);
        size_t size_max = run % 2 ? 200 : 3 * PCCL_RING_BYTES;
        int may_send[2] = {1, 1};
        int64_t deadline_ms = now_ms() + WAIT_MS;
        stream_open(&s, &p, run % 2);
        while (s.received[0] < total || s.received[1] < total) {
            int end = (int)random_below(2);
            size_t left = (size_t)(total - s.sent[end]);
            if (may_send[end] && left > 0) {
                size_t bytes = pccl_min_size(left, 1 + random_below((uint32_t)size_max));
                ssize_t n = end_send(&s, end, bytes);
                REQUIRE(n >= 0);
                may_send[end] = (size_t)n == bytes;
                continue;
            }
            REQUIRE(now_ms() < deadline_ms);
            if (end_await(&s, end, 0) == 0)
                continue;
            may_send[end] = 1;
            REQUIRE(end_receive(&s, end, bytes_max) == -EAGAIN);
        }
        CHECK(s.wires[0]->received_bytes == total && s.wires[1]->sent_bytes == total);
        stream_close(&s, &p);
    }
}

static void a_full_ring_takes_no_more_until_half_of_it_is_free(void)
{
    pair p;
    stream s;
    uint64_t in_flight_bytes, unsent_bytes;
    stream_open(&s, &p, 0);
    CHECK(end_send(&s, 0, PCCL_RING_BYTES) == PCCL_RING_BYTES);
    CHECK(s.wires[0]->type->under_way(s.wires[0], &in_flight_bytes, &unsent_bytes) == 0 && in_flight_bytes == 0);
    CHECK(end_send(&s, 0, 1) == 0);
    CHECK(s.wires[0]->type->under_way(s.wires[0], &in_flight_bytes, &unsent_bytes) == 0);
    CHECK(in_flight_bytes == PCCL_RING_BYTES && unsent_bytes == 0);
    CHECK(end_await(&s, 0, 0) == 0);
    CHECK(end_await(&s, 1, WAIT_MS) & PCCL_POLL_IN);
    CHECK(end_receive(&s, 1, 1) == -EAGAIN && s.received[1] < PCCL_RING_BYTES / 2);
    CHECK(end_await(&s, 0, 0) == 0);
    while (s.received[1] < PCCL_RING_BYTES) {
        CHECK(end_await(&s, 1, WAIT_MS) & PCCL_POLL_IN); /* of its own: the other end is not awake */
        CHECK(end_receive(&s, 1, 1) == -EAGAIN);
    }
    CHECK(end_await(&s, 0, WAIT_MS) & PCCL_POLL_OUT);
    CHECK(end_send(&s, 0, 2 * PCCL_RING_BYTES) == PCCL_RING_BYTES);
    stream_close(&s, &p);
}

static void what_was_sent_before_the_end_arrives(void)
{
    pair p;
    stream s;
    stream_open(&s, &p, 0);
    CHECK(end_send(&s, 0, 1000) == 1000);
    end_close(&s, 0);
    while (end_receive(&s, 1, UINT64_MAX) == -EAGAIN)
        CHECK(end_await(&s, 1, WAIT_MS) & PCCL_POLL_IN);
    CHECK(s.received[1] == 1000 && end_receive(&s, 1, UINT64_MAX) == 0);
    stream_close(&s, &p);
}

/* Offers */

static void expect_no_memory(const uint8_t *offer)
{
    pccl_memory *memory;
    int before = open_fds();
    CHECK(pccl_memory_open(offer, &memory) == PCCL_E_SYSTEM && memory == NULL);
    CHECK(open_fds() == before);
}

static void offers_that_are_not_as_they_should_be_are_refused(void)
{
    pair p;
    int before = open_fds();
    pair_open(&p);
    for (size_t at = 0; at < PCCL_MEMORY_OFFER_BYTES; at++) {
        if (at >= offsetof(pccl_memory_offer, wake_fds) && at < offsetof(pccl_memory_offer, nonce))
            continue;
        uint8_t other[PCCL_MEMORY_OFFER_BYTES];
        memcpy(other, p.offer, sizeof other);
        other[at] ^= 0x40;
        expect_no_memory(other);
    }
    pccl_memory_offer offer;
    memcpy(&offer, p.offer, sizeof offer);
    offer.wake_fds[1] = offer.memory_fd; /* no pipe */
    uint8_t other[PCCL_MEMORY_OFFER_BYTES];
    memcpy(other, &offer, sizeof other);
    expect_no_memory(other);
    for (int end = 0; end < 2; end++) {
        pccl_memory_free(p.memory[end]);
        close(p.fds[end]);
    }
    expect_no_memory(p.offer); /* it is gone */
    pair_forget(&p);
    CHECK(open_fds() == before);
}

/* Connections over TCP need one descriptor each, and what is left is for them. */
static void scarce_descriptors_are_not_spent_on_memory(void)
{
    struct rlimit before;
    if (getrlimit(RLIMIT_NOFILE, &before) != 0)
        stop_test("getrlimit");
    int begin = open_fds();
    struct rlimit scarce = before;
    scarce.rlim_cur = (rlim_t)(2 * begin + 1);
    if (scarce.rlim_cur < 16 || setrlimit(RLIMIT_NOFILE, &scarce) != 0)
        scarce.rlim_cur = 0;
    pccl_memory *memory;
    uint8_t offer[PCCL_MEMORY_OFFER_BYTES];
    int status = pccl_memory_create(&memory, offer);
    int error = errno;
    setrlimit(RLIMIT_NOFILE, &before);
    if (scarce.rlim_cur != 0)
        CHECK(status == PCCL_E_SYSTEM && error == EMFILE && memory == NULL);
    pccl_memory_free(memory);
    CHECK(open_fds() == begin);
}

static void memory_that_could_shrink_is_refused(void)
{
    pair p;
    pair_open(&p);
    for (int is_sealed = 0; is_sealed < 2; is_sealed++) {
        int fd = memfd_create("pccl-wire", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        REQUIRE(fd >= 0 && ftruncate(fd, is_sealed ? PCCL_MEMORY_BYTES / 2 : PCCL_MEMORY_BYTES) == 0);
        REQUIRE(pwrite(fd, p.seen->nonce, sizeof p.seen->nonce, 0) == sizeof p.seen->nonce);
        REQUIRE(!is_sealed || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
        pccl_memory_offer offer;
        memcpy(&offer, p.offer, sizeof offer);
        offer.memory_fd = (uint32_t)fd;
        uint8_t other[PCCL_MEMORY_OFFER_BYTES];
        memcpy(other, &offer, sizeof other);
        expect_no_memory(other);
        close(fd);
    }
    for (int end = 0; end < 2; end++) {
        pccl_memory_free(p.memory[end]);
        close(p.fds[end]);
    }
    pair_forget(&p);
}

static void a_forked_child_frees_memory_that_it_does_not_have(void)
{
    pair p;
    pair_open(&p);
    pid_t child = fork();
    if (child == 0) {
        pccl_memory_free(p.memory[0]);
        pccl_memory_free(p.memory[1]);
        _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    CHECK(p.seen->rings[0].reader_sleeps == 1);
    for (int end = 0; end < 2; end++) {
        pccl_memory_free(p.memory[end]);
        close(p.fds[end]);
    }
    pair_forget(&p);
}

/* Engines */

static void ops_have_the_same_results(void)
{
    tested_memory = 1;
    for (int run = 0; run < RUNS(40); run++) {
        world w;
        uint32_t size = 2 + random_below(3);
        world_open(&w, size, 1 + random_below(2), 0, run % 2);
        tested_algorithm = (uint8_t)(run % PCCL_ALGORITHM_COUNT);
        for (int i = 0; i < 3; i++) {
            uint32_t count = 1 + random_below(i == 0 ? 100 : 200000);
            pccl_op_shape shape = plain_shape(count, random_below(PCCL_DTYPE_COUNT), PCCL_SUM,
                16 + 16 * random_below(run % 3 == 0 ? 20 : 8000), size);
            trial_run(&w, &shape, i % 2);
        }
        world_close(&w);
    }
    tested_memory = 0;
}

/* Of the connections around a ring some are in memory, whose payload has no checksum, and some on TCP. */
static void memory_and_tcp_serve_the_same_op(void)
{
    for (int run = 0; run < RUNS(30); run++) {
        world w;
        world_init(&w, 3);
        for (uint32_t rank = 0; rank < 3; rank++)
            node_open(&w.nodes[rank], 0);
        for (uint32_t a = 0; a < 3; a++)
            for (uint32_t b = a + 1; b < 3; b++)
                for (int i = 0; i < 2; i++) {
                    tested_memory = (int)random_below(2);
                    world_link(&w, a, b, 1);
                }
        tested_memory = 0;
        tested_algorithm = (uint8_t)(run % PCCL_ALGORITHM_COUNT);
        pccl_op_shape shape = plain_shape(1 + random_below(100000), PCCL_FLOAT32, PCCL_SUM, 4096, 3);
        trial_run(&w, &shape, run / 2 % 2);
        world_close(&w);
    }
}

/* One engine; this test is the process at the other end. */
typedef struct {
    node n;
    pair p;
} victim;

static void victim_open(victim *v)
{
    node_open(&v->n, 0);
    pair_open(&v->p);
    if (pccl_engine_link_add_memory(v->n.engine, 1, v->p.fds[0], v->p.memory[0]) != 0)
        stop_test("link_add_memory");
    node_await_stat(&v->n, tx_wire_bytes, 1); /* its HELLO */
}

static void victim_expect(victim *v, const char *why)
{
    pccl_event event = node_wait(&v->n, PCCL_EVENT_LINK_LOST, 1);
    CHECK_MSG(strstr(event.detail, why) != NULL, "'%s' instead of '%s'", event.detail, why);
    CHECK(!pccl_engine_has_failed(v->n.engine));
    pccl_memory_free(v->p.memory[1]);
    close(v->p.fds[1]);
    pair_forget(&v->p);
    node_close(&v->n);
}

static void victim_wake(victim *v) { CHECK(write(v->p.wake_fd, "", 1) == 1 || errno == EAGAIN); }

static void counts_out_of_bounds_lose_the_link(void)
{
    static const uint64_t counts[] = {PCCL_RING_BYTES + 1, UINT64_MAX, UINT64_MAX / 2, UINT64_MAX - PCCL_RING_BYTES};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        victim v;
        victim_open(&v);
        __atomic_store_n(&v.p.seen->rings[1].written, counts[i], __ATOMIC_SEQ_CST);
        victim_wake(&v);
        victim_expect(&v, "out of bounds");
    }
    static const uint64_t more[] = {1, PCCL_RING_BYTES, UINT64_MAX / 2, UINT64_MAX - PCCL_RING_BYTES};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        victim v;
        victim_open(&v);
        pccl_memory_header *seen = v.p.seen;
        uint64_t written = __atomic_load_n(&seen->rings[0].written, __ATOMIC_SEQ_CST);
        __atomic_store_n(&seen->rings[0].consumed, written + more[i], __ATOMIC_SEQ_CST);
        /* A HELLO makes it send. */
        pccl_frame frame;
        memset(&frame, 0, sizeof frame);
        frame.type = PCCL_FRAME_HELLO;
        frame.connection = 1;
        uint8_t *ring = (uint8_t *)seen + PCCL_MEMORY_HEADER_BYTES + PCCL_RING_BYTES;
        pccl_frame_encode(&frame, ring);
        memset(&frame, 0, sizeof frame);
        frame.type = PCCL_FRAME_CREDIT;
        for (uint32_t k = 1; k <= 2 * PCCL_ACK_FRAMES; k++)
            pccl_frame_encode(&frame, ring + k * PCCL_FRAME_BYTES);
        __atomic_store_n(
            &seen->rings[1].written, (2 * PCCL_ACK_FRAMES + 1) * (uint64_t)PCCL_FRAME_BYTES, __ATOMIC_SEQ_CST);
        victim_wake(&v);
        victim_expect(&v, "out of bounds");
    }
}

static void damaged_headers_lose_the_link(void)
{
    victim v;
    victim_open(&v);
    memset((uint8_t *)v.p.seen + PCCL_MEMORY_HEADER_BYTES + PCCL_RING_BYTES, 0x5a, PCCL_FRAME_BYTES);
    __atomic_store_n(&v.p.seen->rings[1].written, (uint64_t)PCCL_FRAME_BYTES, __ATOMIC_SEQ_CST);
    victim_wake(&v);
    victim_expect(&v, "connection 1");
}

static void bytes_on_the_socket_lose_the_link(void)
{
    victim v;
    victim_open(&v);
    CHECK(write(v.p.fds[1], "x", 1) == 1);
    victim_expect(&v, "bytes beside");
}

static void the_end_of_the_socket_loses_the_link(void)
{
    victim v;
    victim_open(&v);
    CHECK(shutdown(v.p.fds[1], SHUT_RDWR) == 0);
    victim_expect(&v, "closed by the other side");
}

/* Whatever is written to the memory, by a process that also wakes the engine, is at most a lost link. */
static void no_writing_to_the_memory_crashes(void)
{
    for (int run = 0; run < RUNS(60); run++) {
        victim v;
        victim_open(&v);
        volatile uint8_t *bytes = (volatile uint8_t *)v.p.seen;
        for (int i = 0; i < 200; i++) {
            uint32_t where = random_below(4);
            size_t at = where == 0 ? random_below(sizeof(pccl_memory_header)) : random_below(PCCL_MEMORY_BYTES);
            if (where < 3)
                bytes[at] = (uint8_t)random_u64();
            else
                __atomic_fetch_add(&v.p.seen->rings[1].written, random_below(300), __ATOMIC_SEQ_CST);
            if (i % 8 == 0)
                victim_wake(&v);
        }
        shutdown(v.p.fds[1], SHUT_RDWR);
        __atomic_store_n(&v.p.seen->rings[1].written, UINT64_MAX / 3, __ATOMIC_SEQ_CST);
        victim_wake(&v);
        victim_expect(&v, "connection 1");
    }
}

static void descriptors_and_memory_are_given_back(void)
{
    int before = open_fds();
    tested_memory = 1;
    world w;
    world_open(&w, 3, 2, 0, 0);
    world_close(&w);
    tested_memory = 0;
    CHECK(open_fds() == before);
    pair p;
    pair_open(&p);
    node n;
    node_open(&n, 0);
    int closed = p.fds[0];
    close(closed);
    CHECK(pccl_engine_link_add_memory(n.engine, 1, closed, p.memory[0]) == PCCL_E_SYSTEM);
    node_close(&n);
    pccl_memory_free(p.memory[1]);
    close(p.fds[1]);
    pair_forget(&p);
    CHECK(open_fds() == before);
}

#endif

int main(void)
{
#if defined(__linux__)
    RUN(bytes_arrive_in_order_in_both_directions);
    RUN(a_full_ring_takes_no_more_until_half_of_it_is_free);
    RUN(what_was_sent_before_the_end_arrives);
    RUN(offers_that_are_not_as_they_should_be_are_refused);
    RUN(scarce_descriptors_are_not_spent_on_memory);
    RUN(memory_that_could_shrink_is_refused);
    RUN(a_forked_child_frees_memory_that_it_does_not_have);
    RUN(ops_have_the_same_results);
    RUN(memory_and_tcp_serve_the_same_op);
    RUN(counts_out_of_bounds_lose_the_link);
    RUN(damaged_headers_lose_the_link);
    RUN(bytes_on_the_socket_lose_the_link);
    RUN(the_end_of_the_socket_loses_the_link);
    RUN(no_writing_to_the_memory_crashes);
    RUN(descriptors_and_memory_are_given_back);
#endif
    return check_summary();
}
