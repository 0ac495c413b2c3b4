/* op_exchange.h: what both algorithms of an exchange have in common: how parts are divided, and the rank's own one. */
#ifndef PCCL_OP_EXCHANGE_H
#define PCCL_OP_EXCHANGE_H

#include "op_algorithm.h"

/* Counts what is to go out and to come in, without the rank's own part. */
void pccl_exchange_begin(pccl_op *op);

/* A segment has been taken to be sent, or has come: copies a segment of the rank's own part, or the rest of it with the
 * last. */
void pccl_exchange_note_out(pccl_op *op);
void pccl_exchange_note_in(pccl_op *op);

/* Where elements are that this rank has for a rank, a range of `tiling`. */
const uint8_t *pccl_exchange_send_at(const pccl_op *op, uint32_t rank, pccl_range range);

/* Where elements go that come from a rank, a range of `in_tiling`. */
uint8_t *pccl_exchange_recv_at(const pccl_op *op, uint32_t rank, pccl_range range);

/* Nonzero if the op is around a ring, and a segment of the chunk that it sends passes through. */
int pccl_relay_passes(const pccl_op *op, uint32_t chunk);

/* The next rank has acknowledged such a segment with this payload, which is freed. */
void pccl_relay_acknowledged(const uint8_t *payload);

/* Nonzero if enough has been passed on since the last report to the source; and the frame that reports it. */
int pccl_relay_has_to_report(const pccl_op_peer *source);
void pccl_relay_report(pccl_op *op, pccl_frame *frame);

/* A report has come: NULL, or the rule that it breaks. */
const char *pccl_relay_on_report(pccl_op_peer *target, const pccl_frame *frame);

/* Nothing is reduced. */
void pccl_exchange_reduce(
    pccl_op *op, const pccl_op_inbound *inbound, size_t first, pccl_reduction *reduction, size_t elements);
int pccl_exchange_is_bare(const pccl_op *op, uint32_t chunk, uint32_t hop);

#endif
