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
    int is_decrypting;
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
    cipher->is_decrypting = direction == PCCL_CIPHER_DECRYPT;
    cipher->rekey_bytes = PCCL_CIPHER_REKEY_BYTES;
    memcpy(cipher->key, key, sizeof cipher->key);
    if (crypto->init(cipher->context, crypto->aes_256_gcm(), NULL, key, NULL, !cipher->is_decrypting) != 1) {
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

/* One message under the present key; `is_encrypting` differs from the cipher's own direction only for a new key. */
static int pass(pccl_cipher *cipher, int is_encrypting, const uint8_t *nonce, const void *associated,
    size_t associated_bytes, const struct iovec *iov, int count, uint8_t *to, uint8_t *tag)
{
    static const unsigned char nothing;
    unsigned char rest[16];
    int done = 0;
    size_t bytes = 0;
    PCCL_ASSERT(associated_bytes <= INT_MAX);
    if (cipher->crypto->init(cipher->context, NULL, NULL, NULL, nonce, is_encrypting) != 1)
        return -1;
    if (associated_bytes > 0 &&
        cipher->crypto->update(cipher->context, NULL, &done, associated, (int)associated_bytes) != 1)
        return -1;
    for (int i = 0; i < count; i++) {
        size_t part_bytes = iov[i].iov_len;
        PCCL_ASSERT(part_bytes <= INT_MAX);
        if (part_bytes > 0 &&
            (cipher->crypto->update(cipher->context, to + bytes, &done, iov[i].iov_base, (int)part_bytes) != 1 ||
                done != (int)part_bytes))
            return -1;
        bytes += part_bytes;
    }
    if (bytes == 0 && associated_bytes == 0 && cipher->crypto->update(cipher->context, NULL, &done, &nothing, 0) != 1)
        return -1;
    if (!is_encrypting &&
        cipher->crypto->context_ctrl(cipher->context, EVP_CTRL_AEAD_SET_TAG, PCCL_CIPHER_TAG_BYTES, tag) != 1)
        return -1;
    if (cipher->crypto->final(cipher->context, rest, &done) != 1)
        return -1;
    if (is_encrypting &&
        cipher->crypto->context_ctrl(cipher->context, EVP_CTRL_AEAD_GET_TAG, PCCL_CIPHER_TAG_BYTES, tag) != 1)
        return -1;
    return 0;
}

static struct iovec iov_of(const void *bytes, size_t count)
{
    struct iovec part;
    part.iov_base = (void *)(uintptr_t)bytes;
    part.iov_len = count;
    return part;
}

static int take_next_key(pccl_cipher *cipher)
{
    static const uint8_t zeros[PCCL_CIPHER_KEY_BYTES];
    uint8_t nonce[NONCE_BYTES], tag[PCCL_CIPHER_TAG_BYTES];
    struct iovec part = iov_of(zeros, sizeof zeros);
    memset(nonce, 0xff, sizeof nonce);
    if (pass(cipher, 1, nonce, NULL, 0, &part, 1, cipher->key, tag) != 0 ||
        cipher->crypto->init(cipher->context, NULL, NULL, cipher->key, NULL, !cipher->is_decrypting) != 1)
        return -1;
    cipher->messages = 0;
    cipher->bytes = 0;
    return 0;
}

static int next_message(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const struct iovec *iov,
    int count, void *to, uint8_t *tag)
{
    uint8_t nonce[NONCE_BYTES] = {0};
    if (cipher->is_broken)
        return -1;
    for (int i = 0; i < 8; i++)
        nonce[4 + i] = (uint8_t)(cipher->messages >> (56 - 8 * i));
    cipher->messages++;
    for (int i = 0; i < count; i++)
        cipher->bytes += iov[i].iov_len;
    cipher->bytes += associated_bytes;
    if (pass(cipher, !cipher->is_decrypting, nonce, associated, associated_bytes, iov, count, to, tag) != 0 ||
        (cipher->bytes >= cipher->rekey_bytes && take_next_key(cipher) != 0)) {
        cipher->is_broken = 1;
        return -1;
    }
    return 0;
}

int pccl_cipher_encrypt(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *plain,
    size_t bytes, void *encrypted, uint8_t *tag)
{
    struct iovec part = iov_of(plain, bytes);
    return pccl_cipher_encrypt_iov(cipher, associated, associated_bytes, &part, 1, encrypted, tag);
}

int pccl_cipher_encrypt_iov(pccl_cipher *cipher, const void *associated, size_t associated_bytes,
    const struct iovec *iov, int count, void *encrypted, uint8_t *tag)
{
    PCCL_ASSERT(!cipher->is_decrypting && count <= PCCL_CIPHER_IOV_MAX);
    return next_message(cipher, associated, associated_bytes, iov, count, encrypted, tag);
}

int pccl_cipher_decrypt(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *encrypted,
    size_t bytes, void *plain, const uint8_t *tag)
{
    uint8_t expected[PCCL_CIPHER_TAG_BYTES];
    struct iovec part = iov_of(encrypted, bytes);
    PCCL_ASSERT(cipher->is_decrypting);
    memcpy(expected, tag, sizeof expected);
    return next_message(cipher, associated, associated_bytes, &part, 1, plain, expected);
}
