#include "link.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

pccl_link *pccl_link_create(uint64_t id)
{
    pccl_link *link = calloc(1, sizeof *link);
    if (link == NULL)
        return NULL;
    link->id = id;
    link->carried_ms = -1;
    pccl_list_init(&link->in_links);
    pccl_list_init(&link->in_failed);
    pccl_list_init(&link->in_pending);
    pccl_list_init(&link->in_waiting);
    pccl_list_init(&link->conns);
    pccl_list_init(&link->lost_conns);
    pccl_list_init(&link->free_conns);
    pccl_list_init(&link->talk_conns);
    pccl_list_init(&link->notices);
    pccl_list_init(&link->resends);
    pccl_list_init(&link->dones);
    pccl_list_init(&link->ready_ops);
    pccl_list_init(&link->active_ops);
    pccl_list_init(&link->announced);
    return link;
}

void pccl_link_destroy(pccl_link *link)
{
    PCCL_ASSERT(pccl_list_is_empty(&link->conns) && pccl_list_is_empty(&link->announced));
    free(link);
}

void pccl_link_adopt(pccl_link *link, pccl_conn *conn)
{
    conn->link = link;
    conn->number = ++link->conns_added;
    link->conns_count++;
    link->live_count++;
    pccl_list_append(&link->conns, &conn->in_conns);
    conn->is_hello_due = 1;
    link->host->wants_tick = 1;
    pccl_link_offer(conn);
}

void pccl_link_fail(pccl_link *link, int system_error, const char *format, ...)
{
    if (link->is_failed)
        return;
    link->is_failed = 1;
    link->system_error = system_error;
    va_list args;
    va_start(args, format);
    vsnprintf(link->detail, sizeof link->detail, format, args);
    va_end(args);
    pccl_list_append(&link->host->failed_links, &link->in_failed);
}

void pccl_link_note_pending(pccl_link *link)
{
    if (!link->is_failed && !pccl_list_is_member(&link->in_pending))
        pccl_list_append(&link->host->pending_links, &link->in_pending);
}

void pccl_link_offer(pccl_conn *conn)
{
    pccl_link *link = conn->link;
    if (conn->is_lost || link->is_failed)
        return;
    if ((conn->is_hello_due || conn->is_ack_due) && pccl_conn_is_drained(conn) &&
        !pccl_list_is_member(&conn->in_talk)) {
        pccl_list_append(&link->talk_conns, &conn->in_talk);
        pccl_link_note_pending(link);
    }
    if (pccl_conn_is_open(conn) && !pccl_list_is_member(&conn->in_free)) {
        pccl_list_append(&link->free_conns, &conn->in_free);
        pccl_link_note_pending(link);
    }
}

void pccl_link_note_ack_due(pccl_conn *conn)
{
    conn->is_ack_due = 1;
    pccl_link_offer(conn);
}

/* Lost connections */

static void link_queue_notice(pccl_conn *lost)
{
    PCCL_ASSERT(lost->is_lost && !lost->is_notice_received);
    if (lost->peer_number == 0 || pccl_list_is_member(&lost->in_notices))
        return;
    lost->is_notice_queued = 1;
    pccl_list_append(&lost->link->notices, &lost->in_notices);
    pccl_link_note_pending(lost->link);
}

static void link_forget_if_settled(pccl_conn *lost)
{
    if (!lost->is_buried || !lost->is_told || !lost->is_notice_received || lost->tx_acked != lost->tx_counted)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&lost->in_notices) && !pccl_list_is_member(&lost->in_resend));
    pccl_list_remove(&lost->in_conns);
    pccl_conn_destroy(lost);
}

