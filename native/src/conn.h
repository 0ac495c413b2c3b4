/* conn.h: one stream socket: frames in, frames out.
 *
 * In. Payload goes where it belongs by itself: straight into a result buffer, or through the staging buffer
 * that all connections share into the reduction, or nowhere. One readv takes the rest of a payload and,
 * beyond it, up to READ_AHEAD bytes: the next headers and small frames, which are then handled without a
 * system call of their own. Elements that a read has cut in two wait in `carry`.
 *
 * Every payload is checksummed piece by piece as it is read, while it is in cache, and compared with what its
 * header says before anyone is told that it is there. Results may already hold it by then, and need not be
 * cleaned: a frame that does not arrive leaves its segment unfinished. Nothing made of it is sent on (only
 * what has arrived is), so no other rank gets to see it; and its op does not become done here, so that it
 * cannot be committed. Since nothing has told what else is wrong with the stream, the link fails; the caller
 * aborts the op, which puts back what was overwritten in place.
 *
 * Out. A batch of up to TX_FRAMES_MAX frames is handed to one sendmsg, header and payload each where they
 * are. The checksum is taken right before, and so brings the payload into the cache for the system's copy. A
 * connection whose batch is not wholly taken by the socket waits for the poller. With
 * TCP_NOTSENT_LOWAT, "taken" means nearly on the wire, not merely copied to a deep socket buffer: that is
 * what makes faster connections carry more.
 *
 * Neither direction allocates. When an op ends, what a half-sent frame still needs of its buffers is copied
 * to a spill buffer, and a half-received frame is discarded from there on. */
#ifndef PCCL_CONN_H
#define PCCL_CONN_H

#include "frame.h"
#include "list.h"
#include "op.h"
#include "poller.h"

struct pccl_announcement;
struct pccl_conn;
struct pccl_link;

enum { PCCL_STAGING_BYTES = 256 << 10 };

typedef struct {
    uint64_t tx_payload_bytes;
    uint64_t rx_payload_bytes;
    uint64_t tx_wire_bytes;
    uint64_t rx_wire_bytes;
} pccl_conn_counters; /* written by one thread, atomically; read by any */

/* What the connections of an engine share, and whom they tell. */
typedef struct pccl_conn_host {
    pccl_poller *poller;
    uint8_t *staging; /* PCCL_STAGING_BYTES */
    pccl_conn_counters counters;
    pccl_list failed_links; /* pccl_link.in_failed */
    pccl_list pending_links; /* pccl_link.in_pending */

    /* A header has come. Either the frame has no payload and is dealt with, or its payload is put on its way
     * with one of the pccl_conn_expect_ functions. Otherwise returns the rule that the frame breaks. */
    const char *(*on_header)(struct pccl_conn_host *host, struct pccl_conn *conn, const pccl_frame *frame);

    /* A segment is complete. */
    void (*on_arrived)(struct pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound);

    /* Payload that came before its op is complete. */
    void (*on_kept)(struct pccl_conn_host *host, struct pccl_announcement *kept);
} pccl_conn_host;

enum { TX_FRAMES_MAX = 8, READ_AHEAD_BYTES = 8 << 10 };

typedef struct {
    uint8_t header[PCCL_FRAME_BYTES];
    const uint8_t *payload;
    uint8_t *spill;
    pccl_op *op; /* NULL: none, or it has ended */
    uint32_t payload_bytes;
    uint32_t index;
} pccl_conn_tx_frame;

enum pccl_conn_rx_state { RX_HEADER, RX_STORE, RX_REDUCE, RX_DISCARD };

typedef struct pccl_conn {
    pccl_poll_entry poll;
    struct pccl_link *link;
    pccl_list in_conns;
    pccl_list in_free;
    unsigned number; /* within its link, from 1: for messages */

    enum pccl_conn_rx_state rx_state;
    pccl_op *rx_op;
    struct pccl_announcement *rx_kept; /* else */
    pccl_op_inbound rx_inbound;
    uint32_t rx_left_bytes; /* of the payload */
    uint32_t rx_crc; /* of the payload so far */
    uint32_t rx_expected_crc;
    uint32_t rx_reduced; /* elements */
    uint32_t rx_carry_bytes;
    uint8_t rx_carry[16];
    uint32_t rx_ahead_begin;
    uint32_t rx_ahead_end;
    uint8_t rx_ahead[READ_AHEAD_BYTES];

    unsigned tx_count;
    unsigned tx_first;
    size_t tx_offset; /* sent of the first frame */
    size_t tx_batch_bytes;
    pccl_conn_tx_frame tx_frames[TX_FRAMES_MAX];
} pccl_conn;

/* Makes a socket fit for use; 0, or -1 with errno set. */
int pccl_conn_prepare_socket(int fd);

pccl_conn *pccl_conn_create(int fd); /* NULL without memory */
void pccl_conn_destroy(pccl_conn *conn); /* leaves the descriptor open */

void pccl_conn_expect_segment(pccl_conn *conn, pccl_op *op, const pccl_op_inbound *inbound);
void pccl_conn_expect_kept(
    pccl_conn *conn, struct pccl_announcement *kept, uint8_t *store, uint32_t payload_bytes);
void pccl_conn_expect_nothing_of_use(pccl_conn *conn, uint32_t payload_bytes);

/* Reads and handles what has come, up to a bound. Trouble fails the link. */
void pccl_conn_receive(pccl_conn *conn);

/* Whether another frame may be added to the batch, which had better not exceed this size. */
int pccl_conn_has_room(const pccl_conn *conn, size_t batch_bytes_max);

/* Sets the payload's checksum in the frame. The payload must not change until it is sent. */
void pccl_conn_add(
    pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index);

/* Sends what was added. Nonzero when all of it is gone; otherwise wait until writable, or the link has
 * failed. */
int pccl_conn_flush(pccl_conn *conn);

/* The op's buffers are about to be taken away: forgets it. Without memory for that, fails the link. */
void pccl_conn_release_rx(pccl_conn *conn, const pccl_op *op);
void pccl_conn_release_kept(pccl_conn *conn); /* what it receives into is about to be taken away */
void pccl_conn_release_tx(pccl_conn *conn, const pccl_op *op);

#endif
