#include "check.h"
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
    frame.shape.world_size = 0x71727374;
    return frame;
}

static pccl_frame segment_frame(void)
{
    pccl_frame frame = ready_frame();
    frame.type = PCCL_FRAME_SEGMENT;
    memset(&frame.shape, 0, sizeof frame.shape);
    frame.payload_bytes = 0xfedcba98;
    frame.chunk = 0x01020304;
    frame.segment = 0x11121314;
    frame.hop = 0x21222324;
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
    CHECK(out.type == in.type && out.payload_bytes == in.payload_bytes);
    CHECK(pccl_op_key_equal(&out.key, &in.key));
    CHECK(out.chunk == in.chunk && out.segment == in.segment && out.hop == in.hop);
}

static void the_layout_is_as_documented(void)
{
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame frame = segment_frame();
    pccl_frame_encode(&frame, header);
    CHECK(memcmp(header, "PC\x01\x02\0\0\0\0\x98\xba\xdc\xfe\0\0\0\0", 16) == 0);
    CHECK(memcmp(header + 16, "\x08\x07\x06\x05\x04\x03\x02\x01", 8) == 0);
    CHECK(memcmp(header + 40, "\x34\x33\x32\x31\0\0\0\0", 8) == 0);
    CHECK(memcmp(header + 48, "\x04\x03\x02\x01\x14\x13\x12\x11\x24\x23\x22\x21", 12) == 0);
}

/* Every field that has only one allowed value, or few. */
static void what_is_malformed_is_refused(void)
{
    static const int strict[] = {0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 44, 45, 46, 47};
    uint8_t header[PCCL_FRAME_BYTES];
    pccl_frame out;
    for (int kind = 0; kind < 2; kind++) {
        pccl_frame frame = kind == 0 ? ready_frame() : segment_frame();
        for (size_t i = 0; i < PCCL_COUNT_OF(strict); i++) {
            pccl_frame_encode(&frame, header);
            header[strict[i]] ^= 0x40;
            CHECK_MSG(pccl_frame_decode(header, &out) != NULL, "byte %d", strict[i]);
        }
    }
    pccl_frame ready = ready_frame();
    for (int at = 56; at < 60; at++) {
        pccl_frame_encode(&ready, header);
        header[at] = 200;
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    pccl_frame_encode(&ready, header);
    header[8] = 1;
    CHECK(pccl_frame_decode(header, &out) != NULL);
    pccl_frame segment = segment_frame();
    for (int at = 60; at < PCCL_FRAME_BYTES; at++) {
        pccl_frame_encode(&segment, header);
        header[at] = 1;
        CHECK(pccl_frame_decode(header, &out) != NULL);
    }
    segment.payload_bytes = 0;
    pccl_frame_encode(&segment, header);
    CHECK(pccl_frame_decode(header, &out) != NULL);
}

/* Whatever is accepted is encoded to the same bytes again: nothing on the wire goes unlooked at. */
static void accepted_noise_round_trips(void)
{
    int accepted = 0;
    for (int i = 0; i < 200000; i++) {
        uint8_t header[PCCL_FRAME_BYTES];
        uint8_t again[PCCL_FRAME_BYTES];
        pccl_frame frame = i & 1 ? ready_frame() : segment_frame();
        pccl_frame_encode(&frame, header);
        for (int k = random_byte() % 4; k >= 0; k--)
            header[random_byte() % PCCL_FRAME_BYTES] = (uint8_t)(random_byte() & random_byte());
        if (pccl_frame_decode(header, &frame) != NULL)
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
    RUN(the_layout_is_as_documented);
    RUN(what_is_malformed_is_refused);
    RUN(accepted_noise_round_trips);
    RUN(every_shape_field_counts);
    return check_summary();
}
