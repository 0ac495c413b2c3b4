/* One engine, rank 1 of three, whose peers are the test itself: what they must not do with the direct algorithm
 * and with eager payload. What is common to all frames is test_engine_wire.c's. */
#include "check.h"
#include "crc32c.h"
#include "engine_world.h"
#include "frame.h"
#include "link.h"

enum {
    RANK = 1,
    WORLD = 3,
    CHUNK = 10, /* elements */
    COUNT = WORLD * CHUNK,
    SEGMENT_BYTES = 20, /* two a chunk */
    WHOLE_BYTES = CHUNK * 4 /* as segment_bytes: one a chunk, and so eager */
};

typedef struct {
    node n;
    uint64_t links[WORLD];
    int peers[WORLD];
    pccl_op_request request;
    float values[COUNT];
} wire;

static uint64_t next_link = 1;

static float input(int i) { return (float)(i % 7) - 2.0f; }

static void wire_prepare(wire *w, uint32_t segment_bytes)
{
    memset(&w->request, 0, sizeof w->request);
    w->request.op = w->request.key.sequence = 1;
    w->request.key.epoch = 1;
    w->request.shape = plain_shape(COUNT, PCCL_FLOAT32, PCCL_SUM, segment_bytes, WORLD);
    w->request.shape.algorithm = PCCL_DIRECT;
    w->request.rank = RANK;
    w->request.rank_links = w->links;
    w->request.send = w->request.recv = w->values;
    for (int i = 0; i < COUNT; i++)
        w->values[i] = input(i);
}

static void write_all(int fd, const void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = send(fd, (const uint8_t *)data + done, bytes - done, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the engine has hung up, which the test will see */
        done += (size_t)n;
    }
}

static int read_all(int fd, void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        struct pollfd pfd = {.fd = fd, .events = POLLIN};
        if (poll(&pfd, 1, WAIT_MS) != 1)
            return 0;
        ssize_t n = recv(fd, (uint8_t *)data + done, bytes - done, 0);
        if (n <= 0)
            return 0;
        done += (size_t)n;
    }
    return 1;
}

static unsigned greetings; /* and acknowledgements, sent to the engine of the test */

/* What begins every connection, in both directions. */
static void greet(int fd)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_HELLO;
    frame.connection = 1;
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    greetings++;
    REQUIRE(read_all(fd, header, sizeof header));
    REQUIRE(pccl_frame_verify(header) == NULL && pccl_frame_decode(header, &frame) == NULL);
    CHECK(frame.type == PCCL_FRAME_HELLO);
}

static void acknowledge(int fd, uint32_t frames)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_ACK;
    frame.received_frames = frames;
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    greetings++;
}

static void wire_connect(wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        int fds[2];
        w->links[rank] = next_link++;
        w->peers[rank] = -1;
        if (rank == RANK)
            continue;
        pair_unix(fds);
        if (pccl_engine_link_add(w->n.engine, w->links[rank], fds[0], NULL) != 0)
            stop_test("link_add");
        w->peers[rank] = fds[1];
        greet(fds[1]);
    }
}

static void wire_disconnect(wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank++)
        if (rank != RANK)
            close(w->peers[rank]);
}

static void wire_submit(wire *w)
{
    if (pccl_engine_submit(w->n.engine, &w->request) != 0)
        stop_test("submit");
}

static void wire_open_bare(wire *w, uint32_t segment_bytes)
{
    memset(w, 0, sizeof *w);
    greetings = 0;
    node_open(&w->n, 0);
    wire_connect(w);
    wire_prepare(w, segment_bytes);
}

static void wire_close(wire *w)
{
    node_close(&w->n);
    wire_disconnect(w);
}

static void write_frame(int fd, pccl_frame frame, const void *payload, size_t payload_sent_bytes)
{
    uint8_t header[PCCL_FRAME_BYTES];
    if (payload != NULL)
        frame.payload_crc = pccl_crc32c(0, payload, frame.payload_bytes);
    pccl_frame_encode(&frame, header);
    write_all(fd, header, sizeof header);
    write_all(fd, payload, payload_sent_bytes);
}

static void read_frame(int fd, pccl_frame *frame, void *payload, size_t payload_bytes_max)
{
    uint8_t header[PCCL_FRAME_BYTES];
    memset(frame, 0, sizeof *frame);
    do { /* ACK frames come when they like */
        REQUIRE(read_all(fd, header, sizeof header));
        REQUIRE(pccl_frame_verify(header) == NULL && pccl_frame_decode(header, frame) == NULL);
    } while (frame->type == PCCL_FRAME_ACK);
    REQUIRE(frame->payload_bytes <= payload_bytes_max);
    CHECK(read_all(fd, payload, frame->payload_bytes));
}

/* What has been announced is open: a segment for it is not taken for one that comes too late. */
static void wire_await_announcements(const wire *w)
{
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        pccl_frame frame;
        float payload[CHUNK];
        read_frame(w->peers[rank], &frame, payload, sizeof payload);
        CHECK(frame.type == PCCL_FRAME_READY || frame.type == PCCL_FRAME_EAGER);
    }
}

