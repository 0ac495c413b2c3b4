/* One engine whose peer is the test itself, byte by byte: what a peer must not do, and what an engine must
 * not let happen when an op ends in the middle of a frame. */
#include "engine_wire.h"

/* The whole dialogue as it should be, by hand. */
static void a_correct_peer_is_served(void)
{
    wire w;
    float payload[10];
    wire_open(&w);
    pccl_frame frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_READY && pccl_op_shape_equal(&frame.shape, &w.request.shape));
    pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
    write_frame(w.peer, &ready, NULL);
    for (uint32_t segment = 0; segment < 2; segment++) {
        frame = read_header(w.peer);
        CHECK(frame.chunk == 0 && frame.segment == segment && frame.hop == 0 && frame.payload_bytes == 40);
        CHECK(read_all(w.peer, payload, sizeof payload) && payload[9] == (float)(10 * segment + 9));
        CHECK(frame.payload_crc == pccl_crc32c(0, payload, sizeof payload));
    }
    for (uint32_t segment = 2; segment-- > 0;) {
        frame = segment_for(&w.request, 1, segment, 0, 40);
        write_frame(w.peer, &frame, ones);
        frame = read_header(w.peer);
        CHECK(frame.chunk == 1 && frame.segment == segment && frame.hop == 1);
        CHECK(read_all(w.peer, payload, sizeof payload) && payload[0] == (float)(20 + 10 * segment + 1));
    }
    for (uint32_t segment = 0; segment < 2; segment++) {
        frame = segment_for(&w.request, 0, segment, 1, 40);
        write_frame(w.peer, &frame, ones);
    }
    pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
    CHECK(event.rx_bytes == 160 && event.tx_bytes == 160);
    for (int i = 0; i < COUNT; i++)
        CHECK(w.values[i] == (i < 20 ? 1.0f : (float)(i + 1)));
    wire_close(&w);
}

/* The same, a byte at a time. */
static void frames_may_be_fragmented(void)
{
    wire w;
    uint8_t stream[4 * (PCCL_FRAME_BYTES + 40) + PCCL_FRAME_BYTES];
    uint8_t *at = stream;
    pccl_frame frame;
    wire_open(&w);
    frame = op_frame(&w.request, PCCL_FRAME_READY, 0);
    pccl_frame_encode(&frame, at);
    at += PCCL_FRAME_BYTES;
    for (uint32_t i = 0; i < 2; i++) {
        frame = segment_for(&w.request, 1, i, 0, 40);
        pccl_frame_encode(&frame, at);
        memcpy(at + PCCL_FRAME_BYTES, ones, 40);
        at += PCCL_FRAME_BYTES + 40;
    }
    for (const uint8_t *byte = stream; byte < at; byte++) {
        write_all(w.peer, byte, 1);
        pccl_engine_stats stats;
        do
            pccl_engine_get_stats(w.n.engine, &stats);
        while (stats.rx_wire_bytes < PCCL_FRAME_BYTES + (uint64_t)(byte + 1 - stream));
    }
    for (int i = 0; i < 5; i++) {
        uint8_t payload[40];
        frame = read_header(w.peer);
        CHECK(read_all(w.peer, payload, frame.payload_bytes));
    }
    at = stream;
    for (uint32_t i = 0; i < 2; i++) {
        frame = segment_for(&w.request, 0, i, 1, 40);
        pccl_frame_encode(&frame, at);
        memcpy(at + PCCL_FRAME_BYTES, ones, 40);
        at += PCCL_FRAME_BYTES + 40;
    }
    write_all(w.peer, stream, (size_t)(at - stream));
    node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
    for (int i = 0; i < COUNT; i++)
        CHECK(w.values[i] == (i < 20 ? 1.0f : (float)(i + 1)));
    wire_close(&w);
}

