#include "crypto.h"

#include "base.h"
#include "pccl_native.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#ifdef __APPLE__
#define LIBRARY "libcrypto.3.dylib"
#else
#define LIBRARY "libcrypto.so.3"
#endif

static pccl_libcrypto loaded;
static int is_loaded;
static char load_error[256];
static pthread_once_t load_once = PTHREAD_ONCE_INIT;

static int load(pccl_libcrypto *into, const char *library, char *error, size_t error_bytes)
{
    struct {
        const char *name;
        void *at;
    } symbols[] = {
        {"EVP_CIPHER_CTX_new", &into->context_new},
        {"EVP_CIPHER_CTX_free", &into->context_free},
        {"EVP_CIPHER_CTX_ctrl", &into->context_ctrl},
        {"EVP_aes_256_gcm", &into->aes_256_gcm},
        {"EVP_CipherInit_ex", &into->init},
        {"EVP_CipherUpdate", &into->update},
        {"EVP_CipherFinal_ex", &into->final},
        {"OPENSSL_cleanse", &into->cleanse},
        {"CRYPTO_memcmp", &into->compare},
        {"EVP_PKEY_CTX_new", &into->key_context_of},
        {"EVP_PKEY_CTX_free", &into->key_context_free},
        {"EVP_PKEY_new_raw_private_key", &into->private_key},
        {"EVP_PKEY_new_raw_public_key", &into->public_key},
        {"EVP_PKEY_get_raw_public_key", &into->public_bytes},
        {"EVP_PKEY_free", &into->key_free},
        {"EVP_PKEY_derive_init", &into->derive_init},
        {"EVP_PKEY_derive_set_peer", &into->derive_with},
        {"EVP_PKEY_derive", &into->derive},
        {"ERR_clear_error", &into->error_clear},
    };
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(error, error_bytes, "encryption needs OpenSSL 3, whose library cannot be loaded: %s", dlerror());
        return -1;
    }
    for (size_t i = 0; i < PCCL_COUNT_OF(symbols); i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (symbol == NULL) {
            snprintf(error, error_bytes, "encryption needs OpenSSL 3, but %s has no %s", library, symbols[i].name);
            dlclose(handle);
            return -1;
        }
        memcpy(symbols[i].at, &symbol, sizeof symbol); /* C has no cast from an object to a function */
    }
    return 0;
}

static void load_default(void) { is_loaded = load(&loaded, LIBRARY, load_error, sizeof load_error) == 0; }

const pccl_libcrypto *pccl_libcrypto_get(char *error, size_t error_bytes)
{
    pthread_once(&load_once, load_default);
    if (!is_loaded)
        snprintf(error, error_bytes, "%s", load_error);
    return is_loaded ? &loaded : NULL;
}

int pccl_libcrypto_probe(const char *library, char *error, size_t error_bytes)
{
    pccl_libcrypto unused;
    return load(&unused, library, error, error_bytes);
}

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

/* Key exchange over Curve25519 (X25519, RFC 7748), as pccl_native.h declares it; OpenSSL does the work. The system
 * draws private keys: OpenSSL would first set up three generators of random numbers, which takes longer than all else
 * here. */
enum { REMEMBERED_MAX = 64 };

struct pccl_key_exchange {
    const pccl_libcrypto *crypto;
    void *key;
    size_t made; /* secrets, so far */
    struct {
        uint8_t theirs[PCCL_KEY_EXCHANGE_BYTES];
        uint8_t secret[PCCL_KEY_EXCHANGE_BYTES];
    } remembered[REMEMBERED_MAX]; /* the last ones */
};

static void *new_key(const pccl_libcrypto *crypto)
{
    uint8_t drawn[PCCL_KEY_EXCHANGE_BYTES];
    void *key = NULL;
    if (getentropy(drawn, sizeof drawn) == 0)
        key = crypto->private_key(EVP_PKEY_X25519, NULL, drawn, sizeof drawn);
    crypto->cleanse(drawn, sizeof drawn);
    return key;
}

int pccl_key_exchange_create(const uint8_t *private_key, uint8_t *public_key, pccl_key_exchange **made)
{
    char error[256];
    size_t bytes = PCCL_KEY_EXCHANGE_BYTES;
    const pccl_libcrypto *crypto = pccl_libcrypto_get(error, sizeof error);
    *made = NULL;
    if (crypto == NULL)
        return PCCL_E_ENCRYPTION;
    pccl_key_exchange *exchange = calloc(1, sizeof *exchange);
    if (exchange == NULL)
        return PCCL_E_MEMORY;
    exchange->crypto = crypto;
    exchange->key = private_key == NULL
                        ? new_key(crypto)
                        : crypto->private_key(EVP_PKEY_X25519, NULL, private_key, PCCL_KEY_EXCHANGE_BYTES);
    if (exchange->key == NULL || crypto->public_bytes(exchange->key, public_key, &bytes) != 1 ||
        bytes != PCCL_KEY_EXCHANGE_BYTES) {
        crypto->error_clear();
        pccl_key_exchange_free(exchange);
        return PCCL_E_ENCRYPTION;
    }
    *made = exchange;
    return 0;
}

static int multiply(const pccl_key_exchange *exchange, const uint8_t *their_public_key, uint8_t *secret)
{
    static const uint8_t zeros[PCCL_KEY_EXCHANGE_BYTES];
    const pccl_libcrypto *crypto = exchange->crypto;
    size_t bytes = PCCL_KEY_EXCHANGE_BYTES;
    void *theirs = crypto->public_key(EVP_PKEY_X25519, NULL, their_public_key, PCCL_KEY_EXCHANGE_BYTES);
    void *context = crypto->key_context_of(exchange->key, NULL);
    int is_made = theirs != NULL && context != NULL && crypto->derive_init(context) == 1 &&
                  crypto->derive_with(context, theirs) == 1 && crypto->derive(context, secret, &bytes) == 1 &&
                  bytes == PCCL_KEY_EXCHANGE_BYTES && crypto->compare(secret, zeros, PCCL_KEY_EXCHANGE_BYTES) != 0;
    crypto->key_context_free(context);
    crypto->key_free(theirs);
    return is_made;
}

int pccl_key_exchange_secret(pccl_key_exchange *exchange, const uint8_t *their_public_key, uint8_t *secret)
{
    for (size_t i = 0; i < exchange->made && i < REMEMBERED_MAX; i++)
        if (memcmp(exchange->remembered[i].theirs, their_public_key, PCCL_KEY_EXCHANGE_BYTES) == 0) {
            memcpy(secret, exchange->remembered[i].secret, PCCL_KEY_EXCHANGE_BYTES);
            return 0;
        }
    if (!multiply(exchange, their_public_key, secret)) {
        exchange->crypto->error_clear();
        exchange->crypto->cleanse(secret, PCCL_KEY_EXCHANGE_BYTES);
        return PCCL_E_ENCRYPTION;
    }
    size_t at = exchange->made++ % REMEMBERED_MAX;
    memcpy(exchange->remembered[at].theirs, their_public_key, PCCL_KEY_EXCHANGE_BYTES);
    memcpy(exchange->remembered[at].secret, secret, PCCL_KEY_EXCHANGE_BYTES);
    return 0;
}

void pccl_key_exchange_free(pccl_key_exchange *exchange)
{
    if (exchange == NULL)
        return;
    const pccl_libcrypto *crypto = exchange->crypto;
    crypto->key_free(exchange->key);
    crypto->cleanse(exchange, sizeof *exchange);
    free(exchange);
}