void pccl_link_note_lost(pccl_link *link, pccl_conn *conn)
{
    PCCL_ASSERT(link->live_count > 1);
    link->live_count--;
    pccl_list_remove(&conn->in_free);
    pccl_list_remove(&conn->in_talk);
    pccl_list_append(&link->host->lost_conns, &conn->in_lost);
    link_queue_notice(conn);
    /* Notices do not wait to be asked for again: two ends could wait for each other's. */
    for (uint32_t i = conn->tx_acked; i != conn->tx_counted; i++) {
        pccl_conn_record *record = &conn->records[i % PCCL_CONN_WINDOW];
        if (record->type != PCCL_FRAME_LOST)
            continue;
        if (record->of.lost != NULL)
            link_queue_notice(record->of.lost);
        record->of.lost = NULL;
    }
}

void pccl_link_note_buried(pccl_conn *conn)
{
    conn->is_buried = 1;
    pccl_boxes_free(conn->boxes);
    conn->boxes = NULL;
    pccl_list_append(&conn->link->lost_conns, &conn->in_conns);
    link_forget_if_settled(conn);
}

void pccl_link_note_notice_received(pccl_conn *lost)
{
    lost->is_notice_received = 1;
    link_forget_if_settled(lost);
}

static pccl_conn *link_find_conn(const pccl_list *conns, uint32_t number)
{
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->number == number)
            return conn;
    }
    return NULL;
}

const char *pccl_link_on_lost(pccl_conn *conn, const pccl_frame *frame)
{
    pccl_link *link = conn->link;
    pccl_conn *lost = link_find_conn(&link->conns, frame->peer_connection);
    if (lost == NULL)
        lost = link_find_conn(&link->lost_conns, frame->peer_connection);
    if (lost == NULL && frame->peer_connection <= link->conns_added)
        return NULL; /* settled, and told once more */
    if (lost == NULL || lost == conn || (lost->peer_number != 0 && lost->peer_number != frame->connection))
        return "the loss of an unknown connection";
    if (lost->is_told)
        return NULL;
    pccl_conn_lose(lost, 0, "given up by the other side");
    lost->peer_number = frame->connection;
    lost->is_told = 1;
    if (pccl_conn_acked(lost, frame->frames) != 0)
        return "more received than was sent";
    if (!lost->is_notice_queued)
        link_queue_notice(lost);
    if (lost->tx_acked != lost->tx_counted) {
        pccl_list_append(&link->resends, &lost->in_resend);
        pccl_link_note_pending(link);
    }
    link_forget_if_settled(lost);
    return NULL;
}

/* Stands still while others of its link move. If none of them has had anything to move since, one gets a frame
 * to be acknowledged, whatever it says. */
static void link_look_at_stuck(pccl_link *link, pccl_conn *stuck, int64_t now_ms, int64_t stall_ms)
{
    int has_idle = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *other = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (other == stuck || other->is_lost)
            continue;
        has_idle |= other->tx_acked == other->tx_counted;
        if (other->moved_ms > stuck->progress_ms && now_ms - other->progress_ms <= stall_ms) {
            pccl_conn_lose(stuck, 0, "no progress for %lld ms", (long long)(now_ms - stuck->progress_ms));
            return;
        }
    }
    pccl_list_remove(&stuck->in_free);
    if (has_idle) {
        link->eager.is_credit_due = 1;
        pccl_link_note_pending(link);
    }
}

int pccl_link_tick(pccl_link *link, int64_t now_ms, int64_t stall_ms)
{
    int has_more = 0;
    pccl_list *conns = &link->conns;
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (!conn->is_lost)
            has_more |= pccl_conn_tick(conn, now_ms);
    }
    for (pccl_list *node = conns->next; node != conns; node = node->next) {
        pccl_conn *stuck = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (!stuck->is_lost && now_ms - stuck->progress_ms > stall_ms)
            link_look_at_stuck(link, stuck, now_ms, stall_ms);
    }
    return has_more;
}

/* Since the last look: for most of the time, and of that for most by its window. Inside a machine more connections do not
 * help. */
static int conn_is_limited(const pccl_conn *conn, pccl_tcp_limits before)
{
    enum { BUSY_US_MIN = 50000 };
    if (conn->is_local)
        return 0;
    uint64_t busy_us = conn->limits.busy_us - before.busy_us;
    return busy_us >= BUSY_US_MIN && (conn->limits.window_us - before.window_us) * 2 > busy_us;
}