static void broken_segments_lose_the_link(void)
{
    static const struct {
        uint32_t chunk, segment, hop, bytes;
        const char *why;
    } cases[] = {
        {2, 0, 0, 40, "no such segment"},
        {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, "no such segment"},
        {1, 2, 0, 40, "no such segment"},
        {1, 0, 1, 40, "a hop"},
        {1, 0, 2, 40, "a hop"},
        {1, 0, UINT32_MAX, 40, "a hop"},
        {0, 0, 0, 40, "a hop"},
        {1, 0, 0, 36, "wrong payload size"},
        {1, 0, 0, 44, "wrong payload size"},
        {0, 0, 1, 40, "a result before its parts"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        wire w;
        wire_open(&w);
        read_header(w.peer);
        pccl_frame frame = segment_for(&w.request, cases[i].chunk, cases[i].segment, cases[i].hop, cases[i].bytes);
        write_frame(w.peer, &frame, NULL);
        expect_lost(&w, cases[i].why);
        wire_close(&w);
    }
}

static void repetitions_lose_the_link(void)
{
    wire w;
    wire_open(&w);
    read_header(w.peer);
    repeat(&w, segment_for(&w.request, 1, 0, 0, 40), ones, "the same segment twice");

    wire_open(&w);
    repeat(&w, op_frame(&w.request, PCCL_FRAME_READY, 0), NULL, "announced twice");

    wire_open_bare(&w);
    w.request = wire_request(1, NULL, COUNT, SEGMENT_BYTES);
    repeat(&w, op_frame(&w.request, PCCL_FRAME_READY, 0), NULL, "announced twice");
}

static void the_wrong_peer_loses_its_link(void)
{
    for (int kind = 0; kind < 2; kind++) {
        wire w;
        int fds[2];
        wire_open(&w);
        read_header(w.peer);
        pair_unix(fds);
        CHECK(pccl_engine_link_add(w.n.engine, LINK + 1, fds[0], NULL) == 0);
        write_hello(fds[1], 1);
        pccl_frame frame = kind == 0 ? op_frame(&w.request, PCCL_FRAME_READY, 0) : segment_for(&w.request, 1, 0, 0, 40);
        write_frame(fds[1], &frame, NULL);
        pccl_event event = node_wait(&w.n, PCCL_EVENT_LINK_LOST, LINK + 1);
        CHECK(strstr(event.detail, "wrong peer") != NULL);
        close(fds[1]);
        wire_close(&w);
    }
}

static void garbage_loses_the_link(void)
{
    uint32_t state = 1;
    for (int round = 0; round < 200; round++) {
        wire w;
        uint8_t bytes[400];
        wire_open(&w);
        read_header(w.peer);
        pccl_frame frame = round % 4 == 0   ? op_frame(&w.request, PCCL_FRAME_READY, 0)
                           : round % 4 == 1 ? segment_for(&w.request, 1, 0, 0, 40)
                                            : segment_for(&w.request, 1, 1, 0, 40);
        for (size_t i = 0; i < sizeof bytes; i++) {
            state = state * 1664525u + 1013904223u;
            bytes[i] = (uint8_t)(state >> 24);
        }
        if (round % 4 != 3)
            pccl_frame_encode(&frame, bytes);
        bytes[bytes[399] % PCCL_FRAME_BYTES] ^= (uint8_t)(1 + bytes[398] % 255);
        if (bytes[397] & 1)
            pccl_frame_set_header_crc(bytes);
        write_all(w.peer, bytes, sizeof bytes);
        shutdown(w.peer, SHUT_WR);
        node_wait(&w.n, PCCL_EVENT_LINK_LOST, LINK);
        CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
        node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
        for (int i = 0; i < COUNT; i++)
            CHECK(w.values[i] == (float)i);
        wire_close(&w);
    }
}

/* Every bit of a header and of its payload, stored or reduced, a few at a time. */
static void damage_loses_the_link(void)
{
    for (int is_final = 0; is_final < 2; is_final++)
        for (unsigned bit = 0; bit < 8 * (PCCL_FRAME_BYTES + 40); bit += 7) {
            wire w;
            uint8_t bytes[PCCL_FRAME_BYTES + 40];
            wire_open(&w);
            read_header(w.peer);
            if (is_final) {
                pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
                write_frame(w.peer, &ready, NULL);
                for (int i = 0; i < 2; i++) {
                    uint8_t payload[40];
                    read_header(w.peer);
                    CHECK(read_all(w.peer, payload, sizeof payload));
                }
            }
            pccl_frame frame = segment_for(&w.request, is_final ? 0 : 1, 0, is_final ? 1 : 0, 40);
            pccl_frame_encode(&frame, bytes);
            memcpy(bytes + PCCL_FRAME_BYTES, ones, 40);
            bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
            write_all(w.peer, bytes, sizeof bytes);
            expect_lost(&w, bit < 16                     ? "not a pccl frame"
                            : bit < 24                   ? "unknown frame version"
                            : bit < 8 * PCCL_FRAME_BYTES ? "wrong header checksum"
                                                         : "wrong payload checksum");
            wire_close(&w);
        }
}

/* Of a frame that nobody waits for any more, too. */
static void damage_to_dropped_payload_loses_the_link(void)
{
    wire w;
    wire_open(&w);
    read_header(w.peer);
    pccl_op_request unknown = wire_request(99, NULL, COUNT, SEGMENT_BYTES);
    pccl_frame frame = segment_for(&unknown, 0, 0, 1, 40);
    frame.payload_crc ^= 1;
    write_frame(w.peer, &frame, NULL);
    write_all(w.peer, ones, 40);
    expect_lost(&w, "wrong payload checksum");
    wire_close(&w);
}

static void hanging_up_loses_the_link(void)
{
    wire w;
    wire_open(&w);
    read_header(w.peer);
    shutdown(w.peer, SHUT_WR);
    expect_lost(&w, "closed by the other side");
    wire_close(&w);
}

/* A link lives as long as one of its connections. */
static void the_last_connection_counts(void)
{
    wire w;
    uint8_t byte;
    wire_open_bare(&w);
    int second = wire_connect(&w);
    close(second);
    pccl_event event = node_wait(&w.n, PCCL_EVENT_CONNECTION_LOST, LINK);
    CHECK(strstr(event.detail, "connection 2: closed by the other side") != NULL);
    pccl_frame frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_LOST && frame.connection == 2 && frame.frames == 0);
    shutdown(w.peer, SHUT_WR);
    event = node_wait(&w.n, PCCL_EVENT_LINK_LOST, LINK);
    CHECK(strstr(event.detail, "connection 1: closed by the other side") != NULL);
    CHECK(read(w.peer, &byte, 1) == 0);
    wire_close(&w);
}