static void wire_open(wire *w, uint32_t segment_bytes)
{
    wire_open_bare(w, segment_bytes);
    wire_submit(w);
    wire_await_announcements(w);
}

static pccl_frame announcement(const pccl_op_request *request, enum pccl_frame_type type, uint32_t bytes)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    frame.key = request->key;
    frame.shape = request->shape;
    frame.payload_bytes = bytes;
    return frame;
}

static pccl_frame segment(
    const pccl_op_request *request, uint32_t chunk, uint32_t index, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_SEGMENT;
    frame.key = request->key;
    frame.chunk = chunk;
    frame.segment = index;
    frame.hop = hop;
    frame.payload_bytes = bytes;
    return frame;
}

static const float ones[CHUNK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static void write_ready(const wire *w, uint32_t rank)
{
    write_frame(w->peers[rank], announcement(&w->request, PCCL_FRAME_READY, 0), NULL, 0);
}

static void write_segment(
    const wire *w, uint32_t rank, uint32_t chunk, uint32_t index, uint32_t hop, uint32_t bytes)
{
    write_frame(w->peers[rank], segment(&w->request, chunk, index, hop, bytes), ones, bytes);
}

static const float many_ones[COUNT] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

static void write_eager(const wire *w, uint32_t rank, uint32_t bytes)
{
    write_frame(w->peers[rank], announcement(&w->request, PCCL_FRAME_EAGER, bytes), ones, bytes);
}

static void wait_for_wire(node *n, uint64_t bytes)
{
    int64_t deadline_ms = now_ms() + WAIT_MS;
    pccl_engine_stats stats;
    do {
        pccl_engine_get_stats(n->engine, &stats);
        if (now_ms() > deadline_ms)
            stop_test("bytes did not come");
    } while (stats.rx_wire_bytes < (uint64_t)greetings * PCCL_FRAME_BYTES + bytes);
}

static void expect_inputs(const wire *w)
{
    for (int i = 0; i < COUNT; i++)
        CHECK(w->values[i] == input(i));
}

static void end_op(wire *w)
{
    CHECK(pccl_engine_end(w->n.engine, w->request.op, 0) == 0);
    node_wait(&w->n, PCCL_EVENT_OP_ENDED, w->request.op);
    expect_inputs(w);
}

static void expect_lost(wire *w, uint32_t rank, const char *why)
{
    pccl_event event = node_wait(&w->n, PCCL_EVENT_LINK_LOST, w->links[rank]);
    CHECK_MSG(strstr(event.detail, why) != NULL, "'%s' instead of '%s'", event.detail, why);
}

/* The whole dialogue, with the shares in the wrong order and one peer late. */
static void correct_peers_are_served(void)
{
    wire w;
    pccl_frame frame;
    float payload[CHUNK];
    wire_open_bare(&w, SEGMENT_BYTES);
    wire_submit(&w);
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        read_frame(w.peers[rank], &frame, NULL, 0);
        CHECK(frame.type == PCCL_FRAME_READY && pccl_op_shape_equal(&frame.shape, &w.request.shape));
    }
    write_ready(&w, 2);
    for (uint32_t i = 0; i < 2; i++) {
        read_frame(w.peers[2], &frame, payload, sizeof payload);
        CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.chunk == 2 && frame.segment == i &&
              frame.hop == RANK && frame.payload_bytes == SEGMENT_BYTES);
        CHECK(payload[0] == input(20 + 5 * (int)i));
        write_segment(&w, 2, 1, i, 2, SEGMENT_BYTES);
    }
    for (uint32_t i = 2; i-- > 0;) {
        write_segment(&w, 0, 1, i, 0, SEGMENT_BYTES);
        read_frame(w.peers[2], &frame, payload, sizeof payload);
        CHECK(frame.chunk == 1 && frame.segment == i && frame.hop == WORLD);
        for (int k = 0; k < 5; k++)
            CHECK(payload[k] == input(10 + 5 * (int)i + k) + 2);
    }
    write_ready(&w, 0);
    for (uint32_t i = 0; i < 4; i++) {
        read_frame(w.peers[0], &frame, payload, sizeof payload);
        CHECK(i < 2 ? frame.chunk == 0 && frame.segment == i && frame.hop == RANK
                    : frame.chunk == 1 && frame.segment == 3 - i && frame.hop == WORLD);
    }
    for (uint32_t i = 0; i < 2; i++) {
        write_segment(&w, 0, 0, i, WORLD, SEGMENT_BYTES);
        write_segment(&w, 2, 2, i, WORLD, SEGMENT_BYTES);
    }
    pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
    CHECK(event.tx_bytes == 8 * SEGMENT_BYTES && event.rx_bytes == 8 * SEGMENT_BYTES);
    for (int i = 0; i < COUNT; i++)
        CHECK(w.values[i] == (i / CHUNK == RANK ? input(i) + 2 : 1));
    wire_close(&w);
}

