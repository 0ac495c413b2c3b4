#include "frame.h"

#include "crc32c.h"

#include <string.h>

const char pccl_out_of_memory[] = "out of memory";
const char pccl_op_disagreement[] = "another op by the same name";

enum {
    AT_MAGIC = 0,
    AT_VERSION = 2,
    AT_TYPE = 3,
    AT_RECEIVED_FRAMES = 4,
    AT_PAYLOAD_BYTES = 8,
    AT_PAYLOAD_CRC = 12,
    AT_KEY = 16,
    AT_HEADER_CRC = AT_KEY + PCCL_KEY_BYTES,
    AT_BODY = 48,
    BODY_BYTES = PCCL_FRAME_BYTES - 48
};

static void ready_encode(const pccl_op_shape *shape, uint8_t *body)
{
    pccl_put_u64(body, shape->count);
    body[8] = shape->dtype;
    body[9] = (uint8_t)(shape->reduce_op | shape->slice << 4);
    body[10] = (uint8_t)(shape->quantization | shape->last_slice << 4);
    body[11] = shape->quantized_dtype;
    pccl_put_u32(body + 12, pccl_op_shape_names_root(shape) ? shape->root : shape->quantization_block);
    pccl_put_u32(body + 16, shape->segment_bytes);
    pccl_put_u32(body + 20, shape->world_size | (uint32_t)(shape->algorithm | shape->collective << 4) << 24);
    pccl_put_u64(body + 24, shape->step);
    pccl_put_u64(body + 32, shape->dimensions);
}

static const char *ready_decode(const uint8_t *body, pccl_frame *frame)
{
    pccl_op_shape *shape = &frame->shape;
    shape->count = pccl_get_u64(body);
    shape->dtype = body[8];
    shape->reduce_op = body[9] & 15;
    shape->slice = body[9] >> 4;
    shape->quantization = body[10] & 15;
    shape->last_slice = body[10] >> 4;
    shape->quantized_dtype = body[11];
    shape->segment_bytes = pccl_get_u32(body + 16);
    shape->world_size = pccl_get_u32(body + 20) & 0xffffff;
    shape->algorithm = body[23] & 15;
    shape->collective = body[23] >> 4;
    shape->step = pccl_get_u64(body + 24);
    shape->dimensions = pccl_get_u64(body + 32);
    *(pccl_op_shape_names_root(shape) ? &shape->root : &shape->quantization_block) = pccl_get_u32(body + 12);
    if (shape->dtype >= PCCL_DTYPE_COUNT || shape->reduce_op >= PCCL_REDUCE_OP_COUNT ||
        shape->quantization >= PCCL_QUANT_COUNT ||
        (shape->quantized_dtype >= PCCL_DTYPE_COUNT &&
            (shape->quantized_dtype < PCCL_CODE_UINT4 || shape->quantized_dtype >= PCCL_CODE_END)) ||
        shape->algorithm >= PCCL_ALGORITHM_COUNT || shape->collective >= PCCL_COLLECTIVE_COUNT)
        return "unknown dtype, reduce op, quantization, algorithm or collective";
    if (shape->slice > shape->last_slice)
        return "no such slice";
    if (shape->step > PCCL_STEP_MAX)
        return "no such step";
    if (frame->type == PCCL_FRAME_READY && frame->payload_bytes != 0)
        return "payload after a READY frame";
    if (frame->type == PCCL_FRAME_EAGER && frame->payload_bytes == 0)
        return "empty segment";
    return NULL;
}

static const char *segment_decode(const uint8_t *body, pccl_frame *frame)
{
    static const uint8_t zeros[BODY_BYTES - 24];
    frame->chunk = pccl_get_u32(body);
    frame->segment = pccl_get_u32(body + 4);
    frame->hop = pccl_get_u32(body + 8);
    frame->destination = pccl_get_u32(body + 12);
    frame->part_elements = pccl_get_u64(body + 16);
    if (memcmp(body + 24, zeros, sizeof zeros) != 0)
        return "reserved bytes in use";
    return NULL;
}

/* Checks a frame without op and payload, whose body ends with `reserved` reserved bytes. */
static const char *reserved_check(const uint8_t *body, const pccl_frame *frame, size_t reserved_bytes)
{
    static const uint8_t zeros[BODY_BYTES];
    static const pccl_op_key no_key;
    if (memcmp(body + BODY_BYTES - reserved_bytes, zeros, reserved_bytes) != 0 ||
        !pccl_op_key_equal(&frame->key, &no_key))
        return "reserved bytes in use";
    if (frame->payload_bytes != 0)
        return "payload after a frame without op";
    return NULL;
}