/* What connections say about themselves has to be right. */
static void broken_connection_rules_lose_the_link(void)
{
    enum { HELLO_TWICE, NO_HELLO, ACK_TOO_MUCH, LOST_UNKNOWN, LOST_ITSELF, LOST_RENAMED, LOST_TOO_MUCH, KINDS };
    static const char *const why[KINDS] = {"HELLO has to come first", "HELLO has to come first",
        "more received than was sent", "unknown connection", "unknown connection", "unknown connection",
        "more received than was sent"};
    for (int kind = 0; kind < KINDS; kind++) {
        wire w;
        int fds[2] = {-1, -1};
        wire_open_bare(&w);
        int second = wire_connect(&w);
        pair_unix(fds);
        pccl_engine_stats stats;
        do
            pccl_engine_get_stats(w.n.engine, &stats);
        while (stats.rx_wire_bytes < 2 * PCCL_FRAME_BYTES); /* it knows all names */
        if (kind == HELLO_TWICE)
            write_hello(w.peer, 1);
        if (kind == NO_HELLO) {
            CHECK(pccl_engine_link_add(w.n.engine, LINK, fds[0], NULL) == 0);
            fds[0] = -1;
            write_ack(fds[1], 0);
        }
        if (kind == ACK_TOO_MUCH)
            write_ack(w.peer, 1);
        if (kind == LOST_UNKNOWN)
            write_lost(w.peer, 3, 3, 0);
        if (kind == LOST_ITSELF)
            write_lost(w.peer, 1, 1, 0);
        if (kind == LOST_RENAMED)
            write_lost(w.peer, 7, 2, 0);
        if (kind == LOST_TOO_MUCH)
            write_lost(w.peer, 2, 2, 1);
        expect_lost(&w, why[kind]);
        if (fds[0] >= 0)
            close(fds[0]);
        close(fds[1]);
        close(second);
        wire_close(&w);
    }
}

