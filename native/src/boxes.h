/* boxes.h: the inside of pccl_native.h's pccl_boxes, which seal and open the stream of one connection.
 *
 *     box   bytes u16   65535 - bytes u16   ciphertext of so many bytes   tag, PCCL_CIPHER_TAG_BYTES
 *
 * Integers are little-endian; the second one shows a damaged length at once, which could else be waited for in vain.
 * A box is one message of a cipher (cipher.h), its length authenticated with it, so boxes open only whole, unchanged
 * and in the order in which they were sealed; nothing of a box is given out before that. Where boxes begin has nothing
 * to do with what is in them.
 *
 * Out, sealed bytes wait in a buffer until the socket has taken them, so nothing is ever sealed twice, and what was
 * sealed may be changed afterwards. In, boxes are opened where they were received. Both buffers are allocated with the
 * boxes: PCCL_BOXES_BYTES in all, and nothing after that. */
#ifndef PCCL_BOXES_H
#define PCCL_BOXES_H

#include "cipher.h"
#include "pccl_native.h"

#include <sys/uio.h>

enum {
    PCCL_BOX_LENGTH_BYTES = 4,
    PCCL_BOX_OVERHEAD_BYTES = PCCL_BOX_LENGTH_BYTES + PCCL_CIPHER_TAG_BYTES,
    PCCL_BOX_BYTES_MAX = 60 << 10, /* of what is in it: a u16, and every box costs OpenSSL half a microsecond */
    PCCL_BOXES_OUT = 2,
    PCCL_BOXES_IN = 3,
    PCCL_BOXES_BYTES = (PCCL_BOXES_OUT + PCCL_BOXES_IN) * (PCCL_BOX_BYTES_MAX + PCCL_BOX_OVERHEAD_BYTES)
};

/* pccl_boxes_seal of what lies in pieces, none of them empty. */
size_t pccl_boxes_seal_pieces(pccl_boxes *boxes, const struct iovec *pieces, int count);

#endif
