/* quant.c: float payloads in fewer bits: blocks of codes with a scale, or a cast to a 16-bit float.
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
 * What a sender may rely on, with CAST
 *   - Each element is rounded for itself, as IEEE 754 does it: NaN (made canonical) and infinities arrive, and
 *     a finite value beyond the greatest one (65504, 3.39e38) arrives as infinity. Clamping it instead would
 *     hide an error of any size in a plausible number; the infinity is seen, by the very checks that training
 *     in float16 has anyway. Whoever has such values casts to bfloat16 or uses blocks.
 *   - float64 is rounded to float32 first.
 *
 * Stochastic rounding
 *   A value between two codes goes to the upper one with the probability of its distance from the lower one
 *   (to 2^-24 of a code, 2^-8 with 16 bits), so that it is unbiased. dither.h has the random numbers: a
 *   function of the sender's seed, op and rank and of the element's index. Nobody needs to share them: a chunk
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
#include "quant.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "base.h"
#include "dither.h"
#include "dtype.h"
#include "half.h"
#include "simd.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload travels in the byte order of the machine, which has to be little-endian"
#endif

enum {
    CHUNK = 1024, /* elements converted at a time: 4 KiB of floats on the stack, at home in the L1 cache */
    NAN_BITS = 0x7fc00000,
    FLOAT_EXPONENT_MIN = -100, /* of float64s that are quantized as they are */
    FLOAT_EXPONENT_MAX = 126,
    SHIFT_MIN = -1000,
    SHIFT_MAX = 1022
};

/* Inside these bounds float32 neither overflows nor meets subnormals: steps are below 2^16. */
#define SCALE_MIN 0x1p-100f
#define SCALE_MAX 0x1p100f
#define BASE_MAX 0x1p126f

/* Added to a small float or double, these leave its nearest integer (ties to even) in the lowest bits. */
#define ROUND_F32 0x1.8p23f
#define ROUND_F64 0x1.8p52

typedef struct {
    uint32_t bits; /* 4, 8 or 16 */
    uint32_t steps_max; /* 15, 255 or 65535 */
    uint32_t first; /* added to steps, in the code's width: 0, or the least code as an unsigned number */
    uint32_t shift_at; /* in the header, for float64 */
    uint32_t header_bytes;
} code_type;

/* What random numbers depend on; NULL where values are rounded to nearest. */
typedef struct {
    uint64_t stream;
    uint64_t first; /* index of the first element */
} dithering;

/* How one block is turned into codes. */
typedef struct {
    int marked;
    int wide;
    int dithered;
    float scale;
    float base;
    float inverse;
    float top;
    uint32_t zero;
    double inverse_wide;
} encoding;

static code_type code_type_of(const pccl_op_shape *shape)
{
    const uint32_t code = shape->quantized_dtype;
    const int is_signed = code == PCCL_CODE_INT4 || code == PCCL_INT8 || code == PCCL_INT16;
    code_type type;
    type.bits = code == PCCL_CODE_UINT4 || code == PCCL_CODE_INT4 ? 4 : 8 * pccl_dtype_bytes(code);
    type.steps_max = (1u << type.bits) - 1;
    type.first = is_signed ? type.steps_max / 2 + 1 : 0;
    type.shift_at = type.bits == 4 ? 4 : 8;
    type.header_bytes = type.shift_at + (shape->dtype == PCCL_FLOAT64 ? 2 : 0);
    return type;
}

PCCL_INLINE size_t codes_bytes(const code_type *type, size_t count) { return (count * type->bits + 7) / 8; }

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
    case PCCL_QUANT_CAST:
        return (shape->dtype == PCCL_FLOAT32 || shape->dtype == PCCL_FLOAT64)
            && (code == PCCL_FLOAT16 || code == PCCL_BFLOAT16) && block == 0;
    default:
        return 0;
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
    const code_type type = code_type_of(shape);
    const size_t blocks = count / shape->quantization_block, rest = count % shape->quantization_block;
    return blocks * (type.header_bytes + codes_bytes(&type, shape->quantization_block))
        + (rest > 0 ? type.header_bytes + codes_bytes(&type, rest) : 0);
}