/* Nothing that counts is sent to whom could not name the connection when it is lost. */
static void nothing_is_sent_before_the_greeting(void)
{
    wire w;
    int fds[2];
    uint8_t byte;
    memset(&w, 0, sizeof w);
    node_open(&w.n, 0);
    pair_unix(fds);
    CHECK(pccl_engine_link_add(w.n.engine, LINK, fds[0], NULL) == 0);
    w.peer = fds[1];
    wire_submit(&w, COUNT, SEGMENT_BYTES);
    pccl_frame frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_HELLO);
    pccl_engine_stats stats;
    do
        pccl_engine_get_stats(w.n.engine, &stats);
    while (stats.ops_open == 0);
    CHECK(recv(w.peer, &byte, 1, MSG_DONTWAIT) < 0);
    write_hello(w.peer, 9);
    frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_READY);
    wire_close(&w);
}

/* Of the frames on a lost connection those come again that did not arrive, unless their op has ended; a notice
 * that comes twice changes nothing. */
static void what_was_not_received_comes_again(void)
{
    for (int is_ended = 0; is_ended < 2; is_ended++) {
        wire w;
        uint8_t payload[40];
        wire_open_bare(&w);
        int second = wire_connect(&w);
        wire_submit(&w, COUNT, SEGMENT_BYTES);
        struct pollfd pfds[2] = {{.fd = w.peer, .events = POLLIN}, {.fd = second, .events = POLLIN}};
        CHECK(poll(pfds, 2, WAIT_MS) > 0);
        int lost = pfds[0].revents ? w.peer : second;
        int kept = pfds[0].revents ? second : w.peer;
        uint32_t lost_number = pfds[0].revents ? 1 : 2;
        pccl_frame frame = read_header(lost);
        CHECK(frame.type == PCCL_FRAME_READY);
        if (is_ended) {
            CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
            node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
        }
        write_lost(kept, lost_number, lost_number, 0);
        write_lost(kept, lost_number, lost_number, 0);
        frame = read_header(kept);
        CHECK(frame.type == PCCL_FRAME_LOST && frame.peer_connection == lost_number && frame.frames == 0);
        node_wait(&w.n, PCCL_EVENT_CONNECTION_LOST, LINK);
        if (is_ended)
            CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
        frame = read_header(kept);
        CHECK(frame.type == PCCL_FRAME_READY && pccl_op_shape_equal(&frame.shape, &w.request.shape));
        pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
        write_frame(kept, &ready, NULL);
        for (uint32_t segment = 0; segment < 2; segment++) {
            frame = read_header(kept);
            CHECK(frame.type == PCCL_FRAME_SEGMENT && frame.segment == segment);
            CHECK(read_all(kept, payload, sizeof payload));
        }
        if (lost != w.peer)
            close(lost);
        else {
            close(w.peer);
            w.peer = second;
        }
        wire_close(&w);
    }
}

static void payload_of_unknown_ops_is_dropped(void)
{
    wire w;
    static uint8_t zeros[1 << 20];
    wire_open(&w);
    read_header(w.peer);
    pccl_op_request unknown = wire_request(99, NULL, COUNT, SEGMENT_BYTES);
    pccl_frame frame = segment_for(&unknown, 7, 7, 7, sizeof zeros);
    write_frame(w.peer, &frame, zeros);
    pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
    write_frame(w.peer, &ready, NULL);
    frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_SEGMENT);
    wire_close(&w);
}

static void announcements_are_bounded(void)
{
    wire w;
    wire_open_bare(&w);
    pccl_op_request request = wire_request(1, NULL, COUNT, SEGMENT_BYTES);
    for (uint64_t i = 0; i <= 65536; i++) {
        request.key.sequence = i;
        pccl_frame ready = op_frame(&request, PCCL_FRAME_READY, 0);
        write_frame(w.peer, &ready, NULL);
    }
    expect_lost(&w, "too many ops announced");
    wire_close(&w);
}

