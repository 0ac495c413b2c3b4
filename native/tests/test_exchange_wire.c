/* One engine, rank 1 of three, whose peers are the test itself, in an all-to-all: what they must not do, straight and
 * around a ring. */
#include "direct_wire.h"
#include "trial.h"

#include <sys/resource.h>

/* Freed memory is kept for a while to find its use; keep less, so that growth means something. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=16"; }

static float received[COUNT];

static void exchange_open_bare(wire *w, uint8_t algorithm)
{
    wire_open_bare(w, SEGMENT_BYTES);
    memset(received, 0, sizeof received);
    w->request.shape.collective = PCCL_ALL_TO_ALL;
    w->request.shape.algorithm = algorithm;
    w->request.link_prev = w->links[0];
    w->request.link_next = w->links[2];
    w->request.recv = received;
}

static void exchange_open(wire *w, uint8_t algorithm)
{
    exchange_open_bare(w, algorithm);
    wire_submit(w);
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        pccl_frame frame;
        read_frame(w->peers[rank], &frame, NULL, 0);
        CHECK(frame.type == PCCL_FRAME_READY && frame.shape.count == CHUNK && frame.shape.root == CHUNK);
    }
}

/* As a rank describes the op that gives this one so many elements. */
static void describe(const wire *w, uint32_t rank, enum pccl_frame_type type, uint64_t count, uint32_t bytes)
{
    pccl_frame frame = op_frame(&w->request, type, bytes);
    frame.shape.count = count;
    frame.shape.root = CHUNK;
    write_frame(w->peers[rank], &frame, bytes > 0 ? ones : NULL);
}

typedef struct {
    uint32_t from, chunk, segment, hop, destination, part, bytes;
    const char *why;
} broken_segment;

static void write_exchanged(const wire *w, const broken_segment *of)
{
    pccl_frame frame = segment_frame(&w->request, of->chunk, of->segment, of->hop, of->bytes);
    frame.destination = of->destination;
    frame.part_elements = of->part;
    write_frame(w->peers[of->from], &frame, ones);
}

static void check_broken(uint8_t algorithm, const broken_segment *cases, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        wire w;
        exchange_open(&w, algorithm);
        write_exchanged(&w, &cases[i]);
        expect_lost(&w, cases[i].from, cases[i].why);
        end_op(&w);
        wire_close(&w);
    }
}

static void broken_segments_lose_the_link(void)
{
    static const broken_segment direct[] = {
        {0, 3, 0, 0, 0, 0, 20, "no such segment"},
        {0, 0, 2, 0, 0, 0, 20, "no such segment"},
        {0, 1, 0, 0, 0, 0, 20, "a hop"}, /* our own part */
        {0, 2, 0, 0, 0, 0, 20, "a hop"}, /* somebody else's */
        {0, 0, 0, 1, 0, 0, 20, "a hop"},
        {0, 0, 0, 0, 0, 0, 16, "wrong payload size"},
        {0, 0, 0, 0, 1, 0, 20, "reserved bytes in use"},
        {0, 0, 0, 0, 0, 10, 20, "reserved bytes in use"},
    };
    static const broken_segment ring[] = {
        {2, 2, 0, 0, 1, 10, 20, "a hop that does not end here"}, /* it is not before us */
        {0, 0, 0, 1, 1, 10, 20, "a hop that does not end here"},
        {0, 1, 0, 2, 1, 10, 20, "a hop that does not end here"}, /* our own part */
        {0, 0, 0, 0, 3, 10, 20, "a hop that does not end here"},
        {0, 3, 0, 0, 1, 10, 20, "a hop that does not end here"},
        {0, 0, 0, UINT32_MAX, 1, 10, 20, "a hop that does not end here"},
        {0, 2, 0, 1, 0, 10, 20, "a hop beyond its destination"},
        {0, 0, 0, 0, 0, 10, 20, "a hop beyond its destination"},
        {0, 0, 0, 0, 2, 10, 24, "wrong payload size"},
        {0, 0, 0, 0, 2, 10, 16, "wrong payload size"}, /* also of what passes through */
        {0, 0, 0, 0, 2, 0, 4, "wrong payload size"},
        {0, 0, 1, 0, 2, 6, 20, "wrong payload size"},
        {0, 0, 2, 0, 2, 10, 20, "no such segment"},
        {0, 0, 1, 0, 2, 0, 0, "no such segment"},
        {0, 0, 0, 0, 1, 10, 16, "wrong payload size"},
        {0, 0, 2, 0, 1, 10, 20, "no such segment"},
    };
    check_broken(PCCL_DIRECT, direct, sizeof direct / sizeof *direct);
    check_broken(PCCL_RING, ring, sizeof ring / sizeof *ring);
}