/* Everybody has sent all of it, but one says so late. */
static void done_waits_for_every_announcement(void)
{
    wire w;
    pccl_frame frame;
    float payload[CHUNK];
    wire_open_bare(&w, WHOLE_BYTES);
    w.request.shape.count = 1; /* rank 0 owns it all */
    wire_submit(&w);
    write_eager(&w, 0, 4);
    expect_lost(&w, 0, "no such segment");
    end_op(&w);
    wire_close(&w);

    wire_open_bare(&w, WHOLE_BYTES);
    w.request.shape.count = 1;
    wire_submit(&w);
    read_frame(w.peers[0], &frame, payload, sizeof payload);
    CHECK(frame.type == PCCL_FRAME_EAGER && frame.payload_bytes == 4);
    read_frame(w.peers[2], &frame, NULL, 0);
    CHECK(frame.type == PCCL_FRAME_READY);
    write_ready(&w, 0);
    write_segment(&w, 0, 0, 0, WORLD, 4);
    wait_for_wire(&w.n, 2 * PCCL_FRAME_BYTES + 4);
    pccl_event event;
    node_collect(&w.n);
    CHECK(!node_take_collected(&w.n, PCCL_EVENT_OP_DONE, 1, &event));
    write_ready(&w, 2);
    node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
    CHECK(w.values[0] == 1);
    wire_close(&w);
}

static void broken_segments_lose_the_link(void)
{
    static const struct {
        uint32_t from, chunk, segment, hop, bytes;
        const char *why;
    } cases[] = {
        {0, 3, 0, 0, 20, "no such segment"},
        {0, UINT32_MAX, UINT32_MAX, UINT32_MAX, 20, "no such segment"},
        {0, 1, 2, 0, 20, "no such segment"},
        {0, 1, 0, 1, 20, "a hop"}, /* our own share */
        {0, 1, 0, 2, 20, "a hop"}, /* somebody else's */
        {2, 1, 0, 0, 20, "a hop"},
        {0, 1, 0, 3, 20, "a hop"}, /* the result that is ours to say */
        {0, 1, 0, UINT32_MAX, 20, "a hop"},
        {0, 0, 0, 0, 20, "a hop"}, /* a share that is not for us */
        {0, 2, 0, 0, 20, "a hop"},
        {0, 2, 0, 3, 20, "a hop"}, /* a result that is not its to say */
        {2, 2, 0, 4, 20, "a hop"},
        {0, 1, 0, 0, 16, "wrong payload size"},
        {2, 1, 0, 2, 24, "wrong payload size"},
        {0, 0, 0, 3, 20, "a result before its parts"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        wire w;
        wire_open(&w, SEGMENT_BYTES);
        write_segment(
            &w, cases[i].from, cases[i].chunk, cases[i].segment, cases[i].hop, cases[i].bytes);
        expect_lost(&w, cases[i].from, cases[i].why);
        end_op(&w);
        wire_close(&w);
    }
}

static void repetitions_lose_the_link(void)
{
    pccl_frame frame;
    float payload[CHUNK];
    for (int kind = 0; kind < 4; kind++) {
        wire w;
        wire_open(&w, SEGMENT_BYTES);
        uint32_t rank = kind == 1 ? 2 : 0;
        if (kind < 2) { /* a share in its turn, and one ahead of it */
            write_segment(&w, rank, 1, 1, rank, SEGMENT_BYTES);
            write_segment(&w, rank, 1, 1, rank, SEGMENT_BYTES);
        } else if (kind == 2) { /* a result */
            write_ready(&w, 0);
            for (int i = 0; i < 2; i++)
                read_frame(w.peers[0], &frame, payload, sizeof payload);
            write_segment(&w, 0, 0, 1, WORLD, SEGMENT_BYTES);
            write_segment(&w, 0, 0, 1, WORLD, SEGMENT_BYTES);
        } else {
            write_ready(&w, 0);
            write_ready(&w, 0);
        }
        expect_lost(&w, rank, kind == 3 ? "announced twice" : "the same segment twice");
        end_op(&w);
        wire_close(&w);
    }
}

static void wrong_peers_lose_their_links(void)
{
    for (int kind = 0; kind < 3; kind++) {
        wire w;
        int fds[2];
        uint64_t link = next_link++;
        wire_open(&w, WHOLE_BYTES);
        pair_unix(fds);
        CHECK(pccl_engine_link_add(w.n.engine, link, fds[0], NULL) == 0);
        greet(fds[1]);
        if (kind == 0)
            write_frame(fds[1], announcement(&w.request, PCCL_FRAME_READY, 0), NULL, 0);
        else if (kind == 1)
            write_frame(fds[1], announcement(&w.request, PCCL_FRAME_EAGER, 40), ones, 40);
        else
            write_frame(fds[1], segment(&w.request, 1, 0, 0, 40), ones, 40);
        pccl_event event = node_wait(&w.n, PCCL_EVENT_LINK_LOST, link);
        CHECK(strstr(event.detail, "wrong peer") != NULL);
        close(fds[1]);
        end_op(&w);
        wire_close(&w);
    }
}

/* The dialogue of a small op, with payload before or after its submission. */
static void correct_eager_peers_are_served(void)
{
    for (int order = 0; order < 4; order++) {
        wire w;
        pccl_frame frame;
        float payload[CHUNK];
        wire_open_bare(&w, WHOLE_BYTES);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            if (order >> (rank / 2) & 1) {
                write_eager(&w, rank, WHOLE_BYTES);
                wait_for_wire(&w.n, PCCL_FRAME_BYTES + WHOLE_BYTES);
            }
        wire_submit(&w);
        for (uint32_t rank = 0; rank < WORLD; rank += 2) {
            read_frame(w.peers[rank], &frame, payload, sizeof payload);
            CHECK(frame.type == PCCL_FRAME_EAGER && pccl_op_shape_equal(&frame.shape, &w.request.shape));
            CHECK(frame.payload_bytes == WHOLE_BYTES && payload[3] == input((int)rank * CHUNK + 3));
            if (!(order >> (rank / 2) & 1))
                write_eager(&w, rank, WHOLE_BYTES);
        }
        for (uint32_t rank = 0; rank < WORLD; rank += 2) {
            read_frame(w.peers[rank], &frame, payload, sizeof payload);
            CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.chunk == RANK && frame.hop == WORLD);
            CHECK(payload[4] == input(CHUNK + 4) + 2);
            write_segment(&w, rank, rank, 0, WORLD, WHOLE_BYTES);
        }
        node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
        for (int i = 0; i < COUNT; i++)
            CHECK(w.values[i] == (i / CHUNK == RANK ? input(i) + 2 : 1));
        wire_close(&w);
    }
}

