/* One engine whose peer is the test itself: DONE frames to it and from it. */
#include "engine_wire.h"

static void wire_submit_completing(wire *w)
{
    w->values = ramp(COUNT);
    w->request = wire_request(1, w->values, COUNT, SEGMENT_BYTES);
    w->request.awaits_completion = 1;
    if (pccl_engine_submit(w->n.engine, &w->request) != 0)
        stop_test("submit");
    read_header(w->peer);
}

static void read_segments(wire *w)
{
    uint8_t payload[SEGMENT_BYTES];
    for (int i = 0; i < 2; i++)
        CHECK(read_header(w->peer).type == PCCL_FRAME_SEGMENT && read_all(w->peer, payload, sizeof payload));
}

static void write_segments(wire *w, uint32_t chunk, uint32_t hop)
{
    for (uint32_t segment = 0; segment < 2; segment++) {
        pccl_frame frame = segment_for(&w->request, chunk, segment, hop, SEGMENT_BYTES);
        write_frame(w->peer, &frame, ones);
    }
}

/* Frames may overtake each other on a link's connections, so the other end may be heard to be done at any time. */
static void done_is_said_and_heard(void)
{
    for (int is_first = 0; is_first < 2; is_first++) {
        wire w;
        wire_open_bare(&w);
        wire_submit_completing(&w);
        pccl_frame done = op_frame(&w.request, PCCL_FRAME_DONE, 0);
        pccl_frame frame = op_frame(&w.request, PCCL_FRAME_READY, 0);
        write_frame(w.peer, &frame, NULL);
        read_segments(&w);
        write_segments(&w, 1, 0);
        read_segments(&w);
        if (is_first)
            write_frame(w.peer, &done, NULL);
        write_segments(&w, 0, 1);
        frame = read_header(w.peer);
        CHECK(frame.type == PCCL_FRAME_DONE && pccl_op_key_equal(&frame.key, &w.request.key));
        if (!is_first)
            write_frame(w.peer, &done, NULL);
        node_wait(&w.n, PCCL_EVENT_OP_COMPLETED, 1);
        wire_close(&w);
    }
}

static void done_twice_loses_the_link(void)
{
    wire w;
    wire_open_bare(&w);
    wire_submit_completing(&w);
    repeat(&w, op_frame(&w.request, PCCL_FRAME_DONE, 0), NULL, "the same op done twice");
}

/* Barriers, which are done as soon as the other end has announced them, too. */
static void wire_submit_barriers(wire *w, uint64_t count)
{
    w->request = wire_request(0, NULL, 0, SEGMENT_BYTES);
    w->request.shape.collective = PCCL_BARRIER;
    w->request.shape.reduce_op = 0;
    w->request.awaits_completion = 1;
    for (uint64_t op = 1; op <= count; op++) {
        w->request.op = w->request.key.sequence = op;
        CHECK(pccl_engine_submit(w->n.engine, &w->request) == 0);
        pccl_frame frame = read_header(w->peer);
        CHECK(frame.type == PCCL_FRAME_READY && frame.key.sequence == op);
    }
}

/* At once, so that all of them are done at once. */
static void write_readies(const wire *w, uint64_t count)
{
    enum { READIES_MAX = 100 };
    static uint8_t headers[READIES_MAX][PCCL_FRAME_BYTES];
    PCCL_ASSERT(count <= READIES_MAX);
    for (uint64_t op = 1; op <= count; op++) {
        pccl_frame ready = op_frame(&w->request, PCCL_FRAME_READY, 0);
        ready.key.sequence = op;
        pccl_frame_encode(&ready, headers[op - 1]);
    }
    write_all(w->peer, headers, count * PCCL_FRAME_BYTES);
}

