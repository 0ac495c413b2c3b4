#include "boxes.h"

#include "base.h"
#include "libcrypto.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BOX_ALL_BYTES_MAX = PCCL_BOX_BYTES_MAX + PCCL_BOX_OVERHEAD_BYTES };

PCCL_STATIC_ASSERT(sizeof((pccl_link_keys *)0)->tx == PCCL_CIPHER_KEY_BYTES, key_bytes);

struct pccl_boxes {
    pccl_cipher *seal;
    pccl_cipher *open;
    size_t out_begin;
    size_t out_end;
    size_t in_begin;
    size_t in_end;
    uint8_t out[PCCL_BOXES_OUT * BOX_ALL_BYTES_MAX];
    uint8_t in[PCCL_BOXES_IN * BOX_ALL_BYTES_MAX];
};

int pccl_encryption_available(char *error, size_t error_bytes)
{
    uint8_t public_key[PCCL_EXCHANGE_BYTES];
    pccl_exchange *exchange;
    if (pccl_libcrypto_get(error, error_bytes) == NULL)
        return PCCL_E_ENCRYPTION;
    int status = pccl_exchange_create(NULL, public_key, &exchange);
    if (status != 0)
        snprintf(error, error_bytes, "OpenSSL refuses X25519, perhaps by its configuration");
    pccl_exchange_free(exchange);
    return status;
}

int pccl_boxes_create(const pccl_link_keys *keys, pccl_boxes **made)
{
    char error[256];
    *made = NULL;
    if (pccl_libcrypto_get(error, sizeof error) == NULL)
        return PCCL_E_ENCRYPTION;
    pccl_boxes *boxes = calloc(1, sizeof *boxes);
    if (boxes == NULL)
        return PCCL_E_MEMORY;
    boxes->seal = pccl_cipher_create(keys->tx, PCCL_CIPHER_SEAL, error, sizeof error);
    boxes->open = pccl_cipher_create(keys->rx, PCCL_CIPHER_OPEN, error, sizeof error);
    if (boxes->seal == NULL || boxes->open == NULL) {
        pccl_boxes_free(boxes);
        return PCCL_E_ENCRYPTION;
    }
    *made = boxes;
    return 0;
}

void pccl_boxes_free(pccl_boxes *boxes)
{
    if (boxes == NULL)
        return;
    pccl_cipher_free(boxes->seal);
    pccl_cipher_free(boxes->open);
    free(boxes);
}

/* Out */

static size_t pieces_bytes(const struct iovec *pieces, int count)
{
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += pieces[i].iov_len;
    return bytes;
}

/* The first `bytes` of the pieces, `skip` of the first one left out: what they are made of. */
static int pieces_cut(const struct iovec *pieces, size_t skip, size_t bytes, struct iovec *cut)
{
    int count = 0;
    for (; bytes > 0; pieces++, skip = 0) {
        PCCL_ASSERT(count < PCCL_CIPHER_PIECES_MAX);
        cut[count].iov_base = (uint8_t *)pieces->iov_base + skip;
        cut[count].iov_len = pccl_min_size(pieces->iov_len - skip, bytes);
        bytes -= cut[count++].iov_len;
    }
    return count;
}

size_t pccl_boxes_seal_pieces(pccl_boxes *boxes, const struct iovec *pieces, int count)
{
    PCCL_ASSERT(boxes->out_begin == boxes->out_end && count <= PCCL_CIPHER_PIECES_MAX);
    size_t left_bytes = pieces_bytes(pieces, count);
    size_t sealed_bytes = 0;
    size_t skip = 0;
    boxes->out_begin = boxes->out_end = 0;
    for (int i = 0; i < PCCL_BOXES_OUT && left_bytes > 0; i++) {
        struct iovec cut[PCCL_CIPHER_PIECES_MAX];
        size_t bytes = pccl_min_size(left_bytes, PCCL_BOX_BYTES_MAX);
        uint8_t *box = boxes->out + boxes->out_end;
        uint8_t *sealed = box + PCCL_BOX_LENGTH_BYTES;
        pccl_put_u16(box, (uint16_t)bytes);
        pccl_put_u16(box + 2, (uint16_t)~bytes);
        int cut_count = pieces_cut(pieces, skip, bytes, cut);
        if (pccl_cipher_seal_pieces(
                boxes->seal, box, PCCL_BOX_LENGTH_BYTES, cut, cut_count, sealed, sealed + bytes) != 0) {
            boxes->out_end = 0;
            return 0;
        }
        boxes->out_end += bytes + PCCL_BOX_OVERHEAD_BYTES;
        sealed_bytes += bytes;
        left_bytes -= bytes;
        for (skip += bytes; left_bytes > 0 && skip >= pieces->iov_len; pieces++)
            skip -= pieces->iov_len;
    }
    return sealed_bytes;
}

size_t pccl_boxes_seal(pccl_boxes *boxes, const void *plain, size_t bytes)
{
    struct iovec piece;
    piece.iov_base = (void *)(uintptr_t)plain;
    piece.iov_len = bytes;
    return pccl_boxes_seal_pieces(boxes, &piece, 1);
}

const uint8_t *pccl_boxes_out(const pccl_boxes *boxes, size_t *bytes)
{
    *bytes = boxes->out_end - boxes->out_begin;
    return boxes->out + boxes->out_begin;
}

void pccl_boxes_sent(pccl_boxes *boxes, size_t bytes)
{
    PCCL_ASSERT(bytes <= boxes->out_end - boxes->out_begin);
    boxes->out_begin += bytes;
}

/* In */

uint8_t *pccl_boxes_in(pccl_boxes *boxes, size_t *room)
{
    size_t rest_bytes = boxes->in_end - boxes->in_begin;
    if (boxes->in_begin > 0)
        memmove(boxes->in, boxes->in + boxes->in_begin, rest_bytes);
    boxes->in_begin = 0;
    boxes->in_end = rest_bytes;
    *room = sizeof boxes->in - rest_bytes;
    return boxes->in + rest_bytes;
}

void pccl_boxes_received(pccl_boxes *boxes, size_t bytes)
{
    PCCL_ASSERT(bytes <= sizeof boxes->in - boxes->in_end);
    boxes->in_end += bytes;
}

int pccl_boxes_open(pccl_boxes *boxes, const uint8_t **plain, size_t *bytes)
{
    uint8_t *box = boxes->in + boxes->in_begin;
    size_t here_bytes = boxes->in_end - boxes->in_begin;
    if (here_bytes < PCCL_BOX_LENGTH_BYTES)
        return 0;
    size_t box_bytes = pccl_get_u16(box);
    if (box_bytes == 0 || box_bytes > PCCL_BOX_BYTES_MAX || pccl_get_u16(box + 2) != (uint16_t)~box_bytes)
        return PCCL_E_ENCRYPTION;
    if (here_bytes < box_bytes + PCCL_BOX_OVERHEAD_BYTES)
        return 0;
    uint8_t *sealed = box + PCCL_BOX_LENGTH_BYTES;
    if (pccl_cipher_open(
            boxes->open, box, PCCL_BOX_LENGTH_BYTES, sealed, box_bytes, sealed, sealed + box_bytes) != 0)
        return PCCL_E_ENCRYPTION;
    boxes->in_begin += box_bytes + PCCL_BOX_OVERHEAD_BYTES;
    *plain = sealed;
    *bytes = box_bytes;
    return 1;
}
