/* quant_levels.h: float32 as codes of 2 bits or 1 bit with a scale a block (quant_format.h, LLOYD_MAX and SIGN). */
#ifndef PCCL_QUANT_LEVELS_H
#define PCCL_QUANT_LEVELS_H

#include "quant_format.h"

/* Blocks have a multiple of 8 elements, and at most PCCL_QUANT_CHUNK. */
static inline int pccl_quant_has_levels(const pccl_op_shape *shape)
{
    return shape->quantization == PCCL_QUANT_LLOYD_MAX || shape->quantization == PCCL_QUANT_SIGN;
}

void pccl_levels_quantize(const pccl_op_shape *shape, const float *source, size_t count, uint8_t *wire);

/* Decodes elements first .. first + count - 1 of a segment; `first` is a multiple of 8. */
void pccl_levels_dequantize(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, float *destination);

#endif
