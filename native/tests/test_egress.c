/* Links whose segments wait for turns: the pace of all together, and what waits while links come and go. */
#include "trial.h"

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

/* None is served to its end before another one has its turn. */
static void links_take_turns(void)
{
    enum { CHUNK_BYTES = COUNT / SIZE * 4 };
    world w = paced(1, 0);
    trial t = open_direct(COUNT);
    trial_submit_all(&t, &w);
    uint64_t most, least;
    do {
        most = 0;
        least = UINT64_MAX;
        for (uint32_t rank = 1; rank < SIZE; rank++) {
            uint64_t bytes = sent_on(&w, 0, rank);
            most = bytes > most ? bytes : most;
            least = bytes < least ? bytes : least;
        }
    } while (most < CHUNK_BYTES / 2);
    CHECK_MSG(least >= most / 4, "%llu and %llu bytes", (unsigned long long)least, (unsigned long long)most);
    trial_commit_all(&t, &w);
    trial_close(&t);
    world_close(&w);
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
    RUN(a_link_that_waits_may_be_closed);
    RUN(announcements_need_no_turn);
    return check_summary();
}
