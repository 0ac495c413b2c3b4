/* frame.h: what travels on a connection.
 *
 * A connection carries frames and nothing else; a frame is a header of PCCL_FRAME_BYTES and payload_bytes of
 * payload. Integers are little-endian, payload is as the op's elements are in memory.
 *
 *     0  magic u16   2 version u8   3 type u8   4 received_frames u32
 *     8  payload_bytes u32         12 payload_crc u32
 *    16  epoch u64   24 tag u64    32 sequence u64            40 group u32   44 header_crc u32
 *    48  40 bytes that depend on the type
 *          READY    count u64, dtype u8, reduce_op u4, slice u4, quantization u4, last_slice u4, quantized_dtype u8,
 *                   quantization_block or root u32, segment_bytes u32, world_size u24, algorithm u4,
 *                   collective u4, step u64, dimensions u64
 *          EAGER    as READY
 *          SEGMENT  chunk u32, segment u32, hop u32, destination u32, part_elements u64, reserved 16 bytes
 *          CREDIT   eager_bytes u64, reserved 32 bytes
 *          HELLO    connection u32, reserved 36 bytes
 *          ACK      received_bytes u64, reserved 32 bytes
 *          LOST     connection u32, peer_connection u32, frames u32, reserved 28 bytes
 *          DONE     reserved 40 bytes
 *          PASSED   passed_bytes u64 for each of two classes, reserved 24 bytes
 *
 * READY has no payload: the sender has submitted the op of this key and shape, and payload for it may come. Its count
 * is that of the op; for an all-to-all it is that of the part which goes from its sender to its receiver, and in the
 * place of the root is the lower half of the count of the part which goes the other way.
 * SEGMENT carries one segment on one hop (plans.h); without payload
 * it only says that the segment is final where it ends, or, of an exchange in a ring, that a part is empty. EAGER
 * carries a sender's only segment for this receiver on its first hop, or the first of several one after the other, with
 * the shape, because the receiver may not have submitted the op yet.
 * CREDIT belongs to no op (its key is zero): so much eager payload of this link is no longer buffered, counted
 * from the link's beginning (link.h).
 * DONE says that the sender is done with the op of this key (completion.h), and with those of the keys that its payload
 * is, each as it would be in bytes 16 to 44. What counts frames counts it as one for each key.
 * PASSED says how much of what its receiver has sent for other ranks in an exchange around a ring has been sent on,
 * counted from the op's beginning (op_relay.c).
 *
 * HELLO, ACK and LOST are about connections (conn.h) and belong to no op either. The sender calls this one, or a
 * lost one, `connection`, the receiver calls the latter `peer_connection`. received_frames is how many frames
 * have come on this connection, in all frames but HELLO and ACK, modulo 2^32; received_bytes the same of payload.
 *
 * Both checksums are CRC32C (crc32c.h): that of the payload, 0 where there is none, and that of the header
 * without its own four bytes. What is reserved is 0 in this version and refused otherwise, so that a later
 * version can give it a meaning. */
#ifndef PCCL_FRAME_H
#define PCCL_FRAME_H

#include "base.h"
#include "pccl_native.h"

enum { PCCL_FRAME_BYTES = 88, PCCL_FRAME_MAGIC = 0x4350, PCCL_FRAME_VERSION = 7 };

enum {
    PCCL_KEY_BYTES = 28,
    PCCL_DONE_KEYS_MAX = PCCL_SIZE(64, 8),
    PCCL_DONE_PAYLOAD_MAX = (PCCL_DONE_KEYS_MAX - 1) * PCCL_KEY_BYTES
};

enum pccl_frame_type {
    PCCL_FRAME_READY = 1,
    PCCL_FRAME_SEGMENT = 2,
    PCCL_FRAME_EAGER = 3,
    PCCL_FRAME_CREDIT = 4,
    PCCL_FRAME_HELLO = 5,
    PCCL_FRAME_ACK = 6,
    PCCL_FRAME_LOST = 7,
    PCCL_FRAME_DONE = 8,
    PCCL_FRAME_PASSED = 9
};

/* Returned in the place of a broken rule: none is broken, but there is no memory to buffer what the frame says; or the
 * sender describes the op in another way. */
extern const char pccl_out_of_memory[];
extern const char pccl_op_disagreement[];

typedef struct {
    enum pccl_frame_type type;
    uint32_t payload_bytes;
    uint32_t payload_crc;
    uint8_t has_payload_crc; /* it is known, or never checked (wire.h) */
    uint32_t received_frames;
    pccl_op_key key;
    pccl_op_shape shape; /* READY, EAGER */
    uint64_t eager_bytes; /* CREDIT */
    uint64_t passed_bytes[2]; /* PASSED: of each class */
    uint64_t received_bytes; /* ACK */
    uint32_t connection; /* HELLO, LOST */
    uint32_t peer_connection; /* LOST */
    uint32_t frames; /* LOST: that were received on it */
    uint32_t chunk; /* SEGMENT */
    uint32_t segment; /* within its chunk */
    uint32_t hop;
    uint32_t destination; /* these two of an exchange in a ring, else 0 */
    uint64_t part_elements; /* of the part to which the segment belongs */
} pccl_frame;

void pccl_frame_encode(const pccl_frame *frame, uint8_t *header);

/* Returns NULL if these bytes are a header as it was sent, or else what is wrong: damage on the way, or another version
 * or program at the other end. */
const char *pccl_frame_verify(const uint8_t *header);

/* Decodes a verified header, which comes from the network and may hold anything. Returns NULL, or the rule that it
 * breaks, as far as a header can be checked without its op. */
const char *pccl_frame_decode(const uint8_t *header, pccl_frame *frame);

/* Sets the checksum of the header itself, which makes a changed one verify, for tests. */
void pccl_frame_set_header_crc(uint8_t *header);

/* A key as PCCL_KEY_BYTES, which it is in a header. */
void pccl_op_key_encode(const pccl_op_key *key, uint8_t *bytes);
pccl_op_key pccl_op_key_decode(const uint8_t *bytes);

/* Returns how many keys a DONE frame has. */
static inline uint32_t pccl_frame_keys(const pccl_frame *frame) { return 1 + frame->payload_bytes / PCCL_KEY_BYTES; }

int pccl_op_key_equal(const pccl_op_key *a, const pccl_op_key *b);
int pccl_op_shape_equal(const pccl_op_shape *a, const pccl_op_shape *b);

/* Nonzero if the description has a root, and no quantization. */
static inline int pccl_op_shape_names_root(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_BROADCAST || shape->collective == PCCL_SEND ||
           shape->collective == PCCL_ALL_TO_ALL || shape->collective == PCCL_GATHER ||
           shape->collective == PCCL_SCATTER || shape->collective == PCCL_REDUCE;
}

static inline int pccl_op_shape_reduces(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_ALL_REDUCE || shape->collective == PCCL_REDUCE_SCATTER ||
           shape->collective == PCCL_REDUCE;
}

/* Nonzero if all elements come from one rank, and go to all others. */
static inline int pccl_op_shape_has_root(const pccl_op_shape *shape)
{
    return shape->collective == PCCL_BROADCAST || shape->collective == PCCL_SEND;
}

#endif
