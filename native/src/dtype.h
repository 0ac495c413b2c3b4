/* dtype.h: the properties of element types. pccl_dtype_bytes is public. */
#ifndef PCCL_DTYPE_H
#define PCCL_DTYPE_H

#include "pccl_native.h"

int pccl_dtype_is_float(uint32_t dtype);

/* Names for messages: "float32", "sum", "min_max"; "unknown" beyond the enums. */
const char *pccl_dtype_name(uint32_t dtype);
const char *pccl_reduce_op_name(uint32_t reduce_op);
const char *pccl_quantization_name(uint32_t quantization);

#endif
