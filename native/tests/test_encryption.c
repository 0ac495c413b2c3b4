/* Engines over encrypted connections: the same results, nothing to be read or changed on the way. */
#include "trial.h"

#include "frame.h"
#include "proxy.h"

enum { STALL_MS = 60000 };

static uint64_t checked_bytes; /* of more than headers, by any thread */

/* Calls of these come through here (the Makefile's --wrap). */
uint32_t __real_pccl_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t __wrap_pccl_crc32c(uint32_t crc, const void *data, size_t bytes);
uint32_t __wrap_pccl_crc32c(uint32_t crc, const void *data, size_t bytes)
{
    if (bytes > PCCL_FRAME_BYTES)
        __atomic_fetch_add(&checked_bytes, bytes, __ATOMIC_RELAXED);
    return __real_pccl_crc32c(crc, data, bytes);
}

uint32_t __real_pccl_crc32c_copy(uint32_t crc, void *to, const void *from, size_t bytes);
uint32_t __wrap_pccl_crc32c_copy(uint32_t crc, void *to, const void *from, size_t bytes);
uint32_t __wrap_pccl_crc32c_copy(uint32_t crc, void *to, const void *from, size_t bytes)
{
    __atomic_fetch_add(&checked_bytes, bytes, __ATOMIC_RELAXED);
    return __real_pccl_crc32c_copy(crc, to, from, bytes);
}

