/* quant_format.h: float payloads in fewer bits: blocks of codes with a scale, or a cast to a 16-bit float.
 *
 * Wire format of MIN_MAX and ZERO_POINT_SCALE
 *   A segment of n elements is cut into blocks of `quantization_block` elements, the last one maybe shorter.
 *   Blocks follow each other without padding. A block is a scale, a second parameter and the codes, all of it
 *   little-endian:
 *
 *     codes of      scale       MIN_MAX: minimum    ZERO_POINT_SCALE: zero point, itself a code
 *     8, 16 bits    float32     float32             int32
 *     4 bits        bfloat16    bfloat16            int16
 *
 *     one code an element: uint8, int8, uint16, int16, or 4 bits, unsigned or two's complement. Element 2k of
 *     a block is the low half of byte k, element 2k + 1 the high half; a last odd one leaves the high half 0.
 *     So that no block but the last has such a half, blocks of 4-bit codes have an even number of elements.
 *
 *   With `first` the least code of the type (0, -8, -128 or -32768) a code means
 *
 *     MIN_MAX            minimum + scale * (code - first)
 *     ZERO_POINT_SCALE   scale * (code - zero_point)
 *
 *   A block whose scale or minimum is not finite, or whose zero point is no code, means NaN throughout.
 *
 *   Where elements are float64 an int16 follows the two parameters: all of the block is 2 to the power of that many
 *   times what has been said. It is 0 unless the greatest magnitude is beyond those that float32 holds at its full
 *   precision, and from -1000 to 1022; with any other number the block means NaN throughout.
 *
 * Wire format of LLOYD_MAX and SIGN
 *   Blocks as above, of float32 only. A block is one byte b for its scale s, and codes of 2 bits (LLOYD_MAX) or 1 bit
 *   (SIGN), from the lowest bits of each byte up; a last byte is filled up with zeros. Blocks have a multiple of 8
 *   elements, the last one maybe any number.
 *
 *     b = 0        s = 0: all elements are 0
 *     b = 1..254   s = 2^((b - 1) / 4 - 44)
 *     b = 255      NaN throughout: the block has a NaN or an infinity, or its scale is above 2^19
 *
 *     SIGN         s, negative where the code is 1; s is the mean magnitude, rounded
 *     LLOYD_MAX    0.4528 s, or 1.510 s where the higher bit is set; negative where the lower one is. s is the root
 *                  mean square, rounded, and magnitudes from 0.9816 s on have the higher bit
 *
 * Wire format of CAST
 *   The elements, float32 or float64, as float16 or bfloat16. There are no blocks.
 *
 * What a sender may rely on, with blocks
 *   - Error: at most half a scale, a whole one with stochastic rounding, plus rounding to float32 and to the
 *     dtype. 16-bit codes add up to 0.02 of a scale by float arithmetic. The scale is the block's range (which
 *     for ZERO_POINT_SCALE includes 0) divided by 15, 255 or 65535, one less for ZERO_POINT_SCALE with
 *     stochastic rounding, rounded up, so that the codes always span the block. 4-bit codes have short
 *     parameters: their scale is up to 2^-7 greater, and their minimum up to 2^-7 of itself below the least
 *     element, which matters to blocks that lie far from 0. It saves half a bit an element at 64 a block, and
 *     at equal bytes the smaller blocks that it pays for halve the error where there are outliers.
 *   - A block of one repeated value is exact (to float32) with 8 and 16 bits; so is 0 under ZERO_POINT_SCALE
 *     in any block.
 *   - A finite block never turns into infinity: results are clamped to the dtype's finite range.
 *   - A block that holds a NaN or an infinity has no honest codes. It is sent with scale NaN and arrives as
 *     NaN in every element: loud, and confined to the block.
 *   - float64 is quantized as float32, times a power of two where its magnitudes are beyond float32's.
 *
 * What a sender may rely on, with LLOYD_MAX and SIGN
 *   - The mean square error of normally distributed elements is 0.116 of their mean square, and 0.36 with SIGN; of
 *     other distributions it is more (Laplace: 0.18, 0.49). One element's error is bounded only by its own magnitude
 *     plus 1.51 s: these are for sums whose errors are carried over to the next one (error feedback).
 *   - Rounding is to nearest always.
 *
 * What a sender may rely on, with CAST
 *   - Each element is rounded for itself, as IEEE 754 does it: NaN (made canonical) and infinities arrive, and
 *     a finite value beyond the greatest one (65504, 3.39e38) arrives as infinity. Clamping it instead would
 *     hide an error of any size in a plausible number; the infinity is seen, by the very checks that training
 *     in float16 has anyway. Such values are for a cast to bfloat16 or uses blocks.
 *   - float64 is rounded to float32 first.
 *
 * Stochastic rounding
 *   A value between two codes goes to the upper one with the probability of its distance from the lower one
 *   (to 2^-24 of a code, 2^-8 with 16 bits), so that it is unbiased. dither.h has the random numbers: a
 *   function of the sender's seed, op and rank and of the element's index. They need not be shared: a chunk
 *   is finished by one rank, and all ranks, that one included, decode what it has sent. Codes mean the same,
 *   however they were rounded. 0 under ZERO_POINT_SCALE and, with 8 and 16 bits, constants stay exact; CAST
 *   decides on overflow as it does without.
 *
 * Sums over W ranks
 *   The direct algorithm rounds twice whatever W is: the parts of W - 1 ranks, and the sum. The ring rounds W
 *   times, each time a partial sum, with a scale that grows with it. For independent parts of one variance,
 *   and q the mean square error of rounding relative to the mean square of what is rounded, the sum's is
 *
 *     direct   q (2 - 1/W)          ring   q (W + 1) / 2
 *
 *   and where parts lie in [-m, m], its error in the worst case at most
 *
 *     direct   (2W - 1) m / steps plus what the first rounding adds to the range
 *     ring     W (W + 1) / 2 m / steps, likewise                       with steps 15, 255 or 65535
 *
 * Arithmetic
 *   Codes are counted from 0 here ("steps"), so that signed types differ by one offset. Both directions,
 *
 *     steps = rint(min((value - base) * inverse, top))        value = base + scale * (steps - zero)
 *
 *   are float32, with zero = 0 for MIN_MAX and base = 0 for ZERO_POINT_SCALE, except where that could
 *   overflow or lose precision: such blocks go through doubles ("wide"). Which of the two a receiver takes
 *   follows from the parameters on the wire alone, so that all of them compute the same bits.
 */
