/* fuzz_frame.c: streams of damaged, forged and misplaced frames against an engine that has honest work to do.
 *
 *     fuzz_frame [--frames N] [--seed S]
 *
 * A stream is a few frames of every kind, near to what an op that waits for them could get, or all that a rank of it
 * sends, in some order, with DONE at any place, the first included, and perhaps something said more than once; lengths
 * are at the boundaries of elements, segments and chunks, and parts of exchanges of any length, zero included. Bytes
 * and fields of frames are then changed, most of them with their checksums made right again: what has a wrong one gets
 * no further than that. Ops are of every collective, algorithm and form that they have, with windows of one segment in
 * half of all streams. A quarter of them are encrypted, and some come after their op has ended. A stream is written to
 * a link of its own, with one connection or two, some of which take over as UDP does, which is then closed. What must
 * hold:
 *
 *     the process lives (run it under ASan and UBSan)
 *     the link is lost, its op ends by abort, and its input is as it was
 *     an op that is detached on the way does not touch the caller's buffers again
 *     a reduce with an honest engine, in flight meanwhile, comes out right
 *     nothing is left: no scratch, no op, no connection, no memory beyond a bound
 *
 * Everything is drawn from the seed. Built with -fsanitize=fuzzer and PCCL_LIBFUZZER defined, the same is done with
 * streams that libFuzzer makes. */
#include "../src/wire.h" /* tests/ has one, too */
#include "plans.h"
#include "records.h"
#include "tiling.h"
#include "wire.h"

#include <inttypes.h>
#include <sys/resource.h>

enum {
    COUNT = 48, /* elements, at most */
    SEGMENT_BYTES = 40, /* three a chunk between two ranks, two among three, five of a broadcast */
    PAYLOAD_MAX = 512,
    FRAMES_MAX = 24,
    WORLD_MAX = 3,
    CONNECTIONS_MAX = 2,
    HONEST_COUNT = 3000,
    EVENT_MS = 20000, /* far more than anything here takes */
    MEMORY_GROWTH_KIB_MAX = 32 * 1024
};

/* Freed memory is kept for a while to find its use; keep less, so that growth means something. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=16:malloc_context_size=4"; }

typedef struct {
    uint8_t bytes[2 * FRAMES_MAX * (PCCL_FRAME_BYTES + PAYLOAD_MAX)];
    size_t size;
} stream;

static world honest;
static uint64_t next_number = 10000; /* of links and ops, both; honest links have smaller ones */
static uint64_t streams_done;
static uint64_t random_state;

static uint64_t random_u64(void)
{
    /* splitmix64 */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint32_t below(uint32_t bound) { return (uint32_t)(random_u64() % bound); }

int __real_pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made);
int __wrap_pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made);

static int has_begun; /* after the honest engines' connections */

int __wrap_pccl_wire_tcp_open(pccl_fd_registry *fds, int fd, pccl_wire **made)
{
    int status = __real_pccl_wire_tcp_open(fds, fd, made);
    if (status == 0 && has_begun)
        (*made)->takes_over = below(4) == 0;
    return status;
}

static void require(int condition, const char *what)
{
    if (!condition) {
        fprintf(stderr, "play %" PRIu64 ": not so: %s\n", streams_done, what);
        abort();
    }
}

static void write_plain(int fd, const uint8_t *data, size_t bytes)
{
    while (bytes > 0) {
        ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the engine has hung up */
        data += n;
        bytes -= (size_t)n;
    }
}

/* In records, if there are any. */
static void write_some(int fd, pccl_records *records, const uint8_t *data, size_t bytes)
{
    if (records == NULL) {
        write_plain(fd, data, bytes);
        return;
    }
    while (bytes > 0) {
        size_t plain_bytes = 1 + below((uint32_t)bytes);
        size_t encrypted_bytes = pccl_records_encrypt(records, data, plain_bytes);
        require(encrypted_bytes > 0, "encryption");
        data += encrypted_bytes;
        bytes -= encrypted_bytes;
        size_t out_bytes;
        const uint8_t *out = pccl_records_out(records, &out_bytes);
        write_plain(fd, out, out_bytes);
        pccl_records_sent(records, out_bytes);
    }
}

/* How many elements the op's rank gives each rank, and gets from each. */
typedef struct {
    uint64_t sent[WORLD_MAX];
    uint64_t received[WORLD_MAX];
} part_counts;

static uint32_t part_length(void) { return below(3) == 0 ? 0 : below(COUNT / WORLD_MAX + 1); }

