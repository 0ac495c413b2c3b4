/* quant.c: block quantization of float payloads to 8 or 16 bits an element.
 *
 * Wire format
 *   A segment of n elements is cut into blocks of `quantization_block` elements, the last one maybe shorter.
 *   Blocks follow each other without padding. All of it is little-endian:
 *
 *     bytes 0..3   float32   scale, the distance of neighbouring codes
 *     bytes 4..7   MIN_MAX: float32 minimum;  ZERO_POINT_SCALE: int32 zero point, itself a code
 *     bytes 8..    one code an element: uint8, int8, uint16 or int16
 *
 *   With `first` the least code of the type (0, -128 or -32768) a code means
 *
 *     MIN_MAX            minimum + scale * (code - first)
 *     ZERO_POINT_SCALE   scale * (code - zero_point)
 *
 *   A block whose scale or minimum is not finite, or whose zero point is no code, means NaN throughout.
 *
 * What a sender may rely on
 *   - Error: at most half a scale, plus rounding to float32 and to the dtype. The scale is rounded up, so
 *     that the codes always span the block. 16-bit codes add up to 0.02 of a scale by float arithmetic.
 *   - A block of one repeated value is exact (to float32); so is 0 under ZERO_POINT_SCALE in any block.
 *   - A finite block never turns into infinity: results are clamped to the dtype's finite range.
 *   - A block that holds a NaN or an infinity has no honest codes. It is sent with scale NaN and arrives as
 *     NaN in every element: loud, and confined to the block.
 *   - float64 is quantized as float32: what rounds to an infinite float32 counts as infinity.
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
#include "dtype.h"
#include "half.h"
#include "simd.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload travels in the byte order of the machine, which has to be little-endian"
#endif

enum {
    HEADER_BYTES = 8,
    CHUNK = 1024, /* elements converted at a time: 4 KiB of floats on the stack, at home in the L1 cache */
    NAN_BITS = 0x7fc00000
};

/* Inside these bounds float32 neither overflows nor meets subnormals: steps are below 2^16. */
#define SCALE_MIN 0x1p-100f
#define SCALE_MAX 0x1p100f
#define BASE_MAX 0x1p126f

/* Added to a small float or double, these leave its nearest integer (ties to even) in the lowest bits. */
#define ROUND_F32 0x1.8p23f
#define ROUND_F64 0x1.8p52

typedef struct {
    uint32_t code_bytes;
    uint32_t steps_max; /* 255 or 65535 */
    uint32_t first; /* added to steps, in the code's width: 0, or the least code as an unsigned number */
} code_type;

/* How one block is turned into codes. */
typedef struct {
    int marked;
    int wide;
    float scale;
    float base;
    float inverse;
    float top;
    uint32_t zero;
    double inverse_wide;
} encoding;

static code_type code_type_of(const pccl_op_shape *shape)
{
    code_type type;
    int is_signed = shape->quantized_dtype == PCCL_INT8 || shape->quantized_dtype == PCCL_INT16;
    type.code_bytes = pccl_dtype_bytes(shape->quantized_dtype);
    type.steps_max = type.code_bytes == 1 ? 0xff : 0xffff;
    type.first = is_signed ? type.steps_max / 2 + 1 : 0;
    return type;
}

int pccl_quant_valid(const pccl_op_shape *shape)
{
    return pccl_dtype_is_float(shape->dtype)
        && (shape->quantization == PCCL_QUANT_MIN_MAX || shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE)
        && shape->quantized_dtype <= PCCL_INT16 && shape->quantization_block >= 1
        && shape->quantization_block <= PCCL_QUANT_BLOCK_MAX;
}

/* Without quantization the plain size; 0 for a shape that is not valid. */
size_t pccl_quantized_bytes(const pccl_op_shape *shape, size_t count)
{
    if (shape->quantization == PCCL_QUANT_NONE)
        return count * pccl_dtype_bytes(shape->dtype);
    if (!pccl_quant_valid(shape))
        return 0;
    size_t blocks = (size_t)pccl_div_up_u64(count, shape->quantization_block);
    return blocks * HEADER_BYTES + count * pccl_dtype_bytes(shape->quantized_dtype);
}

