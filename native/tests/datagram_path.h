/* datagram_path.h: two streams (udp_stream.h) and the path between them, with a clock that only tests move: each
 * direction has a bottleneck with a drop-tail queue, a delay, and packets lost, repeated or swapped by chance. */
#ifndef PCCL_DATAGRAM_PATH_H
#define PCCL_DATAGRAM_PATH_H

#include "check.h"
#include "udp_stream.h"

#include <stdlib.h>
#include <string.h>

enum { PATH_STEP_US = 100, PATH_IP_BYTES = 28, PATH_BATCH = 40, PATH_MESSAGES_MAX = 1 << 16 };

typedef struct {
    int64_t arrives_ns;
    uint64_t order;
    size_t bytes;
    uint8_t *datagram;
} path_message;

typedef struct {
    double loss;
    double repeated;
    double swapped;
    int64_t swapped_ns; /* later */
    int64_t delay_ns;
    double bytes_per_ns; /* 0: no limit */
    int64_t queue_ns;
    double others; /* share of the rate that other packets take, which are never fewer */
    size_t datagram_bytes_max;
    uint8_t is_cut;

    int64_t free_ns; /* the bottleneck has sent all */
    path_message *messages; /* a heap, the first to arrive first */
    size_t messages_count;
    uint64_t orders;
    uint64_t queue_drops;
    uint64_t packets;
    uint64_t bytes;
    int64_t queue_ns_sum; /* of all packets */
    int64_t queue_ns_most;
} path_direction;

typedef struct {
    pccl_udp_stream *stream;
    uint64_t written; /* each byte follows from its offset */
    uint64_t to_write;
    uint64_t read;
    size_t read_bytes_per_step; /* at most */
    uint64_t wrong_bytes;
    const char *broken;
} path_end;

typedef struct {
    int64_t now_ns;
    uint64_t random;
    path_direction way[2]; /* from that end */
    path_end end[2];
} datagram_path;

static inline uint64_t path_random(datagram_path *path)
{
    path->random ^= path->random << 13;
    path->random ^= path->random >> 7;
    path->random ^= path->random << 17;
    return path->random;
}

static inline int path_chance(datagram_path *path, double probability)
{
    return probability > 0 && (double)(path_random(path) >> 11) / 9007199254740992.0 < probability;
}

static inline uint8_t path_byte(uint64_t offset) { return (uint8_t)((offset * UINT64_C(0x9e3779b97f4a7c15)) >> 56); }

static inline datagram_path *path_open(uint64_t seed, double mbit, int64_t delay_ms, double loss)
{
    static const uint8_t secret[PCCL_UDP_SECRET_BYTES] = "thirty-two bytes that two share";
    datagram_path *path = calloc(1, sizeof *path);
    path->now_ns = 1000000000;
    path->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int i = 0; i < 2; i++) {
        path_direction *way = &path->way[i];
        way->loss = loss;
        way->delay_ns = delay_ms * 1000000;
        way->bytes_per_ns = mbit / 8e3;
        way->queue_ns = 2 * way->delay_ns > 10000000 ? 2 * way->delay_ns : 10000000;
        way->datagram_bytes_max = 1472;
        way->free_ns = path->now_ns;
        way->messages = malloc(PATH_MESSAGES_MAX * sizeof *way->messages);
        path->end[i].stream = pccl_udp_stream_create(secret, i == 0, path->now_ns);
        path->end[i].read_bytes_per_step = SIZE_MAX;
    }
    return path;
}

static inline void path_close(datagram_path *path)
{
    for (int i = 0; i < 2; i++) {
        pccl_udp_stream_free(path->end[i].stream);
        for (size_t m = 0; m < path->way[i].messages_count; m++)
            free(path->way[i].messages[m].datagram);
        free(path->way[i].messages);
    }
    free(path);
}

static inline int path_is_before(const path_message *a, const path_message *b)
{
    return a->arrives_ns < b->arrives_ns || (a->arrives_ns == b->arrives_ns && a->order < b->order);
}

static inline void path_push(path_direction *way, path_message message)
{
    size_t at = way->messages_count++;
    message.order = way->orders++;
    for (; at > 0 && path_is_before(&message, &way->messages[(at - 1) / 2]); at = (at - 1) / 2)
        way->messages[at] = way->messages[(at - 1) / 2];
    way->messages[at] = message;
}

static inline path_message path_pop(path_direction *way)
{
    path_message first = way->messages[0];
    path_message last = way->messages[--way->messages_count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child + 1 < way->messages_count && path_is_before(&way->messages[child + 1], &way->messages[child]))
            child++;
        if (child >= way->messages_count || !path_is_before(&way->messages[child], &last))
            break;
        way->messages[at] = way->messages[child];
        at = child;
    }
    way->messages[at] = last;
    return first;
}