/* An all-to-all whose parts are of different lengths, of which some are empty. */
static void make_uneven(pccl_op_request *request, part_counts *counts)
{
    uint64_t sent = 0;
    uint64_t received = 0;
    for (uint32_t rank = 0; rank < request->shape.world_size; rank++) {
        counts->sent[rank] = part_length();
        counts->received[rank] = rank == request->rank ? counts->sent[rank] : part_length();
        sent += counts->sent[rank];
        received += counts->received[rank];
    }
    request->shape.count = sent > received ? sent : received;
    request->send_counts = counts->sent;
    request->recv_counts = counts->received;
}

/* The op that the streams are about. Where an abort puts back what was there, it is in place. */
static pccl_op_request fuzzed_request(
    uint64_t op, const uint64_t *links, uint32_t world, float *values, float *result, part_counts *counts)
{
    static const uint8_t lengths[] = {COUNT, COUNT, COUNT / 2, COUNT / 4, COUNT - 6};
    pccl_op_request request;
    pccl_op_shape *shape = &request.shape;
    memset(&request, 0, sizeof request);
    request.op = op;
    request.key.epoch = 1;
    request.key.sequence = op;
    request.rank = below(world);
    *shape = plain_shape(lengths[below(sizeof lengths)], PCCL_FLOAT32, PCCL_SUM, SEGMENT_BYTES, world);
    shape->algorithm = (uint8_t)below(PCCL_ALGORITHM_COUNT);
    shape->collective = (uint8_t)(below(2) ? PCCL_ALL_REDUCE : below(PCCL_COLLECTIVE_COUNT));
    if (shape->collective == PCCL_ALL_REDUCE && below(4) == 0)
        shape->segment_bytes = COUNT * sizeof(float); /* one-shot, if direct */
    if (below(4) == 0)
        shape->collective = PCCL_ALL_TO_ALL;
    if (shape->collective == PCCL_SEND && world > 2)
        shape->collective = PCCL_BROADCAST;
    if (shape->collective == PCCL_BARRIER)
        shape->count = 0;
    if (shape->collective == PCCL_ALL_TO_ALL && below(4) != 0)
        make_uneven(&request, counts);
    if (pccl_op_shape_has_root(shape) || shape->collective == PCCL_GATHER || shape->collective == PCCL_SCATTER)
        shape->root = below(world);
    if (shape->collective == PCCL_ALL_REDUCE || shape->collective == PCCL_REDUCE_SCATTER)
        shape->reduce_op = (uint8_t)below(PCCL_REDUCE_OP_COUNT);
    if (shape->collective == PCCL_ALL_REDUCE && below(3) == 0) {
        shape->quantization = PCCL_QUANT_MIN_MAX;
        shape->quantized_dtype = PCCL_UINT8;
        shape->quantization_block = 8;
    }
    if (below(4) == 0)
        shape->step = 1 + below(2);
    if (below(4) == 0)
        shape->dimensions = 1 + below(2);
    if (below(8) == 0) {
        shape->last_slice = (uint8_t)(1 + below(2));
        shape->slice = (uint8_t)below(shape->last_slice + 1u);
    }
    request.link_prev = links[(request.rank + world - 1) % world];
    request.link_next = links[(request.rank + 1) % world];
    request.awaits_completion = below(2);
    if (shape->algorithm == PCCL_DIRECT || request.awaits_completion || below(4) != 0)
        request.rank_links = links;
    request.send = values;
    int is_put_back = shape->collective == PCCL_ALL_REDUCE || pccl_op_shape_has_root(shape);
    request.recv = is_put_back && below(8) != 0 ? values : result;
    return request;
}

/* Far from that of any stream's op: a damaged frame of that must not become a contradicting description of the honest
 * one, which would count, since any link may be to a rank of the op that calls it with another algorithm. */
static pccl_op_key honest_key(uint64_t op)
{
    return (pccl_op_key){.epoch = 1, .tag = op * 0x9e3779b97f4a7c15u, .sequence = op};
}

static pccl_op_request honest_request(uint32_t rank, uint64_t op, float *values)
{
    pccl_op_shape shape = plain_shape(HONEST_COUNT, PCCL_FLOAT32, PCCL_SUM, 4096, 2);
    pccl_op_request request = request_for(&honest, rank, op, &shape);
    request.key = honest_key(op);
    request.send = request.recv = values;
    return request;
}

static uint32_t chunks_of(const pccl_op_shape *shape)
{
    return pccl_op_shape_has_root(shape) || pccl_oneshot_is(shape) ? 1 : shape->world_size;
}