/* Several segments in one frame, before or after the op, go where each belongs. */
static void several_eager_segments_are_taken_apart(void)
{
    for (int order = 0; order < 4; order++) {
        wire w;
        wire_open_bare(&w, SEGMENT_BYTES);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            if (order >> (rank / 2) & 1) {
                write_eager(&w, rank, 2 * SEGMENT_BYTES);
                wait_for_wire(&w.n, PCCL_FRAME_BYTES + 2 * SEGMENT_BYTES);
            }
        wire_submit(&w);
        wire_await_announcements(&w);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            if (!(order >> (rank / 2) & 1))
                write_eager(&w, rank, 2 * SEGMENT_BYTES);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            for (int i = 0; i < 4; i++) {
                pccl_frame frame;
                float payload[CHUNK];
                read_frame(w.peers[rank], &frame, payload, sizeof payload);
                CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.chunk == (i < 2 ? rank : RANK));
                CHECK(i < 2 || payload[4] == input(CHUNK + 5 * (int)frame.segment + 4) + 2);
            }
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            for (uint32_t i = 0; i < 2; i++)
                write_segment(&w, rank, rank, i, WORLD, SEGMENT_BYTES);
        node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
        for (int i = 0; i < COUNT; i++)
            CHECK(w.values[i] == (i / CHUNK == RANK ? input(i) + 2 : 1));
        wire_close(&w);
    }
}

static void broken_several_eager_segments_lose_the_link(void)
{
    static const struct {
        uint32_t bytes;
        const char *why;
    } cases[] = {{16, "wrong payload size"}, {36, "wrong payload size"}, {44, "wrong payload size"}};
    for (size_t i = 0; i < PCCL_COUNT_OF(cases); i++)
        for (int is_early = 0; is_early < 2; is_early++) {
            wire w;
            wire_open_bare(&w, SEGMENT_BYTES);
            if (!is_early) {
                wire_submit(&w);
                wire_await_announcements(&w);
            }
            write_frame(w.peers[0], announcement(&w.request, PCCL_FRAME_EAGER, cases[i].bytes), many_ones,
                        cases[i].bytes);
            if (is_early) {
                wait_for_wire(&w.n, PCCL_FRAME_BYTES + cases[i].bytes);
                wire_submit(&w);
            }
            expect_lost(&w, 0, cases[i].why);
            end_op(&w);
            wire_close(&w);
        }
}

/* More than there is of it, of an op that everybody says to be done with, whichever of its frames is the last. */
static void a_tail_after_the_last_segment_loses_the_link(void)
{
    for (int is_in_parts = 0; is_in_parts < 2; is_in_parts++) {
        wire w;
        float chunk[CHUNK];
        wire_open_bare(&w, SEGMENT_BYTES);
        w.request.shape.collective = PCCL_REDUCE_SCATTER;
        w.request.awaits_completion = 1;
        w.request.recv = chunk;
        wire_submit(&w);
        wire_await_announcements(&w);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            write_frame(w.peers[rank], announcement(&w.request, PCCL_FRAME_DONE, 0), NULL, 0);
        write_eager(&w, 2, 2 * SEGMENT_BYTES);
        wait_for_wire(&w.n, 3 * PCCL_FRAME_BYTES + 2 * SEGMENT_BYTES);
        uint32_t bytes = 2 * SEGMENT_BYTES + 4;
        uint32_t begun_bytes = is_in_parts ? 2 * SEGMENT_BYTES : bytes;
        write_frame(w.peers[0], announcement(&w.request, PCCL_FRAME_EAGER, bytes), many_ones, begun_bytes);
        write_all(w.peers[0], many_ones, bytes - begun_bytes);
        expect_lost(&w, 0, "wrong payload size");
        CHECK(!node_has_event(&w.n, PCCL_EVENT_OP_DONE, w.request.op));
        end_op(&w);
        wire_close(&w);
    }
}

