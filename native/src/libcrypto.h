/* libcrypto.h: the functions that are used of OpenSSL's libcrypto, version 3, which is loaded when it is first needed:
 * neither building nor running needs it. Without it whatever has to be encrypted fails with a text that says so, and
 * everything else works. Thread-safe. */
#ifndef PCCL_LIBCRYPTO_H
#define PCCL_LIBCRYPTO_H

#include <stddef.h>
#include <stdint.h>

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