static pccl_tiling tiling_of(const pccl_op_shape *shape)
{
    pccl_tiling tiling;
    pccl_tiling_init(&tiling, shape->count, shape->segment_bytes / sizeof(float), chunks_of(shape), shape->slice,
        shape->last_slice + 1u);
    return tiling;
}

static uint32_t wire_bytes(const pccl_op_shape *shape, uint32_t elements)
{
    if (shape->quantization != PCCL_QUANT_NONE)
        return (uint32_t)pccl_quantized_bytes(shape, elements);
    return elements * (uint32_t)sizeof(float);
}

/* Of the first so many segments of a chunk. */
static uint32_t segments_bytes(const pccl_op_shape *shape, uint32_t chunk, uint32_t count)
{
    pccl_tiling tiling = tiling_of(shape);
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < count && i < pccl_tiling_chunk_segments(&tiling, chunk); i++)
        bytes += wire_bytes(shape, pccl_tiling_range(&tiling, chunk, i).count);
    return bytes;
}

/* At the boundaries of elements, segments and chunks, or beside them. */
static uint32_t boundary_bytes(const pccl_op_request *request)
{
    static const int8_t beside[] = {0, 0, 0, 0, -1, 1, -4, 4, 8};
    const pccl_op_shape *shape = &request->shape;
    int64_t bytes = segments_bytes(shape, below(chunks_of(shape)), below(4) == 0 ? COUNT : below(4));
    bytes += beside[below(sizeof beside)];
    if (below(16) == 0)
        bytes *= 2;
    return (uint32_t)(bytes < 0 ? 0 : bytes > PAYLOAD_MAX ? PAYLOAD_MAX : bytes);
}

/* The hops on which segments of the chunk come from the sender, the partial one first; PCCL_NO_HOP: none. */
static void hops_from(const pccl_op_request *request, uint32_t sender, uint32_t chunk, uint32_t hops[2])
{
    const pccl_op_shape *shape = &request->shape;
    uint32_t world = shape->world_size;
    int is_previous = (sender + 1) % world == request->rank;
    hops[0] = hops[1] = PCCL_NO_HOP;
    if (shape->collective != PCCL_ALL_REDUCE && shape->collective != PCCL_REDUCE_SCATTER) {
        int is_from = shape->algorithm == PCCL_DIRECT ? sender == pccl_spread_origin(shape, chunk) : is_previous;
        hops[0] = is_from ? pccl_spread_hops_of(shape, request->rank, chunk).receive : PCCL_NO_HOP;
    } else if (pccl_oneshot_is(shape)) {
        hops[0] = sender;
    } else if (shape->algorithm == PCCL_DIRECT) {
        hops[0] = chunk == request->rank ? sender : PCCL_NO_HOP;
        hops[1] = chunk == sender ? world : PCCL_NO_HOP;
    } else if (is_previous) {
        pccl_ring_hops of_ring = pccl_ring_hops_of(world, request->rank, chunk);
        hops[0] = of_ring.receive_partial;
        hops[1] = of_ring.receive_final;
    }
}

/* The sender's frame of this type, which describes the op as the victim expects it. */
static pccl_frame announcement(
    const pccl_op_request *request, uint32_t sender, enum pccl_frame_type type, uint32_t payload_bytes)
{
    pccl_frame frame = op_frame(request, type, payload_bytes);
    if (request->shape.collective == PCCL_ALL_TO_ALL) {
        uint64_t out[WORLD_MAX];
        uint64_t in[WORLD_MAX];
        pccl_exchange_lengths(request, out, in);
        frame.shape.count = in[sender];
        frame.shape.root = (uint32_t)out[sender];
    }
    return frame;
}

/* The segments of a part of an exchange on one hop to the victim; how many frames. */
static uint32_t part_frames(const pccl_op_request *request, uint32_t chunk, uint32_t destination, uint64_t elements,
    pccl_frame *frames, uint32_t frames_max)
{
    const pccl_op_shape *shape = &request->shape;
    uint32_t world = shape->world_size;
    int is_ring = shape->algorithm == PCCL_RING;
    pccl_tiling part;
    pccl_tiling_init(&part, elements, SEGMENT_BYTES / sizeof(float), 1, shape->slice, shape->last_slice + 1u);
    uint32_t segments = (uint32_t)pccl_tiling_segments(&part);
    int is_told = is_ring && shape->collective == PCCL_ALL_TO_ALL && segments == 0 && shape->slice == 0;
    uint32_t count = 0;
    for (; count < segments + (uint32_t)is_told && count < frames_max; count++) {
        uint32_t bytes = is_told ? 0 : pccl_tiling_range(&part, 0, count).count * (uint32_t)sizeof(float);
        pccl_frame *frame = &frames[count];
        *frame = op_frame(request, PCCL_FRAME_SEGMENT, bytes);
        frame->chunk = chunk;
        frame->segment = count;
        frame->hop = is_ring ? (request->rank + world - chunk - 1) % world : 0;
        frame->destination = is_ring ? destination : 0;
        frame->part_elements = is_ring ? elements : 0;
    }
    return count;
}