static void broken_eager_frames_lose_the_link(void)
{
    enum { TWICE, WITH_READY, AFTER_READY, WRONG_SIZE, TWO_SHAPES, KINDS };
    static const char *const why[KINDS] = {
        "announced twice", "announced twice", "announced twice", "wrong payload size", "described in two ways"};
    for (int kind = 0; kind < KINDS; kind++)
        for (int is_early = 0; is_early < 2; is_early++) {
            wire w;
            wire_open_bare(&w, WHOLE_BYTES);
            if (!is_early) {
                wire_submit(&w);
                wire_await_announcements(&w);
            }
            if (kind == AFTER_READY)
                write_ready(&w, 0);
            write_eager(&w, 0, kind == WRONG_SIZE ? 36 : WHOLE_BYTES);
            if (kind == TWICE)
                write_eager(&w, 0, WHOLE_BYTES);
            if (kind == WITH_READY)
                write_ready(&w, 0);
            if (kind == TWO_SHAPES) {
                pccl_frame other = announcement(&w.request, PCCL_FRAME_READY, 0);
                other.shape.count++;
                write_frame(w.peers[0], other, NULL, 0);
            }
            if (is_early && kind == WRONG_SIZE) {
                wait_for_wire(&w.n, PCCL_FRAME_BYTES + 36);
                wire_submit(&w);
            }
            if (kind == TWO_SHAPES && !is_early) {
                node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
            } else {
                expect_lost(&w, 0, why[kind]);
                if (is_early && kind != WRONG_SIZE)
                    wire_submit(&w);
            }
            end_op(&w);
            wire_close(&w);
        }
}

/* In a ring of two both neighbours are one peer: its READY is the target's, its EAGER the source's. */
static void a_ring_of_two_hears_both(void)
{
    for (int order = 0; order < 6; order++) {
        wire w;
        pccl_frame frame;
        float payload[COUNT];
        wire_open_bare(&w, COUNT * 4);
        w.request.rank = 1;
        w.request.shape.world_size = 2;
        w.request.shape.algorithm = PCCL_RING;
        w.request.rank_links = NULL;
        w.request.link_prev = w.request.link_next = w.links[2];
        static const float more_ones[COUNT / 2] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
        for (int i = 0; i < 3; i++) {
            static const char *const orders[] = {"srE", "sEr", "rsE", "Esr", "rEs", "Ers"};
            switch (orders[order][i]) {
            case 's':
                wire_submit(&w);
                break;
            case 'r':
                write_ready(&w, 2);
                break;
            default:
                write_frame(
                    w.peers[2], announcement(&w.request, PCCL_FRAME_EAGER, COUNT * 2), more_ones, COUNT * 2);
            }
        }
        int heard_of = 0;
        for (int i = 0; i < 3; i++) {
            read_frame(w.peers[2], &frame, payload, sizeof payload);
            heard_of |= 1 << frame.type;
            if (frame.type == PCCL_FRAME_SEGMENT)
                CHECK(frame.chunk == 1 && frame.hop == 1 && payload[2] == input(COUNT / 2 + 2) + 1);
        }
        CHECK(heard_of == (1 << PCCL_FRAME_READY | 1 << PCCL_FRAME_EAGER | 1 << PCCL_FRAME_SEGMENT));
        write_frame(w.peers[2], segment(&w.request, 0, 0, 1, COUNT * 2), more_ones, COUNT * 2);
        node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
        CHECK(w.values[COUNT - 1] == input(COUNT - 1) + 1 && w.values[0] == 1);
        wire_close(&w);
    }
}

/* A peer that does not keep to the window, with payload that waits or is of no use. */
static void flooding_loses_the_link(void)
{
    enum { FRAMES = PCCL_EAGER_WINDOW_BYTES / (WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES) };
    wire w;
    wire_open_bare(&w, WHOLE_BYTES);
    for (uint64_t i = 0; i < FRAMES; i++) {
        w.request.key.sequence = i;
        write_eager(&w, 0, WHOLE_BYTES);
    }
    wait_for_wire(&w.n, FRAMES * (PCCL_FRAME_BYTES + WHOLE_BYTES));
    node_collect(&w.n);
    CHECK(w.n.events_count == 0);
    w.request.key.sequence++;
    write_eager(&w, 0, WHOLE_BYTES);
    expect_lost(&w, 0, "more eager payload than allowed");
    wire_close(&w);

    /* One frame that could never be kept. */
    wire_open_bare(&w, WHOLE_BYTES);
    write_frame(w.peers[0], announcement(&w.request, PCCL_FRAME_EAGER, PCCL_EAGER_WINDOW_BYTES), NULL, 0);
    expect_lost(&w, 0, "more eager payload than allowed");
    wire_close(&w);
}