static inline void path_send(datagram_path *path, path_direction *way, const uint8_t *bytes, size_t count)
{
    if (way->is_cut || count > way->datagram_bytes_max || path_chance(path, way->loss) ||
        way->messages_count + 2 >= PATH_MESSAGES_MAX)
        return;
    int64_t leaves_ns = path->now_ns;
    if (way->bytes_per_ns > 0) {
        if (way->free_ns < path->now_ns)
            way->free_ns = path->now_ns;
        if (way->free_ns - path->now_ns > way->queue_ns) {
            way->queue_drops++;
            return;
        }
        way->packets++;
        way->bytes += count + PATH_IP_BYTES;
        way->queue_ns_sum += way->free_ns - path->now_ns;
        if (way->free_ns - path->now_ns > way->queue_ns_most)
            way->queue_ns_most = way->free_ns - path->now_ns;
        way->free_ns += (int64_t)((double)(count + PATH_IP_BYTES) / way->bytes_per_ns);
        leaves_ns = way->free_ns;
    }
    int copies = path_chance(path, way->repeated) ? 2 : 1;
    for (int i = 0; i < copies; i++) {
        path_message message = {leaves_ns + way->delay_ns, 0, count, malloc(count)};
        if (path_chance(path, way->swapped))
            message.arrives_ns += way->swapped_ns;
        memcpy(message.datagram, bytes, count);
        path_push(way, message);
    }
}

static inline void path_put_out(datagram_path *path, int at)
{
    pccl_udp_datagram datagrams[PATH_BATCH];
    uint8_t bytes[2048];
    int count;
    while ((count = pccl_udp_stream_output(path->end[at].stream, path->now_ns, datagrams, PATH_BATCH)) > 0)
        for (int i = 0; i < count; i++) {
            memcpy(bytes, datagrams[i].header, PCCL_UDP_HEADER_BYTES);
            memcpy(bytes + PCCL_UDP_HEADER_BYTES, datagrams[i].payload, datagrams[i].payload_bytes);
            CHECK(i == 0 || datagrams[i].payload_bytes == datagrams[0].payload_bytes ||
                  (i == count - 1 && datagrams[i].payload_bytes < datagrams[0].payload_bytes));
            path_send(path, &path->way[at], bytes, PCCL_UDP_HEADER_BYTES + datagrams[i].payload_bytes);
        }
}

static inline void path_read(path_end *end)
{
    for (size_t left = end->read_bytes_per_step; left > 0;) {
        size_t bytes;
        const uint8_t *at = pccl_udp_stream_peek(end->stream, &bytes);
        bytes = bytes < left ? bytes : left;
        if (bytes == 0)
            return;
        for (size_t i = 0; i < bytes; i++)
            end->wrong_bytes += at[i] != path_byte(end->read + i);
        end->read += bytes;
        pccl_udp_stream_consume(end->stream, bytes);
        left -= bytes;
    }
}

static inline void path_write(datagram_path *path, path_end *end)
{
    uint8_t bytes[16384];
    while (end->to_write > 0) {
        size_t count = end->to_write < sizeof bytes ? (size_t)end->to_write : sizeof bytes;
        for (size_t i = 0; i < count; i++)
            bytes[i] = path_byte(end->written + i);
        struct iovec iov = {bytes, count};
        size_t taken = pccl_udp_stream_write(end->stream, &iov, 1, 256 << 10, path->now_ns);
        end->written += taken;
        end->to_write -= taken;
        if (taken < count)
            return;
    }
}

static inline void path_step(datagram_path *path)
{
    path->now_ns += PATH_STEP_US * 1000;
    for (int i = 0; i < 2; i++) {
        path_direction *way = &path->way[i];
        if (way->others > 0) {
            if (way->free_ns < path->now_ns)
                way->free_ns = path->now_ns;
            int64_t more_ns = (int64_t)(way->others * PATH_STEP_US * 1000);
            if (way->free_ns - path->now_ns <= way->queue_ns)
                way->free_ns += more_ns;
        }
    }
    for (int i = 0; i < 2; i++) {
        path_direction *way = &path->way[1 - i];
        path_end *end = &path->end[i];
        while (way->messages_count > 0 && way->messages[0].arrives_ns <= path->now_ns) {
            path_message message = path_pop(way);
            int is_foreign;
            const char *broken =
                pccl_udp_stream_input(end->stream, message.datagram, message.bytes, path->now_ns, &is_foreign);
            if (broken != NULL)
                end->broken = broken;
            CHECK(!is_foreign);
            free(message.datagram);
        }
        path_read(end);
        path_write(path, end);
        if (pccl_udp_stream_deadline_ns(end->stream) <= path->now_ns || end->to_write > 0)
            path_put_out(path, i);
    }
}

/* Sends so many bytes from one end, or both. Returns the milliseconds that it took; `ms_max`: longer. */
static inline int64_t path_transfer(datagram_path *path, uint64_t bytes_0, uint64_t bytes_1, int64_t ms_max)
{
    int64_t began_ns = path->now_ns;
    path->end[0].to_write += bytes_0;
    path->end[1].to_write += bytes_1;
    uint64_t ends[2] = {path->end[1].written + path->end[1].to_write, path->end[0].written + path->end[0].to_write};
    while (path->now_ns - began_ns < ms_max * 1000000 && (path->end[0].read < ends[0] || path->end[1].read < ends[1]))
        path_step(path);
    return (path->now_ns - began_ns) / 1000000;
}

static inline void path_wait(datagram_path *path, int64_t ms)
{
    for (int64_t end_ns = path->now_ns + ms * 1000000; path->now_ns < end_ns;)
        path_step(path);
}

#endif
