/* One engine, rank 1 of three, whose peers are the test itself: what they must not do with the direct algorithm
 * and with eager payload. What is common to all frames is test_engine_wire.c's. */
#include "direct_wire.h"

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
        CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.chunk == 2 && frame.segment == i && frame.hop == RANK &&
              frame.payload_bytes == SEGMENT_BYTES);
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
    w.request.shape.count = w.request.shape.last_slice = 1; /* rank 0 owns it all; slices are not one-shot */
    wire_submit(&w);
    write_eager(&w, 0, 4);
    expect_lost(&w, 0, "no such segment");
    end_op(&w);
    wire_close(&w);

    wire_open_bare(&w, WHOLE_BYTES);
    w.request.shape.count = w.request.shape.last_slice = 1;
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
        write_segment(&w, cases[i].from, cases[i].chunk, cases[i].segment, cases[i].hop, cases[i].bytes);
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
        greet_engine(fds[1]);
        pccl_frame frame = kind == 0   ? op_frame(&w.request, PCCL_FRAME_READY, 0)
                           : kind == 1 ? op_frame(&w.request, PCCL_FRAME_EAGER, 40)
                                       : segment_frame(&w.request, 1, 0, 0, 40);
        write_frame(fds[1], &frame, kind == 0 ? NULL : ones);
        expect_link_lost(&w.n, link, "wrong peer");
        close(fds[1]);
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
static uint32_t random_near(uint32_t limit) { return random_u32() % 16 ? random_u32() % (limit + 1) : random_u32(); }

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
    uint32_t bytes_max = w->request.shape.segment_bytes > WHOLE_BYTES ? COUNT * 4 : WHOLE_BYTES;
    frame.payload_bytes = random_u32() % 4 ? bytes_max : 1 + random_u32() % bytes_max;
    if (frame.type == PCCL_FRAME_SEGMENT) {
        frame.chunk = random_near(WORLD);
        frame.segment = random_near(1);
        frame.hop = random_near(WORLD);
        return frame;
    }
    frame.shape = w->request.shape;
    if (random_u32() % 4 == 0)
        switch (random_u32() % 4) {
        case 0: frame.shape.count = random_u32(); break;
        case 1: frame.shape.algorithm ^= 1; break;
        case 2: frame.shape.dtype = PCCL_INT32; break;
        default: frame.shape.world_size = random_u32() & 0xffffff;
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
        static const uint32_t segments[] = {SEGMENT_BYTES, WHOLE_BYTES, COUNT * 4};
        wire_prepare(&w, segments[random_u32() % 3]);
        w.request.op = round;
        w.request.key.epoch = round;
        uint32_t submit_at = random_u32() % 12;
        for (uint32_t i = 0; i < 24; i++) {
            if (i == submit_at)
                wire_submit(&w);
            pccl_frame frame = random_frame(&w);
            uint8_t junk[COUNT * 4] = {(uint8_t)i};
            write_frame(w.peers[random_u32() % 2 * 2], &frame, junk);
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

static void write_codes(const wire *w, const uint16_t *codes, uint32_t segment, uint32_t hop, uint32_t bytes)
{
    pccl_frame frame = segment_frame(&w->request, 2, segment, hop, bytes);
    write_frame(w->peers[0], &frame, codes);
}

/* A small op: each rank sends all of its elements to each other one. */
static void small_open(wire *w)
{
    wire_open_bare(w, COUNT * 4);
    wire_submit(w);
}

static void small_check_result(const wire *w)
{
    for (int i = 0; i < COUNT; i++)
        CHECK(w->values[i] == input(i) + 2 * many_ones[i]);
}

static void small_write_eager(const wire *w, uint32_t rank)
{
    write_op_frame(w, rank, PCCL_FRAME_EAGER, COUNT * 4, many_ones, COUNT * 4);
}

static void small_read_inputs(const wire *w, uint32_t rank)
{
    pccl_frame frame;
    float payload[COUNT];
    read_frame(w->peers[rank], &frame, payload, sizeof payload);
    CHECK(frame.type == PCCL_FRAME_EAGER ||
          (frame.type == PCCL_FRAME_SEGMENT && frame.chunk == 0 && frame.segment == 0 && frame.hop == RANK));
    CHECK(frame.payload_bytes == COUNT * 4);
    for (int i = 0; i < COUNT; i++)
        CHECK(payload[i] == input(i));
}

static void a_small_op_takes_one_exchange(void)
{
    wire w;
    small_open(&w);
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        small_write_eager(&w, rank);
        small_read_inputs(&w, rank);
    }
    pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
    CHECK(event.tx_bytes == 2 * COUNT * 4 && event.rx_bytes == 2 * COUNT * 4);
    small_check_result(&w);
    end_op(&w);
    wire_close(&w);
}

/* In place, what has not been sent yet when the result is made is sent all the same. */
static void a_small_op_sends_its_input_after_it_has_the_result(void)
{
    wire w;
    pccl_frame frame;
    for (int is_eager = 0; is_eager < 2; is_eager++) {
        tested_eager_bytes_max = is_eager ? UINT32_MAX : 0;
        wire_open_bare(&w, COUNT * 4);
        for (uint32_t rank = 0; rank < WORLD; rank += 2)
            small_write_eager(&w, rank);
        wait_for_wire(&w.n, 2 * (PCCL_FRAME_BYTES + COUNT * 4));
        wire_submit(&w);
        node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
        small_check_result(&w);
        for (uint32_t rank = 0; rank < WORLD; rank += 2) {
            if (!is_eager) {
                read_frame(w.peers[rank], &frame, NULL, 0);
                CHECK(frame.type == PCCL_FRAME_READY);
            }
            small_read_inputs(&w, rank);
        }
        end_op(&w);
        wire_close(&w);
    }
}

static void broken_small_ops_lose_the_link(void)
{
    static const struct {
        uint32_t chunk, segment, hop, bytes;
        const char *why;
    } cases[] = {
        {1, 0, 0, COUNT * 4, "no such segment"},
        {0, 1, 0, COUNT * 4, "no such segment"},
        {0, 0, 1, COUNT * 4, "a hop"},
        {0, 0, 2, COUNT * 4, "a hop"},
        {0, 0, WORLD, COUNT * 4, "a hop"},
        {0, 0, 0, COUNT * 4 - 4, "wrong payload size"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        wire w;
        small_open(&w);
        small_read_inputs(&w, 0);
        pccl_frame frame = segment_frame(&w.request, cases[i].chunk, cases[i].segment, cases[i].hop, cases[i].bytes);
        write_frame(w.peers[0], &frame, many_ones);
        expect_lost(&w, 0, cases[i].why);
        end_op(&w);
        wire_close(&w);
    }
    for (uint32_t rank = 0; rank < WORLD; rank += 2) {
        wire w;
        small_open(&w);
        small_read_inputs(&w, rank);
        small_write_eager(&w, rank);
        pccl_frame again = segment_frame(&w.request, 0, 0, rank, COUNT * 4);
        write_frame(w.peers[rank], &again, many_ones);
        expect_lost(&w, rank, "the same segment twice");
        end_op(&w);
        wire_close(&w);
    }
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
        write_codes(&w, codes, i, 0, BYTES);
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 0 && frame.hop == 1);
    write_codes(&w, codes, 0, 3, BYTES); /* it goes no further */
    read_frame(w.peers[2], &frame, payload, sizeof payload);
    CHECK(frame.chunk == 2 && frame.segment == 1 && frame.hop == 1);
    write_codes(&w, codes, 2, 0, BYTES);
    write_codes(&w, codes, 3, 0, 2);
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
    RUN(a_small_op_takes_one_exchange);
    RUN(a_small_op_sends_its_input_after_it_has_the_result);
    RUN(broken_small_ops_lose_the_link);
    RUN(nonsense_does_no_harm);
    return check_summary();
}