/* Its keys are those from `first` on. */
static void read_done(int fd, uint64_t first, uint32_t count)
{
    uint8_t keys[PCCL_DONE_PAYLOAD_MAX];
    pccl_frame frame = read_header(fd);
    CHECK_MSG(frame.type == PCCL_FRAME_DONE && frame.key.sequence == first, "frame %d of op %d, not %d", frame.type,
        (int)frame.key.sequence, (int)first);
    CHECK_MSG(pccl_frame_keys(&frame) == count, "%u keys instead of %u", pccl_frame_keys(&frame), count);
    CHECK(read_all(fd, keys, frame.payload_bytes) && frame.payload_crc == pccl_crc32c(0, keys, frame.payload_bytes));
    for (uint32_t i = 1; i < pccl_frame_keys(&frame); i++)
        CHECK(pccl_op_key_decode(keys + (i - 1) * PCCL_KEY_BYTES).sequence == first + i);
}

/* Of the ops `first` to `last`, and of one that nobody knows. `bytes_max` of it are written. */
static void write_done(const wire *w, int fd, uint64_t first, uint64_t last, size_t bytes_max)
{
    uint8_t bytes[PCCL_FRAME_BYTES + PCCL_DONE_PAYLOAD_MAX];
    pccl_frame done = op_frame(&w->request, PCCL_FRAME_DONE, 0);
    done.key.sequence = 12345;
    for (uint64_t op = first; op <= last; op++) {
        pccl_op_key key = w->request.key;
        key.sequence = op;
        pccl_op_key_encode(&key, bytes + PCCL_FRAME_BYTES + done.payload_bytes);
        done.payload_bytes += PCCL_KEY_BYTES;
    }
    done.payload_crc = pccl_crc32c(0, bytes + PCCL_FRAME_BYTES, done.payload_bytes);
    pccl_frame_encode(&done, bytes);
    write_all(fd, bytes, pccl_min_size(bytes_max, PCCL_FRAME_BYTES + done.payload_bytes));
}

static void expect_completed(wire *w, uint64_t first, uint64_t last)
{
    for (uint64_t op = first; op <= last; op++) {
        node_wait(&w->n, PCCL_EVENT_OP_COMPLETED, op);
        CHECK(pccl_engine_end(w->n.engine, op, PCCL_COMMIT_BY_ALL) == 0);
    }
}

/* What is done together is said together, up to a bound, and counts as many frames. */
static void ops_share_frames_of_being_done(void)
{
    enum { MORE = 3, OPS = PCCL_DONE_KEYS_MAX + MORE };
    wire w;
    wire_open_bare(&w);
    wire_submit_barriers(&w, OPS);
    write_readies(&w, OPS);
    read_done(w.peer, 1, PCCL_DONE_KEYS_MAX);
    for (uint32_t i = 1; i <= MORE; i++)
        read_done(w.peer, PCCL_DONE_KEYS_MAX + i, 1);
    write_done(&w, w.peer, 1, PCCL_DONE_KEYS_MAX - 1, SIZE_MAX);
    expect_completed(&w, 1, PCCL_DONE_KEYS_MAX - 1);
    write_done(&w, w.peer, PCCL_DONE_KEYS_MAX, OPS, SIZE_MAX);
    expect_completed(&w, PCCL_DONE_KEYS_MAX, OPS);

    pccl_op_request request = wire_request(OPS + 1, NULL, 0, SEGMENT_BYTES);
    request.shape = w.request.shape;
    CHECK(pccl_engine_submit(w.n.engine, &request) == 0);
    pccl_frame frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_READY && frame.received_frames == OPS + PCCL_DONE_KEYS_MAX + (MORE + 1) + 1);
    pccl_engine_stats stats;
    pccl_engine_get_stats(w.n.engine, &stats);
    CHECK(stats.tx_payload_bytes == 0 && stats.rx_payload_bytes == 0);
    write_ack(w.peer, 2 * OPS + 2);
    expect_lost(&w, "more received than was sent");
    wire_close(&w);
}

static void done_twice_in_a_frame_loses_the_link(void)
{
    wire w;
    wire_open_bare(&w);
    wire_submit_barriers(&w, 1);
    uint8_t keys[2 * PCCL_KEY_BYTES];
    pccl_op_key_encode(&w.request.key, keys);
    pccl_op_key_encode(&w.request.key, keys + PCCL_KEY_BYTES);
    pccl_frame done = op_frame(&w.request, PCCL_FRAME_DONE, 0);
    done.key.sequence = 99;
    done.payload_bytes = sizeof keys;
    write_frame(w.peer, &done, keys);
    expect_lost(&w, "the same op done twice");
    wire_close(&w);
}