/* Whatever becomes of eager payload, the peer is told that it may send more. */
static void what_is_dropped_is_credited(void)
{
    enum { ROUNDS = 3, FRAMES = PCCL_EAGER_WINDOW_BYTES * 3 / 4 / (WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES) };
    wire w;
    pccl_frame frame;
    uint64_t sent_bytes = 0;
    uint64_t credited_bytes = 0;
    wire_open_bare(&w, WHOLE_BYTES);
    for (uint64_t epoch = 1; epoch <= ROUNDS; epoch++) {
        w.request.key.epoch = epoch;
        if (epoch == ROUNDS) /* and for the last round before it has come */
            CHECK(pccl_engine_freeze(w.n.engine, 0, epoch) == 0);
        for (uint64_t i = 0; i < FRAMES; i++) {
            w.request.key.sequence = i;
            write_eager(&w, 0, WHOLE_BYTES);
            sent_bytes += WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES;
        }
        wait_for_wire(&w.n, epoch * FRAMES * (PCCL_FRAME_BYTES + WHOLE_BYTES));
        CHECK(pccl_engine_freeze(w.n.engine, 0, epoch) == 0);
        while (sent_bytes - credited_bytes >= PCCL_EAGER_WINDOW_BYTES / 4) {
            read_frame(w.peers[0], &frame, NULL, 0);
            REQUIRE(frame.type == PCCL_FRAME_CREDIT);
            CHECK(frame.eager_bytes > credited_bytes && frame.eager_bytes <= sent_bytes);
            credited_bytes = frame.eager_bytes;
        }
    }
    wire_close(&w);
}

static void credit_opens_the_window(void)
{
    enum { FRAMES = PCCL_EAGER_WINDOW_BYTES / (WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES) };
    wire w;
    pccl_frame frame;
    float payload[CHUNK];
    wire_open_bare(&w, WHOLE_BYTES);
    float *send = calloc(COUNT, sizeof *send);
    float *recv = calloc(COUNT, sizeof *recv);
    w.request.send = send;
    w.request.recv = recv;
    for (uint64_t i = 0; i <= FRAMES + 1; i++) {
        if (i == FRAMES + 1) {
            pccl_frame credit;
            memset(&credit, 0, sizeof credit);
            credit.type = PCCL_FRAME_CREDIT;
            credit.eager_bytes = WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES;
            credit.received_frames = (uint32_t)i;
            write_frame(w.peers[0], credit, NULL, 0);
            wait_for_wire(&w.n, PCCL_FRAME_BYTES);
        }
        w.request.op = w.request.key.sequence = i;
        wire_submit(&w);
        read_frame(w.peers[0], &frame, payload, sizeof payload);
        CHECK(frame.type == (i == FRAMES ? PCCL_FRAME_READY : PCCL_FRAME_EAGER));
        read_frame(w.peers[2], &frame, payload, sizeof payload);
        acknowledge(w.peers[0], (uint32_t)i + 1);
        acknowledge(w.peers[2], (uint32_t)i + 1);
    }
    wire_close(&w);
    free(send);
    free(recv);

    for (uint64_t excess = 0; excess < 2; excess++) {
        pccl_frame credit;
        memset(&credit, 0, sizeof credit);
        credit.type = PCCL_FRAME_CREDIT;
        credit.eager_bytes = WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES + excess;
        wire_open(&w, WHOLE_BYTES);
        write_frame(w.peers[0], credit, NULL, 0);
        write_frame(w.peers[0], credit, NULL, 0);
        if (excess) {
            expect_lost(&w, 0, "credit for what was not sent");
        } else {
            wait_for_wire(&w.n, 2 * PCCL_FRAME_BYTES);
            node_collect(&w.n);
            CHECK(w.n.events_count == 0);
        }
        end_op(&w);
        wire_close(&w);
    }
}