/* Announcements of epochs that are over make room: many times the bound passes through. */
static void announcements_of_old_epochs_are_forgotten(void)
{
    wire w;
    wire_open_bare(&w);
    pccl_op_request request = wire_request(1, NULL, COUNT, SEGMENT_BYTES);
    for (uint64_t epoch = 1; epoch <= 4; epoch++) {
        for (uint64_t i = 0; i < 40000; i++) {
            request.key.epoch = epoch;
            request.key.sequence = i;
            pccl_frame ready = op_frame(&request, PCCL_FRAME_READY, 0);
            write_frame(w.peer, &ready, NULL);
        }
        pccl_engine_stats stats;
        do
            pccl_engine_get_stats(w.n.engine, &stats);
        while (stats.rx_wire_bytes < PCCL_FRAME_BYTES + epoch * 40000 * PCCL_FRAME_BYTES);
        CHECK(pccl_engine_freeze(w.n.engine, 0, epoch) == 0);
        node_wait(&w.n, PCCL_EVENT_GROUP_FROZEN, epoch);
    }
    pccl_event event;
    CHECK(!node_take_collected(&w.n, PCCL_EVENT_LINK_LOST, LINK, &event));
    wire_close(&w);
}

/* Of two connections one is not read from: it takes what its socket holds, and the other all the rest. */
static void a_slow_connection_carries_less(void)
{
    enum { LARGE = 4 << 20, SEGMENT = 16 << 10, BYTES = LARGE / 2 * 4 };
    static uint8_t payload[SEGMENT];
    wire w;
    wire_open_bare(&w);
    int second = wire_connect(&w);
    wire_submit(&w, LARGE, SEGMENT);
    struct pollfd pfds[2] = {{.fd = w.peer, .events = POLLIN}, {.fd = second, .events = POLLIN}};
    CHECK(poll(pfds, 2, WAIT_MS) > 0);
    int fast = pfds[0].revents ? 0 : 1;
    read_header(pfds[fast].fd);
    pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
    write_frame(pfds[fast].fd, &ready, NULL);
    uint64_t carried_bytes = 0;
    uint32_t received_frames = 1;
    while (carried_bytes < BYTES * 3 / 4) {
        pccl_frame frame = read_header(pfds[fast].fd);
        if (frame.payload_bytes == 0 || !read_all(pfds[fast].fd, payload, frame.payload_bytes))
            break;
        carried_bytes += frame.payload_bytes;
        write_ack(pfds[fast].fd, ++received_frames);
    }
    CHECK(carried_bytes >= BYTES * 3 / 4);
    close(second);
    wire_close(&w);
}

/* Nobody reads, the socket is full, the op ends and its buffer is gone: the frame is still what it was. */
static void a_half_sent_frame_is_finished_from_a_copy(void)
{
    enum { LARGE = 4 << 20 };
    wire w;
    wire_open_bare(&w);
    wire_submit(&w, LARGE, 8 << 20);
    read_header(w.peer);
    pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
    write_frame(w.peer, &ready, NULL);
    pccl_frame frame = read_header(w.peer);
    CHECK(frame.payload_bytes == LARGE / 2 * 4);
    CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
    node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
    memset(w.values, 0xff, LARGE * sizeof(float));
    free(w.values);
    w.values = NULL;
    float *payload = ramp(LARGE / 2);
    memset(payload, 0, LARGE / 2 * sizeof *payload);
    CHECK(read_all(w.peer, payload, LARGE / 2 * sizeof *payload));
    int wrong = 0;
    for (int i = 0; i < LARGE / 2; i++)
        wrong += payload[i] != (float)i;
    CHECK(wrong == 0);

    /* The connection goes on with other ops. */
    w.values = ramp(COUNT);
    w.request = wire_request(2, w.values, COUNT, SEGMENT_BYTES);
    CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
    frame = read_header(w.peer);
    CHECK(frame.type == PCCL_FRAME_READY && frame.key.sequence == 2);
    free(payload);
    wire_close(&w);
}

