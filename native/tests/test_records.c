/* What goes through records comes out the same, however the stream is cut up; and a stream with any change in it gives
 * out nothing from there on. */
#include "base.h"
#include "records.h"
#include "trial.h"

#include <malloc.h>

enum { STREAM_BYTES_MAX = 400 * 1000 };

static int looks_at_freed;
static size_t plain_bytes_freed; /* what was in freed memory of several letters 'f' in a row */

/* Calls of free come through here (the Makefile's --wrap). */
void __real_free(void *memory);
void __wrap_free(void *memory);
void __wrap_free(void *memory)
{
    size_t bytes = memory != NULL && looks_at_freed ? malloc_usable_size(memory) : 0;
    for (size_t i = 0; i + 8 <= bytes; i++)
        plain_bytes_freed += memcmp((const uint8_t *)memory + i, "ffffffff", 8) == 0;
    __real_free(memory);
}

typedef struct {
    pccl_records *ours;
    pccl_records *theirs;
} ends;

static void ends_make(ends *e)
{
    key_pair keys;
    key_pair_make(&keys);
    if (pccl_records_create(&keys.ends[0], &e->ours) != 0 || pccl_records_create(&keys.ends[1], &e->theirs) != 0)
        stop_test("records");
}

static void ends_free(ends *e)
{
    pccl_records_free(e->ours);
    pccl_records_free(e->theirs);
}

/* All of `plain` encrypted, in portions of random size; how many bytes that makes. */
static size_t encrypt_all(
    pccl_records *records, const uint8_t *plain, size_t bytes, uint32_t portion_max, uint8_t *stream)
{
    size_t encrypted_bytes = 0;
    while (bytes > 0) {
        struct iovec iov[PCCL_CIPHER_IOV_MAX];
        int count = 0;
        size_t offered_bytes = 0;
        while (count < PCCL_CIPHER_IOV_MAX && offered_bytes < bytes) {
            iov[count].iov_base = (uint8_t *)(uintptr_t)(plain + offered_bytes);
            iov[count].iov_len = pccl_min_size(1 + random_below(portion_max), bytes - offered_bytes);
            offered_bytes += iov[count++].iov_len;
        }
        size_t taken_bytes = pccl_records_encrypt_iov(records, iov, count);
        CHECK(taken_bytes > 0 && taken_bytes <= offered_bytes);
        plain += taken_bytes;
        bytes -= taken_bytes;
        size_t left_bytes;
        const uint8_t *out = pccl_records_out(records, &left_bytes);
        while (left_bytes > 0) {
            size_t n = 1 + random_below((uint32_t)left_bytes);
            memcpy(stream + encrypted_bytes, out, n);
            encrypted_bytes += n;
            pccl_records_sent(records, n);
            out = pccl_records_out(records, &left_bytes);
        }
    }
    return encrypted_bytes;
}

/* What a stream opens to, received in portions of random size; *is_refused if there is something else in it. */
static size_t decrypt_all(
    pccl_records *records, const uint8_t *stream, size_t bytes, uint32_t portion_max, uint8_t *plain, int *is_refused)
{
    size_t plain_bytes = 0;
    *is_refused = 0;
    while (bytes > 0 && !*is_refused) {
        size_t room, record_bytes;
        const uint8_t *record;
        uint8_t *in = pccl_records_in(records, &room);
        size_t n = pccl_min_size(pccl_min_size(1 + random_below(portion_max), room), bytes);
        CHECK(room > 0);
        memcpy(in, stream, n);
        pccl_records_received(records, n);
        stream += n;
        bytes -= n;
        int status;
        while ((status = pccl_records_decrypt(records, &record, &record_bytes)) > 0) {
            memcpy(plain + plain_bytes, record, record_bytes);
            plain_bytes += record_bytes;
        }
        *is_refused = status < 0;
    }
    return plain_bytes;
}

static void a_stream_comes_out_as_it_went_in(void)
{
    static const uint32_t portions[] = {3, 100, 5000, STREAM_BYTES_MAX};
    uint8_t *plain = allocate(STREAM_BYTES_MAX), *decrypted = allocate(STREAM_BYTES_MAX);
    uint8_t *stream = allocate(30 * STREAM_BYTES_MAX);
    for (int run = 0; run < 16 * THOROUGHNESS; run++) {
        ends e;
        int is_refused;
        uint32_t portion_max = portions[run % 4];
        size_t bytes = 1 + random_below(portion_max < 100 ? 5000 : STREAM_BYTES_MAX);
        ends_make(&e);
        fill_random(plain, PCCL_UINT8, bytes);
        size_t encrypted_bytes = encrypt_all(e.ours, plain, bytes, portion_max, stream);
        CHECK(decrypt_all(e.theirs, stream, encrypted_bytes, portions[run / 4 % 4], decrypted, &is_refused) == bytes);
        CHECK(!is_refused && memcmp(plain, decrypted, bytes) == 0);
        ends_free(&e);
    }
    free(plain);
    free(decrypted);
    free(stream);
}

enum { RECORDS = 6, SMALL_BYTES = 40 };