/* All segments of an exchange that the sender would send to the victim; how many frames. */
static uint32_t exchange_frames(
    const pccl_op_request *request, uint32_t sender, pccl_frame *frames, uint32_t frames_max)
{
    uint64_t out[WORLD_MAX];
    uint64_t in[WORLD_MAX];
    uint32_t world = request->shape.world_size;
    uint32_t count = 0;
    pccl_exchange_lengths(request, out, in);
    if (request->shape.algorithm == PCCL_DIRECT)
        return part_frames(request, sender, request->rank, in[sender], frames, frames_max);
    for (uint32_t way = 1; way < world && (sender + 1) % world == request->rank; way++) {
        uint32_t chunk = (request->rank + world - way) % world;
        for (uint32_t beyond = 0; way + beyond < world; beyond++) { /* what passes through is of any length */
            uint64_t elements = beyond == 0 ? in[chunk] : part_length();
            uint32_t destination = (request->rank + beyond) % world;
            count += part_frames(request, chunk, destination, elements, frames + count, frames_max - count);
        }
    }
    return count;
}

/* All that the sender would send, once in the order in which it would and once in another; how many frames. */
static uint32_t whole_dialogue(const pccl_op_request *request, uint32_t sender, pccl_frame *frames, uint32_t frames_max)
{
    const pccl_op_shape *shape = &request->shape;
    pccl_tiling tiling = tiling_of(shape);
    uint32_t count = 0;
    uint32_t first = 0; /* of what may change places */
    int is_eager = below(2);
    frames[count] = op_frame(request, PCCL_FRAME_HELLO, 0);
    memset(&frames[count].key, 0, sizeof frames[count].key);
    frames[count++].connection = 1;
    if (!is_eager || shape->algorithm == PCCL_RING)
        frames[count++] = announcement(request, sender, PCCL_FRAME_READY, 0);
    if (is_eager)
        frames[count++] = announcement(request, sender, PCCL_FRAME_EAGER, boundary_bytes(request));
    first = count;
    int is_exchange = pccl_exchange_is(shape->collective);
    if (is_exchange)
        count += exchange_frames(request, sender, frames + count, frames_max - 2 - count);
    if (is_exchange && below(4) == 0) {
        frames[count] = op_frame(request, PCCL_FRAME_PASSED, 0);
        frames[count++].passed_bytes[below(2)] = below(2) * 256;
    }
    for (uint32_t form = is_exchange ? 2 : 0; form < 2; form++)
        for (uint32_t chunk = 0; chunk < tiling.world_size; chunk++) {
            uint32_t hops[2];
            hops_from(request, sender, chunk, hops);
            uint32_t segments = (uint32_t)pccl_tiling_chunk_segments(&tiling, chunk);
            for (uint32_t i = 0; hops[form] != PCCL_NO_HOP && i < segments && count + 1 < frames_max; i++) {
                int is_bare = shape->collective == PCCL_REDUCE_SCATTER && form == 1;
                uint32_t bytes = is_bare ? 0 : wire_bytes(shape, pccl_tiling_range(&tiling, chunk, i).count);
                if (is_eager && form == 0 && below(4) != 0)
                    continue; /* it is in the eager one, or was to be */
                frames[count] = op_frame(request, PCCL_FRAME_SEGMENT, bytes);
                frames[count].chunk = chunk;
                frames[count].segment = i;
                frames[count++].hop = hops[form];
            }
        }
    for (uint32_t swaps = below(3) == 0 ? below(4) : 0; swaps > 0 && count > first; swaps--) {
        pccl_frame *a = &frames[first + below(count - first)];
        pccl_frame *b = &frames[first + below(count - first)];
        pccl_frame frame = *a;
        *a = *b;
        *b = frame;
    }
    uint32_t at = below(2) ? 1 : 1 + below(count);
    memmove(frames + at + 1, frames + at, (count - at) * sizeof *frames);
    frames[at] = op_frame(request, PCCL_FRAME_DONE, 0);
    return count + 1;
}