static double power_of_two(int exponent)
{
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

/* The power of two that a block of float64 is divided by, as its exponent. */
PCCL_INLINE int shift_of(const void *x, size_t count)
{
    const pccl_u64 *bits = x;
    uint64_t greatest = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t magnitude = bits[i] & 0x7fffffffffffffffu;
        greatest = magnitude > greatest ? magnitude : greatest;
    }
    const int exponent = (int)(greatest >> 52) - 1023;
    if (greatest == 0 || exponent == 1024 || (exponent >= FLOAT_EXPONENT_MIN && exponent <= FLOAT_EXPONENT_MAX))
        return 0;
    return exponent < SHIFT_MIN ? SHIFT_MIN : exponent > SHIFT_MAX ? SHIFT_MAX : exponent;
}

/* Elements as float32: `x` itself where it is that already, else converted into `buffer`; times `factor` where they are
 * float64. */
PCCL_INLINE const pccl_f32 *load(uint32_t dtype, const void *x, size_t count, double factor, float *buffer)
{
    switch (dtype) {
    case PCCL_FLOAT16: pccl_f16_widen(x, count, buffer); return buffer;
    case PCCL_BFLOAT16: {
        const pccl_u16 *halves = x;
        for (size_t i = 0; i < count; i++)
            buffer[i] = pccl_bf16_to_f32(halves[i]);
        return buffer;
    }
    case PCCL_FLOAT32: return x;
    default: {
        const pccl_f64 *doubles = x;
        for (size_t i = 0; i < count; i++)
            buffer[i] = (float)(doubles[i] * factor);
        return buffer;
    }
    }
}

/* Floats in order as signed integers: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN. One integer reduction
 * finds the range, whether it is finite, and the same zero whatever the order of elements. */
PCCL_INLINE void extend_range(const pccl_f32 *x, size_t count, int32_t *least, int32_t *greatest)
{
    int32_t lo = *least, hi = *greatest;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = pccl_f32_bits(x[i]);
        uint32_t negative = 0u - (bits >> 31);
        int32_t key = (int32_t)(bits ^ (negative & 0x7fffffff));
        lo = key < lo ? key : lo;
        hi = key > hi ? key : hi;
    }
    *least = lo;
    *greatest = hi;
}

static float float_of_key(int32_t key)
{
    uint32_t bits = (uint32_t)key;
    return pccl_f32_of_bits(bits & 0x80000000u ? bits ^ 0x7fffffff : bits);
}

static int key_is_finite(int32_t key) { return key > -0x7f800001 && key < 0x7f800000; }

static float round_up_to_float(double value)
{
    float nearest = (float)value;
    /* The next float of a positive one has the next bits. */
    return (double)nearest < value ? pccl_f32_of_bits(pccl_f32_bits(nearest) + 1) : nearest;
}

/* rint, by the addition that rounds. */
static double round_f64(double value) { return (value + ROUND_F64) - ROUND_F64; }

/* The nearest bfloat16 that is not less (not greater), for what is in its range. */
static float bf16_up(float positive)
{
    return pccl_f32_of_bits((pccl_f32_bits(positive) + 0xffff) & 0xffff0000);
}

static float bf16_down(float value)
{
    const uint32_t least = 0xff7f0000, bits = pccl_f32_bits(value);
    if (bits < 0x80000000)
        return pccl_f32_of_bits(bits & 0xffff0000);
    return pccl_f32_of_bits(bits > least ? least : (bits + 0xffff) & 0xffff0000);
}

static encoding plan(
    const pccl_op_shape *shape, const code_type *type, int dithered, int32_t least, int32_t greatest)
{
    encoding e = {0};
    if (!key_is_finite(least) || !key_is_finite(greatest)) {
        e.marked = 1;
        return e;
    }
    const int is_short = type->bits == 4, has_zero = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE;
    double lo = float_of_key(least), hi = float_of_key(greatest);
    /* One step away from the zero point. */
    const int exact = has_zero && lo == hi && !is_short;
    e.dithered = dithered && !exact;
    double steps = exact ? 1 : type->steps_max;
    if (has_zero) {
        lo = lo < 0 ? lo : 0;
        hi = hi > 0 ? hi : 0;
        /* Either end of the range lies between two codes, and both of them are needed. */
        steps -= e.dithered;
    } else {
        e.base = is_short ? bf16_down((float)lo) : (float)lo;
        lo = e.base;
    }
    e.scale = hi > lo ? round_up_to_float((hi - lo) / steps) : 0;
    if (is_short)
        e.scale = bf16_up(e.scale);
    e.wide = e.scale != 0 && !(e.scale >= SCALE_MIN && e.scale <= SCALE_MAX);
    e.inverse_wide = e.scale != 0 ? 1.0 / (double)e.scale : 0;
    e.inverse = e.wide ? 0 : (float)e.inverse_wide;
    if (has_zero) {
        /* The very rounding that elements get, so that the least one comes to step 0. */
        double below = e.wide ? -lo * e.inverse_wide : (double)((float)-lo * e.inverse);
        double zero = round_f64(below);
        e.zero = (uint32_t)(e.dithered && zero < below ? zero + 1 : zero);
        PCCL_ASSERT(e.zero <= type->steps_max);
    }
    e.top = (float)(type->steps_max - e.zero);
    return e;
}

