/* conn.h: one connection of a link: frames in, frames out, and no frame lost when it breaks.
 *
 * In. Payload goes where it belongs by itself: straight into a result buffer, or through the staging buffer that all
 * connections share into the reduction, or nowhere. One readv takes the rest of a payload and, beyond it, up to
 * READ_AHEAD_BYTES: the next headers and small frames, which are then handled without a system call of their own.
 * Elements that a read has cut in two wait in `carry`. What a wire shows in place is reduced from there.
 *
 * Damage. Every payload is checksummed as it is read, while it is in cache, and compared with what its header says
 * before anybody is told that it is there; what an authentic wire brings (wire.h) is not. Results may already
 * hold damaged bytes by then, and need not be cleaned:
 *
 *   1. A frame that does not arrive leaves its segment unfinished, and only what has arrived is sent on. So no other
 *      rank gets to see the damage.
 *   2. Its op does not become done here. So it cannot be committed.
 *   3. The connection is lost, since nothing tells what else is wrong with the stream. Either the frame comes again on
 *      another connection, or the link fails and the caller aborts the op, which puts back what was overwritten.
 *
 * Out. A batch of up to TX_FRAMES_MAX frames is handed to one send, header and payload each where they are. The
 * checksum is taken right before, and so brings the payload into the cache for the system's copy. A connection whose
 * batch is not wholly taken by its wire (wire.h) waits for the poller.
 *
 * Loss. A connection that breaks, damages a frame, or stands still while others of its link move, is given up; the link
 * lives as long as it has another. As in Multipath TCP, what was on its way is sent again on the others:
 *
 *   1. Both ends count the frames that they have sent and received on a connection, except HELLO and ACK. The sender
 *      keeps a note of each frame until it is known to be received, in a window of PCCL_CONN_WINDOW; the count comes in
 *      every header of the other direction, or in ACK frames where there are none. So the sender always knows which
 *      frames may be missing. A DONE frame counts as many as it has keys, and each key has its note: it is received as
 *      a whole or not at all, but its keys may be sent again in other frames.
 *   2. Each end begins with a HELLO that says how it calls the connection, and sends nothing that counts before it has
 *      the other's. So an end that has something to send again can name the lost connection to the other end.
 *   3. The end that gives up a connection stops reading from it and forgets the half-received frame (pccl_op_retract);
 *      then it sends a LOST frame on another connection: with the number of frames received. The other end gives it up
 *      too and answers with its own LOST. Each sends again what the other's count does not cover, in any order. So no
 *      frame is lost, and none arrives twice: its receiver has stopped reading before it says what it has.
 *   4. LOST frames count too, but are sent again at once when their own connection is lost, because two ends could
 *      otherwise wait for each other's. So one may come twice, and the second is ignored.
 *   5. A frame is sent again from where it was sent from; no copy is kept. What is there is still the same: a range is
 *      overwritten after it was sent only by what has come of it, a segment's final form, which cannot be on its way
 *      before the frame was received, and is then counted.
 *   6. Frames of ended ops are not sent again, except DONE: either every rank is done and has received all, or the op
 *      is aborted and they are not wanted.
 *
 * Silence. A single connection has nothing to be compared with, nor have all of them when the path
 * swallows everything. Then the system is asked what it has in flight, that is sent and not acknowledged by the other
 * end's system: a link on which bytes are in flight, and none gets across or comes in for the link's timeout, is lost.
 * Systems are asked because they acknowledge at once; engines may have a lot to say before they come to that, on a slow
 * path. With nothing in flight nothing is missed here; if the other end misses something, it has bytes in flight.
 *
 * Memory. A system that has none at the moment for what is to be sent or received (ENOBUFS, ENOMEM) is asked again
 * after 1, 2, 4 ... RETRY_DELAY_MS_MAX ms, until RETRY_MS_MAX have passed; until then the poller is not asked for that
 * direction. Where the engine itself has none to keep what a peer has sent, that is no peer's fault: the host fails.
 *
 * Neither direction allocates. When an op ends, what a half-sent frame still needs of its buffers is copied to a spill
 * buffer, and a half-received frame is discarded from there on. */
