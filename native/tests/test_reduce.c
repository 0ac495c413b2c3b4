/* One pass over a partial gives what its steps give one after the other, to the bit and on every CPU level. */
#include "base.h"
#include "check.h"
#include "crc32c.h"
#include "dtype.h"
#include "pccl_native.h"
#include "noise.h"
#include "reduce.h"
#include "simd.h"

#include <string.h>

enum { BYTES_MAX = 3 * 4096, OFFSET_MAX = 64, ROOM_BYTES = BYTES_MAX + 2 * OFFSET_MAX };

typedef struct {
    uint8_t destination[ROOM_BYTES];
    uint8_t own[ROOM_BYTES];
    uint8_t payload[ROOM_BYTES];
    uint8_t backup[ROOM_BYTES];
} buffers;

typedef struct {
    uint8_t dtype, reduce_op;
    size_t elements;
    size_t offsets[4]; /* bytes, whole elements */
    int is_in_place, has_backup, checks_payload, checks_sum, is_payload_first;
    uint32_t ranks;
} trial;

static trial some_trial(uint8_t dtype)
{
    trial t;
    size_t element_bytes = pccl_dtype_bytes(dtype);
    memset(&t, 0, sizeof t);
    t.dtype = dtype;
    t.reduce_op = (uint8_t)(noise_u32() % PCCL_REDUCE_OP_COUNT);
    t.elements = noise_u32() % (BYTES_MAX / element_bytes + 1);
    if (noise_u32() % 4 == 0)
        t.elements %= 70;
    for (size_t i = 0; i < PCCL_COUNT_OF(t.offsets); i++)
        t.offsets[i] = noise_u32() % (OFFSET_MAX / element_bytes) * element_bytes;
    t.is_in_place = noise_u32() % 2 == 0;
    t.has_backup = noise_u32() % 2 == 0;
    t.checks_payload = noise_u32() % 2 == 0;
    t.checks_sum = noise_u32() % 2 == 0;
    t.is_payload_first = noise_u32() % 2 == 0;
    t.ranks = noise_u32() % 3;
    return t;
}

static void one_pass_equals_steps(const trial *t, buffers *got, buffers *want)
{
    size_t bytes = t->elements * pccl_dtype_bytes(t->dtype);
    uint32_t payload_crc = noise_u32(), sum_crc = noise_u32();
    uint32_t want_payload_crc = payload_crc, want_sum_crc = sum_crc;
    noise_fill(got->destination, ROOM_BYTES);
    noise_fill(got->own, ROOM_BYTES);
    noise_fill(got->payload, ROOM_BYTES);
    noise_fill(got->backup, ROOM_BYTES);
    memcpy(want, got, sizeof *got);

    uint8_t *own = want->own + t->offsets[1];
    const uint8_t *payload = want->payload + t->offsets[2];
    uint8_t *destination = t->is_in_place ? own : want->destination + t->offsets[0];
    if (t->checks_payload)
        want_payload_crc = pccl_crc32c(payload_crc, payload, bytes);
    if (t->has_backup)
        memcpy(want->backup + t->offsets[3], own, bytes);
    pccl_kernel_reduce(t->dtype, t->reduce_op, destination, t->is_payload_first ? payload : own,
        t->is_payload_first ? own : payload, t->elements);
    if (t->ranks > 0)
        pccl_kernel_average(t->dtype, destination, t->elements, t->ranks);
    if (t->checks_sum)
        want_sum_crc = pccl_crc32c(sum_crc, destination, bytes);

    pccl_reduction r;
    memset(&r, 0, sizeof r);
    r.own = got->own + t->offsets[1];
    r.payload = got->payload + t->offsets[2];
    r.destination = t->is_in_place ? got->own + t->offsets[1] : got->destination + t->offsets[0];
    r.backup = t->has_backup ? got->backup + t->offsets[3] : NULL;
    r.payload_crc = t->checks_payload ? &payload_crc : NULL;
    r.sum_crc = t->checks_sum ? &sum_crc : NULL;
    r.ranks = t->ranks;
    r.is_payload_first = (uint8_t)t->is_payload_first;
    pccl_reduce(t->dtype, t->reduce_op, &r, t->elements);

    CHECK(payload_crc == want_payload_crc && sum_crc == want_sum_crc);
    CHECK(memcmp(got, want, sizeof *got) == 0);
}

static void at_every_level(void)
{
    enum { TRIALS = 400 };
    static buffers got __attribute__((aligned(OFFSET_MAX)));
    static buffers want;
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++)
        for (int i = 0; i < TRIALS; i++)
            for (uint8_t dtype = 0; dtype < PCCL_DTYPE_COUNT; dtype++) {
                trial t = some_trial(i % 2 == 0 ? PCCL_FLOAT32 : dtype);
                one_pass_equals_steps(&t, &got, &want);
            }
}

int main(void)
{
    RUN(at_every_level);
    return check_summary();
}