static const char *credit_decode(const uint8_t *body, pccl_frame *frame)
{
    frame->eager_bytes = pccl_get_u64(body);
    return reserved_check(body, frame, BODY_BYTES - 8);
}

static const char *hello_decode(const uint8_t *body, pccl_frame *frame)
{
    frame->connection = pccl_get_u32(body);
    return frame->connection == 0 ? "no connection number" : reserved_check(body, frame, BODY_BYTES - 4);
}

static const char *ack_decode(const uint8_t *body, pccl_frame *frame)
{
    frame->received_bytes = pccl_get_u64(body);
    return reserved_check(body, frame, BODY_BYTES - 8);
}

static const char *lost_decode(const uint8_t *body, pccl_frame *frame)
{
    frame->connection = pccl_get_u32(body);
    frame->peer_connection = pccl_get_u32(body + 4);
    frame->frames = pccl_get_u32(body + 8);
    if (frame->connection == 0 || frame->peer_connection == 0)
        return "no connection number";
    return reserved_check(body, frame, BODY_BYTES - 12);
}

static const char *done_decode(const uint8_t *body, const pccl_frame *frame)
{
    static const uint8_t zeros[BODY_BYTES];
    if (memcmp(body, zeros, sizeof zeros) != 0)
        return "reserved bytes in use";
    if (frame->payload_bytes % PCCL_KEY_BYTES != 0 || frame->payload_bytes > PCCL_DONE_PAYLOAD_MAX)
        return "not the keys of a DONE frame";
    return NULL;
}

static const char *passed_decode(const uint8_t *body, pccl_frame *frame)
{
    static const uint8_t zeros[BODY_BYTES - 16];
    frame->passed_bytes[0] = pccl_get_u64(body);
    frame->passed_bytes[1] = pccl_get_u64(body + 8);
    if (memcmp(body + 16, zeros, sizeof zeros) != 0)
        return "reserved bytes in use";
    return frame->payload_bytes == 0 ? NULL : "payload after a PASSED frame";
}

static uint32_t header_crc(const uint8_t *header)
{
    uint32_t crc = pccl_crc32c(0, header, AT_HEADER_CRC);
    return pccl_crc32c(crc, header + AT_BODY, PCCL_FRAME_BYTES - AT_BODY);
}

void pccl_frame_set_header_crc(uint8_t *header) { pccl_put_u32(header + AT_HEADER_CRC, header_crc(header)); }

void pccl_frame_encode(const pccl_frame *frame, uint8_t *header)
{
    memset(header, 0, PCCL_FRAME_BYTES);
    pccl_put_u16(header + AT_MAGIC, PCCL_FRAME_MAGIC);
    header[AT_VERSION] = PCCL_FRAME_VERSION;
    header[AT_TYPE] = (uint8_t)frame->type;
    pccl_put_u32(header + AT_RECEIVED_FRAMES, frame->received_frames);
    pccl_put_u32(header + AT_PAYLOAD_BYTES, frame->payload_bytes);
    pccl_put_u32(header + AT_PAYLOAD_CRC, frame->payload_crc);
    pccl_op_key_encode(&frame->key, header + AT_KEY);
    switch (frame->type) {
    case PCCL_FRAME_READY:
    case PCCL_FRAME_EAGER: ready_encode(&frame->shape, header + AT_BODY); break;
    case PCCL_FRAME_SEGMENT:
        pccl_put_u32(header + AT_BODY, frame->chunk);
        pccl_put_u32(header + AT_BODY + 4, frame->segment);
        pccl_put_u32(header + AT_BODY + 8, frame->hop);
        pccl_put_u32(header + AT_BODY + 12, frame->destination);
        pccl_put_u64(header + AT_BODY + 16, frame->part_elements);
        break;
    case PCCL_FRAME_CREDIT: pccl_put_u64(header + AT_BODY, frame->eager_bytes); break;
    case PCCL_FRAME_HELLO: pccl_put_u32(header + AT_BODY, frame->connection); break;
    case PCCL_FRAME_ACK: pccl_put_u64(header + AT_BODY, frame->received_bytes); break;
    case PCCL_FRAME_LOST:
        pccl_put_u32(header + AT_BODY, frame->connection);
        pccl_put_u32(header + AT_BODY + 4, frame->peer_connection);
        pccl_put_u32(header + AT_BODY + 8, frame->frames);
        break;
    case PCCL_FRAME_DONE: break;
    case PCCL_FRAME_PASSED:
        pccl_put_u64(header + AT_BODY, frame->passed_bytes[0]);
        pccl_put_u64(header + AT_BODY + 8, frame->passed_bytes[1]);
        break;
    }
    pccl_frame_set_header_crc(header);
}

