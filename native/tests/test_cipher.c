/* What was encrypted is decrypted to the same, and nothing else is; the published vectors of AES-256-GCM.
 *
 *     test_cipher bench        measures it */
#include "check.h"
#include "crypto.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LARGE_BYTES = 300 * 1000 };

typedef struct {
    pccl_cipher *encrypt;
    pccl_cipher *decrypt;
} pair;

static void pair_make(pair *p, uint8_t key_byte)
{
    uint8_t key[PCCL_CIPHER_KEY_BYTES];
    char error[256] = "";
    memset(key, key_byte, sizeof key);
    p->encrypt = pccl_cipher_create(key, PCCL_CIPHER_ENCRYPT, error, sizeof error);
    p->decrypt = pccl_cipher_create(key, PCCL_CIPHER_DECRYPT, error, sizeof error);
    if (p->encrypt == NULL || p->decrypt == NULL) {
        fprintf(stderr, "%s\n", error);
        abort();
    }
}

static void pair_free(pair *p)
{
    pccl_cipher_free(p->encrypt);
    pccl_cipher_free(p->decrypt);
}

/* Test cases 13 and 14 of the specification of GCM (McGrew and Viega): key and nonce are zero. */
static void published_vectors(void)
{
    static const uint8_t tag_13[] = {
        0x53, 0x0f, 0x8a, 0xfb, 0xc7, 0x45, 0x36, 0xb9, 0xa9, 0x63, 0xb4, 0xf1, 0xc4, 0xcb, 0x73, 0x8b};
    static const uint8_t encrypted_14[] = {
        0xce, 0xa7, 0x40, 0x3d, 0x4d, 0x60, 0x6b, 0x6e, 0x07, 0x4e, 0xc5, 0xd3, 0xba, 0xf3, 0x9d, 0x18};
    static const uint8_t tag_14[] = {
        0xd0, 0xd1, 0xc8, 0xa7, 0x99, 0x99, 0x6b, 0xf0, 0x26, 0x5b, 0x98, 0xb5, 0xd4, 0x8a, 0xb9, 0x19};
    uint8_t data[16] = {0}, tag[PCCL_CIPHER_TAG_BYTES];
    pair p;
    pair_make(&p, 0);
    CHECK(pccl_cipher_encrypt(p.encrypt, NULL, 0, NULL, 0, NULL, tag) == 0);
    CHECK(memcmp(tag, tag_13, sizeof tag) == 0);
    CHECK(pccl_cipher_decrypt(p.decrypt, NULL, 0, NULL, 0, NULL, tag) == 0);
    pair_free(&p);
    pair_make(&p, 0);
    CHECK(pccl_cipher_encrypt(p.encrypt, NULL, 0, data, sizeof data, data, tag) == 0);
    CHECK(memcmp(data, encrypted_14, sizeof data) == 0 && memcmp(tag, tag_14, sizeof tag) == 0);
    pair_free(&p);
}

static void messages_are_decrypted_in_order_and_in_place(void)
{
    static uint8_t data[LARGE_BYTES];
    uint8_t header[72], tag[PCCL_CIPHER_TAG_BYTES];
    pair p;
    pair_make(&p, 7);
    for (uint32_t round = 0; round < 60; round++) {
        size_t bytes = round % 3 == 0 ? 0 : round % 3 == 1 ? round : LARGE_BYTES - round;
        size_t header_bytes = round % 2 ? sizeof header : 0;
        memset(header, (int)round, sizeof header);
        for (size_t i = 0; i < bytes; i++)
            data[i] = (uint8_t)(i * 31 + round);
        CHECK(pccl_cipher_encrypt(p.encrypt, header, header_bytes, data, bytes, data, tag) == 0);
        CHECK(pccl_cipher_decrypt(p.decrypt, header, header_bytes, data, bytes, data, tag) == 0);
        for (size_t i = 0; i < bytes; i++)
            if (data[i] != (uint8_t)(i * 31 + round)) {
                CHECK_MSG(0, "round %u, byte %zu", round, i);
                break;
            }
    }
    pair_free(&p);
}

enum change { CHANGE_DATA, CHANGE_TAG, CHANGE_HEADER, CHANGE_LENGTH, CHANGE_ORDER, CHANGE_KEY, CHANGE_COUNT };

static void nothing_else_is_decrypted(void)
{
    for (int change = 0; change < CHANGE_COUNT; change++) {
        uint8_t header[8] = "header", data[2][50], plain[50], tag[2][PCCL_CIPHER_TAG_BYTES];
        size_t bytes = sizeof data[0];
        pair p, other;
        pair_make(&p, 1);
        pair_make(&other, 2);
        for (int i = 0; i < 2; i++) {
            memset(data[i], i, bytes);
            CHECK(pccl_cipher_encrypt(p.encrypt, header, sizeof header, data[i], bytes, data[i], tag[i]) == 0);
        }
        int which = change == CHANGE_ORDER;
        data[0][49] ^= change == CHANGE_DATA;
        tag[0][15] ^= change == CHANGE_TAG;
        header[0] ^= change == CHANGE_HEADER;
        bytes -= change == CHANGE_LENGTH;
        pccl_cipher *decrypter = change == CHANGE_KEY ? other.decrypt : p.decrypt;
        CHECK_MSG(pccl_cipher_decrypt(decrypter, header, sizeof header, data[which], bytes, plain, tag[which]) != 0,
            "change %d goes through", change);
        /* And what is whole does not afterwards. */
        CHECK(pccl_cipher_decrypt(decrypter, header, sizeof header, data[1], sizeof data[1], plain, tag[1]) != 0);
        pair_free(&p);
        pair_free(&other);
    }
}

