#include "libcrypto.h"

#include "base.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

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