int pccl_link_look(pccl_link *link, int64_t now_ms)
{
    enum { LIMITED_TICKS_MIN = 3 };
    int are_all = !link->is_failed && link->live_count > 0;
    link->was_full = link->is_full;
    link->is_full = (uint8_t)are_all;
    link->acked_bytes = 0;
    link->looked_ms = now_ms;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        pccl_tcp_limits before = conn->limits;
        if (pccl_tcp_limits_read(conn->poll.fd, &conn->limits) != 0) {
            are_all = link->is_full = 0;
            continue;
        }
        if (link->round_trip_us == 0 || conn->limits.round_trip_us_min < link->round_trip_us)
            link->round_trip_us = conn->limits.round_trip_us_min;
        are_all &= conn_is_limited(conn, before);
        link->is_full &= conn->limits.unsent_bytes > 0;
        link->acked_bytes += conn->limits.acked_bytes - before.acked_bytes;
    }
    link->limited_ticks = are_all ? link->limited_ticks + 1 : 0;
    if (link->limited_ticks < LIMITED_TICKS_MIN || link->has_asked)
        return 0;
    link->has_asked = 1;
    return 1;
}

uint64_t pccl_link_look_under_way(pccl_link *link)
{
    link->under_way_bytes = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        pccl_conn_look_under_way(conn);
        link->under_way_bytes += conn->under_way_bytes;
    }
    return link->under_way_bytes;
}

int pccl_link_add_to_round(pccl_link *link, pccl_pacer_round *round)
{
    int has_carried = 0;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        pccl_tcp_limits before = conn->round;
        if (conn->is_lost || pccl_tcp_limits_read(conn->poll.fd, &conn->round) != 0)
            continue;
        const pccl_tcp_limits *now = &conn->round;
        if (now->delivered == before.delivered)
            continue;
        has_carried = 1;
        round->delivered_bytes += (uint64_t)(now->delivered - before.delivered) * now->segment_bytes;
        round->resent_bytes += (uint64_t)(now->resent - before.resent) * now->segment_bytes;
        round->has_queued |= now->round_trip_us > now->round_trip_us_min / 4 * 5;
    }
    return has_carried;
}

void pccl_link_count_full(pccl_link *link, int is_only_full, int64_t since_ms)
{
    enum { FULL_RUN_MS = 500 };
    if (!is_only_full || !link->was_full) {
        link->run_ms = link->run_bytes = 0;
        link->is_run_long = 0;
        return;
    }
    link->run_ms += (uint64_t)(link->looked_ms - since_ms);
    link->run_bytes += link->acked_bytes;
    link->is_run_long |= link->run_ms >= FULL_RUN_MS;
    if (link->is_run_long) {
        link->full_ms += link->run_ms;
        link->full_bytes += link->run_bytes;
        link->run_ms = link->run_bytes = 0;
    }
}

int pccl_link_watch(pccl_link *link, int64_t now_ms, int64_t timeout_ms, int starts_anew)
{
    int is_loaded = 0;
    int has_carried = starts_anew;
    for (pccl_list *node = link->conns.next; node != &link->conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_conns);
        if (conn->is_lost)
            continue;
        has_carried |= pccl_conn_has_carried(conn);
        is_loaded |= conn->lying_bytes > 0;
    }
    if (has_carried || !is_loaded || link->carried_ms < 0)
        link->carried_ms = now_ms;
    else if (now_ms - link->carried_ms > timeout_ms)
        pccl_link_fail(link, 0, "nothing got through for %lld ms", (long long)(now_ms - link->carried_ms));
    return is_loaded;
}

/* Eager payload */

static uint64_t eager_charge(uint32_t payload_bytes)
{
    return (uint64_t)payload_bytes + PCCL_EAGER_OVERHEAD_BYTES;
}

