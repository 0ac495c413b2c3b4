/* Key exchange over Curve25519 (X25519, RFC 7748), as pccl_native.h declares it; OpenSSL does the work. */
#include "libcrypto.h"
#include "pccl_native.h"

#include <stdlib.h>

struct pccl_exchange {
    const pccl_libcrypto *crypto;
    void *key;
};

static void *new_key(const pccl_libcrypto *crypto)
{
    void *key = NULL;
    void *context = crypto->key_context_of_kind(EVP_PKEY_X25519, NULL);
    if (context != NULL && crypto->keygen_init(context) == 1 && crypto->keygen(context, &key) != 1)
        key = NULL;
    crypto->key_context_free(context);
    return key;
}

int pccl_exchange_create(const uint8_t *private_key, uint8_t *public_key, pccl_exchange **made)
{
    char error[256];
    size_t bytes = PCCL_EXCHANGE_BYTES;
    const pccl_libcrypto *crypto = pccl_libcrypto_get(error, sizeof error);
    *made = NULL;
    if (crypto == NULL)
        return PCCL_E_ENCRYPTION;
    pccl_exchange *exchange = calloc(1, sizeof *exchange);
    if (exchange == NULL)
        return PCCL_E_MEMORY;
    exchange->crypto = crypto;
    exchange->key = private_key == NULL ? new_key(crypto)
                                        : crypto->private_key(EVP_PKEY_X25519, NULL, private_key, PCCL_EXCHANGE_BYTES);
    if (exchange->key == NULL || crypto->public_bytes(exchange->key, public_key, &bytes) != 1 ||
        bytes != PCCL_EXCHANGE_BYTES) {
        crypto->error_clear();
        pccl_exchange_free(exchange);
        return PCCL_E_ENCRYPTION;
    }
    *made = exchange;
    return 0;
}

int pccl_exchange_secret(pccl_exchange *exchange, const uint8_t *their_public_key, uint8_t *secret)
{
    static const uint8_t zeros[PCCL_EXCHANGE_BYTES];
    const pccl_libcrypto *crypto = exchange->crypto;
    size_t bytes = PCCL_EXCHANGE_BYTES;
    if (exchange->key == NULL)
        return PCCL_E_INVALID;
    void *theirs = crypto->public_key(EVP_PKEY_X25519, NULL, their_public_key, PCCL_EXCHANGE_BYTES);
    void *context = crypto->key_context_of(exchange->key, NULL);
    int is_made = theirs != NULL && context != NULL && crypto->derive_init(context) == 1 &&
                  crypto->derive_with(context, theirs) == 1 && crypto->derive(context, secret, &bytes) == 1 &&
                  bytes == PCCL_EXCHANGE_BYTES && crypto->compare(secret, zeros, PCCL_EXCHANGE_BYTES) != 0;
    crypto->key_context_free(context);
    crypto->key_free(theirs);
    crypto->key_free(exchange->key);
    exchange->key = NULL;
    if (is_made)
        return 0;
    crypto->error_clear();
    crypto->cleanse(secret, PCCL_EXCHANGE_BYTES);
    return PCCL_E_ENCRYPTION;
}

void pccl_exchange_free(pccl_exchange *exchange)
{
    if (exchange == NULL)
        return;
    exchange->crypto->key_free(exchange->key);
    free(exchange);
}
