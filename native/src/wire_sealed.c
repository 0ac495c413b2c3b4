/* wire_sealed.c: a filter that encrypts another wire's bytes in records (records.h). A batch is encrypted into the
 * records' buffer; what was encrypted is taken, since its plain form is of no more use. What arrives is shown where it
 * was decrypted. */
#include "wire.h"

#include "base.h"
#include "list.h"
#include "records.h"

#include <errno.h>
#include <stdlib.h>

PCCL_STATIC_ASSERT((int)PCCL_CIPHER_IOV_MAX >= (int)PCCL_WIRE_IOV_MAX, batch_in_a_record);

typedef struct {
    pccl_wire wire;
    pccl_wire *inner;
    pccl_records *records;
    uint8_t is_dry; /* the last read has taken all there was */
} sealed_wire;

static sealed_wire *sealed_of(pccl_wire *wire) { return PCCL_CONTAINER_OF(wire, sealed_wire, wire); }

static int sealed_watch(pccl_wire *wire, pccl_poller *poller, void *owner)
{
    pccl_wire *inner = sealed_of(wire)->inner;
    return inner->type->watch(inner, poller, owner);
}

static void sealed_want(pccl_wire *wire, unsigned interest)
{
    pccl_wire *inner = sealed_of(wire)->inner;
    inner->type->want(inner, interest);
}

static void sealed_close(pccl_wire *wire)
{
    sealed_wire *sealed = sealed_of(wire);
    sealed->inner->type->close(sealed->inner);
    pccl_records_free(sealed->records);
    free(sealed);
}

/* Sends encrypted bytes. Returns how many; fewer than there are: wait. Or -errno. */
static ssize_t sealed_flush(sealed_wire *sealed)
{
    struct iovec out;
    out.iov_base = (void *)(uintptr_t)pccl_records_out(sealed->records, &out.iov_len);
    ssize_t n = sealed->inner->type->send(sealed->inner, &out, 1);
    if (n > 0) {
        pccl_records_sent(sealed->records, (size_t)n);
        sealed->wire.sent_bytes += (size_t)n;
    }
    sealed->wire.held_bytes = out.iov_len - (n > 0 ? (size_t)n : 0);
    return n;
}

static ssize_t sealed_send(pccl_wire *wire, struct iovec *iov, int count)
{
    sealed_wire *sealed = sealed_of(wire);
    ssize_t taken_bytes = 0;
    for (;;) {
        if (wire->held_bytes > 0) {
            ssize_t n = sealed_flush(sealed);
            if (wire->held_bytes > 0)
                return n < 0 && taken_bytes == 0 ? n : taken_bytes;
        }
        if (count == 0)
            return taken_bytes;
        size_t encrypted_bytes = pccl_records_encrypt_iov(sealed->records, iov, count);
        if (encrypted_bytes == 0) {
            wire->broken = "OpenSSL cannot encrypt";
            return -EPROTO;
        }
        (void)pccl_records_out(sealed->records, &wire->held_bytes);
        taken_bytes += (ssize_t)encrypted_bytes;
        for (; count > 0 && encrypted_bytes >= iov->iov_len; iov++, count--)
            encrypted_bytes -= iov->iov_len;
        if (count > 0) {
            iov->iov_base = (uint8_t *)iov->iov_base + encrypted_bytes;
            iov->iov_len -= encrypted_bytes;
        }
    }
}

static ssize_t sealed_view(pccl_wire *wire, const uint8_t **at, int may_read)
{
    sealed_wire *sealed = sealed_of(wire);
    for (;;) {
        size_t bytes;
        int has_record = pccl_records_decrypt(sealed->records, at, &bytes);
        if (has_record > 0)
            return (ssize_t)bytes;
        if (has_record < 0) {
            wire->broken = "cannot be decrypted: changed on the way, or not from this peer";
            return -EPROTO;
        }
        if (sealed->is_dry || !may_read) {
            sealed->is_dry = 0;
            return -EAGAIN;
        }
        struct iovec in;
        in.iov_base = pccl_records_in(sealed->records, &in.iov_len);
        ssize_t n = sealed->inner->type->receive(sealed->inner, &in, 1);
        if (n <= 0)
            return n;
        pccl_records_received(sealed->records, (size_t)n);
        wire->received_bytes += (size_t)n;
        sealed->is_dry = (size_t)n < in.iov_len;
    }
}

static void sealed_bound_unsent(pccl_wire *wire, int bytes)
{
    pccl_wire *inner = sealed_of(wire)->inner;
    inner->type->bound_unsent(inner, bytes);
}

static int sealed_under_way(const pccl_wire *wire, uint64_t *in_flight_bytes, uint64_t *unsent_bytes)
{
    const pccl_wire *inner = PCCL_CONTAINER_OF(wire, const sealed_wire, wire)->inner;
    return inner->type->under_way(inner, in_flight_bytes, unsent_bytes);
}

static int sealed_read_limits(const pccl_wire *wire, pccl_wire_limits *limits)
{
    const pccl_wire *inner = PCCL_CONTAINER_OF(wire, const sealed_wire, wire)->inner;
    return inner->type->read_limits(inner, limits);
}

static const pccl_wire_type sealed_type = {
    .watch = sealed_watch,
    .want = sealed_want,
    .close = sealed_close,
    .send = sealed_send,
    .view = sealed_view,
    .bound_unsent = sealed_bound_unsent,
    .under_way = sealed_under_way,
    .read_limits = sealed_read_limits,
};

int pccl_wire_seal(pccl_wire **wire, const pccl_link_keys *keys)
{
    PCCL_ASSERT((*wire)->type->receive != NULL);
    pccl_records *records;
    int status = pccl_records_create(keys, &records);
    if (status != 0)
        return status;
    sealed_wire *sealed = calloc(1, sizeof *sealed);
    if (sealed == NULL) {
        pccl_records_free(records);
        return PCCL_E_MEMORY;
    }
    sealed->wire.type = &sealed_type;
    sealed->wire.is_local = (*wire)->is_local;
    sealed->wire.yields_to_loss = (*wire)->yields_to_loss;
    sealed->wire.takes_over = (*wire)->takes_over;
    sealed->wire.is_authentic = 1;
    sealed->inner = *wire;
    sealed->records = records;
    *wire = &sealed->wire;
    return 0;
}
