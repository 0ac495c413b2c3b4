/* quant.h: payload in fewer bits. The wire format is in quant_format.h; pccl_quantized_bytes, pccl_kernel_quantize,
 * pccl_kernel_quantize_stochastic and pccl_kernel_dequantize are in the public header and want a shape that
 * pccl_quant_valid accepts.
 *
 * Buffers need no alignment.
 */
#ifndef PCCL_QUANT_H
#define PCCL_QUANT_H

#include "pccl_native.h"

enum { PCCL_QUANT_BLOCK_MAX = 1 << 20 };

/* Nonzero if the shape asks for a quantization that exists:
 *   MIN_MAX, ZERO_POINT_SCALE   a float dtype, codes of 4, 8 or 16 bits, 1 .. PCCL_QUANT_BLOCK_MAX elements a
 *                               block, with 4 bits an even number of them
 *   LLOYD_MAX, SIGN             float32, codes of 2 bits, 1 bit, a multiple of 8 up to 1024 elements a block
 *   CAST                        float32 or float64 to float16 or bfloat16, a block of 0
 * Zero for PCCL_QUANT_NONE. */
int pccl_quant_valid(const pccl_op_shape *shape);

/* Encodes elements first .. first + count - 1 of an op's buffer, rounded as the request says. A rank encodes no element
 * twice in an op, so that rounding errors are independent of each other. */
void pccl_quant_quantize(const pccl_op_request *request, uint64_t first, const void *source, size_t count, void *wire);

/* The same with the request's error feedback. */
void pccl_quant_quantize_fed_back(
    const pccl_op_request *request, uint64_t first, const void *source, size_t count, void *wire);

/* Returns the stream of a request's stochastic rounding. */
uint64_t pccl_quant_stream(const pccl_op_request *request);

/* destination[i] = a[i] op dequantized(wire)[i], with the bits that pccl_kernel_dequantize followed by
 * pccl_kernel_reduce would give; destination may be a. */
void pccl_quant_dequantize_reduce(
    const pccl_op_shape *shape, void *destination, const void *a, const void *wire, size_t count);

#endif