#define ENCODE_LOOP(code) \
    do { \
        code *codes = destination; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) { \
            float steps = (x[i] - base) * inverse; \
            steps = steps < top ? steps : top; \
            codes[i] = (code)(pccl_f32_bits(steps + ROUND_F32) + offset); \
        } \
    } while (0)

/* Dithering may also lead below the first code, by rounding errors of a value that lies on it. */
#define DITHERED_LOOP(code) \
    do { \
        code *codes = destination; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) { \
            float steps = (x[i] - base) * inverse + pccl_dither_unit(stream, index + (uint32_t)i); \
            steps = steps < top ? steps : top; \
            steps = steps > bottom ? steps : bottom; \
            codes[i] = (code)(pccl_f32_bits(steps + ROUND_F32) + offset); \
        } \
    } while (0)

/* Codes of 4 bits come out one a byte. */
PCCL_INLINE void encode(const encoding *e, const code_type *type, const pccl_f32 *x, size_t count,
    uint64_t stream, uint32_t index, void *destination)
{
    const float base = e->base, inverse = e->inverse, top = e->top, bottom = -(float)e->zero;
    const uint32_t offset = e->zero + type->first;
    if (e->dithered && type->bits <= 8)
        DITHERED_LOOP(pccl_u8);
    else if (e->dithered)
        DITHERED_LOOP(pccl_u16);
    else if (type->bits <= 8)
        ENCODE_LOOP(pccl_u8);
    else
        ENCODE_LOOP(pccl_u16);
}

static void encode_wide(const encoding *e, const code_type *type, const pccl_f32 *x, size_t count,
    uint64_t stream, uint32_t index, uint8_t *destination)
{
    const double top = e->top, bottom = -(double)e->zero;
    for (size_t i = 0; i < count; i++) {
        double steps = ((double)x[i] - (double)e->base) * e->inverse_wide;
        if (e->dithered)
            steps += (double)pccl_dither_unit(stream, index + (uint32_t)i);
        steps = steps < top ? steps : top;
        steps = round_f64(steps > bottom ? steps : bottom);
        uint32_t code = (uint32_t)(int32_t)steps + e->zero + type->first;
        if (type->bits <= 8)
            destination[i] = (uint8_t)code;
        else
            pccl_put_u16(destination + 2 * i, (uint16_t)code);
    }
}

/* Two codes a byte, and back: pairs as one little-endian word. `codes` has room for an even number of them. */
PCCL_INLINE void pack(uint8_t *codes, size_t count, pccl_u8 *wire)
{
    const pccl_u16 *pairs = (const pccl_u16 *)(const void *)codes;
    if (count % 2 == 1)
        codes[count] = 0;
    PCCL_INDEPENDENT
    for (size_t i = 0; i < (count + 1) / 2; i++)
        wire[i] = (uint8_t)((pairs[i] & 0xf) | (pairs[i] >> 4 & 0xf0));
}

/* `first` is 0 or 8: without it a code is its number of steps. */
PCCL_INLINE void unpack(const pccl_u8 *wire, size_t count, uint32_t first, uint8_t *steps)
{
    const uint32_t flip = first * 0x0101;
    pccl_u16 *pairs = (pccl_u16 *)(void *)steps;
    PCCL_INDEPENDENT
    for (size_t i = 0; i < (count + 1) / 2; i++)
        pairs[i] = (uint16_t)((((uint32_t)wire[i] | (uint32_t)wire[i] << 4) & 0x0f0f) ^ flip);
}