static pccl_frame plausible_frame(const pccl_op_request *request, uint32_t sender, uint32_t index)
{
    static const uint8_t types[] = {PCCL_FRAME_READY, PCCL_FRAME_SEGMENT, PCCL_FRAME_SEGMENT, PCCL_FRAME_SEGMENT,
        PCCL_FRAME_EAGER, PCCL_FRAME_CREDIT, PCCL_FRAME_HELLO, PCCL_FRAME_ACK, PCCL_FRAME_LOST, PCCL_FRAME_DONE,
        PCCL_FRAME_PASSED};
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = (enum pccl_frame_type)types[below(sizeof types)];
    if (index == 0 && below(16) != 0)
        frame.type = PCCL_FRAME_HELLO;
    frame.received_frames = below(4) == 0 ? below(4) : 0; /* too many are the end */
    switch (frame.type) {
    case PCCL_FRAME_READY:
    case PCCL_FRAME_EAGER:
        frame.key = request->key;
        frame.shape = announcement(request, sender, frame.type, 0).shape;
        break;
    case PCCL_FRAME_SEGMENT:
        frame.key = request->key;
        frame.chunk = below(3);
        frame.segment = below(3);
        frame.hop = below(4);
        if (pccl_exchange_is(request->shape.collective) && request->shape.algorithm == PCCL_RING) {
            frame.destination = below(3);
            frame.part_elements = below(COUNT);
        }
        break;
    case PCCL_FRAME_PASSED:
        frame.key = request->key;
        frame.passed_bytes[0] = below(600);
        frame.passed_bytes[1] = below(600);
        break;
    case PCCL_FRAME_DONE: frame.key = request->key; break;
    case PCCL_FRAME_CREDIT: frame.eager_bytes = below(200); break;
    case PCCL_FRAME_ACK: frame.received_bytes = below(200); break;
    case PCCL_FRAME_HELLO: frame.connection = 1 + below(2); break;
    case PCCL_FRAME_LOST:
        frame.connection = 1 + below(2);
        frame.peer_connection = 1 + below(2);
        frame.frames = below(4);
        break;
    }
    if (frame.type == PCCL_FRAME_DONE && below(2))
        frame.payload_bytes = (1 + below(PAYLOAD_MAX / PCCL_KEY_BYTES)) * PCCL_KEY_BYTES;
    if (frame.type == PCCL_FRAME_SEGMENT || frame.type == PCCL_FRAME_EAGER)
        frame.payload_bytes =
            below(2) ? wire_bytes(&request->shape, SEGMENT_BYTES / sizeof(float)) : boundary_bytes(request);
    return frame;
}

static uint64_t interesting(void)
{
    static const uint64_t numbers[] = {0, 1, 2, 3, 7, 19, 20, 39, 40, 41, 80, 160, 255, 256, 4096, 65535, 65536,
        0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 0x100000000, 0x7fffffffffffffff, 0x8000000000000000,
        0xfffffffffffffff0, 0xffffffffffffffff};
    return below(8) == 0 ? random_u64() : numbers[below(sizeof numbers / sizeof *numbers)];
}

/* One field or byte of a frame, wherever its bounds are. */
static void mutate(uint8_t *header, uint32_t payload_bytes)
{
    static const uint8_t fields[][2] = {{2, 1}, {3, 1}, {4, 4}, {8, 4}, {12, 4}, {16, 8}, {24, 8}, {32, 8}, {40, 4},
        {48, 8}, {48, 4}, {52, 4}, {56, 4}, {56, 1}, {57, 1}, {58, 1}, {59, 1}, {60, 4}, {64, 4}, {68, 4}, {68, 1},
        {71, 1}, {72, 8}, {79, 1}, {80, 8}};
    if (below(4) == 0) {
        header[below(PCCL_FRAME_BYTES + payload_bytes)] ^= (uint8_t)(1u << below(8));
        return;
    }
    const uint8_t *field = fields[below(sizeof fields / sizeof *fields)];
    uint64_t value = 0;
    for (unsigned i = 0; i < field[1]; i++)
        value |= (uint64_t)header[field[0] + i] << 8 * i;
    value = below(3) == 0 ? value + (below(2) ? 1 : ~(uint64_t)0) : interesting();
    for (unsigned i = 0; i < field[1]; i++)
        header[field[0] + i] = (uint8_t)(value >> 8 * i);
}

