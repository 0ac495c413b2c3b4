/* Links whose segments wait for turns: the pace of all together, and what waits while links come and go. */
#include "trial.h"
#include "wire.h"

enum { PACE = 16 << 20, SIZE = 4, COUNT = 1 << 20 };

static world paced(unsigned connections, int is_encrypted)
{
    world w;
    tested_pace_bytes_per_s = PACE;
    tested_encryption = is_encrypted;
    world_open(&w, SIZE, connections, 1, 0);
    tested_pace_bytes_per_s = 0;
    tested_encryption = 0;
    return w;
}

static trial open_direct(uint32_t count)
{
    trial t;
    pccl_op_shape shape = plain_shape(count, PCCL_FLOAT32, PCCL_SUM, 64 << 10, SIZE);
    shape.algorithm = PCCL_DIRECT;
    tested_algorithm = PCCL_DIRECT;
    trial_open(&t, &shape, 1);
    return t;
}

/* A quarter faster than the limit's rate, and what may go at once. */
static void all_links_together_keep_the_pace(void)
{
    enum { SENT_BYTES = COUNT / SIZE * 4 * (SIZE - 1) * 2, AT_ONCE_BYTES = 1 << 20 };
    for (int is_encrypted = 0; is_encrypted < 2; is_encrypted++) {
        world w = paced(2, is_encrypted);
        trial t = open_direct(COUNT);
        int64_t began_ms = now_ms();
        trial_submit_all(&t, &w);
        trial_await_done(&t, &w);
        int64_t ms = now_ms() - began_ms;
        CHECK_MSG(ms >= (SENT_BYTES - AT_ONCE_BYTES) / (PACE / 1000 * 5 / 4), "%lld ms", (long long)ms);
        trial_end_all(&t, &w, 1);
        trial_check_results(&t);
        trial_close(&t);
        world_close(&w);
    }
}

static uint64_t sent_on(world *w, uint32_t from, uint32_t to)
{
    CHECK(pccl_engine_request_link_metrics(w->nodes[from].engine, link_number(from, to)) == 0);
    return node_wait(&w->nodes[from], PCCL_EVENT_LINK_METRICS, link_number(from, to)).tx_bytes;
}

/* Half of what goes to one rank is out. Zero if another one has got less than half as much by then. */
static int are_served_evenly(world *w)
{
    enum { CHUNK_BYTES = COUNT / SIZE * 4 };
    uint64_t most, least;
    trial t = open_direct(COUNT);
    for (uint32_t rank = 1; rank < SIZE; rank++)
        trial_submit(&t, w, rank);
    node_await_stat(&w->nodes[0], rx_wire_bytes, (SIZE - 1) * 2 * PCCL_FRAME_BYTES); /* all have greeted and called */
    trial_submit(&t, w, 0);
    do {
        most = 0;
        least = UINT64_MAX;
        for (uint32_t rank = 1; rank < SIZE; rank++) {
            uint64_t bytes = sent_on(w, 0, rank);
            most = bytes > most ? bytes : most;
            least = bytes < least ? bytes : least;
        }
    } while (most < CHUNK_BYTES / 2);
    trial_commit_all(&t, w);
    trial_close(&t);
    return least >= most / 2;
}

/* None is served to its end before another one has its turn. On a busy machine some receivers fall behind. */
static void links_take_turns(void)
{
    int is_even = 0;
    for (int tries = 0; tries < 10 && !is_even; tries++) {
        world w = paced(1, 0);
        is_even = are_served_evenly(&w);
        world_close(&w);
    }
    CHECK(is_even);
}

/* How many a rank is sent that reads nothing, while another one reads. */
static uint64_t segments_that_lie(void)
{
    enum { SEGMENT_BYTES = 8 << 10, ELEMENTS = 3 << 18, READ_SEGMENTS = 16 };
    static float values[ELEMENTS];
    static uint8_t payload[SEGMENT_BYTES];
    uint64_t links[3] = {0, 7, 8};
    int peers[3];
    node n;
    tested_pace_bytes_per_s = 1 << 20;
    node_open(&n, 0);
    tested_pace_bytes_per_s = 0;
    pccl_op_request request;
    memset(&request, 0, sizeof request);
    request.op = request.key.sequence = 1;
    request.key.epoch = 1;
    request.shape = plain_shape(ELEMENTS, PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, 3);
    request.shape.algorithm = PCCL_DIRECT;
    request.rank_links = links;
    request.send = request.recv = values;
    for (uint32_t rank = 1; rank < 3; rank++) {
        int fds[2];
        pair_unix(fds);
        CHECK(pccl_engine_link_add(n.engine, links[rank], fds[0], NULL) == 0);
        peers[rank] = fds[1];
        greet(peers[rank], 1);
        pccl_frame ready = op_frame(&request, PCCL_FRAME_READY, 0);
        write_frame(peers[rank], &ready, NULL);
    }
    node_await_stat(&n, rx_wire_bytes, 4 * PCCL_FRAME_BYTES);
    CHECK(pccl_engine_submit(n.engine, &request) == 0);
    for (int segments = 0; segments < READ_SEGMENTS;) {
        pccl_frame frame;
        read_frame(peers[2], &frame, payload, sizeof payload);
        segments += frame.type == PCCL_FRAME_SEGMENT;
    }
    CHECK(pccl_engine_request_link_metrics(n.engine, links[1]) == 0);
    uint64_t bytes = node_wait(&n, PCCL_EVENT_LINK_METRICS, links[1]).tx_bytes;
    node_close(&n);
    close(peers[1]);
    close(peers[2]);
    return bytes / SEGMENT_BYTES;
}

/* On a busy machine the other one may be slow, too. */
static void a_receiver_that_is_slow_gets_little(void)
{
    uint64_t segments = UINT64_MAX;
    for (int tries = 0; tries < 10 && segments > 4; tries++)
        segments = segments_that_lie();
    CHECK_MSG(segments <= 4, "%llu segments", (unsigned long long)segments);
}

/* While it has segments for which it waits. */
static void a_link_that_waits_may_be_closed(void)
{
    world w = paced(1, 0);
    trial t = open_direct(COUNT);
    trial_submit_all(&t, &w);
    wait_for_payload(&w.nodes[0], 1);
    for (uint32_t rank = 1; rank < SIZE; rank++)
        CHECK(pccl_engine_link_close(w.nodes[0].engine, w.rank_links[0][rank]) == 0);
    for (uint32_t rank = 1; rank < SIZE; rank++)
        node_wait(&w.nodes[rank], PCCL_EVENT_LINK_LOST, w.rank_links[rank][0]);
    trial_end_all(&t, &w, 0);
    for (uint32_t rank = 0; rank < SIZE; rank++)
        trial_check_inputs_kept(&t, rank);
    trial_close(&t);
    world_close(&w);
}

/* What is small does not wait behind what is large. */
static void announcements_need_no_turn(void)
{
    world w = paced(2, 0);
    trial large = open_direct(COUNT);
    trial small = open_direct(SIZE);
    trial_submit_all(&large, &w);
    wait_for_payload(&w.nodes[0], 1);
    trial_submit_all(&small, &w);
    trial_commit_all(&small, &w);
    trial_commit_all(&large, &w);
    trial_close(&small);
    trial_close(&large);
    world_close(&w);
}

int main(void)
{
    RUN(all_links_together_keep_the_pace);
    RUN(links_take_turns);
    RUN(a_receiver_that_is_slow_gets_little);
    RUN(a_link_that_waits_may_be_closed);
    RUN(announcements_need_no_turn);
    return check_summary();
}
