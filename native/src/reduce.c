#include "reduce.h"

#include "base.h"
#include "crc32c.h"
#include "dtype.h"
#include "folding.h"
#include "pccl_native.h"

#include <string.h>

static void advance(pccl_reduction *r, size_t bytes)
{
    r->destination += bytes;
    r->own += bytes;
    r->payload += bytes;
    if (r->backup != NULL)
        r->backup += bytes;
}

static void reduce_by_steps(uint8_t dtype, uint8_t reduce_op, pccl_reduction *r, size_t elements)
{
    enum { PIECE_BYTES = 16 << 10 };
    size_t element_bytes = pccl_dtype_bytes(dtype);
    while (elements > 0) {
        size_t n = pccl_min_size(elements, PIECE_BYTES / element_bytes);
        size_t bytes = n * element_bytes;
        if (r->payload_crc != NULL)
            *r->payload_crc = pccl_crc32c(*r->payload_crc, r->payload, bytes);
        if (r->backup != NULL)
            memcpy(r->backup, r->own, bytes);
        pccl_kernel_reduce(dtype, reduce_op, r->destination, r->is_payload_first ? r->payload : r->own,
            r->is_payload_first ? r->own : r->payload, n);
        if (r->ranks > 0)
            pccl_kernel_average(dtype, r->destination, n, r->ranks);
        if (r->sum_crc != NULL)
            *r->sum_crc = pccl_crc32c(*r->sum_crc, r->destination, bytes);
        advance(r, bytes);
        elements -= n;
    }
}

#if PCCL_SIMD_X86
/* The order of operands makes no difference to a sum whose NaNs are all alike. */
PCCL_TARGET_FOLDING
static inline __m512i sum_f32(__m512i x, __m512i y, int is_divided, __m512 divisor)
{
    __m512 sum = _mm512_add_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y));
    if (is_divided)
        sum = _mm512_div_ps(sum, divisor);
    __mmask16 nans = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    return _mm512_mask_set1_epi32(_mm512_castps_si512(sum), nans, 0x7fc00000);
}

/* `backup` is aligned to a lane. */
PCCL_TARGET_FOLDING
static void sum_f32_by_folding(pccl_reduction *r, size_t blocks)
{
    pccl_folding payload_folding, sum_folding;
    int is_divided = r->ranks > 0, has_backup = r->backup != NULL;
    int checks_payload = r->payload_crc != NULL, checks_sum = r->sum_crc != NULL;
    __m512 divisor = _mm512_set1_ps((float)r->ranks);
    pccl_fold_begin(&payload_folding, checks_payload ? ~*r->payload_crc : 0);
    pccl_fold_begin(&sum_folding, checks_sum ? ~*r->sum_crc : 0);
    for (; blocks > 0; blocks--) {
        for (int i = 0; i < PCCL_FOLD_LANES; i++) {
            size_t at = (size_t)i * PCCL_FOLD_LANE_BYTES;
            __m512i own = pccl_fold_load(r->own + at);
            __m512i payload = pccl_fold_load(r->payload + at);
            __m512i sum = sum_f32(own, payload, is_divided, divisor);
            if (has_backup)
                _mm512_stream_si512((void *)(r->backup + at), own);
            _mm512_storeu_si512((void *)(r->destination + at), sum);
            if (checks_payload)
                pccl_fold_lane(&payload_folding, i, payload);
            if (checks_sum)
                pccl_fold_lane(&sum_folding, i, sum);
        }
        advance(r, PCCL_FOLD_BYTES);
    }
    _mm_sfence();
    if (checks_payload)
        *r->payload_crc = ~pccl_fold_end(&payload_folding);
    if (checks_sum)
        *r->sum_crc = ~pccl_fold_end(&sum_folding);
}
#endif

void pccl_reduce(uint8_t dtype, uint8_t reduce_op, pccl_reduction *r, size_t elements)
{
#if PCCL_SIMD_X86
    int is_sum = reduce_op == PCCL_SUM || reduce_op == PCCL_AVG;
    if (dtype == PCCL_FLOAT32 && is_sum && pccl_simd_level() >= PCCL_SIMD_AVX512 &&
        pccl_crc32c_has(PCCL_CRC32C_FOLDING)) {
        size_t head = -(uintptr_t)r->backup % PCCL_FOLD_LANE_BYTES / sizeof(float);
        head = pccl_min_size(head, elements);
        reduce_by_steps(dtype, reduce_op, r, head);
        size_t blocks = (elements - head) / (PCCL_FOLD_BYTES / sizeof(float));
        if (blocks > 0)
            sum_f32_by_folding(r, blocks);
        elements -= head + blocks * (PCCL_FOLD_BYTES / sizeof(float));
    }
#endif
    reduce_by_steps(dtype, reduce_op, r, elements);
}
