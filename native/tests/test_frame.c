/* Frames: headers that come out as they went in, and every way in which one can be wrong. */
#include "check.h"
#include "crc32c.h"
#include "frame.h"

#include <string.h>

static uint32_t random_state = 12345;

static uint8_t random_byte(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (uint8_t)(random_state >> 24);
}

static pccl_frame ready_frame(void)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_READY;
    frame.key.epoch = UINT64_C(0x0102030405060708);
    frame.key.tag = UINT64_C(0x1112131415161718);
    frame.key.sequence = UINT64_C(0x2122232425262728);
    frame.key.group = 0x31323334;
    frame.shape.count = UINT64_C(0x4142434445464748);
    frame.shape.dtype = PCCL_FLOAT64;
    frame.shape.reduce_op = PCCL_MIN;
    frame.shape.quantization = PCCL_QUANT_ZERO_POINT_SCALE;
    frame.shape.quantized_dtype = PCCL_INT16;
    frame.shape.quantization_block = 0x51525354;
    frame.shape.segment_bytes = 0x61626364;
    frame.shape.world_size = 0x727374;
    frame.shape.algorithm = PCCL_DIRECT;
    frame.shape.slice = 5;
    frame.shape.last_slice = 9;
    frame.shape.step = UINT64_C(0x7182838485868788);
    frame.shape.dimensions = UINT64_C(0x9192939495969798);
    return frame;
}

static pccl_frame segment_frame(void)
{
    pccl_frame frame = ready_frame();
    frame.type = PCCL_FRAME_SEGMENT;
    memset(&frame.shape, 0, sizeof frame.shape);
    frame.payload_bytes = 0xfedcba98;
    frame.payload_crc = 0x35363738;
    frame.chunk = 0x01020304;
    frame.segment = 0x11121314;
    frame.hop = 0x21222324;
    frame.destination = 0x31323334;
    frame.part_elements = UINT64_C(0x4142434445464748);
    return frame;
}

static pccl_frame eager_frame(void)
{
    pccl_frame frame = ready_frame();
    frame.type = PCCL_FRAME_EAGER;
    frame.payload_bytes = 0x1234;
    frame.payload_crc = 0x35363738;
    return frame;
}

static pccl_frame credit_frame(void)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_CREDIT;
    frame.received_frames = 0x71727374;
    frame.eager_bytes = UINT64_C(0x0102030405060708);
    return frame;
}

static pccl_frame connection_frame(enum pccl_frame_type type)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = type;
    frame.received_frames = 0x71727374;
    if (type == PCCL_FRAME_ACK) {
        frame.received_bytes = UINT64_C(0x0102030405060708);
        return frame;
    }
    frame.connection = 0x11121314;
    if (type == PCCL_FRAME_LOST) {
        frame.peer_connection = 0x21222324;
        frame.frames = 0x31323334;
    }
    return frame;
}

static pccl_frame done_frame(void)
{
    pccl_frame frame = credit_frame();
    frame.type = PCCL_FRAME_DONE;
    frame.eager_bytes = 0;
    frame.key = ready_frame().key;
    return frame;
}

static void what_is_encoded_is_decoded(void)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame in = ready_frame();
    pccl_frame out;
    pccl_frame_encode(&in, header);
    CHECK(pccl_frame_decode(header, &out) == NULL);
    CHECK(out.type == in.type && out.payload_bytes == 0);
    CHECK(pccl_op_key_equal(&out.key, &in.key) && pccl_op_shape_equal(&out.shape, &in.shape));

    in = segment_frame();
    pccl_frame_encode(&in, header);
    CHECK(pccl_frame_decode(header, &out) == NULL);
    CHECK(out.type == in.type && out.payload_bytes == in.payload_bytes && out.payload_crc == in.payload_crc);
    CHECK(pccl_op_key_equal(&out.key, &in.key));
    CHECK(out.chunk == in.chunk && out.segment == in.segment && out.hop == in.hop &&
          out.destination == in.destination && out.part_elements == in.part_elements);

    in = eager_frame();
    pccl_frame_encode(&in, header);
    CHECK(pccl_frame_decode(header, &out) == NULL);
    CHECK(out.type == in.type && out.payload_bytes == in.payload_bytes && out.payload_crc == in.payload_crc);
    CHECK(pccl_op_key_equal(&out.key, &in.key) && pccl_op_shape_equal(&out.shape, &in.shape));

    in = credit_frame();
    pccl_frame_encode(&in, header);
    CHECK(pccl_frame_decode(header, &out) == NULL);
    CHECK(out.type == in.type && out.eager_bytes == in.eager_bytes && out.received_frames == in.received_frames);

    in = done_frame();
    pccl_frame_encode(&in, header);
    CHECK(pccl_frame_decode(header, &out) == NULL);
    CHECK(out.type == in.type && pccl_op_key_equal(&out.key, &in.key) && out.received_frames == in.received_frames);

    for (int type = PCCL_FRAME_HELLO; type <= PCCL_FRAME_LOST; type++) {
        in = connection_frame((enum pccl_frame_type)type);
        pccl_frame_encode(&in, header);
        CHECK(pccl_frame_decode(header, &out) == NULL);
        CHECK(out.type == in.type && out.received_frames == in.received_frames);
        CHECK(out.received_bytes == in.received_bytes && out.connection == in.connection);
        CHECK(out.peer_connection == in.peer_connection && out.frames == in.frames);
    }
}