/* The op ends while one of its segments is on its way in, partial or final: the rest of it goes nowhere. */
static void a_half_received_frame_is_discarded(void)
{
    for (int is_final = 0; is_final < 2; is_final++)
        for (int is_frozen = 0; is_frozen < 2; is_frozen++) {
            wire w;
            float payload[20];
            wire_open(&w);
            read_header(w.peer);
            uint64_t expected = 2 * PCCL_FRAME_BYTES + 13;
            if (is_final) {
                pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
                write_frame(w.peer, &ready, NULL);
                expected += PCCL_FRAME_BYTES;
                for (int i = 0; i < 2; i++) {
                    read_header(w.peer);
                    CHECK(read_all(w.peer, payload, 40));
                }
            }
            pccl_frame frame = segment_for(&w.request, is_final ? 0 : 1, 0, is_final ? 1 : 0, 40);
            write_frame(w.peer, &frame, NULL);
            write_all(w.peer, ones, 13);
            pccl_engine_stats stats;
            do
                pccl_engine_get_stats(w.n.engine, &stats);
            while (stats.rx_wire_bytes < expected);
            if (is_frozen)
                CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
            CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
            node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
            for (int i = 0; i < COUNT; i++)
                CHECK(w.values[i] == (float)i);
            free(w.values);
            write_all(w.peer, (const uint8_t *)ones + 13, 27);

            w.values = ramp(COUNT);
            w.request = wire_request(2, w.values, COUNT, SEGMENT_BYTES);
            w.request.key.epoch = 2;
            CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
            frame = read_header(w.peer);
            CHECK(frame.type == PCCL_FRAME_READY && frame.key.sequence == 2);
            frame = segment_for(&w.request, 1, 0, 0, 40);
            write_frame(w.peer, &frame, ones);
            pccl_frame ready = op_frame(&w.request, PCCL_FRAME_READY, 0);
            write_frame(w.peer, &ready, NULL);
            for (int i = 0; i < 3; i++) {
                frame = read_header(w.peer);
                CHECK(read_all(w.peer, payload, frame.payload_bytes));
            }
            wire_close(&w);
        }
}

/* A frozen op takes part in nothing, whether it was there before or came after, and its peer's frames do no
 * harm. */
static void frames_of_frozen_ops_are_dropped(void)
{
    for (int is_born_frozen = 0; is_born_frozen < 2; is_born_frozen++) {
        wire w;
        wire_open_bare(&w);
        if (is_born_frozen)
            CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
        wire_submit(&w, COUNT, SEGMENT_BYTES);
        if (!is_born_frozen) {
            read_header(w.peer);
            CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
        }
        node_wait(&w.n, PCCL_EVENT_GROUP_FROZEN, 1);
        pccl_frame frame = op_frame(&w.request, PCCL_FRAME_READY, 0);
        write_frame(w.peer, &frame, NULL);
        frame = segment_for(&w.request, 1, 0, 0, 40);
        write_frame(w.peer, &frame, ones);

        float *values = ramp(COUNT);
        pccl_op_request later = wire_request(2, values, COUNT, SEGMENT_BYTES);
        later.key.epoch = 2;
        CHECK(pccl_engine_submit(w.n.engine, &later) == 0);
        frame = read_header(w.peer);
        CHECK(frame.type == PCCL_FRAME_READY && frame.key.sequence == 2);
        CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
        pccl_event ended = node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
        CHECK(ended.tx_bytes == 0 && ended.rx_bytes == 0);
        CHECK(pccl_engine_end(w.n.engine, 2, 0) == 0);
        node_wait(&w.n, PCCL_EVENT_OP_ENDED, 2);
        free(values);
        wire_close(&w);
    }
}

