/* A reliable stream over datagrams, on a modelled path with a clock of its own (datagram_path.h): what is written is
 * read once and in order, whatever the path does; and it carries what it can. */
#include "base.h"
#include "bbr.h"
#include "datagram_path.h"
#include "siphash.h"

enum { MIB = 1 << 20 };

static pccl_udp_stats stats_of(const datagram_path *path, int end)
{
    pccl_udp_stats stats;
    pccl_udp_stream_read_stats(path->end[end].stream, &stats);
    return stats;
}

static void check_intact(const datagram_path *path)
{
    for (int i = 0; i < 2; i++) {
        CHECK(path->end[i].read == path->end[1 - i].written);
        CHECK(path->end[i].wrong_bytes == 0);
        CHECK_MSG(path->end[i].broken == NULL, "broken: %s", path->end[i].broken);
    }
}

/* The least time that so many bytes take in one direction. */
static int64_t least_ms(uint64_t bytes, double mbit, int64_t delay_ms)
{
    double on_the_line = (double)bytes * 1500 / 1448;
    return (int64_t)(on_the_line * 8 / mbit / 1e3) + delay_ms;
}

/* Messages that wait behind others' packets do not show what the path carries. */
static void a_few_messages_do_not_end_the_startup(void)
{
    enum { PACKET_BYTES = 1500, ROUND_TRIP_US = 50000, QUEUE_US = 20000, ROUNDS = 100 };
    pccl_bbr bbr;
    pccl_bbr_init(&bbr, PACKET_BYTES, 0);
    for (int i = 1; i <= ROUNDS; i++) {
        pccl_bbr_sample sample;
        memset(&sample, 0, sizeof sample);
        sample.now_us = (int64_t)i * ROUND_TRIP_US;
        sample.acked_bytes = sample.sample_bytes = PACKET_BYTES;
        sample.delivered_bytes = (uint64_t)i * PACKET_BYTES;
        sample.sent_delivered_bytes = (uint64_t)(i - 1) * PACKET_BYTES;
        sample.sample_us = sample.round_trip_us = ROUND_TRIP_US;
        sample.queue_us = QUEUE_US;
        sample.is_app_limited = 1;
        pccl_bbr_note_acked(&bbr, &sample);
    }
    CHECK(bbr.full_rounds == 0);
}

static void the_hash_is_siphash_2_4(void)
{
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++)
        bytes[i] = (uint8_t)i;
    uint64_t key_0 = pccl_get_u64(bytes);
    uint64_t key_1 = pccl_get_u64(bytes + 8);
    CHECK(pccl_siphash_2_4(key_0, key_1, NULL, 0, bytes, 0) == UINT64_C(0x726fdb47dd0e0e31));
    CHECK(pccl_siphash_2_4(key_0, key_1, NULL, 0, bytes, 15) == UINT64_C(0xa129ca6149be45e5));
    CHECK(pccl_siphash_2_4(key_0, key_1, bytes, 8, bytes + 8, 7) == UINT64_C(0xa129ca6149be45e5));
    CHECK(pccl_siphash_2_4(key_0, key_1, bytes, 8, bytes + 8, 0) == UINT64_C(0x93f5f5799a932462));
}

static void bytes_arrive_once_and_in_order_whatever_the_path_does(void)
{
    static const struct {
        double loss, repeated, swapped;
        int64_t swapped_ms;
    } paths[] = {
        {0, 0, 0, 0}, {0.1, 0, 0, 0}, {0, 0.2, 0, 0}, {0, 0, 0.2, 7}, {0.3, 0.3, 0.3, 30}, {0.02, 0.01, 0.01, 100}};
    for (uint64_t seed = 1; seed <= 2; seed++)
        for (size_t i = 0; i < PCCL_COUNT_OF(paths); i++) {
            datagram_path *path = path_open(seed, 100, 10, paths[i].loss);
            for (int w = 0; w < 2; w++) {
                path->way[w].repeated = paths[i].repeated;
                path->way[w].swapped = paths[i].swapped;
                path->way[w].swapped_ns = paths[i].swapped_ms * 1000000;
            }
            for (int transfer = 0; transfer < 3; transfer++) {
                int64_t ms = path_transfer(path, MIB + seed, MIB / 2, 60000);
                CHECK_MSG(ms < 60000, "path %zu, seed %llu: not through", i, (unsigned long long)seed);
                path_wait(path, (int64_t)(path_random(path) % 300));
            }
            path_wait(path, 5000);
            check_intact(path);
            CHECK(stats_of(path, 0).unacked_bytes == 0 && stats_of(path, 1).unacked_bytes == 0);
            path_close(path);
        }
}