const char *pccl_frame_verify(const uint8_t *header)
{
    if (pccl_get_u16(header + AT_MAGIC) != PCCL_FRAME_MAGIC)
        return "not a pccl frame";
    if (header[AT_VERSION] != PCCL_FRAME_VERSION)
        return "unknown frame version";
    if (pccl_get_u32(header + AT_HEADER_CRC) != header_crc(header))
        return "wrong header checksum";
    return NULL;
}

const char *pccl_frame_decode(const uint8_t *header, pccl_frame *frame)
{
    memset(frame, 0, sizeof *frame);
    frame->received_frames = pccl_get_u32(header + AT_RECEIVED_FRAMES);
    frame->payload_bytes = pccl_get_u32(header + AT_PAYLOAD_BYTES);
    frame->payload_crc = pccl_get_u32(header + AT_PAYLOAD_CRC);
    frame->key = pccl_op_key_decode(header + AT_KEY);
    if (frame->payload_bytes == 0 && frame->payload_crc != 0)
        return "a checksum of nothing";
    switch (header[AT_TYPE]) {
    case PCCL_FRAME_READY:
    case PCCL_FRAME_EAGER:
        frame->type = (enum pccl_frame_type)header[AT_TYPE];
        return ready_decode(header + AT_BODY, frame);
    case PCCL_FRAME_SEGMENT: frame->type = PCCL_FRAME_SEGMENT; return segment_decode(header + AT_BODY, frame);
    case PCCL_FRAME_CREDIT: frame->type = PCCL_FRAME_CREDIT; return credit_decode(header + AT_BODY, frame);
    case PCCL_FRAME_HELLO: frame->type = PCCL_FRAME_HELLO; return hello_decode(header + AT_BODY, frame);
    case PCCL_FRAME_ACK: frame->type = PCCL_FRAME_ACK; return ack_decode(header + AT_BODY, frame);
    case PCCL_FRAME_LOST: frame->type = PCCL_FRAME_LOST; return lost_decode(header + AT_BODY, frame);
    case PCCL_FRAME_DONE: frame->type = PCCL_FRAME_DONE; return done_decode(header + AT_BODY, frame);
    case PCCL_FRAME_PASSED: frame->type = PCCL_FRAME_PASSED; return passed_decode(header + AT_BODY, frame);
    default: return "unknown frame type";
    }
}

void pccl_op_key_encode(const pccl_op_key *key, uint8_t *bytes)
{
    pccl_put_u64(bytes, key->epoch);
    pccl_put_u64(bytes + 8, key->tag);
    pccl_put_u64(bytes + 16, key->sequence);
    pccl_put_u32(bytes + 24, key->group);
}

pccl_op_key pccl_op_key_decode(const uint8_t *bytes)
{
    pccl_op_key key;
    memset(&key, 0, sizeof key);
    key.epoch = pccl_get_u64(bytes);
    key.tag = pccl_get_u64(bytes + 8);
    key.sequence = pccl_get_u64(bytes + 16);
    key.group = pccl_get_u32(bytes + 24);
    return key;
}

int pccl_op_key_equal(const pccl_op_key *a, const pccl_op_key *b)
{
    return a->epoch == b->epoch && a->tag == b->tag && a->sequence == b->sequence && a->group == b->group;
}

int pccl_op_shape_equal(const pccl_op_shape *a, const pccl_op_shape *b)
{
    return a->count == b->count && a->dtype == b->dtype && a->reduce_op == b->reduce_op &&
           a->quantization == b->quantization && a->quantized_dtype == b->quantized_dtype &&
           a->quantization_block == b->quantization_block && a->segment_bytes == b->segment_bytes &&
           a->world_size == b->world_size && a->algorithm == b->algorithm && a->slice == b->slice &&
           a->last_slice == b->last_slice && a->collective == b->collective && a->root == b->root &&
           a->step == b->step && a->dimensions == b->dimensions;
}