/* Elements as float32: `x` itself where it is that already, else converted into `buffer`. */
PCCL_INLINE const pccl_f32 *load(uint32_t dtype, const void *x, size_t count, float *buffer)
{
    switch (dtype) {
    case PCCL_FLOAT16: pccl_f16_widen(x, count, buffer); return buffer;
    case PCCL_BFLOAT16: pccl_bf16_widen(x, count, buffer); return buffer;
    case PCCL_FLOAT32: return x;
    default: {
        const pccl_f64 *doubles = x;
        for (size_t i = 0; i < count; i++)
            buffer[i] = (float)doubles[i];
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

static encoding plan(const pccl_op_shape *shape, const code_type *type, int32_t least, int32_t greatest)
{
    encoding e = {0};
    if (!key_is_finite(least) || !key_is_finite(greatest)) {
        e.marked = 1;
        return e;
    }
    double lo = float_of_key(least), hi = float_of_key(greatest);
    int constant = lo == hi;
    if (shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE) {
        lo = lo < 0 ? lo : 0;
        hi = hi > 0 ? hi : 0;
    } else {
        e.base = (float)lo;
    }
    /* A constant block is one step away from the zero point. */
    double steps = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE && constant ? 1 : type->steps_max;
    e.scale = round_up_to_float((hi - lo) / steps);
    e.wide = e.scale != 0 && !(e.scale >= SCALE_MIN && e.scale <= SCALE_MAX);
    e.inverse_wide = e.scale != 0 ? 1.0 / (double)e.scale : 0;
    e.inverse = e.wide ? 0 : (float)e.inverse_wide;
    if (shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE) {
        /* The very rounding that elements get, so that the least one comes to step 0. */
        double below = e.wide ? -lo * e.inverse_wide : (double)((float)-lo * e.inverse);
        e.zero = (uint32_t)round_f64(below);
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

PCCL_INLINE void encode(
    const encoding *e, const code_type *type, const pccl_f32 *x, size_t count, void *destination)
{
    const float base = e->base, inverse = e->inverse, top = e->top;
    const uint32_t offset = e->zero + type->first;
    if (type->code_bytes == 1)
        ENCODE_LOOP(pccl_u8);
    else
        ENCODE_LOOP(pccl_u16);
}

static void encode_wide(
    const encoding *e, const code_type *type, const pccl_f32 *x, size_t count, uint8_t *destination)
{
    for (size_t i = 0; i < count; i++) {
        double steps = ((double)x[i] - (double)e->base) * e->inverse_wide;
        steps = round_f64(steps < (double)e->top ? steps : (double)e->top);
        uint32_t code = (uint32_t)(int32_t)steps + e->zero + type->first;
        if (type->code_bytes == 1)
            destination[i] = (uint8_t)code;
        else
            pccl_put_u16(destination + 2 * i, (uint16_t)code);
    }
}

static void put_header(const pccl_op_shape *shape, const code_type *type, const encoding *e, uint8_t *wire)
{
    uint32_t second = 0;
    if (e->marked) {
        pccl_put_u32(wire, NAN_BITS);
    } else {
        pccl_put_u32(wire, pccl_f32_bits(e->scale));
        second = shape->quantization == PCCL_QUANT_MIN_MAX ? pccl_f32_bits(e->base) : e->zero - type->first;
    }
    pccl_put_u32(wire + 4, second);
}

PCCL_INLINE void quantize_blocks(const pccl_op_shape *shape, const void *source, size_t count, uint8_t *wire)
{
    const code_type type = code_type_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const uint8_t *x = source;
    float buffer[CHUNK];
    while (count > 0) {
        const size_t block = pccl_min_size(shape->quantization_block, count);
        int32_t least = INT32_MAX, greatest = INT32_MIN;
        const pccl_f32 *floats = NULL;
        for (size_t at = 0; at < block; at += CHUNK) {
            size_t n = pccl_min_size(CHUNK, block - at);
            floats = load(shape->dtype, x + at * element_bytes, n, buffer);
            extend_range(floats, n, &least, &greatest);
        }
        const encoding e = plan(shape, &type, least, greatest);
        put_header(shape, &type, &e, wire);
        wire += HEADER_BYTES;
        for (size_t at = 0; at < block; at += CHUNK) {
            size_t n = pccl_min_size(CHUNK, block - at);
            if (block > CHUNK)
                floats = load(shape->dtype, x + at * element_bytes, n, buffer);
            if (e.marked)
                memset(wire, 0, n * type.code_bytes);
            else if (e.wide)
                encode_wide(&e, &type, floats, n, wire);
            else
                encode(&e, &type, floats, n, wire);
            wire += n * type.code_bytes;
        }
        x += block * element_bytes;
        count -= block;
    }
}

/* How the codes of one block are turned into values. */
typedef struct {
    int marked;
    int wide;
    float scale;
    float base;
    float zero;
    float limit; /* of the dtype */
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
    d.scale = pccl_f32_of_bits(pccl_get_u32(wire));
    if (shape->quantization == PCCL_QUANT_MIN_MAX) {
        d.base = pccl_f32_of_bits(pccl_get_u32(wire + 4));
    } else {
        /* Counted in steps; what was below the least code has become huge. */
        uint32_t zero = pccl_get_u32(wire + 4) + type->first;
        d.marked = zero > type->steps_max;
        d.zero = d.marked ? 0 : (float)zero;
    }
    float scale = fabsf(d.scale), base = fabsf(d.base);
    d.marked |= !(scale <= FLT_MAX && base <= FLT_MAX);
    d.wide = !(scale <= SCALE_MAX && base <= BASE_MAX);
    d.limit = dtype_limit(shape->dtype);
    return d;
}

#define DECODE_LOOP(code) \
    do { \
        const code *codes = wire; \
        PCCL_INDEPENDENT \
        for (size_t i = 0; i < count; i++) \
            values[i] = base + scale * ((float)(int32_t)(code)(codes[i] - first) - zero); \
    } while (0)

PCCL_INLINE void decode(
    const decoding *d, const code_type *type, const void *wire, size_t count, pccl_f32 *values)
{
    const float base = d->base, scale = d->scale, zero = d->zero;
    const uint32_t first = type->first;
    if (type->code_bytes == 1)
        DECODE_LOOP(pccl_u8);
    else
        DECODE_LOOP(pccl_u16);
}

static void decode_wide(
    const decoding *d, const code_type *type, const uint8_t *wire, size_t count, pccl_f32 *values)
{
    const double limit = d->limit;
    for (size_t i = 0; i < count; i++) {
        uint32_t code = type->code_bytes == 1 ? wire[i] : pccl_get_u16(wire + 2 * i);
        double steps = (double)((code - type->first) & type->steps_max) - (double)d->zero;
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
    case PCCL_BFLOAT16: pccl_bf16_narrow(values, count, destination); break;
    default: {
        pccl_f64 *doubles = destination;
        for (size_t i = 0; i < count; i++)
            doubles[i] = (double)values[i];
    }
    }
}

/* Elements first .. first + count - 1 of a segment. */
PCCL_INLINE void dequantize_range(
    const pccl_op_shape *shape, const uint8_t *wire, size_t first, size_t count, void *destination)
{
    const code_type type = code_type_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const size_t block = shape->quantization_block;
    size_t in_block = first % block;
    wire += first / block * (HEADER_BYTES + block * type.code_bytes);
    uint8_t *out = destination;
    float buffer[CHUNK];
    while (count > 0) {
        const decoding d = get_header(shape, &type, wire);
        size_t left = pccl_min_size(block - in_block, count);
        const uint8_t *codes = wire + HEADER_BYTES + in_block * type.code_bytes;
        count -= left;
        while (left > 0) {
            size_t n = pccl_min_size(CHUNK, left);
            pccl_f32 *values = shape->dtype == PCCL_FLOAT32 ? (pccl_f32 *)(void *)out : buffer;
            if (d.marked)
                fill_nan(values, n);
            else if (d.wide)
                decode_wide(&d, &type, codes, n, values);
            else
                decode(&d, &type, codes, n, values);
            if (shape->dtype != PCCL_FLOAT32)
                store(&d, shape->dtype, buffer, n, out);
            codes += n * type.code_bytes;
            out += n * element_bytes;
            left -= n;
        }
        wire += HEADER_BYTES + block * type.code_bytes;
        in_block = 0;
    }
}

static void quantize_portable(const pccl_op_shape *shape, const void *source, size_t count, void *wire)
{
    quantize_blocks(shape, source, count, wire);
}

static void dequantize_portable(
    const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination)
{
    dequantize_range(shape, wire, first, count, destination);
}

#if PCCL_SIMD_X86
PCCL_TARGET_AVX2 static void quantize_avx2(
    const pccl_op_shape *shape, const void *source, size_t count, void *wire)
{
    quantize_blocks(shape, source, count, wire);
}

PCCL_TARGET_AVX2 static void dequantize_avx2(
    const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination)
{
    dequantize_range(shape, wire, first, count, destination);
}
#endif

static void dequantize(
    const pccl_op_shape *shape, const void *wire, size_t first, size_t count, void *destination)
{
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        dequantize_avx2(shape, wire, first, count, destination);
        return;
    }
#endif
    dequantize_portable(shape, wire, first, count, destination);
}

void pccl_kernel_quantize(const pccl_op_shape *shape, const void *source, size_t count, void *wire)
{
    PCCL_ASSERT(pccl_quant_valid(shape));
#if PCCL_SIMD_X86
    if (pccl_simd_level() >= PCCL_SIMD_AVX2) {
        quantize_avx2(shape, source, count, wire);
        return;
    }
#endif
    quantize_portable(shape, source, count, wire);
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
    for (size_t at = 0; at < count; at += CHUNK) {
        size_t n = pccl_min_size(CHUNK, count - at);
        dequantize(shape, wire, at, n, buffer);
        pccl_kernel_reduce(shape->dtype, shape->reduce_op, (uint8_t *)destination + at * element_bytes,
            (const uint8_t *)a + at * element_bytes, buffer, n);
    }
}