static void a_path_carries_what_it_can_at_any_loss(void)
{
    static const struct {
        double loss;
        int64_t percent_max; /* of the least time */
    } paths[] = {{0, 115}, {0.001, 125}, {0.01, 130}, {0.05, 150}};
    for (size_t i = 0; i < PCCL_COUNT_OF(paths); i++) {
        datagram_path *path = path_open(3, 100, 20, paths[i].loss);
        path_transfer(path, 8 * MIB, 8 * MIB, 60000);
        for (int op = 0; op < 2; op++) {
            path_wait(path, 5000); /* as outer steps have it */
            int64_t ms = path_transfer(path, 8 * MIB, 8 * MIB, 60000);
            int64_t least = least_ms(8 * MIB, 100, 20);
            CHECK_MSG(ms * 100 <= least * paths[i].percent_max, "loss %g: %lld ms instead of %lld", paths[i].loss,
                (long long)ms, (long long)least);
        }
        check_intact(path);
        path_close(path);
    }
}

static void the_queue_of_a_path_stays_short(void)
{
    datagram_path *path = path_open(4, 100, 20, 0);
    path_transfer(path, 40 * MIB, 0, 60000);
    const path_direction *way = &path->way[0];
    CHECK_MSG(way->queue_drops * 100 < way->packets, "%llu of %llu packets dropped",
        (unsigned long long)way->queue_drops, (unsigned long long)way->packets);
    CHECK_MSG(way->queue_ns_sum / (int64_t)way->packets < 20000000, "packets wait for %.1f ms",
        (double)way->queue_ns_sum / 1e6 / (double)way->packets);
    check_intact(path);
    path_close(path);
}

/* What others send at a fixed rate does not give way; the queue would grow without bound. */
static void beside_others_the_rest_is_taken_and_no_more(void)
{
    datagram_path *path = path_open(5, 100, 20, 0);
    path->way[0].others = 0.5;
    path->way[0].queue_ns = INT64_C(10000000000);
    int64_t ms = path_transfer(path, 20 * MIB, 0, 60000);
    int64_t least = least_ms(20 * MIB, 50, 20);
    CHECK_MSG(ms < least * 130 / 100, "%lld ms instead of %lld", (long long)ms, (long long)least);
    CHECK_MSG(path->way[0].queue_ns_most < 120000000, "a queue of %.1f ms", (double)path->way[0].queue_ns_most / 1e6);
    check_intact(path);
    path_close(path);
}

static void a_path_that_becomes_slower_or_faster_is_followed(void)
{
    datagram_path *path = path_open(6, 100, 20, 0.001);
    path_transfer(path, 10 * MIB, 0, 60000);
    path->way[0].bytes_per_ns /= 5;
    path_transfer(path, 10 * MIB, 0, 60000);
    CHECK_MSG(stats_of(path, 0).rate < 4000000, "%llu bytes per second", (unsigned long long)stats_of(path, 0).rate);
    path->way[0].bytes_per_ns *= 5;
    path_transfer(path, 30 * MIB, 0, 60000);
    CHECK_MSG(stats_of(path, 0).rate > 8000000, "%llu bytes per second", (unsigned long long)stats_of(path, 0).rate);
    check_intact(path);
    path_close(path);
}

static void an_outage_is_survived(void)
{
    datagram_path *path = path_open(7, 100, 20, 0);
    path_transfer(path, 4 * MIB, 4 * MIB, 60000);
    path->end[0].to_write = path->end[1].to_write = 8 * MIB;
    path_wait(path, 100);
    path->way[0].is_cut = path->way[1].is_cut = 1;
    path_wait(path, 5000);
    path->way[0].is_cut = path->way[1].is_cut = 0;
    CHECK(path_transfer(path, 0, 0, 60000) < 4000);
    check_intact(path);
    path_close(path);
}

