/* Key exchange over Curve25519 (X25519, RFC 7748), as pccl_native.h declares it; OpenSSL does the work. The system
 * draws private keys: OpenSSL would first set up three generators of random numbers, which takes longer than all else
 * here. */
#include "base.h"
#include "libcrypto.h"
#include "pccl_native.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

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
