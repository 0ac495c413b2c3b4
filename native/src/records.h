/* records.h: the inside of pccl_native.h's pccl_records, which encrypt and decrypt the stream of one connection in
 * records, as TLS does.
 *
 *     record   bytes u16   65535 - bytes u16   ciphertext of that many bytes   tag, PCCL_CIPHER_TAG_BYTES
 *
 * Integers are little-endian; the second one shows a damaged length at once, which could else be waited for in vain. A
 * record is one message of a cipher (crypto.h), its length authenticated with it, so records are decrypted only whole,
 * unchanged and in the order in which they were encrypted; nothing of a record is given out before that. Where records
 * begin has nothing to do with what is in them.
 *
 * Out, encrypted bytes wait in a buffer until the socket has taken them, so nothing is ever encrypted twice, and what
 * was encrypted may be changed afterwards. In, records are decrypted where they were received. Both buffers are
 * allocated with the records: PCCL_RECORDS_BYTES in all, and nothing after that. */
#ifndef PCCL_RECORDS_H
#define PCCL_RECORDS_H

#include "crypto.h"
#include "pccl_native.h"

#include <sys/uio.h>

enum {
    PCCL_RECORD_LENGTH_BYTES = 4,
    PCCL_RECORD_OVERHEAD_BYTES = PCCL_RECORD_LENGTH_BYTES + PCCL_CIPHER_TAG_BYTES,
    PCCL_RECORD_BYTES_MAX = 60 << 10, /* of what is in it: a u16, and every record costs OpenSSL half a microsecond */
    PCCL_RECORDS_OUT = 2,
    PCCL_RECORDS_IN = 3,
    PCCL_RECORDS_BYTES = (PCCL_RECORDS_OUT + PCCL_RECORDS_IN) * (PCCL_RECORD_BYTES_MAX + PCCL_RECORD_OVERHEAD_BYTES)
};

/* pccl_records_encrypt for data that is scattered over several buffers, none of them empty. */
size_t pccl_records_encrypt_iov(pccl_records *records, const struct iovec *iov, int count);

#endif