static void repetitions_lose_the_link(void)
{
    for (uint8_t algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        int is_ring = algorithm == PCCL_RING;
        broken_segment twice = {0, 0, 1, 0, (uint32_t)is_ring, is_ring ? CHUNK : 0, SEGMENT_BYTES, NULL};
        wire w;
        exchange_open(&w, algorithm);
        write_exchanged(&w, &twice);
        write_exchanged(&w, &twice);
        expect_lost(&w, 0, "the same segment twice");
        end_op(&w);
        wire_close(&w);
    }
}

/* Rank 0 has nothing for us, which it says once. */
static void an_empty_part_said_twice_loses_the_link(void)
{
    static const uint64_t sent[WORLD] = {CHUNK, CHUNK, CHUNK}, expected[WORLD] = {0, CHUNK, 2 * CHUNK};
    static const broken_segment empty = {0, 0, 0, 0, RANK, 0, 0, NULL};
    wire w;
    exchange_open_bare(&w, PCCL_RING);
    w.request.send_counts = sent;
    w.request.recv_counts = expected;
    wire_submit(&w);
    wire_await_announcements(&w);
    describe(&w, 2, PCCL_FRAME_READY, 2 * CHUNK, 0);
    for (int i = 0; i < 2; i++)
        write_exchanged(&w, &empty);
    expect_lost(&w, 0, "the same segment twice");
    CHECK(!node_has_event(&w.n, PCCL_EVENT_OP_DONE, w.request.op));
    end_op(&w);
    wire_close(&w);
}

/* Of what passes through, too, whether the next rank has taken it or not. */
static void passing_segments_said_twice_lose_the_link(void)
{
    static const broken_segment full = {0, 0, 1, 0, 2, CHUNK, SEGMENT_BYTES, NULL}, empty = {0, 0, 0, 0, 2, 0, 0, NULL};
    for (int kind = 0; kind < 4; kind++) {
        const broken_segment *twice = kind % 2 == 0 ? &full : &empty;
        wire w;
        exchange_open(&w, PCCL_RING);
        write_exchanged(&w, twice);
        if (kind >= 2) {
            pccl_frame frame;
            float payload[CHUNK];
            describe(&w, 2, PCCL_FRAME_READY, CHUNK, 0);
            do
                read_frame(w.peers[2], &frame, payload, sizeof payload);
            while (frame.chunk != 0);
            write_ack(w.peers[2], 2 + 4);
        }
        write_exchanged(&w, twice);
        expect_lost(&w, 0, "the same segment twice");
        end_op(&w);
        wire_close(&w);
    }
}

enum { MANY = 16, LARGE = PCCL_RELAY_WINDOW_BYTES / 8 /* bytes */ };

static float many[MANY * LARGE / 4];

static void exchange_open_large(wire *w)
{
    exchange_open_bare(w, PCCL_RING);
    w->request.shape.segment_bytes = LARGE;
}

/* A segment of LARGE bytes from rank 0 for rank 2, of so many. */
static void write_large(const wire *w, uint32_t segment, uint32_t segments)
{
    pccl_frame frame = segment_frame(&w->request, 0, segment, 0, LARGE);
    frame.destination = 2;
    frame.part_elements = (uint64_t)segments * LARGE / 4;
    write_frame(w->peers[0], &frame, many);
}

/* The next rank has not called the op, and takes nothing. */
static void what_waits_to_be_passed_on_is_bounded(void)
{
    wire w;
    exchange_open_large(&w);
    wire_submit(&w);
    wire_await_announcements(&w);
    for (uint32_t i = 0; i < MANY; i++)
        write_large(&w, i, MANY);
    expect_lost(&w, 0, "more to be passed on than allowed");
    end_op(&w);
    wire_close(&w);
}

static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