/* As many keys as a frame may have, and no part of one. */
static void done_frames_list_keys(void)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame out;
    for (uint32_t bytes = 0; bytes <= PCCL_DONE_PAYLOAD_MAX + 2 * PCCL_KEY_BYTES; bytes++) {
        pccl_frame in = done_frame();
        in.payload_bytes = bytes;
        in.payload_crc = bytes > 0;
        pccl_frame_encode(&in, header);
        int is_right = bytes % PCCL_KEY_BYTES == 0 && bytes <= PCCL_DONE_PAYLOAD_MAX;
        CHECK_MSG((pccl_frame_decode(header, &out) == NULL) == is_right, "%u bytes", bytes);
        CHECK(!is_right || pccl_frame_keys(&out) == 1 + bytes / PCCL_KEY_BYTES);
    }
}

static void the_layout_is_as_documented(void)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame = segment_frame();
    pccl_frame_encode(&frame, header);
    CHECK(memcmp(header, "PC\x07\x02\0\0\0\0\x98\xba\xdc\xfe\x38\x37\x36\x35", 16) == 0);
    CHECK(memcmp(header + 16, "\x08\x07\x06\x05\x04\x03\x02\x01", 8) == 0);
    CHECK(memcmp(header + 40, "\x34\x33\x32\x31", 4) == 0);
    CHECK(pccl_get_u32(header + 44) == pccl_crc32c(pccl_crc32c(0, header, 44), header + 48, 40));
    CHECK(memcmp(header + 48, "\x04\x03\x02\x01\x14\x13\x12\x11\x24\x23\x22\x21", 12) == 0);
    CHECK(memcmp(header + 60, "\x34\x33\x32\x31\x48\x47\x46\x45\x44\x43\x42\x41", 12) == 0);
    pccl_frame ready = ready_frame();
    uint8_t ready_header[PCCL_FRAME_BYTES];
    pccl_frame_encode(&ready, ready_header);
    CHECK(memcmp(ready_header + 72, "\x88\x87\x86\x85\x84\x83\x82\x71\x98\x97\x96\x95\x94\x93\x92\x91", 16) == 0);
    uint8_t key_bytes[PCCL_KEY_BYTES];
    pccl_op_key_encode(&frame.key, key_bytes);
    CHECK(memcmp(key_bytes, header + 16, sizeof key_bytes) == 0);
    pccl_op_key key = pccl_op_key_decode(key_bytes);
    CHECK(pccl_op_key_equal(&key, &frame.key) && key.reserved == 0);
}