#ifndef PCCL_CONN_H
#define PCCL_CONN_H

#include "frame.h"
#include "host.h"
#include "link.h"
#include "list.h"
#include "op.h"
#include "os.h"
#include "poller.h"
#include "wire.h"

struct pccl_unexpected_op;

enum {
    TX_FRAMES_MAX = 8,
    READ_AHEAD_BYTES = PCCL_SIZE(8 << 10, 256),
    PCCL_CONN_WINDOW = PCCL_SIZE(512, 32),
    PCCL_ACK_FRAMES = PCCL_CONN_WINDOW / 8, /* received and not acknowledged: then an ACK goes out at once */
    PCCL_ACK_BYTES = PCCL_SIZE(4 << 20, 512)
};

/* A frame sent and not known to be received. */
typedef struct {
    pccl_op *op; /* NULL: none, or it has ended */
    uint32_t payload_bytes;
    uint8_t type; /* enum pccl_frame_type */
    union {
        struct {
            const uint8_t *payload;
            uint32_t index;
            uint32_t chunk;
            uint32_t segment;
            uint32_t hop;
            uint32_t destination;
            uint64_t part_elements;
        } segment; /* READY, EAGER, SEGMENT */
        struct pccl_conn *lost; /* LOST: what it is about, unless sent again */
        pccl_op_key key; /* DONE: its op may be no more */
    } of;
} pccl_conn_unacked;

typedef struct {
    uint8_t header[PCCL_FRAME_BYTES];
    const uint8_t *payload;
    uint8_t *spill;
    pccl_op *op; /* NULL: none, or it has ended */
    uint32_t payload_bytes;
    uint32_t index;
    uint8_t is_done; /* whose payload is keys */
} pccl_conn_tx_frame;

enum pccl_conn_rx_state { RX_HEADER, RX_STORE, RX_REDUCE, RX_DISCARD };