int pccl_link_reserve_eager(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    uint64_t reserved_bytes = eager->reserved_bytes + eager_charge(payload_bytes);
    if (reserved_bytes - eager->credited_bytes > PCCL_EAGER_WINDOW_BYTES)
        return 0;
    eager->reserved_bytes = reserved_bytes;
    return 1;
}

void pccl_link_cancel_eager(pccl_link *link, uint32_t payload_bytes)
{
    link->eager.reserved_bytes -= eager_charge(payload_bytes);
    PCCL_ASSERT(link->eager.reserved_bytes >= link->eager.sent_bytes);
}

const char *pccl_link_on_credit(pccl_link *link, uint64_t eager_bytes)
{
    if (eager_bytes > link->eager.sent_bytes)
        return "credit for what was not sent";
    /* Frames of one link may arrive in any order. */
    link->eager.credited_bytes = pccl_max_u64(link->eager.credited_bytes, eager_bytes);
    return NULL;
}

const char *pccl_link_on_eager(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    eager->received_bytes += eager_charge(payload_bytes);
    if (eager->received_bytes - eager->reported_bytes > PCCL_EAGER_WINDOW_BYTES)
        return "more eager payload than allowed";
    return NULL;
}

void pccl_link_retract_eager(pccl_link *link, uint32_t payload_bytes)
{
    link->eager.received_bytes -= eager_charge(payload_bytes);
    PCCL_ASSERT(link->eager.let_go_bytes <= link->eager.received_bytes);
}

void pccl_link_let_go(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    eager->let_go_bytes += eager_charge(payload_bytes);
    PCCL_ASSERT(eager->let_go_bytes <= eager->received_bytes);
    if (eager->let_go_bytes - eager->reported_bytes < PCCL_EAGER_WINDOW_BYTES / 4)
        return;
    eager->is_credit_due = 1;
    pccl_link_note_pending(link);
}

static void link_add_credit(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_CREDIT;
    frame.eager_bytes = link->eager.reported_bytes = link->eager.let_go_bytes;
    link->eager.is_credit_due = 0;
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
}

/* What is to be sent */

/* All that wait, up to what a frame holds. */
static void link_add_dones(pccl_link *link, pccl_conn *conn)
{
    pccl_op_key keys[PCCL_DONE_KEYS_MAX];
    uint32_t room = pccl_conn_done_room(conn);
    uint32_t count = 0;
    while (count < room && !pccl_list_is_empty(&link->dones))
        keys[count++] = pccl_agreement_take(link);
    pccl_conn_add_done(conn, keys, count);
}

static void link_add_announcement(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->ready_ops.next, pccl_op_peer, in_ready);
    pccl_list_remove(&peer->in_ready);
    int is_eager = peer->announcement == PCCL_ANNOUNCE_EAGER;
    PCCL_ASSERT(peer->announcement != PCCL_ANNOUNCE_NOTHING);
    peer->announcement = PCCL_ANNOUNCE_NOTHING;
    if (is_eager) {
        uint32_t index;
        const uint8_t *payload = pccl_op_take_eager(peer, &frame, &index);
        link->eager.sent_bytes += eager_charge(frame.payload_bytes);
        pccl_conn_add(conn, &frame, payload, peer->op, index);
        if (peer->is_heard && pccl_op_has_sendable(peer))
            pccl_list_append(&link->active_ops, &peer->in_active);
        return;
    }
    memset(&frame, 0, sizeof frame);
    frame.type = PCCL_FRAME_READY;
    frame.key = peer->op->request.key;
    frame.shape = peer->op->request.shape;
    pccl_conn_add(conn, &frame, NULL, peer->op, 0);
}

