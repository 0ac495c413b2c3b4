/* frame.h: what travels on a connection.
 *
 * A connection carries frames and nothing else; a frame is a header of PCCL_FRAME_BYTES and payload_bytes of
 * payload. Integers are little-endian, payload is as the op's elements are in memory.
 *
 *     0  magic u16   2 version u8   3 type u8   4 flags u16   6 reserved u16
 *     8  payload_bytes u32         12 payload_crc u32
 *    16  epoch u64   24 tag u64    32 sequence u64            40 group u32   44 header_crc u32
 *    48  24 bytes that depend on the type
 *          READY    count u64, dtype u8, reduce_op u8, quantization u8, quantized_dtype u8,
 *                   quantization_block u32, segment_bytes u32, world_size u32
 *          SEGMENT  chunk u32, segment u32, hop u32, reserved 12 bytes
 *
 * READY has no payload: the sender has submitted the op of this key and shape, and payload for it may come.
 * SEGMENT carries one segment on one hop (ring_plan.h).
 *
 * flags, the two CRCs and what is reserved are 0 in version 1 and refused otherwise, so that a later version
 * can give them a meaning. */
#ifndef PCCL_FRAME_H
#define PCCL_FRAME_H

#include "base.h"
#include "pccl_native.h"

enum { PCCL_FRAME_BYTES = 72, PCCL_FRAME_MAGIC = 0x4350, PCCL_FRAME_VERSION = 1 };

enum pccl_frame_type { PCCL_FRAME_READY = 1, PCCL_FRAME_SEGMENT = 2 };

typedef struct {
    enum pccl_frame_type type;
    uint32_t payload_bytes;
    pccl_op_key key;
    pccl_op_shape shape; /* READY */
    uint32_t chunk; /* SEGMENT */
    uint32_t segment; /* within its chunk */
    uint32_t hop;
} pccl_frame;

void pccl_frame_encode(const pccl_frame *frame, uint8_t *header);

/* NULL, or what is wrong with the header: it comes from the network and may hold anything. What is right was
 * checked only as far as a header can be without its op. */
const char *pccl_frame_decode(const uint8_t *header, pccl_frame *frame);

int pccl_op_key_equal(const pccl_op_key *a, const pccl_op_key *b);
int pccl_op_shape_equal(const pccl_op_shape *a, const pccl_op_shape *b);

#endif