/* Payload that is half here when its op is submitted, ended, frozen, contradicted, or everything stops. */
static void half_received_eager_payload_is_harmless(void)
{
    enum {
        COMPLETED,
        ENDED,
        FROZEN_UNKNOWN, /* the op is submitted too late, and so not at all */
        FROZEN,
        MISMATCHED,
        LATER_EPOCH_UNKNOWN,
        LATER_EPOCH,
        LINK_CLOSED,
        DESTROYED,
        KINDS
    };
    for (int kind = 0; kind < KINDS; kind++)
        for (int is_early = 0; is_early < 2; is_early++) {
            wire w;
            pccl_frame frame;
            float payload[CHUNK];
            int is_unknown = kind == FROZEN_UNKNOWN || kind == LATER_EPOCH_UNKNOWN;
            if (is_unknown && !is_early)
                continue;
            wire_open_bare(&w, WHOLE_BYTES);
            if (!is_early)
                wire_submit(&w);
            write_frame(w.peers[0], announcement(&w.request, PCCL_FRAME_EAGER, WHOLE_BYTES), ones, 13);
            wait_for_wire(&w.n, PCCL_FRAME_BYTES + 13);
            if (is_early && !is_unknown)
                wire_submit(&w);
            switch (kind) {
            case FROZEN_UNKNOWN:
            case FROZEN:
                CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
                node_wait(&w.n, PCCL_EVENT_GROUP_FROZEN, 1);
                break;
            case MISMATCHED:
                frame = announcement(&w.request, PCCL_FRAME_READY, 0);
                frame.shape.count++;
                write_frame(w.peers[2], frame, NULL, 0);
                node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
                break;
            case LATER_EPOCH: {
                static float other[COUNT];
                pccl_op_request later = w.request;
                later.op = 3;
                later.key.epoch = 2;
                later.key.sequence = 3;
                later.send = later.recv = other;
                CHECK(pccl_engine_submit(w.n.engine, &later) == 0);
                break;
            }
            case LINK_CLOSED:
                CHECK(pccl_engine_link_close(w.n.engine, w.links[0]) == 0);
                break;
            case DESTROYED:
                wire_close(&w);
                expect_inputs(&w);
                continue;
            default:
                break;
            }
            if (kind != COMPLETED && !is_unknown)
                end_op(&w);
            if (kind == LINK_CLOSED) {
                wire_close(&w);
                continue;
            }
            if (kind != COMPLETED) {
                /* The connection goes on with the next epoch. */
                w.request.op = 2;
                w.request.key.epoch = 2;
                wire_submit(&w);
            }
            write_all(w.peers[0], (const uint8_t *)ones + 13, WHOLE_BYTES - 13);
            if (kind != COMPLETED)
                write_eager(&w, 0, WHOLE_BYTES);
            write_eager(&w, 2, WHOLE_BYTES);
            do
                read_frame(w.peers[0], &frame, payload, sizeof payload);
            while (frame.type != PCCL_FRAME_SEGMENT && check_failures == 0);
            CHECK(frame.chunk == RANK && frame.hop == WORLD && payload[9] == input(2 * CHUNK - 1) + 2);
            end_op(&w);
            wire_close(&w);
        }
}

static uint32_t random_state = 1;

static uint32_t random_u32(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8 ^ random_state << 20;
}

/* Mostly what a peer might say, with here and there something that it must not. */
static uint32_t random_near(uint32_t limit)
{
    return random_u32() % 16 ? random_u32() % (limit + 1) : random_u32();
}

static pccl_frame random_frame(const wire *w)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = (enum pccl_frame_type)(PCCL_FRAME_READY + random_u32() % 4);
    if (frame.type == PCCL_FRAME_CREDIT) {
        frame.eager_bytes = random_near(1000);
        return frame;
    }
    frame.key = w->request.key;
    if (random_u32() % 8 == 0)
        frame.key.sequence += random_u32() % 3;
    if (random_u32() % 8 == 0)
        frame.key.epoch += random_u32() % 3 - 1;
    frame.payload_bytes = random_u32() % 4 ? WHOLE_BYTES : 1 + random_u32() % WHOLE_BYTES;
    if (frame.type == PCCL_FRAME_SEGMENT) {
        frame.chunk = random_near(WORLD);
        frame.segment = random_near(1);
        frame.hop = random_near(WORLD);
        return frame;
    }
    frame.shape = w->request.shape;
    if (random_u32() % 4 == 0)
        switch (random_u32() % 4) {
        case 0:
            frame.shape.count = random_u32();
            break;
        case 1:
            frame.shape.algorithm ^= 1;
            break;
        case 2:
            frame.shape.dtype = PCCL_INT32;
            break;
        default:
            frame.shape.world_size = random_u32() & 0xffffff;
        }
    if (frame.type == PCCL_FRAME_READY)
        frame.payload_bytes = 0;
    return frame;
}

/* Frames that are well formed and make no sense: an op is done, is left alone, or has lost links, and its end
 * puts everything back. */
static void nonsense_does_no_harm(void)
{
    wire w;
    memset(&w, 0, sizeof w);
    node_open(&w.n, 0);
    for (uint64_t round = 1; round <= 1500; round++) {
        pccl_event event;
        wire_connect(&w);
        wire_prepare(&w, random_u32() % 2 ? WHOLE_BYTES : SEGMENT_BYTES);
        w.request.op = round;
        w.request.key.epoch = round;
        uint32_t submit_at = random_u32() % 12;
        for (uint32_t i = 0; i < 24; i++) {
            if (i == submit_at)
                wire_submit(&w);
            pccl_frame frame = random_frame(&w);
            uint8_t junk[WHOLE_BYTES] = {(uint8_t)i};
            write_frame(w.peers[random_u32() % 2 * 2], frame, junk, frame.payload_bytes);
        }
        shutdown(w.peers[0], SHUT_WR);
        shutdown(w.peers[2], SHUT_WR);
        node_wait(&w.n, PCCL_EVENT_LINK_LOST, w.links[0]);
        node_wait(&w.n, PCCL_EVENT_LINK_LOST, w.links[2]);
        end_op(&w);
        node_take_collected(&w.n, PCCL_EVENT_OP_MISMATCH, round, &event);
        node_take_collected(&w.n, PCCL_EVENT_OP_DONE, round, &event);
        CHECK(pccl_engine_link_close(w.n.engine, w.links[0]) == 0);
        CHECK(pccl_engine_link_close(w.n.engine, w.links[2]) == 0);
        wire_disconnect(&w);
    }
    CHECK(w.n.events_count == 0);
    pccl_engine_stats stats;
    pccl_engine_get_stats(w.n.engine, &stats);
    CHECK(stats.scratch_bytes == 0 && stats.ops_open == 0);
    node_close(&w.n);
}