static void put_header(const pccl_op_shape *shape, const code_type *type, const encoding *e, uint8_t *wire)
{
    const int has_zero = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE;
    const uint32_t scale = e->marked ? NAN_BITS : pccl_f32_bits(e->scale);
    const uint32_t base = pccl_f32_bits(e->base), zero = e->marked ? 0 : e->zero - type->first;
    if (type->bits == 4) {
        pccl_put_u16(wire, (uint16_t)(scale >> 16));
        pccl_put_u16(wire + 2, (uint16_t)(has_zero ? zero : base >> 16));
    } else {
        pccl_put_u32(wire, scale);
        pccl_put_u32(wire + 4, has_zero ? zero : base);
    }
}

PCCL_INLINE void quantize_blocks(const pccl_op_shape *shape, const dithering *dither, const void *source,
    size_t count, uint8_t *wire)
{
    const code_type type = code_type_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const uint64_t stream = dither != NULL ? dither->stream : 0;
    uint32_t index = dither != NULL ? (uint32_t)dither->first : 0;
    const uint8_t *x = source;
    float buffer[CHUNK];
    uint8_t nibbles[CHUNK];
    while (count > 0) {
        const size_t block = pccl_min_size(shape->quantization_block, count);
        int32_t least = INT32_MAX, greatest = INT32_MIN;
        const pccl_f32 *floats = NULL;
        const int shift = shape->dtype == PCCL_FLOAT64 ? shift_of(x, block) : 0;
        const double factor = power_of_two(-shift);
        for (size_t at = 0; at < block; at += CHUNK) {
            size_t n = pccl_min_size(CHUNK, block - at);
            floats = load(shape->dtype, x + at * element_bytes, n, factor, buffer);
            extend_range(floats, n, &least, &greatest);
        }
        const encoding e = plan(shape, &type, dither != NULL, least, greatest);
        put_header(shape, &type, &e, wire);
        if (shape->dtype == PCCL_FLOAT64)
            pccl_put_u16(wire + type.shift_at, (uint16_t)shift);
        wire += type.header_bytes;
        for (size_t at = 0; at < block; at += CHUNK) {
            const size_t n = pccl_min_size(CHUNK, block - at);
            uint8_t *codes = type.bits == 4 ? nibbles : wire;
            if (block > CHUNK)
                floats = load(shape->dtype, x + at * element_bytes, n, factor, buffer);
            if (e.marked)
                memset(codes, 0, n * (type.bits == 16 ? 2 : 1));
            else if (e.wide)
                encode_wide(&e, &type, floats, n, stream, index, codes);
            else
                encode(&e, &type, floats, n, stream, index, codes);
            if (type.bits == 4)
                pack(nibbles, n, wire);
            wire += codes_bytes(&type, n);
            index += (uint32_t)n;
        }
        x += block * element_bytes;
        count -= block;
    }
}

PCCL_INLINE void cast(const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count,
    uint8_t *wire)
{
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const uint8_t *x = source;
    float buffer[CHUNK];
    for (size_t at = 0; at < count; at += CHUNK) {
        size_t n = pccl_min_size(CHUNK, count - at);
        const pccl_f32 *floats = load(shape->dtype, x + at * element_bytes, n, 1, buffer);
        if (dither != NULL) {
            uint32_t index = (uint32_t)(dither->first + at);
            pccl_u16 *halves = (pccl_u16 *)(void *)(wire + 2 * at);
            if (shape->quantized_dtype == PCCL_FLOAT16)
                for (size_t i = 0; i < n; i++)
                    halves[i] = pccl_f16_dithered(floats[i], pccl_dither(dither->stream, index + (uint32_t)i));
            else
                for (size_t i = 0; i < n; i++)
                    halves[i] = pccl_bf16_dithered(floats[i], pccl_dither(dither->stream, index + (uint32_t)i));
        } else if (shape->quantized_dtype == PCCL_FLOAT16) {
            pccl_f16_narrow(floats, n, wire + 2 * at);
        } else {
            pccl_bf16_narrow(floats, n, wire + 2 * at);
        }
    }
}

PCCL_INLINE void quantize_any(const pccl_op_shape *shape, const dithering *dither, const void *source,
    size_t count, uint8_t *wire)
{
    if (shape->quantization == PCCL_QUANT_CAST)
        cast(shape, dither, source, count, wire);
    else
        quantize_blocks(shape, dither, source, count, wire);
}

/* How the codes of one block are turned into values. */
typedef struct {
    int marked;
    int wide;
    float scale;
    float base;
    float zero;
    float limit; /* of the dtype */
    double factor; /* of float64 */
} decoding;

