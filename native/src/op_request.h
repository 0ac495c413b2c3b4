/* op_request.h: whether the request for an op makes sense, and how large the buffers are that it names. */
#ifndef PCCL_OP_REQUEST_H
#define PCCL_OP_REQUEST_H

#include "pccl_native.h"

/* Returns 0 or PCCL_E_INVALID. */
int pccl_op_request_check(const pccl_op_request *request);

/* Sets how many elements of the rank's `send` and `recv` the op reads and writes. */
void pccl_op_request_buffers(const pccl_op_request *request, uint64_t *send, uint64_t *recv);

#endif
