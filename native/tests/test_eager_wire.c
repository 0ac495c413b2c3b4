/* One engine, rank 1 of three, whose peers are the test itself: payload that comes before or with an announcement. */
#include "direct_wire.h"

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
            write_op_frame(&w, 0, PCCL_FRAME_EAGER, cases[i].bytes, many_ones, cases[i].bytes);
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
            write_op_frame(&w, rank, PCCL_FRAME_DONE, 0, NULL, 0);
        write_eager(&w, 2, 2 * SEGMENT_BYTES);
        wait_for_wire(&w.n, 3 * PCCL_FRAME_BYTES + 2 * SEGMENT_BYTES);
        uint32_t bytes = 2 * SEGMENT_BYTES + 4;
        uint32_t begun_bytes = is_in_parts ? 2 * SEGMENT_BYTES : bytes;
        write_op_frame(&w, 0, PCCL_FRAME_EAGER, bytes, many_ones, begun_bytes);
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
                pccl_frame other = op_frame(&w.request, PCCL_FRAME_READY, 0);
                other.shape.count++;
                write_frame(w.peers[0], &other, NULL);
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
            case 's': wire_submit(&w); break;
            case 'r': write_ready(&w, 2); break;
            default: write_op_frame(&w, 2, PCCL_FRAME_EAGER, COUNT * 2, more_ones, COUNT * 2);
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
        frame = segment_frame(&w.request, 0, 0, 1, COUNT * 2);
        write_frame(w.peers[2], &frame, more_ones);
        node_wait(&w.n, PCCL_EVENT_OP_DONE, 1);
        CHECK(w.values[COUNT - 1] == input(COUNT - 1) + 1 && w.values[0] == 1);
        wire_close(&w);
    }
}

/* In a ring of two an op without elements is done by its announcement, but not by that of a link that has failed at its
 * payload. */
static void what_a_failed_link_has_announced_does_not_count(void)
{
    for (int has_payload = 0; has_payload < 2; has_payload++) {
        wire w;
        wire_open_bare(&w, SEGMENT_BYTES);
        w.request.shape.count = 0;
        w.request.shape.world_size = 2;
        w.request.shape.algorithm = PCCL_RING;
        w.request.rank_links = NULL;
        w.request.link_prev = w.request.link_next = w.links[2];
        write_ready(&w, 2);
        if (has_payload)
            write_eager(&w, 2, SEGMENT_BYTES);
        wait_for_wire(&w.n, PCCL_FRAME_BYTES + (uint64_t)has_payload * (PCCL_FRAME_BYTES + SEGMENT_BYTES));
        wire_submit(&w);
        if (has_payload) {
            expect_lost(&w, 2, "no such segment");
            CHECK(!node_has_event(&w.n, PCCL_EVENT_OP_DONE, w.request.op));
        } else {
            node_wait(&w.n, PCCL_EVENT_OP_DONE, w.request.op);
        }
        end_op(&w);
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
    write_op_frame(&w, 0, PCCL_FRAME_EAGER, PCCL_EAGER_WINDOW_BYTES, NULL, 0);
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
            pccl_frame credit = frame_of(PCCL_FRAME_CREDIT);
            credit.eager_bytes = WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES;
            credit.received_frames = (uint32_t)i;
            write_frame(w.peers[0], &credit, NULL);
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
        pccl_frame credit = frame_of(PCCL_FRAME_CREDIT);
        credit.eager_bytes = WHOLE_BYTES + PCCL_EAGER_OVERHEAD_BYTES + excess;
        wire_open(&w, WHOLE_BYTES);
        write_frame(w.peers[0], &credit, NULL);
        write_frame(w.peers[0], &credit, NULL);
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
            write_op_frame(&w, 0, PCCL_FRAME_EAGER, WHOLE_BYTES, ones, 13);
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
                frame = op_frame(&w.request, PCCL_FRAME_READY, 0);
                frame.shape.count++;
                write_frame(w.peers[2], &frame, NULL);
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
            case LINK_CLOSED: CHECK(pccl_engine_link_close(w.n.engine, w.links[0]) == 0); break;
            case DESTROYED:
                wire_close(&w);
                expect_inputs(&w);
                continue;
            default: break;
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

/* A slow rank announces what has been aborted here, or will never be submitted. More of that than the eager window
 * holds does no harm, and the window comes back. */
static void late_announcements_are_discarded(void)
{
    enum { LATE_BYTES = 512 << 10, LATE_COUNT = 2 * (int)PCCL_EAGER_WINDOW_BYTES / LATE_BYTES };
    static uint8_t payload[LATE_BYTES];
    for (int is_forgotten = 0; is_forgotten < 2; is_forgotten++) {
        wire w;
        wire_open_bare(&w, SEGMENT_BYTES);
        for (int i = 0; i < LATE_COUNT; i++) {
            pccl_frame frame;
            w.request.op = w.request.key.sequence = (uint64_t)i + 1;
            if (is_forgotten) {
                CHECK(pccl_engine_forget_ops(w.n.engine, &w.request.key, 1) == 0);
                pccl_op_request other = w.request; /* whose announcement says that the command has been carried out */
                other.key.tag = 1;
                CHECK(pccl_engine_submit(w.n.engine, &other) == 0);
            } else {
                wire_submit(&w);
            }
            do
                REQUIRE(read_header_to(w.peers[0], &frame));
            while (frame.type == PCCL_FRAME_CREDIT);
            CHECK(read_all(w.peers[0], payload, frame.payload_bytes));
            end_op(&w);
            write_op_frame(&w, 0, PCCL_FRAME_EAGER, LATE_BYTES, payload, LATE_BYTES);
        }
        pccl_frame frame;
        do
            REQUIRE(read_header_to(w.peers[0], &frame));
        while (frame.type != PCCL_FRAME_CREDIT ||
               frame.eager_bytes < (LATE_COUNT - 2) * (uint64_t)(LATE_BYTES + PCCL_EAGER_OVERHEAD_BYTES));
        CHECK(!node_has_event(&w.n, PCCL_EVENT_LINK_LOST, w.links[0]));
        wire_close(&w);
    }
}

int main(void)
{
    RUN(correct_eager_peers_are_served);
    RUN(several_eager_segments_are_taken_apart);
    RUN(broken_several_eager_segments_lose_the_link);
    RUN(a_tail_after_the_last_segment_loses_the_link);
    RUN(broken_eager_frames_lose_the_link);
    RUN(a_ring_of_two_hears_both);
    RUN(what_a_failed_link_has_announced_does_not_count);
    RUN(flooding_loses_the_link);
    RUN(what_is_dropped_is_credited);
    RUN(credit_opens_the_window);
    RUN(half_received_eager_payload_is_harmless);
    RUN(late_announcements_are_discarded);
    return check_summary();
}