static void acknowledgements_that_are_lost_are_made_up_for(void)
{
    datagram_path *path = path_open(8, 100, 20, 0);
    path->way[1].loss = 0.5;
    CHECK(path_transfer(path, 8 * MIB, 0, 60000) < 3 * least_ms(8 * MIB, 100, 20));
    check_intact(path);
    path_close(path);
}

/* The uplink that carries them has other work. */
static void acknowledgements_stay_small_after_losses(void)
{
    datagram_path *path = path_open(7, 20, 25, 0.02);
    path_transfer(path, 8 * MIB, 0, 60000);
    check_intact(path);
    CHECK(path->way[1].bytes < 200 * path->way[1].packets);
    path_close(path);
}

static void a_reader_that_stops_stops_the_sender(void)
{
    datagram_path *path = path_open(9, 1000, 10, 0.01);
    path->end[1].read_bytes_per_step = 0;
    path->end[0].to_write = PCCL_UDP_BUFFER_BYTES_MAX + 4 * MIB;
    path_wait(path, 4000);
    pccl_udp_stats stats = stats_of(path, 0);
    CHECK(stats.acked_bytes == PCCL_UDP_BUFFER_BYTES_MAX);
    CHECK(stats.receiver_us > 0 && stats.receiver_us <= stats.busy_us);
    CHECK(path->end[1].broken == NULL);
    /* The packet that advertises room is lost; probes bring another. */
    path->end[1].read_bytes_per_step = SIZE_MAX;
    path->way[1].is_cut = 1;
    path_step(path);
    path->way[1].is_cut = 0;
    CHECK(path_transfer(path, 0, 0, 10000) < 5000);
    check_intact(path);
    path_close(path);
}

static void the_size_of_datagrams_is_found(void)
{
    static const size_t sizes[][2] = {{1472, 1472}, {1460, 1452}, {1300, 1280}, {1200, 1200}};
    for (size_t i = 0; i < PCCL_COUNT_OF(sizes); i++) {
        datagram_path *path = path_open(10, 100, 10, 0);
        path->way[0].datagram_bytes_max = sizes[i][0];
        path_transfer(path, 8 * MIB, 0, 60000);
        CHECK_MSG(stats_of(path, 0).datagram_bytes == sizes[i][1], "%zu instead of %zu",
            stats_of(path, 0).datagram_bytes, sizes[i][1]);
        /* The path comes to carry smaller ones only. */
        path->way[0].datagram_bytes_max = 1200;
        CHECK(path_transfer(path, 2 * MIB, 0, 60000) < 10000);
        CHECK(stats_of(path, 0).datagram_bytes == 1200);
        check_intact(path);
        path_close(path);
    }
}

static void a_size_that_the_system_refuses_is_not_used(void)
{
    datagram_path *path = path_open(10, 100, 10, 0);
    path_transfer(path, 4096, 0, 60000);
    path_wait(path, 100);
    path->end[0].to_write = MIB;
    path_write(path, &path->end[0]);
    pccl_udp_datagram datagrams[PATH_BATCH];
    REQUIRE(pccl_udp_stream_output(path->end[0].stream, path->now_ns, datagrams, PATH_BATCH) == 1);
    CHECK(datagrams[0].payload_bytes + PCCL_UDP_HEADER_BYTES == 1472);
    pccl_udp_stream_note_too_large(path->end[0].stream, 1472);
    path_transfer(path, 0, 0, 60000);
    CHECK(stats_of(path, 0).datagram_bytes == 1452);
    check_intact(path);
    path_close(path);
}

/* The first datagram that an end has to send. */
static size_t first_datagram(datagram_path *path, int end, uint8_t bytes[2048])
{
    pccl_udp_datagram d;
    if (pccl_udp_stream_output(path->end[end].stream, path->now_ns, &d, 1) != 1)
        return 0;
    memcpy(bytes, d.header, sizeof d.header);
    memcpy(bytes + sizeof d.header, d.payload, d.payload_bytes);
    return sizeof d.header + d.payload_bytes;
}

