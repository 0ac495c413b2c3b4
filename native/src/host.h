/* host.h: what the links and connections of an engine share, and whom they tell. */
#ifndef PCCL_HOST_H
#define PCCL_HOST_H

#include "egress.h"
#include "frame.h"
#include "list.h"
#include "op.h"
#include "poller.h"

struct pccl_unexpected_op;
struct pccl_conn;

enum { PCCL_STAGING_BYTES = 256 << 10 };

typedef struct {
    uint64_t tx_payload_bytes;
    uint64_t rx_payload_bytes;
    uint64_t tx_wire_bytes;
    uint64_t rx_wire_bytes;
} pccl_conn_counters; /* written by one thread, atomically; read by any */

/* What this machine lacks and no peer can be blamed for. From then on nothing is read or sent. */
typedef struct {
    uint8_t is_set;
    int system_error;
    char detail[sizeof((pccl_event *)0)->detail];
} pccl_host_fault;

/* What the connections of an engine share, and whom they tell. */
typedef struct pccl_conn_host {
    pccl_poller *poller;
    uint8_t *staging; /* PCCL_STAGING_BYTES */
    pccl_conn_counters counters;
    pccl_list failed_links; /* pccl_link.in_failed */
    pccl_list lost_conns; /* pccl_conn.in_lost */
    uint8_t wants_tick;
    pccl_host_fault fault; /* at first none */
    pccl_list starved_conns; /* pccl_conn.in_starved */
    pccl_list pending_links; /* pccl_link.in_pending */
    pccl_egress egress;

    /* A header has come, of what the connection does not deal with. Either the frame has no payload and is dealt with,
     * or its payload is put on its way with one of the pccl_conn_expect_ functions. Otherwise returns the rule that the
     * frame breaks. */
    const char *(*on_header)(struct pccl_conn_host *host, struct pccl_conn *conn, const pccl_frame *frame);

    /* A key of a DONE frame, all of which is there. NULL, or the rule that it breaks. */
    const char *(*on_done)(struct pccl_conn_host *host, struct pccl_conn *conn, const pccl_op_key *key);

    /* The frame that is half in will not be completed. */
    void (*on_retract)(struct pccl_conn_host *host, struct pccl_conn *conn);

    /* A segment is complete. */
    void (*on_arrived)(struct pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound);

    /* A segment is out, and all of the op seems to be there. */
    void (*on_sent)(struct pccl_conn_host *host, pccl_op *op);

    /* All of the payload is there that came before its op. */
    void (*on_buffered)(struct pccl_conn_host *host, struct pccl_unexpected_op *buffered);
} pccl_conn_host;

/* Only the first fault counts. */
void pccl_host_fail(pccl_conn_host *host, int system_error, const char *detail);

/* As a broken rule: none is broken, but what a frame says cannot be buffered. */
extern const char pccl_out_of_memory[];

#endif