static float dtype_limit(uint32_t dtype)
{
    if (dtype == PCCL_FLOAT16)
        return 65504.0f;
    return dtype == PCCL_BFLOAT16 ? pccl_f32_of_bits(0x7f7f0000) : FLT_MAX;
}

static decoding get_header(const pccl_op_shape *shape, const code_type *type, const uint8_t *wire)
{
    decoding d = {0};
    uint32_t scale_bits, second;
    if (type->bits == 4) {
        scale_bits = (uint32_t)pccl_get_u16(wire) << 16;
        second = (uint32_t)pccl_get_u16(wire + 2) << 16;
    } else {
        scale_bits = pccl_get_u32(wire);
        second = pccl_get_u32(wire + 4);
    }
    d.scale = pccl_f32_of_bits(scale_bits);
    if (shape->quantization == PCCL_QUANT_MIN_MAX) {
        d.base = pccl_f32_of_bits(second);
    } else {
        /* Counted in steps; what was below the least code has become huge. */
        uint32_t zero = (type->bits == 4 ? (uint32_t)((int32_t)second >> 16) : second) + type->first;
        d.marked = zero > type->steps_max;
        d.zero = d.marked ? 0 : (float)zero;
    }
    d.factor = 1;
    if (shape->dtype == PCCL_FLOAT64) {
        const int shift = (int16_t)pccl_get_u16(wire + type->shift_at);
        if (shift >= SHIFT_MIN && shift <= SHIFT_MAX)
            d.factor = power_of_two(shift);
        else
            d.marked = 1;
    }
    float scale = fabsf(d.scale), base = fabsf(d.base);
    d.marked |= !(scale <= FLT_MAX && base <= FLT_MAX);
    d.wide = !(scale <= SCALE_MAX && base <= BASE_MAX);
    d.limit = dtype_limit(shape->dtype);
    return d;
}

#define DECODE_LOOP(code, result) \
    do { \
        const code *codes = wire; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) { \
            const float value = base + scale * ((float)(int32_t)(code)(codes[i] - first) - zero); \
            values[i] = result; \
        } \
    } while (0)

/* As pccl_kernel_reduce adds. */
PCCL_INLINE float add(float x, float y)
{
    const float sum = x + y;
    return sum != sum ? pccl_f32_of_bits(NAN_BITS) : sum;
}

/* Adds to `a`, where that is not NULL; `values` may be `a`. Of 4 bits come steps, one a byte, not codes. */
PCCL_INLINE void decode(const decoding *d, const code_type *type, const void *wire, size_t count,
    const pccl_f32 *a, pccl_f32 *values)
{
    const float base = d->base, scale = d->scale, zero = d->zero;
    const uint32_t first = type->bits == 4 ? 0 : type->first;
    if (a != NULL && type->bits <= 8)
        DECODE_LOOP(pccl_u8, add(a[i], value));
    else if (a != NULL)
        DECODE_LOOP(pccl_u16, add(a[i], value));
    else if (type->bits <= 8)
        DECODE_LOOP(pccl_u8, value);
    else
        DECODE_LOOP(pccl_u16, value);
}

static void decode_wide(
    const decoding *d, const code_type *type, const uint8_t *wire, size_t count, pccl_f32 *values)
{
    const double limit = d->limit;
    const uint32_t first = type->bits == 4 ? 0 : type->first;
    for (size_t i = 0; i < count; i++) {
        uint32_t code = type->bits <= 8 ? wire[i] : pccl_get_u16(wire + 2 * i);
        double steps = (double)((code - first) & type->steps_max) - (double)d->zero;
        double value = (double)d->base + (double)d->scale * steps;
        value = value < limit ? value : limit;
        values[i] = (float)(value > -limit ? value : -limit);
    }
}

PCCL_INLINE void fill_nan(pccl_f32 *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        values[i] = pccl_f32_of_bits(NAN_BITS);
}