/* Once the next rank has acknowledged it; the rank before is told that it may send more. */
static void what_has_been_passed_on_is_freed(void)
{
    enum { PASSED = RUNS(400) < 400 ? RUNS(400) : 400 };
    wire w;
    pccl_frame frame;
    exchange_open_large(&w);
    wire_submit(&w);
    wire_await_announcements(&w);
    describe(&w, 2, PCCL_FRAME_READY, CHUNK, 0);
    for (uint32_t i = 0; i < 2; i++) /* its own */
        read_frame(w.peers[2], &frame, many, sizeof many);
    long before_kib = peak_kib();
    for (uint32_t i = 0; i < PASSED; i++) {
        write_large(&w, i, PASSED);
        read_frame(w.peers[2], &frame, many, sizeof many);
        CHECK(frame.chunk == 0 && frame.segment == i && frame.payload_bytes == LARGE);
        write_ack(w.peers[2], 4 + i);
    }
    CHECK_MSG(peak_kib() - before_kib < 100 << 10, "%ld MiB", (peak_kib() - before_kib) >> 10);
    do
        REQUIRE(read_header_to(w.peers[0], &frame) && frame.type == PCCL_FRAME_PASSED);
    while (frame.passed_bytes[0] + PCCL_RELAY_WINDOW_BYTES / 4 < (uint64_t)PASSED * LARGE);
    end_op(&w);
    wire_close(&w);
}

/* What the engine sends for others waits for word that the next rank has passed it on. */
static void a_ring_waits_for_its_window(void)
{
    static const uint64_t sent[WORLD] = {MANY * LARGE / 4, CHUNK, CHUNK}, expected[WORLD] = {CHUNK, CHUNK, CHUNK};
    wire w;
    pccl_frame frame;
    exchange_open_large(&w);
    w.request.shape.count = sent[0] + 2 * CHUNK;
    w.request.send_counts = sent;
    w.request.recv_counts = expected;
    float *send = calloc(sent[0] + 2 * CHUNK, sizeof *send);
    REQUIRE(send != NULL);
    w.request.send = send;
    wire_submit(&w);
    wire_await_announcements(&w);
    describe(&w, 2, PCCL_FRAME_READY, CHUNK, 0);
    uint64_t charged_bytes = 0;
    for (; charged_bytes < PCCL_RELAY_WINDOW_BYTES; charged_bytes += LARGE + PCCL_RELAY_OVERHEAD_BYTES) {
        read_frame(w.peers[2], &frame, many, sizeof many);
        CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.chunk == RANK && frame.destination == 0);
    }
    pccl_op_request other = w.request; /* announced after all that might be sent */
    other.op = other.key.sequence = 2;
    CHECK(pccl_engine_submit(w.n.engine, &other) == 0);
    read_frame(w.peers[2], &frame, NULL, 0);
    CHECK(frame.type == PCCL_FRAME_READY && frame.key.sequence == 2);
    for (int i = 0; i < 2; i++) { /* one frame more, told twice */
        pccl_frame passed = op_frame(&w.request, PCCL_FRAME_PASSED, 0);
        passed.passed_bytes[0] = LARGE;
        passed.passed_bytes[1] = 0;
        write_frame(w.peers[2], &passed, NULL);
    }
    read_frame(w.peers[2], &frame, many, sizeof many);
    CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.segment == MANY / 2);
    CHECK(pccl_engine_end(w.n.engine, 2, PCCL_ABORT) == 0);
    end_op(&w);
    wire_close(&w);
    free(send);
}

static void false_reports_lose_the_link(void)
{
    static const struct {
        uint32_t from;
        uint8_t algorithm;
        const char *why;
    } cases[] = {{2, PCCL_RING, "more passed on than was sent"}, {0, PCCL_RING, "a report from the wrong peer"},
        {2, PCCL_DIRECT, "a report from the wrong peer"}};
    for (size_t i = 0; i < 2 * PCCL_COUNT_OF(cases); i++) {
        wire w;
        exchange_open(&w, cases[i / 2].algorithm);
        pccl_frame passed = op_frame(&w.request, PCCL_FRAME_PASSED, 0);
        passed.passed_bytes[i % 2] = 1;
        write_frame(w.peers[cases[i / 2].from], &passed, NULL);
        expect_lost(&w, cases[i / 2].from, cases[i / 2].why);
        end_op(&w);
        wire_close(&w);
    }
}

