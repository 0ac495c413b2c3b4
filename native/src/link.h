/* link.h: what is to be sent to one peer, and how much it may be sent before it asks.
 *
 * A link leads to one peer over one or more connections (conn.h). It has three queues: ops that are done (DONE), ops to
 * be announced (READY, EAGER), and active ops, which have segments to send; link_send.h hands them to the connections.
 *
 * A link fails with its last connection, of those that do not take over (wire.h) if it has both kinds, or when its peer
 * breaks the protocol. Since the code that finds that may still
 * point to a connection, pccl_link_fail only notes it, and links.h carries it out later. */
#ifndef PCCL_LINK_H
#define PCCL_LINK_H

#include "growth.h"
#include "host.h"
#include "list.h"
#include "pccl_native.h"
#include "table.h"

/* The eager window. Eager payload may come before its op is submitted, and is then buffered (unexpected.h). How much
 * one peer can make another buffer is bounded by a window, as in flow control by credits.
 *
 *   1. Counted from the link's beginning, a sender has sent at most PCCL_EAGER_WINDOW_BYTES more than its receiver has
 *      released and reported in a CREDIT frame. So nothing is ever dropped for want of room: a sender without window
 *      announces its op without payload, as usual, and waits.
 *   2. Every eager frame counts as released in the end, whatever becomes of it: used at once or later, dropped with its
 *      epoch, or of no use from the start. So neither side has to know why the other's op ended, and no window is lost.
 *   3. A frame counts PCCL_EAGER_OVERHEAD_BYTES more than its payload. So the window bounds their number, too. */
enum { PCCL_EAGER_WINDOW_BYTES = PCCL_SIZE(2 << 20, 4096), PCCL_EAGER_OVERHEAD_BYTES = 256 };

typedef struct {
    uint64_t reserved_bytes; /* sent or about to be */
    uint64_t sent_bytes; /* of them */
    uint64_t credited_bytes; /* of these, by the peer */
    uint64_t received_bytes;
    uint64_t released_bytes; /* of them */
    uint64_t reported_bytes; /* of these, to the peer */
    uint8_t is_credit_due;
} pccl_link_eager;

/* Health counters: see PCCL_EVENT_LINK_METRICS. */
typedef struct {
    uint64_t busy_us;
    uint64_t sender_us;
    uint64_t receiver_us;
    uint64_t delivered;
    uint64_t resent;
    uint64_t unacked_bytes;
    uint64_t round_trip_us;
    uint64_t stuck_ms;
} pccl_link_health;

typedef struct pccl_link {
    uint64_t id;
    pccl_conn_host *host;
    pccl_table_node by_id;
    pccl_list in_links;
    pccl_list in_failed; /* of the host */
    pccl_list in_pending; /* of the host: may have something to send */
    pccl_list in_waiting; /* of the egress scheduler */
    pccl_list conns;
    pccl_list lost_conns; /* closed ones, also by pccl_conn.in_conns */
    pccl_list free_conns; /* pccl_conn.in_free */
    pccl_list talk_conns; /* pccl_conn.in_talk */
    pccl_list lost_frames; /* pccl_conn.in_lost_frames */
    pccl_list resends; /* pccl_conn.in_resend */
    pccl_list dones; /* pccl_participant.in_dones */
    pccl_list ready_ops; /* pccl_op_peer.in_ready */
    pccl_list active_ops; /* pccl_op_peer.in_active */
    pccl_link_eager eager;
    pccl_list unexpected; /* unexpected.h */
    size_t unexpected_count;
    unsigned conns_count; /* in `conns`: not closed */
    unsigned live_count; /* of them, not lost */
    unsigned over_count; /* of these, with a wire that takes over */
    struct pccl_conn *first_choice; /* of these, works: no other carries frames that count */
    unsigned conns_added;
    unsigned events_promised; /* to the host: a loss and four of LINK_LIMITED for each connection added */
    pccl_growth growth;
    uint8_t is_local; /* the other end is on this machine */
    uint64_t tx_payload_bytes;
    uint64_t rx_payload_bytes;
    uint64_t under_way_bytes; /* of all connections */
    uint64_t round_trip_us; /* the least that any of them has seen; 0: not known */
    uint8_t has_turn; /* of the egress scheduler */
    int64_t looked_ms; /* when pccl_link_look last was */
    uint64_t acked_bytes; /* by the other side, from the look before that one to it */
    uint8_t is_full; /* at that look: no connection could send all it had */
    uint8_t was_full; /* and so at the one before */
    uint64_t run_ms; /* for how long it has been the only full link, since it was not, or since that was counted */
    uint64_t run_bytes; /* acknowledged since then */
    uint8_t is_run_long; /* FULL_RUN_MS have been reached */
    uint64_t full_ms; /* of all long runs: see PCCL_EVENT_LINK_METRICS */
    uint64_t full_bytes;
    pccl_link_health health;
    int64_t carried_ms; /* when something was last seen to get across, or nothing to lie on it; -1: never looked */
    uint8_t is_failed; /* stays known, without connections, until it is closed */
    int system_error;
    char detail[sizeof((pccl_event *)0)->detail];
} pccl_link;

pccl_link *pccl_link_create(uint64_t id); /* NULL without memory */
void pccl_link_destroy(pccl_link *link); /* which has no connections left */

/* Notes that the link has failed. system_error: an errno, or 0 where the other side is to blame. Only the first failure
 * counts. */
void pccl_link_fail(pccl_link *link, int system_error, const char *format, ...) PCCL_PRINTF(3, 4);

/* The link may have something to send. */
void pccl_link_note_pending(pccl_link *link);

/* Reserves window for an eager frame with this payload. Nonzero if there is enough; the frame then must be sent, or be
 * cancelled. */
int pccl_link_reserve_eager(pccl_link *link, uint32_t payload_bytes);
void pccl_link_cancel_eager(pccl_link *link, uint32_t payload_bytes);
void pccl_link_note_eager_sent(pccl_link *link, uint32_t payload_bytes);
void pccl_link_note_eager_lost(pccl_link *link, uint32_t payload_bytes); /* and not sent again: its op has ended */

/* A CREDIT frame, or the header of an eager one, has come: NULL, or the rule that the peer breaks. */
const char *pccl_link_on_credit(pccl_link *link, uint64_t eager_bytes);
const char *pccl_link_on_eager(pccl_link *link, uint32_t payload_bytes);

/* Takes back an eager frame that was half received: it comes again, or never. */
void pccl_link_retract_eager(pccl_link *link, uint32_t payload_bytes);

/* A received eager frame's payload takes no memory any more: the peer may send as much again. */
void pccl_link_release_eager(pccl_link *link, uint32_t payload_bytes);

/* Returns what a CREDIT frame has to say that is about to be sent. */
uint64_t pccl_link_take_credit(pccl_link *link);

#endif