static void a_repetition_is_refused(void)
{
    uint8_t data[10] = {1}, plain[10], tag[PCCL_CIPHER_TAG_BYTES];
    pair p;
    pair_make(&p, 3);
    CHECK(pccl_cipher_encrypt(p.encrypt, NULL, 0, data, sizeof data, data, tag) == 0);
    CHECK(pccl_cipher_decrypt(p.decrypt, NULL, 0, data, sizeof data, plain, tag) == 0 && plain[0] == 1);
    CHECK(pccl_cipher_decrypt(p.decrypt, NULL, 0, data, sizeof data, plain, tag) != 0);
    pair_free(&p);
}

static void keys_change_on_both_ends_at_once(void)
{
    uint8_t plain[40], encrypted[40], first[40], tag[PCCL_CIPHER_TAG_BYTES];
    pair p;
    pair_make(&p, 4);
    pccl_cipher_set_rekey_bytes(p.encrypt, 100);
    pccl_cipher_set_rekey_bytes(p.decrypt, 100);
    for (int round = 0; round < 50; round++) {
        memset(plain, 9, sizeof plain);
        CHECK(pccl_cipher_encrypt(p.encrypt, NULL, 0, plain, sizeof plain, encrypted, tag) == 0);
        if (round == 0)
            memcpy(first, encrypted, sizeof first);
        else
            CHECK(memcmp(first, encrypted, sizeof first) != 0); /* the counter begins anew, the key is another */
        CHECK(pccl_cipher_decrypt(p.decrypt, NULL, 0, encrypted, sizeof encrypted, encrypted, tag) == 0);
        CHECK(memcmp(plain, encrypted, sizeof plain) == 0);
    }
    pccl_cipher_set_rekey_bytes(p.decrypt, 1000000);
    int decrypted = 0;
    for (int round = 0; round < 4; round++) {
        CHECK(pccl_cipher_encrypt(p.encrypt, NULL, 0, plain, sizeof plain, encrypted, tag) == 0);
        decrypted += pccl_cipher_decrypt(p.decrypt, NULL, 0, encrypted, sizeof encrypted, encrypted, tag) == 0;
    }
    CHECK(decrypted < 4);
    pair_free(&p);
}

static void a_missing_library_is_named(void)
{
    char error[256] = "";
    CHECK(pccl_libcrypto_probe("libpccl-is-not-there.so", error, sizeof error) != 0);
    CHECK(strstr(error, "OpenSSL 3") != NULL && strstr(error, "libpccl-is-not-there.so") != NULL);
#ifdef __linux__
    CHECK(pccl_libcrypto_probe("libc.so.6", error, sizeof error) != 0);
    CHECK(strstr(error, "libc.so.6 has no EVP_CIPHER_CTX_new") != NULL);
#endif
}

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void bench(void)
{
    static const size_t sizes[] = {4096, 65536, 1 << 20};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint8_t header[72] = {0}, tag[PCCL_CIPHER_TAG_BYTES], *data = calloc(1, sizes[s]);
        pair p;
        if (data == NULL)
            abort();
        pair_make(&p, 5);
        double encrypt_s = 0, decrypt_s = 0, bytes = 0;
        while (encrypt_s < 0.3) {
            double start = now_s();
            pccl_cipher_encrypt(p.encrypt, header, sizeof header, data, sizes[s], data, tag);
            double middle = now_s();
            if (pccl_cipher_decrypt(p.decrypt, header, sizeof header, data, sizes[s], data, tag) != 0)
                abort();
            decrypt_s += now_s() - middle;
            encrypt_s += middle - start;
            bytes += (double)sizes[s];
        }
        printf("%8zu bytes: encrypt %.2f GB/s, decrypt %.2f GB/s\n", sizes[s], bytes / encrypt_s / 1e9,
            bytes / decrypt_s / 1e9);
        pair_free(&p);
        free(data);
    }
}

int main(int argc, char **argv)
{
    char error[256];
    (void)argv;
    RUN(a_missing_library_is_named);
    if (pccl_libcrypto_get(error, sizeof error) == NULL) {
        printf("the rest is left out: %s\n", error);
        return check_summary();
    }
    if (argc > 1) {
        bench();
        return 0;
    }
    RUN(published_vectors);
    RUN(messages_are_decrypted_in_order_and_in_place);
    RUN(nothing_else_is_decrypted);
    RUN(a_repetition_is_refused);
    RUN(keys_change_on_both_ends_at_once);
    return check_summary();
}