/* The rank after us acknowledges a frame of which the socket has not taken all: that is not freed. */
static void nothing_is_acknowledged_before_it_is_sent(void)
{
    wire w;
    exchange_open_large(&w);
    wire_submit(&w);
    wire_await_announcements(&w);
    describe(&w, 2, PCCL_FRAME_READY, CHUNK, 0);
    wait_for_wire(&w.n, PCCL_FRAME_BYTES);
    write_large(&w, 0, MANY);
    wait_for_wire(&w.n, 2 * PCCL_FRAME_BYTES + LARGE);
    write_ack(w.peers[2], 4);
    expect_lost(&w, 2, "more received than was sent");
    end_op(&w);
    wire_close(&w);
}

static void nothing_is_eager_in_a_ring(void)
{
    wire w;
    exchange_open(&w, PCCL_RING);
    describe(&w, 0, PCCL_FRAME_EAGER, CHUNK, SEGMENT_BYTES);
    expect_lost(&w, 0, "a hop that does not end here");
    end_op(&w);
    wire_close(&w);
}

/* What passes through goes on with one hop more, before the own parts that are not out yet; an empty part, too. */
static void a_ring_passes_on(void)
{
    static const broken_segment passing = {0, 0, 1, 0, 2, CHUNK, SEGMENT_BYTES, NULL};
    wire w;
    pccl_frame frame;
    float payload[CHUNK];
    exchange_open(&w, PCCL_RING);
    write_exchanged(&w, &passing);
    wait_for_wire(&w.n, PCCL_FRAME_BYTES + SEGMENT_BYTES);
    describe(&w, 2, PCCL_FRAME_READY, CHUNK, 0);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 0 && frame.segment == 1 && frame.hop == 1 && frame.destination == 2);
    CHECK(frame.part_elements == CHUNK && frame.payload_bytes == SEGMENT_BYTES && payload[0] == 1);
    for (uint32_t i = 0; i < 4; i++) { /* the farthest first */
        read_frame(w.peers[2], &frame, payload, sizeof payload);
        CHECK(frame.chunk == RANK && frame.segment == i % 2 && frame.hop == 0 && frame.part_elements == CHUNK);
        CHECK(frame.destination == (i < 2 ? 0 : 2));
        CHECK(payload[0] == input((int)(frame.destination * CHUNK + frame.segment * 5)));
    }
    pccl_frame empty = segment_frame(&w.request, 0, 0, 0, 0);
    empty.destination = 2;
    write_frame(w.peers[0], &empty, NULL);
    read_frame(w.peers[2], &frame, NULL, 0);
    CHECK(frame.chunk == 0 && frame.hop == 1 && frame.payload_bytes == 0 && frame.part_elements == 0);
    end_op(&w);
    wire_close(&w);
}

/* Rank 2 is not before us in the ring: that its part is of another length is heard by way of rank 0. */
static void another_length_is_a_mismatch(void)
{
    static const broken_segment shorter = {0, 2, 0, 1, 1, CHUNK - 1, SEGMENT_BYTES, NULL};
    static const broken_segment empty = {0, 2, 0, 1, 1, 0, 0, NULL};
    for (int is_empty = 0; is_empty < 2; is_empty++) {
        wire w;
        exchange_open(&w, PCCL_RING);
        write_exchanged(&w, is_empty ? &empty : &shorter);
        pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
        CHECK(event.sequence == 2 && event.mine.count == CHUNK);
        CHECK(event.theirs.count == (is_empty ? 0 : CHUNK - 1));
        end_op(&w);
        wire_close(&w);
    }
    wire w;
    exchange_open(&w, PCCL_DIRECT);
    describe(&w, 2, PCCL_FRAME_READY, CHUNK + 1, 0);
    pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
    CHECK(event.link == w.links[2] && event.mine.count == CHUNK && event.theirs.count == CHUNK + 1);
    end_op(&w);
    wire_close(&w);
}

int main(void)
{
    RUN(broken_segments_lose_the_link);
    RUN(repetitions_lose_the_link);
    RUN(an_empty_part_said_twice_loses_the_link);
    RUN(passing_segments_said_twice_lose_the_link);
    RUN(what_waits_to_be_passed_on_is_bounded);
    RUN(what_has_been_passed_on_is_freed);
    RUN(a_ring_waits_for_its_window);
    RUN(false_reports_lose_the_link);
    RUN(nothing_is_acknowledged_before_it_is_sent);
    RUN(nothing_is_eager_in_a_ring);
    RUN(a_ring_passes_on);
    RUN(another_length_is_a_mismatch);
    return check_summary();
}
