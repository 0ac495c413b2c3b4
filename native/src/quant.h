/* quant.h: block quantization. The wire format is in quant.c; pccl_quantized_bytes, pccl_kernel_quantize and
 * pccl_kernel_dequantize are in the public header and want a shape that pccl_quant_valid accepts.
 *
 * Buffers need no alignment.
 */
#ifndef PCCL_QUANT_H
#define PCCL_QUANT_H

#include "pccl_native.h"

enum { PCCL_QUANT_BLOCK_MAX = 1 << 20 };

/* Whether the shape asks for a quantization that exists: a float dtype, MIN_MAX or ZERO_POINT_SCALE, codes of
 * 8 or 16 bits, 1 .. PCCL_QUANT_BLOCK_MAX elements a block. False for PCCL_QUANT_NONE. */
int pccl_quant_valid(const pccl_op_shape *shape);

/* destination[i] = a[i] op dequantized(wire)[i], with the bits that pccl_kernel_dequantize followed by
 * pccl_kernel_reduce would give; destination may be a. */
void pccl_quant_dequantize_reduce(
    const pccl_op_shape *shape, void *destination, const void *a, const void *wire, size_t count);

#endif