/* The next record of a lost connection; nothing if it is not of use any more. */
static void link_add_again(pccl_link *link, pccl_conn *conn)
{
    pccl_conn *lost = PCCL_CONTAINER_OF(link->resends.next, pccl_conn, in_resend);
    pccl_conn_record record = lost->records[lost->tx_acked++ % PCCL_CONN_WINDOW];
    if (lost->tx_acked == lost->tx_counted) {
        pccl_list_remove(&lost->in_resend);
        link_forget_if_settled(lost);
    }
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    frame.type = (enum pccl_frame_type)record.type;
    frame.payload_bytes = record.payload_bytes;
    if (record.op != NULL) {
        frame.chunk = record.of.segment.chunk;
        frame.segment = record.of.segment.segment;
        frame.hop = record.of.segment.hop;
        frame.key = record.op->request.key;
        frame.shape = record.op->request.shape;
    }
    switch (frame.type) {
    case PCCL_FRAME_EAGER:
        if (record.op == NULL) {
            link->eager.reserved_bytes -= eager_charge(record.payload_bytes);
            link->eager.sent_bytes -= eager_charge(record.payload_bytes);
            break;
        }
        /* fall through */
    case PCCL_FRAME_READY:
    case PCCL_FRAME_SEGMENT:
        if (record.op != NULL)
            pccl_conn_add(conn, &frame, record.of.segment.payload, record.op, record.of.segment.index);
        break;
    case PCCL_FRAME_DONE:
        pccl_conn_add_done(conn, &record.of.key, 1);
        break;
    case PCCL_FRAME_CREDIT:
        link->eager.is_credit_due = 1;
        break;
    case PCCL_FRAME_LOST: /* on its way again already */
        break;
    case PCCL_FRAME_HELLO:
    case PCCL_FRAME_ACK:
        PCCL_ASSERT(!"these have no record");
        break;
    }
}

static void link_add_notice(pccl_link *link, pccl_conn *conn)
{
    pccl_conn *lost = PCCL_CONTAINER_OF(link->notices.next, pccl_conn, in_notices);
    pccl_list_remove(&lost->in_notices);
    pccl_conn_add_lost(conn, lost);
}

static void link_add_segment(pccl_link *link, pccl_conn *conn)
{
    pccl_frame frame;
    uint32_t index;
    pccl_op_peer *peer = PCCL_CONTAINER_OF(link->active_ops.next, pccl_op_peer, in_active);
    pccl_list_remove(&peer->in_active);
    const uint8_t *payload = pccl_op_take_sendable(peer, &frame, &index);
    pccl_conn_add(conn, &frame, payload, peer->op, index);
    if (link->has_turn) {
        conn->under_way_bytes += frame.payload_bytes;
        conn->unsent_bytes += frame.payload_bytes;
        link->under_way_bytes += frame.payload_bytes;
        pccl_pacer_note_sent(&link->host->uplink.pacer, frame.payload_bytes);
    }
    if (pccl_op_has_sendable(peer))
        pccl_list_append(&link->active_ops, &peer->in_active);
}

static int link_may_send_segments(const pccl_link *link)
{
    const pccl_uplink *uplink = &link->host->uplink;
    if (pccl_list_is_empty(&link->active_ops))
        return 0;
    return link->has_turn ? pccl_pacer_allows(&uplink->pacer) : !pccl_uplink_is_limiting(uplink, link);
}

static int link_has_work(const pccl_link *link)
{
    return link->eager.is_credit_due || !pccl_list_is_empty(&link->notices) ||
           !pccl_list_is_empty(&link->resends) || !pccl_list_is_empty(&link->dones) ||
           !pccl_list_is_empty(&link->ready_ops) || link_may_send_segments(link);
}

/* Where there are several connections they had better share what there is: each has a window of its own. */
static void link_fill(pccl_link *link, pccl_conn *conn)
{
    enum { BATCH_BYTES_MAX = 256 << 10, BATCH_BYTES_MIN = 32 << 10 };
    size_t batch_bytes_max = pccl_max_size(BATCH_BYTES_MIN, BATCH_BYTES_MAX / link->live_count);
    while (link_has_work(link) && pccl_conn_has_room(conn, batch_bytes_max)) {
        if (!pccl_list_is_empty(&link->notices))
            link_add_notice(link, conn);
        else if (link->eager.is_credit_due)
            link_add_credit(link, conn);
        else if (!pccl_list_is_empty(&link->resends))
            link_add_again(link, conn);
        else if (!pccl_list_is_empty(&link->dones))
            link_add_dones(link, conn);
        else if (!pccl_list_is_empty(&link->ready_ops))
            link_add_announcement(link, conn);
        else
            link_add_segment(link, conn);
    }
}