static void packets_without_the_key_are_ignored(void)
{
    datagram_path *path = path_open(11, 100, 10, 0);
    uint8_t bytes[2048];
    size_t count = first_datagram(path, 0, bytes);
    REQUIRE(count >= PCCL_UDP_HEADER_BYTES);
    int is_foreign;
    for (size_t bit = 0; bit < 8 * count; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK(pccl_udp_stream_input(path->end[1].stream, bytes, count, path->now_ns, &is_foreign) == NULL);
        CHECK(is_foreign);
        bytes[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
    for (size_t shorter = 0; shorter < count; shorter++) {
        CHECK(pccl_udp_stream_input(path->end[1].stream, bytes, shorter, path->now_ns, &is_foreign) == NULL);
        CHECK(is_foreign);
    }
    /* Nor does an end take its own. */
    CHECK(pccl_udp_stream_input(path->end[0].stream, bytes, count, path->now_ns, &is_foreign) == NULL);
    CHECK(is_foreign);
    CHECK(pccl_udp_stream_input(path->end[1].stream, bytes, count, path->now_ns, &is_foreign) == NULL);
    CHECK(!is_foreign);
    path_close(path);
}

/* A packet as the end with the dialer's key makes it. */
static const char *put_forged(
    datagram_path *path, uint64_t kind, uint64_t number, uint64_t offset, const uint8_t *payload, size_t payload_bytes)
{
    uint8_t bytes[2048];
    const char *secret = "thirty-two bytes that two share";
    pccl_put_u64(bytes + 8, kind << 56 | number);
    pccl_put_u64(bytes + 16, offset);
    memcpy(bytes + 24, payload, payload_bytes);
    pccl_put_u64(bytes, pccl_siphash_2_4(pccl_get_u64((const uint8_t *)secret),
                            pccl_get_u64((const uint8_t *)secret + 8), bytes + 8, 16, bytes + 24, payload_bytes));
    int is_foreign;
    const char *broken = pccl_udp_stream_input(
        path->end[1].stream, bytes, PCCL_UDP_HEADER_BYTES + payload_bytes, path->now_ns, &is_foreign);
    CHECK(!is_foreign);
    return broken;
}

static void wrong_packets_of_a_peer_break_the_stream_and_nothing_else(void)
{
    datagram_path *path = path_open(12, 100, 10, 0);
    uint8_t ack[1024];
    memset(ack, 0, sizeof ack);
    path_transfer(path, 0, MIB, 60000);
    CHECK(put_forged(path, 9, 0, 0, ack, 0) != NULL);
    CHECK(put_forged(path, 0, 0, 0, ack, 0) != NULL);
    CHECK(put_forged(path, 1, 1, PCCL_UDP_BUFFER_BYTES_MAX + MIB, ack, 1) != NULL);
    CHECK(put_forged(path, 1, 1, UINT64_MAX, ack, 100) != NULL);
    CHECK(put_forged(path, 2, 1, 0, ack, 0) != NULL);
    CHECK(put_forged(path, 2, 1, 0, ack, 36) != NULL); /* an empty range */
    CHECK(put_forged(path, 2, 1, 0, ack, 40) != NULL);
    CHECK(put_forged(path, 2, 1, 0, ack, sizeof ack) != NULL);
    pccl_put_u32(ack + 32, 2); /* packet 0, and the one before */
    CHECK(put_forged(path, 2, 1, 0, ack, 36) != NULL);
    pccl_put_u32(ack + 32, 1);
    CHECK(put_forged(path, 2, 1, 0, ack, 36) == NULL);
    CHECK(put_forged(path, 2, 1, 2 * MIB, ack, 36) != NULL); /* bytes that were not sent */
    pccl_put_u64(ack + 8, 1 << 20); /* a packet that was not sent */
    CHECK(put_forged(path, 2, 1, 0, ack, 36) != NULL);
    pccl_put_u64(ack + 8, UINT64_MAX);
    CHECK(put_forged(path, 2, 1, 0, ack, 36) != NULL);
    path_close(path);
}

/* Every other byte, far from each other and backwards: what cannot be kept is as good as lost. */
static void bytes_in_small_pieces_take_bounded_memory(void)
{
    datagram_path *path = path_open(13, 100, 10, 0);
    uint8_t one = 0;
    for (uint64_t i = 0; i < 20000; i++)
        CHECK(put_forged(path, 1, 5 * i, 1000000 - 2 * i, &one, 1) == NULL);
    size_t bytes;
    (void)pccl_udp_stream_peek(path->end[1].stream, &bytes);
    CHECK(bytes == 0);
    path_close(path);
}

/* Random packets of an authenticated peer, against sanitizers. */
static void nonsense_of_a_peer_is_survived(void)
{
    datagram_path *path = path_open(14, 100, 10, 0);
    uint8_t payload[600];
    path->end[1].to_write = 16 * MIB;
    for (int i = 0; i < 20000; i++) {
        for (size_t b = 0; b < sizeof payload; b++)
            payload[b] = (uint8_t)(path_random(path) % 3);
        uint64_t kind = 1 + path_random(path) % 2;
        uint64_t bound = UINT64_C(1) << path_random(path) % 26;
        pccl_put_u64(payload + 8, path_random(path) % bound % 300);
        size_t count = kind == 1 ? path_random(path) % 600 : 36 + 8 * (path_random(path) % 60);
        (void)put_forged(path, kind, path_random(path) % bound, path_random(path) % bound, payload, count);
        if (i % 4 == 0) {
            path_write(path, &path->end[1]);
            pccl_udp_datagram datagrams[PATH_BATCH];
            (void)pccl_udp_stream_output(path->end[1].stream, path->now_ns, datagrams, PATH_BATCH);
            path->now_ns += 1000000;
        }
        if (i % 64 == 0) {
            size_t bytes;
            (void)pccl_udp_stream_peek(path->end[1].stream, &bytes);
            pccl_udp_stream_consume(path->end[1].stream, bytes);
        }
    }
    path_close(path);
}

static void a_close_arrives(void)
{
    datagram_path *path = path_open(15, 100, 10, 0);
    pccl_udp_datagram d = pccl_udp_stream_close(path->end[0].stream);
    CHECK(d.payload_bytes == 0);
    CHECK(!stats_of(path, 1).has_ended);
    int is_foreign;
    CHECK(pccl_udp_stream_input(path->end[1].stream, d.header, sizeof d.header, path->now_ns, &is_foreign) == NULL);
    CHECK(stats_of(path, 1).has_ended);
    path_close(path);
}

static void a_stream_at_rest_sends_nothing(void)
{
    datagram_path *path = path_open(16, 100, 10, 0);
    path_transfer(path, MIB, MIB, 60000);
    path_wait(path, 2000);
    uint64_t orders = path->way[0].orders + path->way[1].orders;
    path_wait(path, 10000);
    CHECK(path->way[0].orders + path->way[1].orders == orders);
    CHECK(pccl_udp_stream_deadline_ns(path->end[0].stream) == INT64_MAX);
    path_close(path);
}

int main(void)
{
    RUN(the_hash_is_siphash_2_4);
    RUN(a_few_messages_do_not_end_the_startup);
    RUN(bytes_arrive_once_and_in_order_whatever_the_path_does);
    RUN(a_path_carries_what_it_can_at_any_loss);
    RUN(the_queue_of_a_path_stays_short);
    RUN(beside_others_the_rest_is_taken_and_no_more);
    RUN(a_path_that_becomes_slower_or_faster_is_followed);
    RUN(an_outage_is_survived);
    RUN(acknowledgements_that_are_lost_are_made_up_for);
    RUN(acknowledgements_stay_small_after_losses);
    RUN(a_reader_that_stops_stops_the_sender);
    RUN(the_size_of_datagrams_is_found);
    RUN(a_size_that_the_system_refuses_is_not_used);
    RUN(packets_without_the_key_are_ignored);
    RUN(wrong_packets_of_a_peer_break_the_stream_and_nothing_else);
    RUN(bytes_in_small_pieces_take_bounded_memory);
    RUN(nonsense_of_a_peer_is_survived);
    RUN(a_close_arrives);
    RUN(a_stream_at_rest_sends_nothing);
    return check_summary();
}
