#include "cipher.h"

#include "base.h"

#include "libcrypto.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NONCE_BYTES = 12, EVP_CTRL_AEAD_GET_TAG = 0x10, EVP_CTRL_AEAD_SET_TAG = 0x11 };

struct pccl_cipher {
    const pccl_libcrypto *crypto;
    void *context;
    int is_opening;
    int is_broken;
    uint64_t messages; /* under this key */
    uint64_t bytes;
    uint64_t rekey_bytes;
    uint8_t key[PCCL_CIPHER_KEY_BYTES];
};

pccl_cipher *pccl_cipher_create(
    const uint8_t *key, enum pccl_cipher_direction direction, char *error, size_t error_bytes)
{
    const pccl_libcrypto *crypto = pccl_libcrypto_get(error, error_bytes);
    if (crypto == NULL)
        return NULL;
    pccl_cipher *cipher = calloc(1, sizeof *cipher);
    if (cipher == NULL || (cipher->context = crypto->context_new()) == NULL) {
        snprintf(error, error_bytes, "out of memory for a cipher");
        free(cipher);
        return NULL;
    }
    cipher->crypto = crypto;
    cipher->is_opening = direction == PCCL_CIPHER_OPEN;
    cipher->rekey_bytes = PCCL_CIPHER_REKEY_BYTES;
    memcpy(cipher->key, key, sizeof cipher->key);
    if (crypto->init(cipher->context, crypto->aes_256_gcm(), NULL, key, NULL, !cipher->is_opening) != 1) {
        snprintf(error, error_bytes, "OpenSSL refuses AES-256-GCM, perhaps by its configuration");
        pccl_cipher_free(cipher);
        return NULL;
    }
    return cipher;
}

void pccl_cipher_free(pccl_cipher *cipher)
{
    if (cipher == NULL)
        return;
    cipher->crypto->context_free(cipher->context);
    cipher->crypto->cleanse(cipher->key, sizeof cipher->key);
    free(cipher);
}

void pccl_cipher_set_rekey_bytes(pccl_cipher *cipher, uint64_t bytes) { cipher->rekey_bytes = bytes; }

/* One message under the present key; `is_sealing` differs from the cipher's own direction only for a new key. */
static int pass(pccl_cipher *cipher, int is_sealing, const uint8_t *nonce, const void *associated,
    size_t associated_bytes, const struct iovec *pieces, int count, uint8_t *to, uint8_t *tag)
{
    static const unsigned char nothing;
    unsigned char rest[16];
    int done = 0;
    size_t bytes = 0;
    PCCL_ASSERT(associated_bytes <= INT_MAX);
    if (cipher->crypto->init(cipher->context, NULL, NULL, NULL, nonce, is_sealing) != 1)
        return -1;
    if (associated_bytes > 0 &&
        cipher->crypto->update(cipher->context, NULL, &done, associated, (int)associated_bytes) != 1)
        return -1;
    for (int i = 0; i < count; i++) {
        size_t piece_bytes = pieces[i].iov_len;
        PCCL_ASSERT(piece_bytes <= INT_MAX);
        if (piece_bytes > 0 &&
            (cipher->crypto->update(cipher->context, to + bytes, &done, pieces[i].iov_base, (int)piece_bytes) != 1 ||
                done != (int)piece_bytes))
            return -1;
        bytes += piece_bytes;
    }
    if (bytes == 0 && associated_bytes == 0 && cipher->crypto->update(cipher->context, NULL, &done, &nothing, 0) != 1)
        return -1;
    if (!is_sealing &&
        cipher->crypto->context_ctrl(cipher->context, EVP_CTRL_AEAD_SET_TAG, PCCL_CIPHER_TAG_BYTES, tag) != 1)
        return -1;
    if (cipher->crypto->final(cipher->context, rest, &done) != 1)
        return -1;
    if (is_sealing &&
        cipher->crypto->context_ctrl(cipher->context, EVP_CTRL_AEAD_GET_TAG, PCCL_CIPHER_TAG_BYTES, tag) != 1)
        return -1;
    return 0;
}

static struct iovec piece_of(const void *bytes, size_t count)
{
    struct iovec piece;
    piece.iov_base = (void *)(uintptr_t)bytes;
    piece.iov_len = count;
    return piece;
}

static int take_next_key(pccl_cipher *cipher)
{
    static const uint8_t zeros[PCCL_CIPHER_KEY_BYTES];
    uint8_t nonce[NONCE_BYTES], tag[PCCL_CIPHER_TAG_BYTES];
    struct iovec piece = piece_of(zeros, sizeof zeros);
    memset(nonce, 0xff, sizeof nonce);
    if (pass(cipher, 1, nonce, NULL, 0, &piece, 1, cipher->key, tag) != 0 ||
        cipher->crypto->init(cipher->context, NULL, NULL, cipher->key, NULL, !cipher->is_opening) != 1)
        return -1;
    cipher->messages = 0;
    cipher->bytes = 0;
    return 0;
}

static int next_message(pccl_cipher *cipher, const void *associated, size_t associated_bytes,
    const struct iovec *pieces, int count, void *to, uint8_t *tag)
{
    uint8_t nonce[NONCE_BYTES] = {0};
    if (cipher->is_broken)
        return -1;
    for (int i = 0; i < 8; i++)
        nonce[4 + i] = (uint8_t)(cipher->messages >> (56 - 8 * i));
    cipher->messages++;
    for (int i = 0; i < count; i++)
        cipher->bytes += pieces[i].iov_len;
    cipher->bytes += associated_bytes;
    if (pass(cipher, !cipher->is_opening, nonce, associated, associated_bytes, pieces, count, to, tag) != 0 ||
        (cipher->bytes >= cipher->rekey_bytes && take_next_key(cipher) != 0)) {
        cipher->is_broken = 1;
        return -1;
    }
    return 0;
}

int pccl_cipher_seal(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *plain,
    size_t bytes, void *sealed, uint8_t *tag)
{
    struct iovec piece = piece_of(plain, bytes);
    return pccl_cipher_seal_pieces(cipher, associated, associated_bytes, &piece, 1, sealed, tag);
}

int pccl_cipher_seal_pieces(pccl_cipher *cipher, const void *associated, size_t associated_bytes,
    const struct iovec *pieces, int count, void *sealed, uint8_t *tag)
{
    PCCL_ASSERT(!cipher->is_opening && count <= PCCL_CIPHER_PIECES_MAX);
    return next_message(cipher, associated, associated_bytes, pieces, count, sealed, tag);
}

int pccl_cipher_open(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *sealed,
    size_t bytes, void *plain, const uint8_t *tag)
{
    uint8_t expected[PCCL_CIPHER_TAG_BYTES];
    struct iovec piece = piece_of(sealed, bytes);
    PCCL_ASSERT(cipher->is_opening);
    memcpy(expected, tag, sizeof expected);
    return next_message(cipher, associated, associated_bytes, &piece, 1, plain, expected);
}
