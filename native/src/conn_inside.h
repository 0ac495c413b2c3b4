/* conn_inside.h: what the files of a connection (conn.c, conn_rx.c, conn_tx.c, conn_loss.c) share with nobody else. */
#ifndef PCCL_CONN_INSIDE_H
#define PCCL_CONN_INSIDE_H

#include "conn.h"

/* Nonzero if nothing is read from the connection or sent on it any more. */
static inline int pccl_conn_is_over(const pccl_conn *conn)
{
    return conn->is_lost || conn->link->is_failed || conn->link->host->fault.is_set;
}

/* Adds to a counter that one thread writes and any may read. */
static inline void pccl_count(uint64_t *counter, uint64_t bytes)
{
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + bytes, __ATOMIC_RELAXED);
}

/* A system call has failed, other than that it would block: tries again later, loses the connection, or fails the
 * host. */
void pccl_conn_fail_call(pccl_conn *conn, const char *what, int system_error, unsigned direction);

/* Waits for the next header, between two frames or in the middle of one that is given up. */
void pccl_conn_rx_expect_header(pccl_conn *conn);

/* Forgets the batch; what has to be sent again is among the unacknowledged frames. */
void pccl_conn_tx_drop(pccl_conn *conn);

/* The connection is lost: takes it from its link, and queues the LOST frame for the other end. */
void pccl_conn_note_lost(pccl_conn *conn);

/* The other end has the LOST frame of a lost connection. */
void pccl_conn_note_notice_acked(pccl_conn *lost);

#endif