/* Float32 to the dtype. Only a float16 can leave its finite range here, where the block was not wide. */
PCCL_INLINE void store(const decoding *d, uint32_t dtype, float *values, size_t count, void *destination)
{
    switch (dtype) {
    case PCCL_FLOAT16:
        for (size_t i = 0; i < count; i++) {
            float value = values[i];
            value = value > d->limit ? d->limit : value; /* a NaN stays */
            values[i] = value < -d->limit ? -d->limit : value;
        }
        pccl_f16_narrow(values, count, destination);
        break;
    case PCCL_BFLOAT16: {
        pccl_u16 *halves = destination;
        for (size_t i = 0; i < count; i++)
            halves[i] = pccl_bf16_from_f32(values[i]);
        break;
    }
    default: {
        pccl_f64 *doubles = destination;
        for (size_t i = 0; i < count; i++) {
            double value = (double)values[i] * d->factor;
            value = value > DBL_MAX ? DBL_MAX : value; /* a NaN stays */
            doubles[i] = value < -DBL_MAX ? -DBL_MAX : value;
        }
    }
    }
}

/* Elements first .. first + count - 1 of a segment; `first` is even. With `a`, which is float32 as then the
 * dtype has to be, their sums with it; `destination` may be `a`. */
PCCL_INLINE void dequantize_blocks(const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count,
    const pccl_f32 *a, void *destination)
{
    const code_type type = code_type_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const size_t block = shape->quantization_block;
    const size_t block_bytes = type.header_bytes + codes_bytes(&type, block);
    size_t in_block = first % block;
    wire += first / block * block_bytes;
    uint8_t *out = destination;
    float buffer[CHUNK];
    uint8_t nibbles[CHUNK];
    while (count > 0) {
        const decoding d = get_header(shape, &type, wire);
        size_t left = pccl_min_size(block - in_block, count);
        const uint8_t *codes = wire + type.header_bytes + codes_bytes(&type, in_block);
        count -= left;
        while (left > 0) {
            const size_t n = pccl_min_size(CHUNK, left);
            const int is_usual = !d.marked && !d.wide;
            pccl_f32 *sums = (pccl_f32 *)(void *)out; /* where the dtype is float32 */
            pccl_f32 *values = shape->dtype != PCCL_FLOAT32 || (a != NULL && !is_usual) ? buffer : sums;
            const uint8_t *steps = codes;
            if (type.bits == 4) {
                unpack(codes, n, type.first, nibbles);
                steps = nibbles;
            }
            if (is_usual)
                decode(&d, &type, steps, n, a, values);
            else if (d.marked)
                fill_nan(values, n);
            else
                decode_wide(&d, &type, steps, n, values);
            if (shape->dtype != PCCL_FLOAT32)
                store(&d, shape->dtype, buffer, n, out);
            if (a != NULL && !is_usual)
                for (size_t i = 0; i < n; i++)
                    sums[i] = add(a[i], buffer[i]);
            a = a != NULL ? a + n : NULL;
            codes += codes_bytes(&type, n);
            out += n * element_bytes;
            left -= n;
        }
        wire += block_bytes;
        in_block = 0;
    }
}

static void widen(const pccl_op_shape *shape, const uint8_t *halves, size_t count, float *values)
{
    if (shape->quantized_dtype == PCCL_FLOAT16)
        pccl_f16_widen(halves, count, values);
    else
        pccl_bf16_widen(halves, count, values);
    /* Which bits of a NaN a conversion keeps depends on the CPU. */
    pccl_u32 *bits = (pccl_u32 *)(void *)values;
    for (size_t i = 0; i < count; i++)
        bits[i] = (bits[i] & 0x7fffffff) > 0x7f800000 ? NAN_BITS : bits[i];
}

PCCL_INLINE void cast_back(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, void *destination)
{
    float buffer[CHUNK];
    for (size_t at = 0; at < count; at += CHUNK) {
        const size_t n = pccl_min_size(CHUNK, count - at);
        widen(shape, wire + 2 * (first + at), n, buffer);
        if (shape->dtype == PCCL_FLOAT32) {
            memcpy((uint8_t *)destination + 4 * at, buffer, 4 * n);
        } else {
            pccl_f64 *doubles = (pccl_f64 *)destination + at;
            for (size_t i = 0; i < n; i++)
                doubles[i] = (double)buffer[i];
        }
    }
}

PCCL_INLINE void dequantize_any(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, void *destination)
{
    if (shape->quantization == PCCL_QUANT_CAST)
        cast_back(shape, wire, first, count, destination);
    else
        dequantize_blocks(shape, wire, first, count, NULL, destination);
}

