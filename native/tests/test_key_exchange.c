/* The published vectors of X25519, and what must never become a secret. */
#include "check.h"
#include "crypto.h"
#include "pccl_native.h"

#include <string.h>

enum { BYTES = PCCL_KEY_EXCHANGE_BYTES };

static void from_hex(const char *hex, uint8_t *bytes)
{
    for (int i = 0; i < BYTES; i++) {
        unsigned value;
        CHECK(sscanf(hex + 2 * i, "%2x", &value) == 1);
        bytes[i] = (uint8_t)value;
    }
}

static int multiply(const uint8_t *private_key, const uint8_t *their_public_key, uint8_t *secret)
{
    uint8_t public_key[BYTES];
    pccl_key_exchange *exchange;
    CHECK(pccl_key_exchange_create(private_key, public_key, &exchange) == 0);
    int status = pccl_key_exchange_secret(exchange, their_public_key, secret);
    pccl_key_exchange_free(exchange);
    return status;
}

/* RFC 7748, 5.2: scalar, coordinate, and what comes out. */
static void scalar_multiplication(void)
{
    static const char *const vectors[][3] = {
        {"a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"},
        {"4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957"},
    };
    for (int i = 0; i < 2; i++) {
        uint8_t scalar[BYTES], coordinate[BYTES], expected[BYTES], found[BYTES];
        from_hex(vectors[i][0], scalar);
        from_hex(vectors[i][1], coordinate);
        from_hex(vectors[i][2], expected);
        CHECK(multiply(scalar, coordinate, found) == 0);
        CHECK(memcmp(found, expected, BYTES) == 0);
    }
}

/* RFC 7748, 5.2: the results of one multiplication are the arguments of the next. */
static void a_thousand_multiplications(void)
{
    uint8_t scalar[BYTES] = {9}, coordinate[BYTES] = {9}, found[BYTES], expected[BYTES];
    for (int i = 1; i <= 1000; i++) {
        CHECK(multiply(scalar, coordinate, found) == 0);
        memcpy(coordinate, scalar, BYTES);
        memcpy(scalar, found, BYTES);
        if (i == 1) {
            from_hex("422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079", expected);
            CHECK(memcmp(found, expected, BYTES) == 0);
        }
    }
    from_hex("684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51", expected);
    CHECK(memcmp(found, expected, BYTES) == 0);
}

/* RFC 7748, 6.1. */
static void two_sides_agree(void)
{
    static const char *const private_keys[] = {"77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
        "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"};
    static const char *const public_keys[] = {"8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"};
    uint8_t expected[BYTES], key[BYTES], public[2][BYTES], found[BYTES];
    pccl_key_exchange *sides[2];
    for (int i = 0; i < 2; i++) {
        from_hex(private_keys[i], key);
        CHECK(pccl_key_exchange_create(key, public[i], &sides[i]) == 0);
        from_hex(public_keys[i], expected);
        CHECK(memcmp(public[i], expected, BYTES) == 0);
    }
    from_hex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742", expected);
    for (int i = 0; i < 2; i++) {
        CHECK(pccl_key_exchange_secret(sides[i], public[!i], found) == 0);
        CHECK(memcmp(found, expected, BYTES) == 0);
        pccl_key_exchange_free(sides[i]);
    }
}

static void fresh_keys_differ_and_agree(void)
{
    uint8_t public[2][BYTES], secrets[2][BYTES];
    pccl_key_exchange *sides[2];
    for (int i = 0; i < 2; i++)
        CHECK(pccl_key_exchange_create(NULL, public[i], &sides[i]) == 0);
    CHECK(memcmp(public[0], public[1], BYTES) != 0);
    for (int i = 0; i < 2; i++)
        CHECK(pccl_key_exchange_secret(sides[i], public[!i], secrets[i]) == 0);
    CHECK(memcmp(secrets[0], secrets[1], BYTES) == 0);
    for (int i = 0; i < 2; i++)
        pccl_key_exchange_free(sides[i]);
}

/* More others than are remembered, each twice: the first time and the second make the same. */
static void a_key_serves_for_many(void)
{
    enum { OTHERS = 100 };
    static uint8_t public[OTHERS][BYTES], secrets[OTHERS][BYTES];
    uint8_t ours[BYTES], found[BYTES];
    pccl_key_exchange *exchange, *other;
    CHECK(pccl_key_exchange_create(NULL, ours, &exchange) == 0);
    for (int i = 0; i < OTHERS; i++) {
        CHECK(pccl_key_exchange_create(NULL, public[i], &other) == 0);
        CHECK(pccl_key_exchange_secret(other, ours, secrets[i]) == 0);
        pccl_key_exchange_free(other);
        for (int j = 0; j < 2; j++) {
            CHECK(pccl_key_exchange_secret(exchange, public[i], found) == 0);
            CHECK(memcmp(found, secrets[i], BYTES) == 0);
        }
    }
    for (int i = 0; i < OTHERS; i++) {
        CHECK(pccl_key_exchange_secret(exchange, public[i], found) == 0);
        CHECK(memcmp(found, secrets[i], BYTES) == 0);
    }
    pccl_key_exchange_free(exchange);
    pccl_key_exchange_free(NULL);
}

/* Points of small order, some not in their least form: the secret would be zero whatever the private key. */
static void a_secret_of_zeros_is_refused(void)
{
    static const char *const points[] = {
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000080",
    };
    static const uint8_t zeros[BYTES];
    for (size_t i = 0; i < sizeof points / sizeof points[0]; i++) {
        uint8_t public[BYTES], point[BYTES], secret[BYTES];
        pccl_key_exchange *exchange;
        from_hex(points[i], point);
        memset(secret, 1, BYTES);
        CHECK(pccl_key_exchange_create(NULL, public, &exchange) == 0);
        CHECK_MSG(pccl_key_exchange_secret(exchange, point, secret) == PCCL_E_ENCRYPTION, "point %zu", i);
        CHECK(memcmp(secret, zeros, BYTES) == 0);
        CHECK(pccl_key_exchange_secret(exchange, public, secret) == 0); /* the key still serves for others */
        memset(secret, 1, BYTES);
        CHECK_MSG(pccl_key_exchange_secret(exchange, point, secret) == PCCL_E_ENCRYPTION, "point %zu again", i);
        CHECK(memcmp(secret, zeros, BYTES) == 0);
        pccl_key_exchange_free(exchange);
    }
}

int main(void)
{
    char error[256];
    if (pccl_libcrypto_get(error, sizeof error) == NULL) {
        printf("left out: %s\n", error);
        return check_summary();
    }
    CHECK(pccl_encryption_available(error, sizeof error) == 0);
    RUN(scalar_multiplication);
    RUN(a_thousand_multiplications);
    RUN(two_sides_agree);
    RUN(fresh_keys_differ_and_agree);
    RUN(a_key_serves_for_many);
    RUN(a_secret_of_zeros_is_refused);
    return check_summary();
}