static void damaged_keys_lose_the_link(void)
{
    wire w;
    pccl_event event;
    wire_open_bare(&w);
    wire_submit_barriers(&w, 2);
    write_readies(&w, 2);
    pccl_frame done = op_frame(&w.request, PCCL_FRAME_DONE, 0);
    done.key.sequence = 1;
    done.payload_bytes = PCCL_KEY_BYTES;
    done.payload_crc = 1;
    uint8_t key[PCCL_KEY_BYTES] = {0};
    write_frame(w.peer, &done, NULL);
    write_all(w.peer, key, sizeof key);
    expect_lost(&w, "wrong payload checksum");
    CHECK(!node_take_collected(&w.n, PCCL_EVENT_OP_COMPLETED, 1, &event));
    wire_close(&w);
}

/* In both directions: what was not received as a whole, and what was not received at all. */
static void frames_of_being_done_come_again(void)
{
    enum { OPS = 5 };
    wire w;
    pccl_event event;
    wire_open_bare(&w);
    wire_submit_barriers(&w, OPS);
    int kept = wire_connect(&w);
    write_readies(&w, OPS);
    read_done(w.peer, 1, OPS);
    write_done(&w, w.peer, 1, OPS, PCCL_FRAME_BYTES + PCCL_KEY_BYTES + 1);
    shutdown(w.peer, SHUT_WR);
    pccl_frame frame = read_header(kept);
    CHECK(frame.type == PCCL_FRAME_LOST && frame.peer_connection == 1 && frame.frames == OPS);
    CHECK(!node_take_collected(&w.n, PCCL_EVENT_OP_COMPLETED, 1, &event));
    write_lost(kept, 1, 1, OPS);
    for (uint64_t op = 1; op <= OPS; op++)
        read_done(kept, op, 1);
    write_done(&w, kept, 1, OPS, SIZE_MAX);
    expect_completed(&w, 1, OPS);
    close(kept);
    wire_close(&w);
}

/* Of what has ended here, has been stopped, or never was. */
static void other_words_of_being_done_are_dropped(void)
{
    wire w;
    pccl_event event;
    wire_open_bare(&w);
    wire_submit_completing(&w);
    CHECK(pccl_engine_freeze_op(w.n.engine, 1) == 0);
    node_wait(&w.n, PCCL_EVENT_OP_FROZEN, 1);
    pccl_op_request unknown = wire_request(99, NULL, COUNT, SEGMENT_BYTES);
    pccl_frame frames[] = {op_frame(&w.request, PCCL_FRAME_DONE, 0), op_frame(&unknown, PCCL_FRAME_DONE, 0)};
    for (int i = 0; i < 4; i++)
        write_frame(w.peer, &frames[i % 2], NULL);

    float *values = ramp(COUNT);
    pccl_op_request later = wire_request(2, values, COUNT, SEGMENT_BYTES);
    CHECK(pccl_engine_submit(w.n.engine, &later) == 0);
    CHECK(read_header(w.peer).type == PCCL_FRAME_READY);
    pccl_frame ready = op_frame(&later, PCCL_FRAME_READY, 0);
    write_frame(w.peer, &ready, NULL);
    CHECK(read_header(w.peer).type == PCCL_FRAME_SEGMENT);
    CHECK(!node_take_collected(&w.n, PCCL_EVENT_LINK_LOST, LINK, &event));
    CHECK(pccl_engine_end(w.n.engine, 2, 0) == 0);
    node_wait(&w.n, PCCL_EVENT_OP_ENDED, 2);
    free(values);
    wire_close(&w);
}

int main(void)
{
    RUN(done_is_said_and_heard);
    RUN(done_twice_loses_the_link);
    RUN(ops_share_frames_of_being_done);
    RUN(done_twice_in_a_frame_loses_the_link);
    RUN(damaged_keys_lose_the_link);
    RUN(frames_of_being_done_come_again);
    RUN(other_words_of_being_done_are_dropped);
    return check_summary();
}