/* Rank 1 of a ring of three, whose target describes the op in another way when that has been frozen. */
static void a_frozen_mismatch_is_told_to_nobody(void)
{
    wire w;
    int fds[2];
    uint8_t payload[40];
    wire_open_bare(&w);
    pair_unix(fds);
    CHECK(pccl_engine_link_add(w.n.engine, LINK + 1, fds[0], NULL) == 0);
    greet(fds[1], 1);
    w.values = ramp(COUNT);
    w.request = wire_request(1, w.values, COUNT, SEGMENT_BYTES);
    w.request.shape.world_size = 3;
    w.request.link_next = LINK + 1;
    CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
    pccl_frame other = op_frame(&w.request, PCCL_FRAME_READY, 0);
    other.shape.count--;
    write_frame(w.peer, &other, NULL);
    node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
    CHECK(pccl_engine_freeze(w.n.engine, 0, 1) == 0);
    node_wait(&w.n, PCCL_EVENT_GROUP_FROZEN, 1);
    write_frame(fds[1], &other, NULL);

    float *values = ramp(COUNT);
    pccl_op_request later = wire_request(2, values, COUNT, SEGMENT_BYTES);
    later.key.epoch = 2;
    later.link_prev = later.link_next = LINK + 1;
    CHECK(pccl_engine_submit(w.n.engine, &later) == 0);
    pccl_frame ready = op_frame(&later, PCCL_FRAME_READY, 0);
    write_frame(fds[1], &ready, NULL);
    pccl_frame frame;
    do {
        read_frame(fds[1], &frame, payload, sizeof payload);
        CHECK(frame.key.sequence == 2);
    } while (frame.type == PCCL_FRAME_READY);
    CHECK(frame.type == PCCL_FRAME_SEGMENT);
    for (uint64_t op = 1; op <= 2; op++) {
        CHECK(pccl_engine_end(w.n.engine, op, 0) == 0);
        node_wait(&w.n, PCCL_EVENT_OP_ENDED, op);
    }
    free(values);
    close(fds[1]);
    wire_close(&w);
}

/* A ring exchanges no frames with it, but all that it announces is heard. */
static void a_rank_that_is_no_neighbour_may_have_called_something_else(void)
{
    for (int is_early = 0; is_early < 2; is_early++) {
        uint64_t links[4] = {LINK, 0, LINK + 1, LINK + 2};
        wire w;
        int others[2][2];
        wire_open_bare(&w);
        for (uint64_t i = 0; i < 2; i++) {
            pair_unix(others[i]);
            CHECK(pccl_engine_link_add(w.n.engine, LINK + 1 + i, others[i][0], NULL) == 0);
            greet(others[i][1], 1);
        }
        w.values = ramp(COUNT);
        w.request = wire_request(1, w.values, COUNT, SEGMENT_BYTES);
        w.request.shape.world_size = 4;
        w.request.link_next = LINK + 1;
        w.request.rank_links = links;
        w.request.awaits_completion = 1;
        pccl_frame other = op_frame(&w.request, PCCL_FRAME_READY, 0);
        other.shape.algorithm = PCCL_DIRECT;
        if (is_early) {
            write_frame(others[1][1], &other, NULL);
            node_await_stat(&w.n, rx_wire_bytes, 4 * PCCL_FRAME_BYTES);
        }
        CHECK(pccl_engine_submit(w.n.engine, &w.request) == 0);
        if (!is_early)
            write_frame(others[1][1], &other, NULL);
        pccl_event event = node_wait(&w.n, PCCL_EVENT_OP_MISMATCH, 1);
        CHECK(event.link == LINK + 2 && event.theirs.algorithm == PCCL_DIRECT);
        CHECK(pccl_engine_end(w.n.engine, 1, 0) == 0);
        node_wait(&w.n, PCCL_EVENT_OP_ENDED, 1);
        for (int i = 0; i < 2; i++)
            close(others[i][1]);
        wire_close(&w);
    }
}

int main(void)
{
    RUN(a_correct_peer_is_served);
    RUN(frames_may_be_fragmented);
    RUN(broken_segments_lose_the_link);
    RUN(repetitions_lose_the_link);
    RUN(the_wrong_peer_loses_its_link);
    RUN(garbage_loses_the_link);
    RUN(damage_loses_the_link);
    RUN(damage_to_dropped_payload_loses_the_link);
    RUN(hanging_up_loses_the_link);
    RUN(the_last_connection_counts);
    RUN(broken_connection_rules_lose_the_link);
    RUN(nothing_is_sent_before_the_greeting);
    RUN(what_was_not_received_comes_again);
    RUN(payload_of_unknown_ops_is_dropped);
    RUN(announcements_are_bounded);
    RUN(announcements_of_old_epochs_are_forgotten);
    RUN(a_slow_connection_carries_less);
    RUN(a_half_sent_frame_is_finished_from_a_copy);
    RUN(a_half_received_frame_is_discarded);
    RUN(frames_of_frozen_ops_are_dropped);
    RUN(a_frozen_mismatch_is_told_to_nobody);
    RUN(a_rank_that_is_no_neighbour_may_have_called_something_else);
    return check_summary();
}