typedef struct pccl_conn {
    pccl_wire *wire; /* NULL: closed; of use only for what has to be sent again */
    unsigned waits_for; /* PCCL_POLL_ */
    pccl_link *link;
    pccl_list in_conns;
    pccl_list in_free; /* of the link: can take frames */
    pccl_list in_talk; /* of the link: has a HELLO or an ACK to send */
    pccl_list in_lost_frames; /* of the link: lost, a LOST frame is due */
    pccl_list in_resend; /* of the link: lost, with frames to send again */
    pccl_list in_lost; /* of the host: lost, to be closed */
    pccl_list in_nomem; /* of the host: the system had no memory for it */
    pccl_list in_ending; /* of the host: nothing can be sent any more, what has come is to be read yet */
    uint32_t number; /* within its link, from 1 */
    uint32_t peer_number; /* the other end's; 0: no HELLO yet */
    uint8_t is_hello_due;
    uint8_t is_ack_due;

    unsigned nomem; /* PCCL_POLL_IN, PCCL_POLL_OUT: what is to be tried again */
    int64_t nomem_ms; /* since when, without success */
    int64_t retry_ms; /* when */
    uint32_t retry_delay_ms; /* 0: the last time was a success */

    uint8_t is_lost;
    uint8_t has_peer_lost_frame; /* the other end's LOST has come: what it has received */
    uint8_t is_lost_frame_queued; /* our LOST was queued, once or more often */
    uint8_t is_lost_frame_acked; /* the other end has our LOST */
    int send_error; /* 0: none; with that nothing can be sent any more */
    int system_error;
    char detail[sizeof((pccl_event *)0)->detail];

    pccl_wire_limits limits; /* as last seen */
    int64_t acked_ms; /* when last seen to have something acknowledged, or nothing to be; 0: never looked */
    pccl_wire_limits round; /* as seen at the end of the last round of the egress scheduler */
    uint64_t under_way_bytes; /* as last looked at, and segments since */
    uint64_t unsent_bytes; /* of these, what the system has not sent yet: the same */
    int64_t progress_ms; /* when last seen to move or to have nothing to move; -1: see at the next tick */
    int64_t moved_ms; /* when last seen to move */
    uint8_t has_moved; /* since the last tick */
    uint64_t peer_received_bytes;
    uint8_t has_received; /* since the last look of pccl_conn_has_carried */
    uint64_t looked_at_bytes; /* of the wire's sent_bytes, at that look */
    uint64_t in_flight_bytes; /* at that look */

    enum pccl_conn_rx_state rx_state;
    pccl_op *rx_op;
    struct pccl_unexpected_op *rx_buffered; /* else */
    pccl_op_inbound rx_inbound;
    uint32_t rx_left_bytes; /* of the payload */
    uint32_t rx_crc; /* of the payload so far */
    uint32_t rx_expected_crc;
    uint32_t rx_frames; /* received */
    uint32_t rx_frames_acked;
    uint64_t rx_bytes; /* of payload */
    uint64_t rx_bytes_acked;
    uint32_t rx_eager_bytes; /* the frame's payload counts as eager */
    uint8_t rx_is_eager; /* the frame is an EAGER one */
    uint32_t rx_keys; /* number of keys if the frame is DONE; else 0 */
    uint8_t rx_key_bytes[PCCL_DONE_KEYS_MAX * PCCL_KEY_BYTES]; /* of them all, as they come */
    uint32_t rx_reduced; /* elements */
    uint32_t rx_carry_bytes;
    uint8_t rx_carry[16];
    uint32_t rx_ahead_begin;
    uint32_t rx_ahead_end;
    uint8_t rx_ahead[READ_AHEAD_BYTES];

    uint8_t tx_is_under_way; /* of what was added, the system has not taken all */
    unsigned tx_count;
    unsigned tx_first;
    size_t tx_offset; /* sent of the first frame */
    size_t tx_batch_bytes;
    pccl_conn_tx_frame tx_frames[TX_FRAMES_MAX];
    uint32_t tx_keys_bytes; /* used by the batch */
    uint8_t tx_keys[PCCL_DONE_PAYLOAD_MAX];
    uint32_t tx_counted; /* frames added that count */
    uint32_t tx_acked; /* of them received */
    pccl_conn_unacked unacked[PCCL_CONN_WINDOW]; /* at their number modulo the window */
} pccl_conn;

pccl_conn *pccl_conn_create(pccl_wire *wire); /* takes the wire unless NULL: no memory */
void pccl_conn_destroy(pccl_conn *conn);
void pccl_conn_close(pccl_conn *conn); /* its wire; destroying closes, too */

/* Makes the connection one of the link's; it begins with HELLO. */
void pccl_conn_join(pccl_conn *conn, pccl_link *link);

/* The connection may have become able to take frames, or has something of its own to say. */
void pccl_conn_offer(pccl_conn *conn);

/* The other end's HELLO has come. */
void pccl_conn_note_hello(pccl_conn *conn, uint32_t peer_number);

/* An ACK has to go out. */
void pccl_conn_note_ack_due(pccl_conn *conn);

/* The payload of the frame whose header has come goes into an op, to a buffered one, or nowhere. */
void pccl_conn_expect_segment(pccl_conn *conn, pccl_op *op, const pccl_op_inbound *inbound);
void pccl_conn_expect_buffered(
    pccl_conn *conn, struct pccl_unexpected_op *buffered, uint8_t *store, uint32_t payload_bytes);
void pccl_conn_expect_nothing_of_use(pccl_conn *conn, uint32_t payload_bytes);

/* Asks the poller for what the connection waits for. */
void pccl_conn_watch(pccl_conn *conn);

/* Returns when the first connection for which the system had no memory is to be tried again; INT64_MAX: none is. */
int64_t pccl_host_retry_ms(const pccl_conn_host *host);

/* Tries those again whose time has come. */
void pccl_host_retry(pccl_conn_host *host, int64_t now_ms);

/* Reads what has come on connections on which sending has failed, and gives them up. The other end may have said that
 * it is done, and left: what it has said before counts. Nonzero if there were any. */
