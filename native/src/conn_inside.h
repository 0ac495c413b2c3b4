/* conn_inside.h: what the files of a connection (conn.c, conn_rx.c, conn_tx.c, conn_loss.c) share with nobody else. */
#ifndef PCCL_CONN_INSIDE_H
#define PCCL_CONN_INSIDE_H

#include "conn.h"

/* Nothing is read from it or sent on it any more. */
static inline int pccl_conn_is_over(const pccl_conn *conn)
{
    return conn->is_lost || conn->link->is_failed || conn->link->host->fault.is_set;
}

/* Of what one thread writes and any may read. */
static inline void pccl_count(uint64_t *counter, uint64_t bytes)
{
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + bytes, __ATOMIC_RELAXED);
}

/* What a system call has failed with, other than that it would block. */
void pccl_conn_fail_call(pccl_conn *conn, const char *what, int system_error, unsigned direction);

/* Between two frames, or in the middle of one that is given up. */
void pccl_conn_rx_expect_header(pccl_conn *conn);

/* Forgets the batch; what it still holds is in the records. */
void pccl_conn_tx_drop(pccl_conn *conn);

/* The connection is lost: frees its link from it, and queues what the other end has to be told. */
void pccl_conn_note_lost(pccl_conn *conn);

/* The other end knows what this one has received on a lost connection. */
void pccl_conn_note_notice_acked(pccl_conn *lost);

#endif