static void append_frame(stream *s, const pccl_frame *frame, int is_honest)
{
    uint8_t *header = s->bytes + s->size;
    uint32_t payload_bytes = frame->payload_bytes;
    pccl_frame_encode(frame, header);
    for (uint32_t i = 0; i < payload_bytes; i++)
        header[PCCL_FRAME_BYTES + i] = (uint8_t)random_u64();
    for (uint32_t i = 0; frame->type == PCCL_FRAME_DONE && i < payload_bytes; i += PCCL_KEY_BYTES)
        if (below(4) != 0) {
            pccl_op_key key = frame->key;
            key.sequence ^= below(2);
            pccl_op_key_encode(&key, header + PCCL_FRAME_BYTES + i);
        }
    for (uint32_t i = is_honest ? 0 : 1 + below(3); i > 0; i--)
        mutate(header, payload_bytes);
    if (!is_honest && below(8) == 0) /* more or less payload than is announced */
        payload_bytes = below(PAYLOAD_MAX);
    if (is_honest || below(8) != 0) {
        if (payload_bytes > 0)
            pccl_put_u32(header + 12, pccl_crc32c(0, header + PCCL_FRAME_BYTES, payload_bytes));
        pccl_frame_set_header_crc(header);
    }
    s->size += PCCL_FRAME_BYTES + payload_bytes;
}

/* Says the last frame, of so many bytes, twice. */
static void append_again(stream *s, size_t bytes)
{
    memcpy(s->bytes + s->size, s->bytes + s->size - bytes, bytes);
    s->size += bytes;
}

/* What the streams are played against. */
typedef struct {
    uint64_t links[WORLD_MAX]; /* to each rank */
    uint32_t world;
    int peers[WORLD_MAX][CONNECTIONS_MAX];
    pccl_records *records[WORLD_MAX][CONNECTIONS_MAX]; /* of these ends; NULL: they are not encrypted */
    uint32_t connections;
    float values[COUNT];
    float result[COUNT];
    part_counts counts;
    pccl_op_request request;
    int is_ended;
    int is_detached; /* values and result are the caller's again, who has written there */
    int is_with_honest; /* an honest reduce is in flight meanwhile */
    uint64_t honest_op;
    float honest_values[2][HONEST_COUNT];
} play;

static void play_open(play *p)
{
    node *victim = &honest.nodes[0];
    p->world = 2 + below(WORLD_MAX - 1);
    p->connections = 1 + below(CONNECTIONS_MAX);
    for (uint32_t rank = 0; rank < p->world; rank++)
        p->links[rank] = next_number++;
    for (int i = 0; i < COUNT; i++)
        p->values[i] = (float)i;
    p->is_detached = p->is_ended = 0;
    char error[256];
    int is_encrypted = below(4) == 0 && pccl_encryption_available(error, sizeof error) == 0;
    p->request = fuzzed_request(next_number++, p->links, p->world, p->values, p->result, &p->counts);
    for (uint32_t rank = 0; rank < p->world; rank++)
        for (uint32_t i = 0; rank != p->request.rank && i < p->connections; i++) {
            int fds[2];
            pair_unix(fds);
            key_pair keys;
            key_pair_make(&keys);
            p->records[rank][i] = NULL;
            if (is_encrypted)
                require(pccl_records_create(&keys.ends[1], &p->records[rank][i]) == 0, "records");
            require(
                pccl_engine_link_add(victim->engine, p->links[rank], fds[0], is_encrypted ? &keys.ends[0] : NULL) == 0,
                "link_add");
            p->peers[rank][i] = fds[1];
        }
    require(pccl_engine_submit(victim->engine, &p->request) == 0, "submit");
    p->is_with_honest = below(16) == 0;
    if (p->is_with_honest) {
        p->honest_op = next_number++;
        for (uint32_t rank = 0; rank < 2; rank++)
            for (int i = 0; i < HONEST_COUNT; i++)
                p->honest_values[rank][i] = (float)(i + (int)rank);
        pccl_op_request request = honest_request(0, p->honest_op, p->honest_values[0]);
        require(pccl_engine_submit(victim->engine, &request) == 0, "submit");
    }
}

static void wait_for(uint32_t rank, uint32_t kind, uint64_t id)
{
    pccl_event event;
    node *n = &honest.nodes[rank];
    if (node_wait_for(n, kind, id, &event, EVENT_MS))
        return;
    fprintf(stderr, "play %" PRIu64 ": rank %u has no event of kind %u and id %" PRIu64 ", but\n", streams_done, rank,
        kind, id);
    for (int i = 0; i < n->events_count; i++)
        fprintf(stderr, "    kind %u, id %" PRIu64 ", link %" PRIu64 ": %s\n", n->events[i].kind, n->events[i].id,
            n->events[i].link, n->events[i].detail);
    abort();
}