/* A stream of small records, all alike but for their place; how many bytes that makes. */
static size_t small_stream(pccl_records *records, uint8_t *stream)
{
    uint8_t plain[SMALL_BYTES];
    size_t bytes = 0, n;
    for (int i = 0; i < RECORDS; i++) {
        memset(plain, 'a' + i, sizeof plain);
        CHECK(pccl_records_encrypt(records, plain, sizeof plain) == sizeof plain);
        const uint8_t *out = pccl_records_out(records, &n);
        memcpy(stream + bytes, out, n);
        bytes += n;
        pccl_records_sent(records, n);
    }
    return bytes;
}

/* Nothing comes out but what went in, from the first on. */
static void check_beginning(const uint8_t *decrypted, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK(decrypted[i] == 'a' + (int)(i / SMALL_BYTES));
}

enum { SMALL_RECORD_BYTES = SMALL_BYTES + PCCL_RECORD_OVERHEAD_BYTES, STREAM_BYTES = RECORDS * SMALL_RECORD_BYTES };

static void any_changed_bit_is_refused(void)
{
    uint8_t stream[STREAM_BYTES], decrypted[STREAM_BYTES];
    for (size_t bit = 0; bit < 8 * STREAM_BYTES; bit += random_below(2 * 4 / THOROUGHNESS) + 1) {
        ends e;
        int is_refused;
        ends_make(&e);
        CHECK(small_stream(e.ours, stream) == sizeof stream);
        stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
        size_t plain_bytes = decrypt_all(e.theirs, stream, sizeof stream, sizeof stream, decrypted, &is_refused);
        CHECK_MSG(plain_bytes == bit / 8 / SMALL_RECORD_BYTES * SMALL_BYTES, "bit %zu: %zu bytes", bit, plain_bytes);
        CHECK(is_refused);
        check_beginning(decrypted, plain_bytes);
        ends_free(&e);
    }
}

static void records_out_of_place_are_refused(void)
{
    for (int fault = 0; fault < 4; fault++) {
        ends e;
        int is_refused;
        uint8_t stream[STREAM_BYTES], decrypted[STREAM_BYTES], spare[SMALL_RECORD_BYTES];
        uint8_t *third = stream + 2 * SMALL_RECORD_BYTES;
        ends_make(&e);
        small_stream(e.ours, stream);
        switch (fault) {
        case 0: /* repeated */ memmove(third, stream + SMALL_RECORD_BYTES, SMALL_RECORD_BYTES); break;
        case 1: /* left out */ memmove(third, third + SMALL_RECORD_BYTES, 2 * SMALL_RECORD_BYTES); break;
        case 2: /* exchanged */
            memcpy(spare, third, sizeof spare);
            memmove(third, third + SMALL_RECORD_BYTES, SMALL_RECORD_BYTES);
            memcpy(third + SMALL_RECORD_BYTES, spare, sizeof spare);
            break;
        default: /* sent back to whom it came from */
            CHECK(decrypt_all(e.ours, stream, sizeof stream, 1000, decrypted, &is_refused) == 0 && is_refused);
            memset(third, 0, 2); /* and an empty one */
            memset(third + 2, 0xff, 2);
        }
        CHECK(decrypt_all(e.theirs, stream, sizeof stream, 1000, decrypted, &is_refused) == 2 * SMALL_BYTES);
        CHECK(is_refused);
        check_beginning(decrypted, 2 * SMALL_BYTES);
        /* Nor does the right one open after that. */
        size_t bytes;
        const uint8_t *plain;
        CHECK(pccl_records_decrypt(e.theirs, &plain, &bytes) < 0);
        ends_free(&e);
    }
}

static void a_truncated_record_is_never_decrypted(void)
{
    for (size_t bytes = 0; bytes < STREAM_BYTES; bytes++) {
        ends e;
        int is_refused;
        uint8_t stream[STREAM_BYTES], decrypted[STREAM_BYTES];
        ends_make(&e);
        small_stream(e.ours, stream);
        size_t plain_bytes = decrypt_all(e.theirs, stream, bytes, 50, decrypted, &is_refused);
        CHECK(plain_bytes == bytes / SMALL_RECORD_BYTES * SMALL_BYTES && !is_refused);
        ends_free(&e);
    }
}

static void another_key_decrypts_nothing(void)
{
    ends e, other;
    int is_refused;
    uint8_t stream[STREAM_BYTES], decrypted[STREAM_BYTES];
    ends_make(&e);
    ends_make(&other);
    small_stream(e.ours, stream);
    CHECK(decrypt_all(other.theirs, stream, sizeof stream, 1000, decrypted, &is_refused) == 0 && is_refused);
    ends_free(&e);
    ends_free(&other);
}

static void what_was_decrypted_is_wiped(void)
{
    ends e;
    int is_refused;
    uint8_t stream[STREAM_BYTES], decrypted[STREAM_BYTES];
    ends_make(&e);
    CHECK(small_stream(e.ours, stream) == sizeof stream);
    CHECK(decrypt_all(e.theirs, stream, sizeof stream, 1000, decrypted, &is_refused) == RECORDS * SMALL_BYTES);
    looks_at_freed = 1;
    ends_free(&e);
    looks_at_freed = 0;
    CHECK(plain_bytes_freed == 0);
}

int main(void)
{
    RUN(a_stream_comes_out_as_it_went_in);
    RUN(any_changed_bit_is_refused);
    RUN(records_out_of_place_are_refused);
    RUN(a_truncated_record_is_never_decrypted);
    RUN(another_key_decrypts_nothing);
    RUN(what_was_decrypted_is_wiped);
    return check_summary();
}