static void link_flush(pccl_link *link, pccl_conn *conn)
{
    if (pccl_conn_flush(conn))
        pccl_link_offer(conn);
    else if (!conn->is_lost && !link->is_failed)
        pccl_conn_watch(conn);
}

static void link_talk(pccl_link *link)
{
    pccl_conn *conn = PCCL_CONTAINER_OF(link->talk_conns.next, pccl_conn, in_talk);
    pccl_list_remove(&conn->in_talk);
    if (!pccl_conn_is_drained(conn) || (!conn->is_hello_due && !conn->is_ack_due))
        return;
    pccl_frame frame;
    memset(&frame, 0, sizeof frame);
    if (conn->is_hello_due) {
        frame.type = PCCL_FRAME_HELLO;
        frame.connection = conn->number;
        conn->is_hello_due = 0;
    } else {
        frame.type = PCCL_FRAME_ACK;
        frame.received_bytes = conn->rx_bytes;
    }
    pccl_list_remove(&conn->in_free);
    pccl_conn_add(conn, &frame, NULL, NULL, 0);
    link_flush(link, conn);
}

static int link_waits_for_turns(const pccl_link *link)
{
    return !link->is_failed && !pccl_list_is_empty(&link->active_ops) && !pccl_list_is_empty(&link->free_conns);
}

/* Of the free ones, that which has least under way, without those to which the system would only add. */
static pccl_conn *link_next_conn(const pccl_link *link)
{
    enum { UNSENT_BYTES_MAX = 64 << 10 };
    pccl_conn *next = NULL;
    for (const pccl_list *node = link->free_conns.next; node != &link->free_conns; node = node->next) {
        pccl_conn *conn = PCCL_CONTAINER_OF(node, pccl_conn, in_free);
        if (conn->unsent_bytes >= UNSENT_BYTES_MAX)
            continue;
        if (next == NULL || conn->under_way_bytes < next->under_way_bytes)
            next = conn;
    }
    return next;
}

enum pccl_link_turn pccl_link_turn(const pccl_link *link)
{
    if (!link_waits_for_turns(link))
        return PCCL_TURN_NEVER;
    return link_next_conn(link) != NULL ? PCCL_TURN_NOW : PCCL_TURN_LATER;
}

void pccl_link_take_turn(pccl_link *link)
{
    PCCL_ASSERT(pccl_link_turn(link) == PCCL_TURN_NOW);
    pccl_conn *conn = link_next_conn(link);
    pccl_list_remove(&conn->in_free);
    link->has_turn = 1;
    link_fill(link, conn);
    link->has_turn = 0;
    link_flush(link, conn);
}

int pccl_link_send(pccl_link *link, size_t bytes_max)
{
    while (!link->is_failed && !pccl_list_is_empty(&link->talk_conns))
        link_talk(link);
    size_t sent_bytes = 0;
    while (!link->is_failed && link_has_work(link) && !pccl_list_is_empty(&link->free_conns)) {
        if (sent_bytes >= bytes_max)
            return 1;
        pccl_conn *conn = PCCL_CONTAINER_OF(link->free_conns.next, pccl_conn, in_free);
        pccl_list_remove(&conn->in_free);
        link_fill(link, conn);
        sent_bytes += conn->tx_batch_bytes;
        link_flush(link, conn);
    }
    pccl_uplink *uplink = &link->host->uplink;
    if (link_waits_for_turns(link) && pccl_uplink_is_limiting(uplink, link) && !pccl_list_is_member(&link->in_waiting))
        pccl_list_append(&uplink->waiting, &link->in_waiting);
    return 0;
}
