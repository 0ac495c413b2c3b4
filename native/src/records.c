#include "records.h"

#include "base.h"
#include "crypto.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RECORD_ALL_BYTES_MAX = PCCL_RECORD_BYTES_MAX + PCCL_RECORD_OVERHEAD_BYTES };

PCCL_STATIC_ASSERT(sizeof((pccl_link_keys *)0)->tx == PCCL_CIPHER_KEY_BYTES, key_bytes);

struct pccl_records {
    const pccl_libcrypto *crypto;
    pccl_cipher *encrypt;
    pccl_cipher *decrypt;
    size_t out_begin;
    size_t out_end;
    size_t in_begin;
    size_t in_end;
    uint8_t out[PCCL_RECORDS_OUT * RECORD_ALL_BYTES_MAX];
    uint8_t in[PCCL_RECORDS_IN * RECORD_ALL_BYTES_MAX]; /* decrypted in place */
};

int pccl_encryption_available(char *error, size_t error_bytes)
{
    uint8_t public_key[PCCL_KEY_EXCHANGE_BYTES];
    pccl_key_exchange *exchange;
    if (pccl_libcrypto_get(error, error_bytes) == NULL)
        return PCCL_E_ENCRYPTION;
    int status = pccl_key_exchange_create(NULL, public_key, &exchange);
    if (status != 0)
        snprintf(error, error_bytes, "OpenSSL refuses X25519, perhaps by its configuration");
    pccl_key_exchange_free(exchange);
    return status;
}

int pccl_records_create(const pccl_link_keys *keys, pccl_records **made)
{
    char error[256];
    *made = NULL;
    const pccl_libcrypto *crypto = pccl_libcrypto_get(error, sizeof error);
    if (crypto == NULL)
        return PCCL_E_ENCRYPTION;
    pccl_records *records = calloc(1, sizeof *records);
    if (records == NULL)
        return PCCL_E_MEMORY;
    records->crypto = crypto;
    records->encrypt = pccl_cipher_create(keys->tx, PCCL_CIPHER_ENCRYPT, error, sizeof error);
    records->decrypt = pccl_cipher_create(keys->rx, PCCL_CIPHER_DECRYPT, error, sizeof error);
    if (records->encrypt == NULL || records->decrypt == NULL) {
        pccl_records_free(records);
        return PCCL_E_ENCRYPTION;
    }
    *made = records;
    return 0;
}

void pccl_records_free(pccl_records *records)
{
    if (records == NULL)
        return;
    pccl_cipher_free(records->encrypt);
    pccl_cipher_free(records->decrypt);
    records->crypto->cleanse(records->in, sizeof records->in);
    free(records);
}

/* Out */

static size_t iov_bytes(const struct iovec *iov, int count)
{
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += iov[i].iov_len;
    return bytes;
}

/* Sets `cut` to the first `bytes` of what is scattered, less `skip` at its beginning; returns how many parts that
 * is. */
static int iov_cut(const struct iovec *iov, size_t skip, size_t bytes, struct iovec *cut)
{
    int count = 0;
    for (; bytes > 0; iov++, skip = 0) {
        PCCL_ASSERT(count < PCCL_CIPHER_IOV_MAX);
        cut[count].iov_base = (uint8_t *)iov->iov_base + skip;
        cut[count].iov_len = pccl_min_size(iov->iov_len - skip, bytes);
        bytes -= cut[count++].iov_len;
    }
    return count;
}

size_t pccl_records_encrypt_iov(pccl_records *records, const struct iovec *iov, int count)
{
    PCCL_ASSERT(records->out_begin == records->out_end && count <= PCCL_CIPHER_IOV_MAX);
    size_t left_bytes = iov_bytes(iov, count);
    size_t encrypted_bytes = 0;
    size_t skip = 0;
    records->out_begin = records->out_end = 0;
    for (int i = 0; i < PCCL_RECORDS_OUT && left_bytes > 0; i++) {
        struct iovec cut[PCCL_CIPHER_IOV_MAX];
        size_t bytes = pccl_min_size(left_bytes, PCCL_RECORD_BYTES_MAX);
        uint8_t *record = records->out + records->out_end;
        uint8_t *encrypted = record + PCCL_RECORD_LENGTH_BYTES;
        pccl_put_u16(record, (uint16_t)bytes);
        pccl_put_u16(record + 2, (uint16_t)~bytes);
        int cut_count = iov_cut(iov, skip, bytes, cut);
        if (pccl_cipher_encrypt_iov(records->encrypt, record, PCCL_RECORD_LENGTH_BYTES, cut, cut_count, encrypted,
                encrypted + bytes) != 0) {
            records->out_end = 0;
            return 0;
        }
        records->out_end += bytes + PCCL_RECORD_OVERHEAD_BYTES;
        encrypted_bytes += bytes;
        left_bytes -= bytes;
        for (skip += bytes; left_bytes > 0 && skip >= iov->iov_len; iov++)
            skip -= iov->iov_len;
    }
    return encrypted_bytes;
}

size_t pccl_records_encrypt(pccl_records *records, const void *plain, size_t bytes)
{
    struct iovec part;
    part.iov_base = (void *)(uintptr_t)plain;
    part.iov_len = bytes;
    return pccl_records_encrypt_iov(records, &part, 1);
}

const uint8_t *pccl_records_out(const pccl_records *records, size_t *bytes)
{
    *bytes = records->out_end - records->out_begin;
    return records->out + records->out_begin;
}

void pccl_records_sent(pccl_records *records, size_t bytes)
{
    PCCL_ASSERT(bytes <= records->out_end - records->out_begin);
    records->out_begin += bytes;
}

/* In */

uint8_t *pccl_records_in(pccl_records *records, size_t *room)
{
    size_t rest_bytes = records->in_end - records->in_begin;
    if (records->in_begin > 0)
        memmove(records->in, records->in + records->in_begin, rest_bytes);
    records->in_begin = 0;
    records->in_end = rest_bytes;
    *room = sizeof records->in - rest_bytes;
    return records->in + rest_bytes;
}

void pccl_records_received(pccl_records *records, size_t bytes)
{
    PCCL_ASSERT(bytes <= sizeof records->in - records->in_end);
    records->in_end += bytes;
}

int pccl_records_decrypt(pccl_records *records, const uint8_t **plain, size_t *bytes)
{
    uint8_t *record = records->in + records->in_begin;
    size_t here_bytes = records->in_end - records->in_begin;
    if (here_bytes < PCCL_RECORD_LENGTH_BYTES)
        return 0;
    size_t record_bytes = pccl_get_u16(record);
    if (record_bytes == 0 || record_bytes > PCCL_RECORD_BYTES_MAX ||
        pccl_get_u16(record + 2) != (uint16_t)~record_bytes)
        return PCCL_E_ENCRYPTION;
    if (here_bytes < record_bytes + PCCL_RECORD_OVERHEAD_BYTES)
        return 0;
    uint8_t *encrypted = record + PCCL_RECORD_LENGTH_BYTES;
    if (pccl_cipher_decrypt(records->decrypt, record, PCCL_RECORD_LENGTH_BYTES, encrypted, record_bytes, encrypted,
            encrypted + record_bytes) != 0)
        return PCCL_E_ENCRYPTION;
    records->in_begin += record_bytes + PCCL_RECORD_OVERHEAD_BYTES;
    *plain = encrypted;
    *bytes = record_bytes;
    return 1;
}