/* Takes the op's buffers from it, wherever the streams have brought it. */
static void play_detach(play *p)
{
    if (p->is_detached || p->is_ended)
        return;
    p->is_detached = 1;
    require(pccl_engine_detach(honest.nodes[0].engine, p->request.op) == 0, "detach");
    wait_for(0, PCCL_EVENT_OP_DETACHED, p->request.op);
    for (int i = 0; i < COUNT; i++)
        require(p->values[i] == (float)i, "the input is as it was when the op lets go of it");
    for (int i = 0; i < COUNT; i++)
        p->values[i] = p->result[i] = (float)-i;
}

/* Aborts the op while its peers still announce it. */
static void play_end(play *p)
{
    require(pccl_engine_end(honest.nodes[0].engine, p->request.op, PCCL_ABORT) == 0, "end");
    wait_for(0, PCCL_EVENT_OP_ENDED, p->request.op);
    p->is_ended = 1;
}

static void play_close(play *p)
{
    node *victim = &honest.nodes[0];
    for (uint32_t rank = 0; rank < p->world; rank++)
        for (uint32_t i = 0; rank != p->request.rank && i < p->connections; i++)
            shutdown(p->peers[rank][i], SHUT_WR);
    if (p->is_with_honest) {
        pccl_op_request request = honest_request(1, p->honest_op, p->honest_values[1]);
        require(pccl_engine_submit(honest.nodes[1].engine, &request) == 0, "submit");
        for (uint32_t rank = 0; rank < 2; rank++)
            wait_for(
                rank, op_awaits_completion(p->honest_op) ? PCCL_EVENT_OP_COMPLETED : PCCL_EVENT_OP_DONE, p->honest_op);
        for (uint32_t rank = 0; rank < 2; rank++) {
            pccl_engine_end(honest.nodes[rank].engine, p->honest_op, 1);
            wait_for(rank, PCCL_EVENT_OP_ENDED, p->honest_op);
            for (int i = 0; i < HONEST_COUNT; i++)
                require(p->honest_values[rank][i] == (float)(2 * i + 1), "the honest reduce is right");
        }
    }
    for (uint32_t rank = 0; rank < p->world; rank++)
        if (rank != p->request.rank) {
            wait_for(0, PCCL_EVENT_LINK_LOST, p->links[rank]);
            require(pccl_engine_link_close(victim->engine, p->links[rank]) == 0, "link_close");
        }
    if (!p->is_ended)
        play_end(p);
    for (int i = 0; i < COUNT; i++)
        require(p->values[i] == (p->is_detached ? (float)-i : (float)i), "the input is as it was");
    for (int i = 0; p->is_detached && i < COUNT; i++)
        require(p->result[i] == (float)-i, "nobody writes where the op was");
    for (uint32_t rank = 0; rank < p->world; rank++)
        for (uint32_t i = 0; rank != p->request.rank && i < p->connections; i++) {
            close(p->peers[rank][i]);
            pccl_records_free(p->records[rank][i]);
        }
    victim->events_count = 0; /* mismatches and the like, which are fine */
    streams_done++;
}

static void check_nothing_left(void)
{
    pccl_engine_stats stats;
    pccl_engine_get_stats(honest.nodes[0].engine, &stats);
    require(stats.ops_open == 0, "no op is left");
    require(stats.scratch_bytes == 0, "no scratch is left");
    require(stats.connections == 2, "no connection is left but the honest ones");
}

