#include "dtype.h"

#include "base.h"

static const struct {
    uint8_t bytes;
    uint8_t is_float;
    const char *name;
} dtypes[PCCL_DTYPE_COUNT] = {
    [PCCL_UINT8] = {1, 0, "uint8"},
    [PCCL_INT8] = {1, 0, "int8"},
    [PCCL_UINT16] = {2, 0, "uint16"},
    [PCCL_INT16] = {2, 0, "int16"},
    [PCCL_UINT32] = {4, 0, "uint32"},
    [PCCL_INT32] = {4, 0, "int32"},
    [PCCL_UINT64] = {8, 0, "uint64"},
    [PCCL_INT64] = {8, 0, "int64"},
    [PCCL_FLOAT16] = {2, 1, "float16"},
    [PCCL_BFLOAT16] = {2, 1, "bfloat16"},
    [PCCL_FLOAT32] = {4, 1, "float32"},
    [PCCL_FLOAT64] = {8, 1, "float64"},
};

static const char *const reduce_op_names[PCCL_REDUCE_OP_COUNT] = {
    [PCCL_SUM] = "sum",
    [PCCL_AVG] = "avg",
    [PCCL_PROD] = "prod",
    [PCCL_MAX] = "max",
    [PCCL_MIN] = "min",
};

static const char *const quantization_names[PCCL_QUANT_COUNT] = {
    [PCCL_QUANT_NONE] = "none",
    [PCCL_QUANT_MIN_MAX] = "min_max",
    [PCCL_QUANT_ZERO_POINT_SCALE] = "zero_point_scale",
    [PCCL_QUANT_CAST] = "cast",
    [PCCL_QUANT_LLOYD_MAX] = "lloyd_max",
    [PCCL_QUANT_SIGN] = "sign",
};

static const char unknown[] = "unknown";

/* 0 for a dtype that does not exist. */
uint32_t pccl_dtype_bytes(uint32_t dtype) { return dtype < PCCL_DTYPE_COUNT ? dtypes[dtype].bytes : 0; }

int pccl_dtype_is_float(uint32_t dtype) { return dtype < PCCL_DTYPE_COUNT && dtypes[dtype].is_float; }

const char *pccl_dtype_name(uint32_t dtype) { return dtype < PCCL_DTYPE_COUNT ? dtypes[dtype].name : unknown; }

const char *pccl_reduce_op_name(uint32_t reduce_op)
{
    return reduce_op < PCCL_REDUCE_OP_COUNT ? reduce_op_names[reduce_op] : unknown;
}

const char *pccl_quantization_name(uint32_t quantization)
{
    return quantization < PCCL_QUANT_COUNT ? quantization_names[quantization] : unknown;
}