/* Buffers of the systems so small that hardly a send or receive is whole. */
static void link_narrowly(world *w)
{
    int fds[2], bytes = 5000;
    key_pair keys;
    key_pair_make(&keys);
    pair_unix(fds);
    for (int end = 0; end < 2; end++) {
        setsockopt(fds[end], SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        setsockopt(fds[end], SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        CHECK(pccl_engine_link_add(w->nodes[rank].engine, link_number(0, 1), fds[rank], &keys.ends[rank]) == 0);
}

static void results_through_narrow_sockets(void)
{
    world w;
    world_init(&w, 2);
    for (uint32_t rank = 0; rank < 2; rank++)
        node_open(&w.nodes[rank], 0);
    link_narrowly(&w);
    link_narrowly(&w);
    for (int run = 0; run < RUNS(20); run++) {
        pccl_op_shape shape = plain_shape(1 + random_below(60000), (uint32_t)run % PCCL_DTYPE_COUNT, PCCL_SUM,
            16 + 16 * random_below(run % 2 ? 4000 : 20), 2);
        trial_run(&w, &shape, run / 2 % 2);
    }
    world_close(&w);
}

/* Records are authenticated: a checksum would be one more pass over all bytes. */
static void nothing_is_checksummed_as_well(void)
{
    static const uint32_t counts[] = {1000, 50000};
    checked_bytes = 0;
    for (uint32_t size = 2; size < 4; size++)
        for (int run = 0; run < 4; run++) {
            world w;
            world_open(&w, size, 1, 0, 0);
            pccl_op_shape shape = plain_shape(counts[run % 2], PCCL_FLOAT32, PCCL_SUM, 8192, size);
            trial_run(&w, &shape, run / 2);
            world_close(&w);
        }
    CHECK_MSG(checked_bytes == 0, "%llu bytes", (unsigned long long)checked_bytes);
}

/* Of two links around a ring one is encrypted. */
static void plain_links_are_checksummed_all_the_same(void)
{
    for (int run = 0; run < 4; run++) {
        world w;
        world_init(&w, 3);
        for (uint32_t rank = 0; rank < 3; rank++)
            node_open(&w.nodes[rank], 0);
        for (uint32_t rank = 0; rank < 3; rank++) {
            tested_encryption = rank != 1;
            world_link(&w, rank, (rank + 1) % 3, 0);
        }
        tested_encryption = 1;
        pccl_op_shape shape = plain_shape(run % 2 ? 50000 : 1000, PCCL_FLOAT32, PCCL_SUM, 8192, 3);
        trial_run(&w, &shape, run / 2);
        world_close(&w);
    }
}

/* An op ends while its bytes are half on their way; the next one is right. */
static void ops_end_half_sent(void)
{
    for (int run = 0; run < RUNS(10); run++) {
        world w;
        trial t;
        world_open(&w, 2, 1 + (unsigned)run % 2, run % 3 == 0, 0);
        pccl_op_shape shape = plain_shape(500000, PCCL_FLOAT32, PCCL_SUM, 65536, 2);
        trial_open(&t, &shape, run % 2);
        trial_submit_all(&t, &w);
        wait_for_payload(&w.nodes[run % 2], random_below(400000));
        trial_end_all(&t, &w, 0);
        trial_check_inputs_kept(&t, 0);
        trial_check_inputs_kept(&t, 1);
        trial_close(&t);
        trial_run(&w, &shape, 0);
        world_close(&w);
    }
}

/* Whoever loses one then has another. */
static void wait_for_connections(world *w, uint64_t count)
{
    for (uint32_t rank = 0; rank < w->size; rank++)
        node_await_stat(&w->nodes[rank], connections, count);
}

/* One bit anywhere: of two connections the other one goes on, a single one takes the link with it, and no result has
 * the bit. */
static void a_flipped_bit_never_reaches_a_result(void)
{
    for (int run = 0; run < RUNS(40); run++) {
        proxied p;
        trial t;
        pccl_event event;
        unsigned connections = 1 + (unsigned)run % 2;
        pccl_op_shape shape = plain_shape(90000, run % 3 ? PCCL_FLOAT32 : PCCL_UINT8, PCCL_SUM, 8192, 2);
        trial_open(&t, &shape, run / 2 % 2);
        proxied_open(&p, 2, connections, run / 4 % 2, STALL_MS);
        pump *faulty = &p.pumps[random_below(2)];
        faulty->fault = FAULT_FLIP;
        faulty->at_byte = random_below(connections == 1 ? (uint32_t)t.bytes : 200);
        faulty->bit = random_below(8);
        wait_for_connections(&p.w, (p.w.size - 1) * connections);
        proxied_start(&p);
        trial_submit_all(&t, &p.w);
        node *receiver = &p.w.nodes[faulty == &p.pumps[0] ? 1 : 0];
        if (connections == 2) {
            trial_commit_all(&t, &p.w);
            CHECK(!node_has_event(receiver, PCCL_EVENT_LINK_LOST, link_number(0, 1)));
        } else {
            event = node_wait(receiver, PCCL_EVENT_LINK_LOST, link_number(0, 1));
            CHECK_MSG(strstr(event.detail, "cannot be decrypted") != NULL, "'%s'", event.detail);
            for (uint32_t rank = 0; rank < 2; rank++)
                trial_abort_checked(&t, &p.w, rank);
        }
        proxied_close(&p);
        trial_close(&t);
    }
}

/* All but one break at any byte, in any way. */
static void ops_survive_lost_connections(void)
{
    for (int run = 0; run < RUNS(30); run++) {
        proxied p;
        trial t;
        uint32_t size = 2 + random_below(2);
        unsigned connections = 2 + random_below(2);
        pccl_op_shape shape = plain_shape(1 + random_below(100000), PCCL_FLOAT32, PCCL_SUM, 8192, size);
        trial_open(&t, &shape, run % 2);
        proxied_open(&p, size, connections, run / 2 % 2, 1000);
        proxied_doom_spares(&p, connections, (uint32_t)t.bytes / connections + 2000);
        wait_for_connections(&p.w, (p.w.size - 1) * connections);
        proxied_start(&p);
        trial_submit_all(&t, &p.w);
        trial_commit_all(&t, &p.w);
        proxied_close(&p);
        trial_close(&t);
    }
}

static void check_refused(const pccl_link_keys *a, const pccl_link_keys *b, const char *text)
{
    int fds[2];
    node nodes[2];
    pair_unix(fds);
    for (int i = 0; i < 2; i++) {
        node_open(&nodes[i], 0);
        CHECK(pccl_engine_link_add(nodes[i].engine, 1, fds[i], i == 0 ? a : b) == 0);
    }
    pccl_event event = node_wait(&nodes[0], PCCL_EVENT_LINK_LOST, 1);
    CHECK_MSG(strstr(event.detail, text) || strstr(event.detail, "closed"), "'%s'", event.detail);
    event = node_wait(&nodes[1], PCCL_EVENT_LINK_LOST, 1);
    node_close(&nodes[0]);
    node_close(&nodes[1]);
}

static void other_keys_or_none_lose_the_link(void)
{
    key_pair keys, others;
    key_pair_make(&keys);
    key_pair_make(&others);
    check_refused(&keys.ends[0], &others.ends[1], "cannot be decrypted");
    check_refused(&keys.ends[0], &keys.ends[0], "cannot be decrypted");
    check_refused(&keys.ends[0], NULL, "cannot be decrypted");
}

/* Whoever can write to the connection says again what was said on it, whole records too. */
static void a_replayed_stream_loses_the_link(void)
{
    int fds[2], record[2];
    key_pair keys;
    node n, other;
    uint8_t said[200];
    pair_unix(fds);
    pair_unix(record);
    key_pair_make(&keys);
    node_open(&n, 0);
    node_open(&other, 0);
    CHECK(pccl_engine_link_add(n.engine, 1, fds[0], &keys.ends[0]) == 0);
    CHECK(pccl_engine_link_add(other.engine, 1, record[0], &keys.ends[1]) == 0);
    ssize_t bytes = recv(record[1], said, sizeof said, 0); /* its HELLO, one box */
    CHECK(bytes > 0);
    CHECK(send(fds[1], said, (size_t)bytes, 0) == bytes);
    CHECK(send(fds[1], said, (size_t)bytes, 0) == bytes);
    pccl_event event = node_wait(&n, PCCL_EVENT_LINK_LOST, 1);
    CHECK_MSG(strstr(event.detail, "cannot be decrypted") != NULL, "'%s'", event.detail);
    close(fds[1]);
    close(record[1]);
    node_close(&n);
    node_close(&other);
}

int main(void)
{
    tested_encryption = 1;
    for (int algorithm = 0; algorithm < PCCL_ALGORITHM_COUNT; algorithm++) {
        tested_algorithm = (uint8_t)algorithm;
        RUN(results_through_narrow_sockets);
        RUN(nothing_is_checksummed_as_well);
        RUN(plain_links_are_checksummed_all_the_same);
        RUN(ops_end_half_sent);
        RUN(a_flipped_bit_never_reaches_a_result);
        RUN(ops_survive_lost_connections);
    }
    RUN(other_keys_or_none_lose_the_link);
    RUN(a_replayed_stream_loses_the_link);
    return check_summary();
}
