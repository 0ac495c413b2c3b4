/* bench_kernels.c: GB/s of elements through the reduction and through each quantization kernel, on one core, at every
 * level of the CPU. Operands are a segment long and stay in the L2 cache. A sum of integers does nothing but load and
 * store, at what speed the cache allows: it is what the sum of floats is to be held against.
 *
 *     make -C native bench OPTIMIZE=-O3
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../src/base.h"
#include "../src/dtype.h"
#include "../src/quant.h"
#include "../src/simd.h"

static const struct {
    const char *name;
    uint32_t dtype, quantization, code, block;
} cases[] = {
    {"f32 min_max 8", PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256},
    {"f32 min_max 16", PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_UINT16, 256},
    {"f32 min_max 4", PCCL_FLOAT32, PCCL_QUANT_MIN_MAX, PCCL_CODE_UINT4, 64},
    {"f32 lloyd_max 2", PCCL_FLOAT32, PCCL_QUANT_LLOYD_MAX, PCCL_CODE_UINT2, 64},
    {"f32 sign 1", PCCL_FLOAT32, PCCL_QUANT_SIGN, PCCL_CODE_UINT1, 64},
    {"f32 zero_point 8", PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 256},
    {"f32 zero_point 4", PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 64},
    {"f32 cast bf16", PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_BFLOAT16, 0},
    {"f32 cast f16", PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_FLOAT16, 0},
    {"bf16 min_max 8", PCCL_BFLOAT16, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256},
    {"f16 min_max 8", PCCL_FLOAT16, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256},
};

static const struct {
    const char *name;
    uint32_t dtype;
} sums[] = {
    {"u32", PCCL_UINT32}, {"f32", PCCL_FLOAT32}, {"f64", PCCL_FLOAT64}, {"bf16", PCCL_BFLOAT16}, {"f16", PCCL_FLOAT16}};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

enum { QUANTIZE, STOCHASTIC, DEQUANTIZE, DEQUANTIZE_REDUCE, REDUCE };

static const char *const ways[] = {"quantize", "stochastic", "dequantize", "dequantize+sum"};

typedef struct {
    pccl_op_shape shape;
    const void *x;
    void *wire;
    void *y;
    size_t count;
} operands;

static void run(int way, const operands *o)
{
    switch (way) {
    case QUANTIZE: pccl_kernel_quantize(&o->shape, o->x, o->count, o->wire); break;
    case STOCHASTIC: pccl_kernel_quantize_stochastic(&o->shape, 1, 0, o->x, o->count, o->wire); break;
    case DEQUANTIZE: pccl_kernel_dequantize(&o->shape, o->wire, o->count, o->y); break;
    case DEQUANTIZE_REDUCE: pccl_quant_dequantize_reduce(&o->shape, o->y, o->x, o->wire, o->count); break;
    default: pccl_kernel_reduce(o->shape.dtype, PCCL_SUM, o->y, o->y, o->x, o->count);
    }
}

static double gigabytes_per_s(int way, const operands *o)
{
    double best_s = 1e9;
    run(way, o);
    for (int round = 0; round < 7; round++) {
        const double start_s = now_s();
        int times = 0;
        do {
            run(way, o);
            times++;
        } while (now_s() - start_s < 0.01);
        const double taken_s = (now_s() - start_s) / times;
        best_s = taken_s < best_s ? taken_s : best_s;
    }
    return (double)(o->count * pccl_dtype_bytes(o->shape.dtype)) / best_s * 1e-9;
}

static void fill(const operands *o, void *x)
{
    const size_t bytes = pccl_dtype_bytes(o->shape.dtype);
    for (size_t i = 0; i < o->count; i++) {
        const float value = (float)(rand() % 20001) * 1e-4f - 1;
        uint32_t bits;
        memcpy(&bits, &value, 4);
        bits >>= bytes == 2 ? 16 : 0;
        memcpy((uint8_t *)x + i * bytes, &bits, bytes);
    }
}

int main(int argc, char **argv)
{
    const size_t count = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 65536;
    void *x = calloc(count, 8), *y = calloc(count, 8), *wire = calloc(count, 8);
    if (x == NULL || y == NULL || wire == NULL)
        return 1;
    operands o = {.x = x, .y = y, .wire = wire, .count = count};
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++) {
        for (size_t k = 0; k < PCCL_COUNT_OF(sums); k++) {
            o.shape = (pccl_op_shape){.dtype = (uint8_t)sums[k].dtype};
            memset(y, 0, count * 8);
            fill(&o, x);
            printf("level %d  %-18s  sum %6.2f\n", level, sums[k].name, gigabytes_per_s(REDUCE, &o));
        }
        for (size_t k = 0; k < PCCL_COUNT_OF(cases); k++) {
            o.shape = (pccl_op_shape){
                .dtype = (uint8_t)cases[k].dtype,
                .quantization = (uint8_t)cases[k].quantization,
                .quantized_dtype = (uint8_t)cases[k].code,
                .quantization_block = cases[k].block,
            };
            fill(&o, x);
            printf("level %d  %-18s", level, cases[k].name);
            for (int way = 0; way < REDUCE; way++)
                printf("  %s %6.2f", ways[way], gigabytes_per_s(way, &o));
            printf("\n");
        }
    }
    free(x);
    free(y);
    free(wire);
    return 0;
}
