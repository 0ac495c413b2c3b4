/* bench_quant.c: GB/s of the dtype's elements through each quantization kernel, on one core, at every level of the
 * CPU. Operands are a segment long and stay in the L2 cache.
 *
 *     cc -std=c99 -D_GNU_SOURCE -O3 -ffp-contract=off -Iinclude -Isrc \
 *         tests/bench_quant.c src/{quant,half,kernels,simd,dtype,base}.c -lm -o build/bench_quant
 *     build/bench_quant [elements]
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
    {"f32 zero_point 8", PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_INT8, 256},
    {"f32 zero_point 4", PCCL_FLOAT32, PCCL_QUANT_ZERO_POINT_SCALE, PCCL_CODE_INT4, 64},
    {"f32 cast bf16", PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_BFLOAT16, 0},
    {"f32 cast f16", PCCL_FLOAT32, PCCL_QUANT_CAST, PCCL_FLOAT16, 0},
    {"bf16 min_max 8", PCCL_BFLOAT16, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256},
    {"f16 min_max 8", PCCL_FLOAT16, PCCL_QUANT_MIN_MAX, PCCL_UINT8, 256},
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

enum { QUANTIZE, STOCHASTIC, DEQUANTIZE, REDUCE, WAYS };

static const char *const ways[WAYS] = {"quantize", "stochastic", "dequantize", "dequantize+sum"};

static void run(int way, const pccl_op_shape *shape, const void *x, size_t count, void *wire, void *y)
{
    if (way == QUANTIZE)
        pccl_kernel_quantize(shape, x, count, wire);
    else if (way == STOCHASTIC)
        pccl_kernel_quantize_stochastic(shape, 1, 0, x, count, wire);
    else if (way == DEQUANTIZE)
        pccl_kernel_dequantize(shape, wire, count, y);
    else
        pccl_quant_dequantize_reduce(shape, y, x, wire, count);
}

int main(int argc, char **argv)
{
    size_t count = argc > 1 ? (size_t)strtoull(argv[1], NULL, 10) : 65536;
    void *x = calloc(count, 8), *y = calloc(count, 8), *wire = calloc(count, 8);
    for (int level = 0; level < PCCL_SIMD_LEVEL_COUNT && pccl_simd_limit(level) == level; level++)
        for (size_t k = 0; k < PCCL_COUNT_OF(cases); k++) {
            pccl_op_shape shape = {0};
            shape.dtype = (uint8_t)cases[k].dtype;
            shape.quantization = (uint8_t)cases[k].quantization;
            shape.quantized_dtype = (uint8_t)cases[k].code;
            shape.quantization_block = cases[k].block;
            const size_t bytes = pccl_dtype_bytes(shape.dtype);
            for (size_t i = 0; i < count; i++) {
                float value = (float)(rand() % 20001) * 1e-4f - 1;
                uint32_t bits;
                memcpy(&bits, &value, 4);
                bits >>= bytes == 2 ? 16 : 0;
                memcpy((uint8_t *)x + i * bytes, &bits, bytes);
            }
            printf("level %d  %-18s", level, cases[k].name);
            for (int way = 0; way < WAYS; way++) {
                double best = 1e9;
                run(way, &shape, x, count, wire, y);
                for (int round = 0; round < 7; round++) {
                    double start = now_s();
                    int times = 0;
                    do {
                        run(way, &shape, x, count, wire, y);
                        times++;
                    } while (now_s() - start < 0.01);
                    double taken = (now_s() - start) / times;
                    best = taken < best ? taken : best;
                }
                printf("  %s %6.2f", ways[way], (double)(count * bytes) / best * 1e-9);
            }
            printf("\n");
        }
    return 0;
}