int pccl_host_read_rest(pccl_conn_host *host);

/* Gives up the connection; the link too if it is the last one. system_error as in pccl_link_fail. */
void pccl_conn_lose(pccl_conn *conn, int system_error, const char *format, ...) PCCL_PRINTF(3, 4);

/* The lost connection is closed. May free the connection. */
void pccl_conn_note_closed(pccl_conn *conn);

/* A LOST frame has come on this connection: NULL, or the rule that it breaks. */
const char *pccl_conn_on_lost(pccl_conn *conn, const pccl_frame *frame);

/* Takes the next frame that a lost connection has to send again, of which there is one. May free the connection after
 * the last. */
pccl_conn_unacked pccl_conn_take_unacked(pccl_conn *lost);

/* Reads and handles what has come, up to a bound. Trouble loses the connection, or fails the link. */
void pccl_conn_receive(pccl_conn *conn);

/* Nonzero if nothing waits for the system to take it. */
int pccl_conn_is_drained(const pccl_conn *conn);

/* Nonzero if frames that count may be added now. */
int pccl_conn_is_open(const pccl_conn *conn);

/* The other end says how many it has received: 0, or -1 if it cannot have. */
int pccl_conn_acked(pccl_conn *conn, uint32_t frames);

/* Nonzero if another frame may be added to the batch, which had better not exceed this size. */
int pccl_conn_has_room(const pccl_conn *conn, size_t batch_bytes_max);

/* Adds a frame to the batch, and sets its payload's checksum unless it has it. The payload must not change until it is
 * sent. */
void pccl_conn_add(pccl_conn *conn, pccl_frame *frame, const uint8_t *payload, pccl_op *op, uint32_t index);
void pccl_conn_add_lost(pccl_conn *conn, pccl_conn *lost);

/* Adds one DONE frame; at most as many keys as pccl_conn_done_room says, which is at least 1 where there is room at
 * all. */
uint32_t pccl_conn_done_room(const pccl_conn *conn);
void pccl_conn_add_done(pccl_conn *conn, const pccl_op_key *keys, uint32_t count);

/* Sends what was added. Nonzero when all of it is sent; otherwise wait until writable, or the connection is lost. */
int pccl_conn_flush(pccl_conn *conn);

/* The op's buffers are about to be taken away: forgets them. Without memory for what is half sent, fails the host. */
void pccl_conn_release_rx(pccl_conn *conn, const pccl_op *op);
void pccl_conn_release_tx(pccl_conn *conn, const pccl_op *op);

/* The buffered payload that it receives into is about to be taken away. */
void pccl_conn_release_buffered(pccl_conn *conn);

/* Nonzero if anything has got across or come in since the last call. Sets in_flight_bytes. */
int pccl_conn_has_carried(pccl_conn *conn);

/* Sets under_way_bytes, what the other end's system has not acknowledged or this one not even taken, and
 * unsent_bytes. */
void pccl_conn_look_under_way(pccl_conn *conn);

/* Called every now and then: notes progress, and acknowledges. Nonzero if there is anything to come back for. */
int pccl_conn_tick(pccl_conn *conn, int64_t now_ms);

/* For the files of a connection (conn.c, conn_rx.c, conn_tx.c) only. */

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

/* A call of the wire has failed, other than that it would block: tries again later, loses the connection, or fails the
 * host. */
void pccl_conn_fail_call(pccl_conn *conn, const char *what, int system_error, unsigned direction);

/* Waits for the next header, between two frames or in the middle of one that is given up. */
void pccl_conn_rx_expect_header(pccl_conn *conn);

/* Forgets the batch; what has to be sent again is among the unacknowledged frames. */
void pccl_conn_tx_drop(pccl_conn *conn);

/* The connection is lost: takes it from its link, and queues the LOST frame for the other end. */
void pccl_conn_note_lost(pccl_conn *conn);

/* The other end has the LOST frame of a lost connection. */
void pccl_conn_note_lost_frame_acked(pccl_conn *lost);

#endif
