/* quant_encode.c: elements to codes, in the format of quant_format.h. See simd.h for how the loops become one function
 * per CPU level. */
#include "quant.h"

#include "base.h"
#include "dither.h"
#include "dtype.h"
#include "half.h"
#include "quant_format.h"
#include "quant_levels.h"
#include "simd.h"

enum {
    FLOAT_EXPONENT_MIN = -100, /* of float64s that are quantized as they are */
    FLOAT_EXPONENT_MAX = 126
};

/* From here on float32 meets no subnormals. */
#define PCCL_QUANT_SCALE_MIN 0x1p-100f

/* Added to a small float or double, these leave its nearest integer (ties to even) in the lowest bits. */
#define ROUND_F32 0x1.8p23f
#define ROUND_F64 0x1.8p52

/* The stream and position of random numbers; NULL where values are rounded to nearest. */
typedef struct {
    uint64_t stream;
    uint64_t first; /* index of the first element */
} dithering;

/* The parameters by which one block is turned into codes. */
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
    if (exponent < PCCL_QUANT_SHIFT_MIN)
        return PCCL_QUANT_SHIFT_MIN;
    return exponent > PCCL_QUANT_SHIFT_MAX ? PCCL_QUANT_SHIFT_MAX : exponent;
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
static float bf16_up(float positive) { return pccl_f32_of_bits((pccl_f32_bits(positive) + 0xffff) & 0xffff0000); }

static float bf16_down(float value)
{
    const uint32_t least = 0xff7f0000, bits = pccl_f32_bits(value);
    if (bits < 0x80000000)
        return pccl_f32_of_bits(bits & 0xffff0000);
    return pccl_f32_of_bits(bits > least ? least : (bits + 0xffff) & 0xffff0000);
}

static encoding plan(
    const pccl_op_shape *shape, const pccl_quant_code *type, int dithered, int32_t least, int32_t greatest)
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
    e.wide = e.scale != 0 && !(e.scale >= PCCL_QUANT_SCALE_MIN && e.scale <= PCCL_QUANT_SCALE_MAX);
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
PCCL_INLINE void encode(const encoding *e, const pccl_quant_code *type, const pccl_f32 *x, size_t count,
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

static void encode_wide(const encoding *e, const pccl_quant_code *type, const pccl_f32 *x, size_t count,
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

static void put_header(const pccl_op_shape *shape, const pccl_quant_code *type, const encoding *e, uint8_t *wire)
{
    const int has_zero = shape->quantization == PCCL_QUANT_ZERO_POINT_SCALE;
    const uint32_t scale = e->marked ? PCCL_QUANT_NAN_BITS : pccl_f32_bits(e->scale);
    const uint32_t base = pccl_f32_bits(e->base), zero = e->marked ? 0 : e->zero - type->first;
    if (type->bits == 4) {
        pccl_put_u16(wire, (uint16_t)(scale >> 16));
        pccl_put_u16(wire + 2, (uint16_t)(has_zero ? zero : base >> 16));
    } else {
        pccl_put_u32(wire, scale);
        pccl_put_u32(wire + 4, has_zero ? zero : base);
    }
}

PCCL_INLINE void quantize_blocks(
    const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, uint8_t *wire)
{
    const pccl_quant_code type = pccl_quant_code_of(shape);
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const uint64_t stream = dither != NULL ? dither->stream : 0;
    uint32_t index = dither != NULL ? (uint32_t)dither->first : 0;
    const uint8_t *x = source;
    float buffer[PCCL_QUANT_CHUNK];
    uint8_t nibbles[PCCL_QUANT_CHUNK];
    while (count > 0) {
        const size_t block = pccl_min_size(shape->quantization_block, count);
        int32_t least = INT32_MAX, greatest = INT32_MIN;
        const pccl_f32 *floats = NULL;
        const int shift = shape->dtype == PCCL_FLOAT64 ? shift_of(x, block) : 0;
        const double factor = pccl_quant_power_of_two(-shift);
        for (size_t at = 0; at < block; at += PCCL_QUANT_CHUNK) {
            size_t n = pccl_min_size(PCCL_QUANT_CHUNK, block - at);
            floats = load(shape->dtype, x + at * element_bytes, n, factor, buffer);
            extend_range(floats, n, &least, &greatest);
        }
        const encoding e = plan(shape, &type, dither != NULL, least, greatest);
        put_header(shape, &type, &e, wire);
        if (shape->dtype == PCCL_FLOAT64)
            pccl_put_u16(wire + type.shift_at, (uint16_t)shift);
        wire += type.header_bytes;
        for (size_t at = 0; at < block; at += PCCL_QUANT_CHUNK) {
            const size_t n = pccl_min_size(PCCL_QUANT_CHUNK, block - at);
            uint8_t *codes = type.bits == 4 ? nibbles : wire;
            if (block > PCCL_QUANT_CHUNK)
                floats = load(shape->dtype, x + at * element_bytes, n, factor, buffer);
            if (e.marked)
                memset(codes, 0, n * (type.bits == 16 ? 2 : 1));
            else if (e.wide)
                encode_wide(&e, &type, floats, n, stream, index, codes);
            else
                encode(&e, &type, floats, n, stream, index, codes);
            if (type.bits == 4)
                pack(nibbles, n, wire);
            wire += pccl_quant_codes_bytes(&type, n);
            index += (uint32_t)n;
        }
        x += block * element_bytes;
        count -= block;
    }
}

PCCL_INLINE void cast(
    const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, uint8_t *wire)
{
    const size_t element_bytes = pccl_dtype_bytes(shape->dtype);
    const uint8_t *x = source;
    float buffer[PCCL_QUANT_CHUNK];
    for (size_t at = 0; at < count; at += PCCL_QUANT_CHUNK) {
        size_t n = pccl_min_size(PCCL_QUANT_CHUNK, count - at);
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

PCCL_INLINE void quantize_any(
    const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, uint8_t *wire)
{
    if (shape->quantization == PCCL_QUANT_CAST)
        cast(shape, dither, source, count, wire);
    else
        quantize_blocks(shape, dither, source, count, wire);
}

/* One per level of the CPU. */
#define FOR_LEVEL(target, level) \
    target static void quantize_##level( \
        const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, void *wire) \
    { \
        quantize_any(shape, dither, source, count, wire); \
    }

FOR_LEVEL(, portable)
#if PCCL_SIMD_X86
FOR_LEVEL(PCCL_TARGET_AVX2, avx2)
FOR_LEVEL(PCCL_TARGET_AVX512, avx512)
#endif

static void quantize(const pccl_op_shape *shape, const dithering *dither, const void *source, size_t count, void *wire)
{
    PCCL_ASSERT(pccl_quant_valid(shape));
    if (pccl_quant_has_levels(shape)) {
        pccl_levels_quantize(shape, source, count, wire);
        return;
    }
    switch (pccl_simd_level()) {
#if PCCL_SIMD_X86
    case PCCL_SIMD_AVX512: quantize_avx512(shape, dither, source, count, wire); break;
    case PCCL_SIMD_AVX2: quantize_avx2(shape, dither, source, count, wire); break;
#endif
    default: quantize_portable(shape, dither, source, count, wire);
    }
}

void pccl_kernel_quantize(const pccl_op_shape *shape, const void *source, size_t count, void *wire)
{
    quantize(shape, NULL, source, count, wire);
}

void pccl_kernel_quantize_stochastic(
    const pccl_op_shape *shape, uint64_t stream, uint64_t first, const void *source, size_t count, void *wire)
{
    const dithering dither = {stream, first};
    quantize(shape, &dither, source, count, wire);
}
