/* crypto.h: OpenSSL at run time, key exchange, and ciphers.
 *
 * A cipher encrypts and authenticates what travels one way on one connection: AES-256-GCM.
 *
 * Both ends make a cipher from the same key, one to encrypt and one to decrypt, and use it message by message in the
 * same order, as a TCP stream keeps it. A key must serve one direction of one connection only: the nonce is the number
 * of the message under its key (4 zero bytes, then 8 bytes big-endian). After PCCL_CIPHER_REKEY_BYTES both ends replace
 * the key by the encryption of 32 zero bytes under the nonce of all ones, and count from 0 again: that bounds what an
 * attacker learns from much data under one key, and an earlier key cannot be found from a later one.
 *
 * `associated` bytes (a header) are authenticated, not encrypted. A message that was changed, left out, repeated or
 * put elsewhere is refused; after that the cipher decrypts nothing any more.
 *
 * The work is done by OpenSSL (below). Not thread-safe per cipher. */
#ifndef PCCL_CRYPTO_H
#define PCCL_CRYPTO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum { PCCL_CIPHER_KEY_BYTES = 32, PCCL_CIPHER_TAG_BYTES = 16, PCCL_CIPHER_IOV_MAX = 16 };

/* A tenth of what RFC 8446 (5.5) allows for a key. */
#define PCCL_CIPHER_REKEY_BYTES ((uint64_t)1 << 35)

enum pccl_cipher_direction { PCCL_CIPHER_ENCRYPT = 0, PCCL_CIPHER_DECRYPT = 1 };

typedef struct pccl_cipher pccl_cipher;

/* NULL on failure, with the reason in `error`. The key is copied. */
pccl_cipher *pccl_cipher_create(
    const uint8_t *key, enum pccl_cipher_direction direction, char *error, size_t error_bytes);
void pccl_cipher_free(pccl_cipher *cipher); /* may be NULL */

/* `encrypted` gets as many bytes as `plain` has and may be the same buffer, `tag` PCCL_CIPHER_TAG_BYTES. `bytes` and
 * `associated_bytes` are at most INT_MAX. 0, or -1 if libcrypto fails, after which the cipher is of no more use. */
int pccl_cipher_encrypt(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *plain,
    size_t bytes, void *encrypted, uint8_t *tag);

/* The same for a message that is scattered over up to PCCL_CIPHER_IOV_MAX buffers, none of which is `encrypted`. */
int pccl_cipher_encrypt_iov(pccl_cipher *cipher, const void *associated, size_t associated_bytes,
    const struct iovec *iov, int count, void *encrypted, uint8_t *tag);

/* The inverse; `plain` may be the same buffer as `encrypted`. -1: this is not what was encrypted, and `plain` must not
 * be used. */
int pccl_cipher_decrypt(pccl_cipher *cipher, const void *associated, size_t associated_bytes, const void *encrypted,
    size_t bytes, void *plain, const uint8_t *tag);

/* For tests: as if PCCL_CIPHER_REKEY_BYTES were this, on both ends. */
void pccl_cipher_set_rekey_bytes(pccl_cipher *cipher, uint64_t bytes);

/* The functions that are used of OpenSSL's libcrypto, version 3, which is loaded when it is first needed:
 * neither building nor running needs it. Without it whatever has to be encrypted fails with a text that says so, and
 * everything else works. Thread-safe. */
enum { EVP_PKEY_X25519 = 1034 };

/* Functions of OpenSSL's evp.h and crypto.h; the ABI is fixed within version 3. */
typedef struct {
    void *(*context_new)(void);
    void (*context_free)(void *);
    int (*context_ctrl)(void *, int, int, void *);
    const void *(*aes_256_gcm)(void);
    int (*init)(void *, const void *, void *, const unsigned char *, const unsigned char *, int);
    int (*update)(void *, unsigned char *, int *, const unsigned char *, int);
    int (*final)(void *, unsigned char *, int *);
    void (*cleanse)(void *, size_t);
    int (*compare)(const void *, const void *, size_t); /* in constant time */
    void *(*key_context_of)(void *, void *);
    void (*key_context_free)(void *);
    void *(*private_key)(int, void *, const unsigned char *, size_t);
    void *(*public_key)(int, void *, const unsigned char *, size_t);
    int (*public_bytes)(const void *, unsigned char *, size_t *);
    void (*key_free)(void *); /* wipes it */
    int (*derive_init)(void *);
    int (*derive_with)(void *, void *);
    int (*derive)(void *, unsigned char *, size_t *);
    void (*error_clear)(void);
} pccl_libcrypto;

/* Returns the functions, or NULL with the reason in `error`: the library is not there or lacks something. */
const pccl_libcrypto *pccl_libcrypto_get(char *error, size_t error_bytes);

/* Returns 0 if a library of this name would do, else -1 with the reason in `error`. For tests. */
int pccl_libcrypto_probe(const char *library, char *error, size_t error_bytes);

#endif