#ifndef PCCL_QUANT_FORMAT_H
#define PCCL_QUANT_FORMAT_H

#include "base.h"
#include "dtype.h"
#include "simd.h"

#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload travels in the byte order of the machine, which has to be little-endian"
#endif

enum {
    PCCL_QUANT_CHUNK = 1024, /* elements converted at a time: 4 KiB of floats on the stack, at home in the L1 cache */
    PCCL_QUANT_NAN_BITS = 0x7fc00000,
    PCCL_QUANT_SHIFT_MIN = -1000,
    PCCL_QUANT_SHIFT_MAX = 1022
};

/* Inside this bound of a scale and this one of a base float32 does not overflow: steps are below 2^16. */
#define PCCL_QUANT_SCALE_MAX 0x1p100f
#define PCCL_QUANT_BASE_MAX 0x1p126f

typedef struct {
    uint32_t bits; /* 1, 2, 4, 8 or 16 */
    uint32_t steps_max; /* 15, 255 or 65535 */
    uint32_t first; /* added to steps, in the code's width: 0, or the least code as an unsigned number */
    uint32_t shift_at; /* in the header, for float64 */
    uint32_t header_bytes;
} pccl_quant_code;

static inline pccl_quant_code pccl_quant_code_of(const pccl_op_shape *shape)
{
    const uint32_t code = shape->quantized_dtype;
    const int is_signed = code == PCCL_CODE_INT4 || code == PCCL_INT8 || code == PCCL_INT16;
    pccl_quant_code type;
    switch (code) {
    case PCCL_CODE_UINT4:
    case PCCL_CODE_INT4: type.bits = 4; break;
    case PCCL_CODE_UINT2: type.bits = 2; break;
    case PCCL_CODE_UINT1: type.bits = 1; break;
    default: type.bits = 8 * pccl_dtype_bytes(code);
    }
    type.steps_max = (1u << type.bits) - 1;
    type.first = is_signed ? type.steps_max / 2 + 1 : 0;
    type.shift_at = type.bits > 4 ? 8 : type.bits == 4 ? 4 : 1;
    type.header_bytes = type.shift_at + (shape->dtype == PCCL_FLOAT64 ? 2 : 0);
    return type;
}

PCCL_INLINE size_t pccl_quant_codes_bytes(const pccl_quant_code *type, size_t count)
{
    return (count * type->bits + 7) / 8;
}

static inline double pccl_quant_power_of_two(int exponent)
{
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

#endif
