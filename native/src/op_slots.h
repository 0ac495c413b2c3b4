/* op_slots.h: the slots in an op's scratch, in which segments lie that have no place in the caller's buffers: quantized
 * ones as they travel, and shares that wait for their turn. op.h says how they are bounded and taken in turns. */
#ifndef PCCL_OP_SLOTS_H
#define PCCL_OP_SLOTS_H

#include "op.h"

/* Takes a block from the op's pool. 0 or a status. */
int pccl_op_take_memory(pccl_op *op, uint64_t bytes, enum pccl_pool_purpose purpose, pccl_pool_block *block);

/* Sets slot_bytes. 0, or PCCL_E_INVALID for segments that are too large. */
int pccl_op_measure_slots(pccl_op *op);

/* Returns how many segments of the longest chunk can have `slots` slots each within the bound on scratch: all of them,
 * or at least one. */
uint32_t pccl_op_window(const pccl_op *op, uint64_t slots);

/* Takes `wire_slots` slots for each chunk, and so many others. 0 or a status. */
int pccl_op_take_slots(pccl_op *op, uint32_t wire_slots, uint64_t others);

/* The wire slot of a segment: where it is, quantized, while it travels. */
uint8_t *pccl_op_wire_at(const pccl_op *op, uint32_t index);

/* One of the other slots. */
uint8_t *pccl_op_slot_at(const pccl_op *op, uint64_t number);

/* The bytes of so many elements as they travel. */
uint32_t pccl_op_payload_bytes(const pccl_op *op, uint32_t elements);

/* Quantizes elements into the segment's wire slot, and back into recv. */
void pccl_op_encode(pccl_op *op, uint32_t index, pccl_range range, const uint8_t *elements);
void pccl_op_decode(pccl_op *op, uint32_t index, pccl_range range);

#endif