/* One of each per level of the CPU. */
#define FOR_LEVEL(target, level) \
    target static void quantize_##level( \
        const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, void *wire) \
    { \
        quantize_any(shape, dither, source, count, wire); \
    } \
    target static void dequantize_##level( \
        const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination) \
    { \
        dequantize_any(shape, wire, first, count, destination); \
    } \
    target static void dequantize_add_##level( \
        const pccl_op_shape *shape, const void *wire, size_t count, const void *a, void *destination) \
    { \
        dequantize_blocks(shape, wire, 0, count, a, destination); \
    }

FOR_LEVEL(, portable)
#if PCCL_SIMD_X86
FOR_LEVEL(PCCL_TARGET_AVX2, avx2)
FOR_LEVEL(PCCL_TARGET_AVX512, avx512)
#endif

/* Loops over few bytes, as decoding small blocks of 4-bit codes has them, lose more in the remainders of
 * 512-bit vectors than they gain: 14 GB/s of float32 at 64 elements a block, against 23. */
static int decoding_level(const pccl_op_shape *shape)
{
    const int level = pccl_simd_level();
    const int is_short = shape->quantized_dtype == PCCL_CODE_UINT4 || shape->quantized_dtype == PCCL_CODE_INT4;
    return is_short && level > PCCL_SIMD_AVX2 ? PCCL_SIMD_AVX2 : level;
}

static void quantize(
    const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, void *wire)
{
    PCCL_ASSERT(pccl_quant_valid(shape));
    switch (pccl_simd_level()) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: quantize_avx512(shape, dither, source, count, wire); break;
    case PCCL_SIMD_AVX2: quantize_avx2(shape, dither, source, count, wire); break;
#endif
    default: quantize_portable(shape, dither, source, count, wire);
    }
}

static void dequantize(
    const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination)
{
    switch (decoding_level(shape)) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: dequantize_avx512(shape, wire, first, count, destination); break;
    case PCCL_SIMD_AVX2: dequantize_avx2(shape, wire, first, count, destination); break;
#endif
    default: dequantize_portable(shape, wire, first, count, destination);
    }
}

static void dequantize_add(
    const pccl_op_shape *shape, const void *wire, size_t count, const void *a, void *destination)
{
    switch (decoding_level(shape)) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: dequantize_add_avx512(shape, wire, count, a, destination); break;
    case PCCL_SIMD_AVX2: dequantize_add_avx2(shape, wire, count, a, destination); break;
#endif
    default: dequantize_add_portable(shape, wire, count, a, destination);
    }
}

void pccl_kernel_quantize(const pccl_op_shape *shape, const void *source, size_t count, void *wire)
{
    quantize(shape, NULL, source, count, wire);
}

void pccl_kernel_quantize_stochastic(const pccl_op_shape *shape, uint64_t stream, uint64_t first,
    const void *source, size_t count, void *wire)
{
    const dithering dither = {stream, first};
    quantize(shape, &dither, source, count, wire);
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

void pccl_quant_quantize(
    const pccl_op_request *request, uint64_t first, const void *source, size_t count, void *wire)
{
    if (request->rounding == PCCL_ROUND_STOCHASTIC)
        pccl_kernel_quantize_stochastic(
            &request->shape, pccl_quant_stream(request), first, source, count, wire);
    else
        pccl_kernel_quantize(&request->shape, source, count, wire);
}

void pccl_kernel_dequantize(const pccl_op_shape *shape, const void *wire, size_t count, void *destination)
{
    PCCL_ASSERT(pccl_quant_valid(shape));
    dequantize(shape, wire, 0, count, destination);
}

void pccl_quant_dequantize_reduce(
    const pccl_op_shape *shape, void *destination, const void *a, const void *wire, size_t count)
{
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    double buffer[CHUNK]; /* the widest dtype */
    PCCL_ASSERT(pccl_quant_valid(shape));
    if (shape->dtype == PCCL_FLOAT32 && shape->quantization != PCCL_QUANT_CAST
        && (shape->reduce_op == PCCL_SUM || shape->reduce_op == PCCL_AVG)) {
        dequantize_add(shape, wire, count, a, destination);
        return;
    }
    for (size_t at = 0; at < count; at += CHUNK) {
        size_t n = pccl_min_size(CHUNK, count - at);
        dequantize(shape, wire, at, n, buffer);
        pccl_kernel_reduce(shape->dtype, shape->reduce_op, (uint8_t *)destination + at * element_bytes,
            (const uint8_t *)a + at * element_bytes, buffer, n);
    }
}