static void a_flipped_bit_does_not_verify(void)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame = segment_frame();
    pccl_frame_encode(&frame, header);
    CHECK(pccl_frame_verify(header) == NULL);
    for (int bit = 0; bit < 8 * PCCL_FRAME_BYTES; bit++) {
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
        CHECK_MSG(pccl_frame_verify(header) != NULL, "bit %d", bit);
        header[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

/* Every field that has only one allowed value, or few. */
static void what_is_malformed_is_refused(void)
{
    static const int strict[] = {3};
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame out;
    for (int kind = 0; kind < 4; kind++) {
        pccl_frame frame = kind == 0   ? ready_frame()
                           : kind == 1 ? segment_frame()
                           : kind == 2 ? eager_frame()
                                       : credit_frame();
        for (int at = 0; at < 3; at++) {
            pccl_frame_encode(&frame, header);
            header[at] ^= 0x40;
            pccl_frame_set_header_crc(header);
            CHECK_MSG(pccl_frame_verify(header) != NULL, "byte %d", at);
        }
        for (size_t i = 0; i < PCCL_COUNT_OF(strict); i++) {
            pccl_frame_encode(&frame, header);
            header[strict[i]] ^= 0x40;
            CHECK_MSG(pccl_frame_decode(header, &out) != NULL, "byte %d", strict[i]);
        }
    }
    pccl_frame ready = ready_frame();
    ready.shape.slice = ready.shape.last_slice + 1;
    pccl_frame_encode(&ready, header);
    CHECK(pccl_frame_decode(header, &out) != NULL);
    ready = ready_frame();
    ready.shape.step = PCCL_STEP_MAX + 1;
    pccl_frame_encode(&ready, header);
    CHECK(pccl_frame_decode(header, &out) != NULL);
    ready = ready_frame();
    for (int at = 56; at < 60; at++) {
        pccl_frame_encode(&ready, header);
        header[at] = 200;
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    for (int at = 8; at < 16; at++) {
        pccl_frame_encode(&ready, header);
        header[at] = 1;
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    pccl_frame_encode(&ready, header);
    header[71] = PCCL_ALGORITHM_COUNT;
    CHECK(pccl_frame_decode(header, &out) != NULL);
    pccl_frame credit = credit_frame();
    for (int at = 8; at < PCCL_FRAME_BYTES; at++) {
        pccl_frame_encode(&credit, header);
        header[at] = 1;
        CHECK((pccl_frame_decode(header, &out) == NULL) == (at >= 44 && at < 56));
    }
    pccl_frame done = done_frame();
    for (int at = 8; at < PCCL_FRAME_BYTES; at++) {
        pccl_frame_encode(&done, header);
        header[at] = 1;
        CHECK((pccl_frame_decode(header, &out) == NULL) == (at >= 16 && at < 48));
    }
    static const int body_ends[] = {52, 56, 60};
    for (int type = PCCL_FRAME_HELLO; type <= PCCL_FRAME_LOST; type++)
        for (int at = 8; at < PCCL_FRAME_BYTES; at++) {
            pccl_frame frame = connection_frame((enum pccl_frame_type)type);
            pccl_frame_encode(&frame, header);
            header[at] = 1;
            int is_free = at >= 44 && at < body_ends[type - PCCL_FRAME_HELLO];
            CHECK((pccl_frame_decode(header, &out) == NULL) == is_free);
        }
    for (int at = 48; at < 56; at += 4) {
        pccl_frame lost = connection_frame(PCCL_FRAME_LOST);
        pccl_frame_encode(&lost, header);
        memset(header + at, 0, 4);
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    pccl_frame segment = segment_frame();
    for (int at = 72; at < PCCL_FRAME_BYTES; at++) {
        pccl_frame_encode(&segment, header);
        header[at] = 1;
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    segment.payload_bytes = segment.payload_crc = 0; /* bare: a final segment of a reduce-scatter */
    pccl_frame_encode(&segment, header);
    CHECK(pccl_frame_decode(header, &out) == NULL && out.payload_bytes == 0);
    pccl_frame eager = eager_frame();
    eager.payload_bytes = eager.payload_crc = 0;
    pccl_frame_encode(&eager, header);
    CHECK(pccl_frame_decode(header, &out) != NULL);
}

/* Whatever is accepted is encoded to the same bytes again: nothing on the wire goes unlooked at. */
static void accepted_noise_round_trips(void)
{
    int accepted = 0;
    for (int i = 0; i < 200000; i++) {
        uint8_t header[PCCL_FRAME_BYTES];
        uint8_t again[PCCL_FRAME_BYTES];
        pccl_frame frame = i % 8 == 0   ? ready_frame()
                           : i % 8 == 1 ? segment_frame()
                           : i % 8 == 2 ? eager_frame()
                           : i % 8 == 3 ? credit_frame()
                           : i % 8 == 4 ? done_frame()
                                        : connection_frame((enum pccl_frame_type)(PCCL_FRAME_HELLO + i % 8 - 5));
        pccl_frame_encode(&frame, header);
        for (int k = random_byte() % 4; k >= 0; k--)
            header[random_byte() % PCCL_FRAME_BYTES] = (uint8_t)(random_byte() & random_byte());
        pccl_frame_set_header_crc(header);
        if (pccl_frame_verify(header) != NULL || pccl_frame_decode(header, &frame) != NULL)
            continue;
        accepted++;
        pccl_frame_encode(&frame, again);
        CHECK(memcmp(header, again, sizeof header) == 0);
    }
    CHECK(accepted > 1000);
}

static void every_shape_field_counts(void)
{
    pccl_frame frame = ready_frame();
    for (size_t at = 0; at < sizeof(pccl_op_shape); at++) {
        pccl_op_shape other = frame.shape;
        ((uint8_t *)&other)[at] ^= 1;
        CHECK(!pccl_op_shape_equal(&frame.shape, &other));
    }
    for (size_t at = 0; at < offsetof(pccl_op_key, reserved); at++) {
        pccl_op_key other = frame.key;
        ((uint8_t *)&other)[at] ^= 1;
        CHECK(!pccl_op_key_equal(&frame.key, &other));
    }
}

int main(void)
{
    RUN(what_is_encoded_is_decoded);
    RUN(done_frames_list_keys);
    RUN(the_layout_is_as_documented);
    RUN(a_flipped_bit_does_not_verify);
    RUN(what_is_malformed_is_refused);
    RUN(accepted_noise_round_trips);
    RUN(every_shape_field_counts);
    return check_summary();
}
