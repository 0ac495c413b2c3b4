#include "quant.h"

#include "base.h"
#include "dtype.h"
#include "quant_format.h"
#include "quant_levels.h"

#include <float.h>
#include <math.h>
#include <string.h>

int pccl_quant_valid(const pccl_op_shape *shape)
{
    const uint32_t code = shape->quantized_dtype, block = shape->quantization_block;
    switch (shape->quantization) {
    case PCCL_QUANT_MIN_MAX:
    case PCCL_QUANT_ZERO_POINT_SCALE:
        if (!pccl_dtype_is_float(shape->dtype) || block < 1 || block > PCCL_QUANT_BLOCK_MAX)
            return 0;
        if (code == PCCL_CODE_UINT4 || code == PCCL_CODE_INT4)
            return block % 2 == 0;
        return code <= PCCL_INT16;
    case PCCL_QUANT_LLOYD_MAX:
    case PCCL_QUANT_SIGN:
        return shape->dtype == PCCL_FLOAT32 && block > 0 && block % 8 == 0 && block <= PCCL_QUANT_CHUNK &&
               code == (shape->quantization == PCCL_QUANT_SIGN ? PCCL_CODE_UINT1 : PCCL_CODE_UINT2);
    case PCCL_QUANT_CAST:
        return (shape->dtype == PCCL_FLOAT32 || shape->dtype == PCCL_FLOAT64) &&
               (code == PCCL_FLOAT16 || code == PCCL_BFLOAT16) && block == 0;
    default: return 0;
    }
}

/* Without quantization the plain size; 0 for a shape that is not valid. */
size_t pccl_quantized_bytes(const pccl_op_shape *shape, size_t count)
{
    if (shape->quantization == PCCL_QUANT_NONE)
        return count * pccl_dtype_bytes(shape->dtype);
    if (!pccl_quant_valid(shape))
        return 0;
    if (shape->quantization == PCCL_QUANT_CAST)
        return count * pccl_dtype_bytes(shape->quantized_dtype);
    const pccl_quant_code type = pccl_quant_code_of(shape);
    const size_t blocks = count / shape->quantization_block, rest = count % shape->quantization_block;
    return blocks * (type.header_bytes + pccl_quant_codes_bytes(&type, shape->quantization_block)) +
           (rest > 0 ? type.header_bytes + pccl_quant_codes_bytes(&type, rest) : 0);
}

/* The finalizer of splitmix64. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t pccl_quant_stream(const pccl_op_request *request)
{
    const pccl_op_key *key = &request->key;
    const uint64_t parts[] = {key->epoch, key->tag, key->sequence, key->group, request->rank};
    uint64_t stream = mix(request->rounding_seed + 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < PCCL_COUNT_OF(parts); i++)
        stream = mix((stream ^ parts[i]) + 0x9e3779b97f4a7c15u);
    return stream;
}

void pccl_quant_quantize(const pccl_op_request *request, uint64_t first, const void *source, size_t count, void *wire)
{
    if (request->rounding == PCCL_ROUND_STOCHASTIC && !pccl_quant_has_levels(&request->shape))
        pccl_kernel_quantize_stochastic(&request->shape, pccl_quant_stream(request), first, source, count, wire);
    else
        pccl_kernel_quantize(&request->shape, source, count, wire);
}

void pccl_quant_quantize_fed_back(
    const pccl_op_request *request, uint64_t first, const void *source, size_t count, void *wire)
{
    float *next = request->residual_next + first;
    const float decay = (float)request->feedback_decay;
    pccl_op_shape shape = request->shape;
    shape.reduce_op = PCCL_SUM;
    if (request->residual == NULL)
        memcpy(next, source, count * sizeof *next);
    else
        for (size_t i = 0; i < count; i++) {
            float value;
            memcpy(&value, (const uint8_t *)source + i * sizeof value, sizeof value);
            next[i] = value + request->residual[first + i];
        }
    pccl_quant_quantize(request, first, next, count, wire);
    for (size_t i = 0; i < count; i++) /* the negative error, because a reduction cannot subtract */
        next[i] = -next[i];
    pccl_quant_dequantize_reduce(&shape, next, next, wire, count);
    for (size_t i = 0; i < count; i++) {
        float kept = next[i] * -decay;
        float magnitude = fabsf(kept);
        next[i] = magnitude >= FLT_MIN && magnitude <= FLT_MAX ? kept : 0.0f;
    }
}