static long peak_kib(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

static void open_honest(void) { world_open(&honest, 2, 2, 0, 0); }

#ifdef PCCL_LIBFUZZER

/* The first byte is the seed of everything but the stream, the next one whether checksums are made right. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static play p;
    uint8_t bytes[4096];
    if (size < 2 || size > sizeof bytes)
        return 0;
    if (honest.size == 0)
        open_honest();
    random_state = data[0];
    play_open(&p);
    size -= 2;
    memcpy(bytes, data + 2, size);
    for (size_t at = 0; data[1] & 1 && at + PCCL_FRAME_BYTES <= size;) {
        size_t payload_bytes = pccl_get_u32(bytes + at + 8);
        size_t left = size - at - PCCL_FRAME_BYTES;
        if (payload_bytes > 0 && payload_bytes <= left)
            pccl_put_u32(bytes + at + 12, pccl_crc32c(0, bytes + at + PCCL_FRAME_BYTES, payload_bytes));
        pccl_put_u16(bytes + at, PCCL_FRAME_MAGIC);
        bytes[at + 2] = PCCL_FRAME_VERSION;
        pccl_frame_set_header_crc(bytes + at);
        at += PCCL_FRAME_BYTES + (payload_bytes < left ? payload_bytes : left);
    }
    uint32_t sender = p.request.rank == 0 ? 1 : 0;
    write_some(p.peers[sender][0], p.records[sender][0], bytes, size);
    play_close(&p);
    check_nothing_left();
    return 0;
}

#else

static uint64_t argument(int argc, char **argv, const char *name, uint64_t otherwise)
{
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0)
            return strtoull(argv[i + 1], NULL, 10);
    return otherwise;
}

typedef struct {
    uint64_t frames;
    uint64_t mutated;
} tally;

/* What the victim has to say, if it has, so that what comes next can be an answer. */
static void await_answer(int fd)
{
    struct pollfd pfd = {.fd = fd, .events = POLLIN};
    (void)poll(&pfd, 1, 1);
}

static void play_stream(play *p, uint32_t sender, uint32_t connection, tally *made)
{
    stream s = {.size = 0};
    pccl_frame frames[FRAMES_MAX];
    size_t cut = 0;
    int is_whole = below(2);
    uint32_t count = is_whole ? whole_dialogue(&p->request, sender, frames, FRAMES_MAX) : 1 + below(FRAMES_MAX / 2);
    uint32_t mutated = below(count); /* of a dialogue: more than one, and little of it would be looked at */
    for (uint32_t i = 0; i < count; i++) {
        pccl_frame frame = is_whole ? frames[i] : plausible_frame(&p->request, sender, i);
        int is_honest = is_whole ? below(2) != 0 || i != mutated : below(i == 0 ? 8 : 2) != 0;
        if (p->is_with_honest && below(4) == 0 && (frame.type == PCCL_FRAME_SEGMENT || frame.type == PCCL_FRAME_DONE)) {
            /* Of somebody else's op. */
            frame.key = honest_key(p->honest_op);
            is_honest = 1;
        }
        append_frame(&s, &frame, is_honest);
        if (is_honest && i > 0 && below(16) == 0)
            append_again(&s, PCCL_FRAME_BYTES + (size_t)frame.payload_bytes);
        if (cut == 0 && below(count) == 0)
            cut = s.size - below(frame.payload_bytes + 1);
        made->frames++;
        made->mutated += !is_honest || is_whole;
    }
    if (!is_whole && below(4) == 0)
        s.size -= below((uint32_t)s.size);
    int fd = p->peers[sender][connection];
    pccl_records *records = p->records[sender][connection];
    if (below(8) == 0 && cut < s.size) {
        write_some(fd, records, s.bytes, cut);
        await_answer(fd);
        write_some(fd, records, s.bytes + cut, s.size - cut);
        await_answer(fd);
    } else {
        write_some(fd, records, s.bytes, s.size);
    }
}

static void play_some(uint64_t frames_max, tally *made)
{
    static play p;
    long settled_kib = 0;
    uint64_t streams_before = streams_done;
    open_honest();
    while (made->mutated < frames_max) {
        play_open(&p);
        for (uint32_t connection = 0; connection < p.connections; connection++)
            for (uint32_t sender = 0; sender < p.world; sender++)
                if (sender != p.request.rank) {
                    play_stream(&p, sender, connection, made);
                    if (below(8) == 0)
                        play_detach(&p);
                    if (!p.is_ended && below(8) == 0)
                        play_end(&p); /* later streams announce what has ended */
                }
        play_close(&p);
        if (streams_done % 1000 == 0) {
            check_nothing_left();
            if (streams_done - streams_before >= 1000 && settled_kib == 0)
                settled_kib = peak_kib();
            require(settled_kib == 0 || peak_kib() < settled_kib + MEMORY_GROWTH_KIB_MAX, "memory is bounded");
        }
    }
    check_nothing_left();
    world_close(&honest);
}

int main(int argc, char **argv)
{
    uint64_t frames_max = argument(argc, argv, "--frames", 20000);
    uint64_t seed = argument(argc, argv, "--seed", 1);
    tally made = {0, 0};
    int64_t start_ms = now_ms();
    printf("fuzz_frame: seed %" PRIu64 "\n", seed);
    fflush(stdout);
    random_state = seed;
    has_begun = 1;
    play_some(frames_max / 2, &made);
    tested_op_scratch_bytes_max = 0;
    play_some(frames_max, &made);
    int64_t taken_ms = now_ms() - start_ms + 1;
    printf("%" PRIu64 " frames, %" PRIu64 " of them mutated or in a made-up dialogue, in %" PRIu64 " plays; %" PRId64
           " a second; peak %ld MiB; 1 passed, 0 failed\n",
        made.frames, made.mutated, streams_done, (int64_t)made.mutated * 1000 / taken_ms, peak_kib() / 1024);
    return 0;
}

#endif
