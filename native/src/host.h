/* host.h: what the links and connections of an engine share, and the callbacks by which they report upwards, since they
 * do not include the modules that deal with ops (receiver.h). */
#ifndef PCCL_HOST_H
#define PCCL_HOST_H

#include "frame.h"
#include "list.h"
#include "op.h"
#include "pacer.h"
#include "poller.h"

struct pccl_unexpected_op;
struct pccl_conn;

enum { PCCL_STAGING_BYTES = PCCL_SIZE(256 << 10, 128) };

typedef struct {
    uint64_t tx_payload_bytes;
    uint64_t rx_payload_bytes;
    uint64_t tx_wire_bytes;
    uint64_t rx_wire_bytes;
} pccl_conn_counters; /* written by one thread, atomically; read by any */

/* A failure of this machine, for which no peer can be blamed. From then on nothing is read or sent. */
typedef struct {
    uint8_t is_set;
    int system_error;
    char detail[sizeof((pccl_event *)0)->detail];
} pccl_host_fault;

/* The limit that links to other machines share, and the links that wait for their turns: egress.h. */
typedef struct {
    pccl_pacer pacer;
    pccl_list waiting; /* pccl_link.in_waiting */
    uint8_t is_fixed; /* the limit was given: it holds for all links, and nothing is measured */
    uint8_t is_watched; /* several links lead far away, or the limit is fixed */
} pccl_egress;

/* Nonzero if a link like this one is among those that share the limit, if there is one. */
static inline int pccl_egress_carries(const pccl_egress *egress, int is_local, uint64_t round_trip_us)
{
    enum { FAR_US = 2000 };
    return (!is_local && round_trip_us >= FAR_US) || egress->is_fixed;
}

/* Nonzero if segments of such a link wait for turns. */
static inline int pccl_egress_is_limiting(const pccl_egress *egress, int is_local, uint64_t round_trip_us)
{
    return pccl_pacer_is_limiting(&egress->pacer) && pccl_egress_carries(egress, is_local, round_trip_us);
}

typedef struct pccl_conn_host {
    pccl_poller *poller;
    uint8_t *staging; /* PCCL_STAGING_BYTES */
    pccl_conn_counters counters;
    int64_t now_ns; /* the time at which this batch of events began */
    pccl_list failed_links; /* pccl_link.in_failed */
    pccl_list lost_conns; /* pccl_conn.in_lost */
    uint8_t wants_tick;
    pccl_host_fault fault; /* at first none */
    pccl_list nomem_conns; /* pccl_conn.in_nomem */
    pccl_list ending_conns; /* pccl_conn.in_ending */
    pccl_list pending_links; /* pccl_link.in_pending */
    unsigned undrained; /* connections that are not: pccl_conn_is_drained */
    pccl_egress egress;

    /* The header has come of a frame that is not about connections. Deals with the frame if it has no payload;
     * otherwise says where the payload goes with one of the pccl_conn_expect_ functions. NULL, or the rule that the
     * frame breaks. */
    const char *(*on_header)(struct pccl_conn_host *host, struct pccl_conn *conn, const pccl_frame *frame);

    /* A DONE frame with this key has come, all of it. NULL, or the rule that it breaks. */
    const char *(*on_done)(struct pccl_conn_host *host, struct pccl_conn *conn, const pccl_op_key *key);

    /* The connection's half-received frame will not be completed. */
    void (*on_retract)(struct pccl_conn_host *host, struct pccl_conn *conn);

    /* All of a segment's payload has come. */
    void (*on_arrived)(struct pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound);

    /* A segment has been sent with which the op may have become done. */
    void (*on_sent)(struct pccl_conn_host *host, pccl_op *op);

    /* All of an EAGER frame's payload has come that is buffered. */
    void (*on_buffered)(struct pccl_conn_host *host, struct pccl_unexpected_op *buffered);
} pccl_conn_host;

/* Notes a failure of this machine. Only the first one counts. */
void pccl_host_fail(pccl_conn_host *host, int system_error, const char *detail);

#endif