/* With a window of one segment, a share goes out when the final before it is in, whatever else is in by then. */
static void the_window_opens_with_finals(void)
{
    wire w;
    pccl_frame frame;
    float payload[CHUNK];
    tested_op_scratch_bytes_max = 0;
    wire_open(&w, SEGMENT_BYTES);
    write_ready(&w, 2);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 0 && frame.hop == RANK);
    for (uint32_t i = 0; i < 2; i++) {
        write_segment(&w, 2, 1, i, 2, SEGMENT_BYTES);
        write_segment(&w, 0, 1, i, 0, SEGMENT_BYTES);
        read_frame(w.peers[2], &frame, payload, sizeof payload);
        CHECK(frame.chunk == 1 && frame.segment == i && frame.hop == WORLD);
        CHECK(payload[4] == input(14 + 5 * (int)i) + 2);
    }
    write_segment(&w, 2, 2, 0, WORLD, SEGMENT_BYTES);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 1 && frame.hop == RANK && payload[0] == input(25));
    end_op(&w);
    wire_close(&w);
    tested_op_scratch_bytes_max = UINT32_MAX;
}

static void shares_beyond_the_window_lose_the_link(void)
{
    wire w;
    tested_op_scratch_bytes_max = 0;
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        wire_open(&w, SEGMENT_BYTES);
        write_segment(&w, rank, 1, 0, rank, SEGMENT_BYTES);
        write_segment(&w, rank, 1, 1, rank, SEGMENT_BYTES);
        expect_lost(&w, rank, "a segment beyond the window");
        end_op(&w);
        wire_close(&w);
    }
    tested_op_scratch_bytes_max = UINT32_MAX;
}

/* Around a ring only what is quantized needs slots. */
static void the_ring_has_a_window_too(void)
{
    enum { ELEMENTS = 3, BYTES = ELEMENTS * 2 };
    static const uint16_t codes[ELEMENTS] = {0x3f80, 0x3f80, 0x3f80}; /* 1 */
    wire w;
    pccl_frame frame;
    uint16_t payload[CHUNK];
    tested_op_scratch_bytes_max = 0;
    wire_open_bare(&w, ELEMENTS * 4);
    w.request.shape.algorithm = PCCL_RING;
    w.request.shape.quantization = PCCL_QUANT_CAST;
    w.request.shape.quantized_dtype = PCCL_BFLOAT16;
    w.request.rank_links = NULL;
    w.request.link_prev = w.links[0];
    w.request.link_next = w.links[2];
    wire_submit(&w);
    read_frame(w.peers[0], &frame, NULL, 0);
    write_ready(&w, 2);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 0 && frame.segment == 0 && frame.hop == 0);
    for (uint32_t i = 0; i < 2; i++)
        write_frame(w.peers[0], segment(&w.request, 2, i, 0, BYTES), codes, BYTES);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 0 && frame.hop == 1);
    write_frame(w.peers[0], segment(&w.request, 2, 0, 3, BYTES), codes, BYTES); /* it goes no further */
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 1 && frame.hop == 1);
    write_frame(w.peers[0], segment(&w.request, 2, 2, 0, BYTES), codes, BYTES);
    write_frame(w.peers[0], segment(&w.request, 2, 3, 0, 2), codes, 2);
    expect_lost(&w, 0, "a segment beyond the window");
    end_op(&w);
    wire_close(&w);
    tested_op_scratch_bytes_max = UINT32_MAX;
}

int main(void)
{
    RUN(correct_peers_are_served);
    RUN(the_window_opens_with_finals);
    RUN(shares_beyond_the_window_lose_the_link);
    RUN(the_ring_has_a_window_too);
    RUN(done_waits_for_every_announcement);
    RUN(broken_segments_lose_the_link);
    RUN(repetitions_lose_the_link);
    RUN(wrong_peers_lose_their_links);
    RUN(correct_eager_peers_are_served);
    RUN(several_eager_segments_are_taken_apart);
    RUN(broken_several_eager_segments_lose_the_link);
    RUN(a_tail_after_the_last_segment_loses_the_link);
    RUN(broken_eager_frames_lose_the_link);
    RUN(a_ring_of_two_hears_both);
    RUN(flooding_loses_the_link);
    RUN(what_is_dropped_is_credited);
    RUN(credit_opens_the_window);
    RUN(half_received_eager_payload_is_harmless);
    RUN(nonsense_does_no_harm);
    return check_summary();
}
