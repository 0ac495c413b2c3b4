/* kernels.h: elementwise reduction and averaging; the functions are in the public header.
 *
 * Buffers need no alignment. Broken invariants: a dtype or reduce_op beyond its enum, a world_size outside
 * 1 .. INT32_MAX.
 */
#ifndef PCCL_KERNELS_H
#define PCCL_KERNELS_H

#include "pccl_native.h"

#endif
