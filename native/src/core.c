#include "core.h"

#include "announcements.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { SEND_BYTES_MAX = 1 << 20 /* per link and turn, so that receiving gets its own */ };

struct pccl_core {
    pccl_conn_host host;
    pccl_fd_registry *fds;
    pccl_event_queue *events;
    pccl_table links_by_id;
    pccl_list links;
    pccl_list pending_links;
    pccl_table ops_by_id;
    pccl_table ops_by_key;
    pccl_list ops;
    pccl_table groups;
    pccl_announcements announcements;
    uint64_t ops_open; /* read by any thread */
    uint64_t connections;
};

static const char *core_on_header(pccl_conn_host *host, pccl_conn *conn, const pccl_frame *frame);
static void core_on_arrived(pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound);

pccl_core *pccl_core_create(pccl_poller *poller, pccl_fd_registry *fds, pccl_event_queue *events)
{
    pccl_core *core = calloc(1, sizeof *core);
    uint8_t *staging = NULL;
    if (core == NULL || posix_memalign((void **)&staging, 64, PCCL_STAGING_BYTES) != 0) {
        free(core);
        return NULL;
    }
    core->host.poller = poller;
    core->host.staging = staging;
    core->host.on_header = core_on_header;
    core->host.on_arrived = core_on_arrived;
    core->fds = fds;
    core->events = events;
    pccl_list_init(&core->host.failed_links);
    pccl_list_init(&core->links);
    pccl_list_init(&core->pending_links);
    pccl_list_init(&core->ops);
    pccl_table_init(&core->links_by_id);
    pccl_table_init(&core->ops_by_id);
    pccl_table_init(&core->ops_by_key);
    pccl_table_init(&core->groups);
    pccl_announcements_init(&core->announcements);
    return core;
}

void pccl_core_count(const pccl_core *core, pccl_engine_stats *stats)
{
    const pccl_conn_counters *counters = &core->host.counters;
    stats->tx_payload_bytes = __atomic_load_n(&counters->tx_payload_bytes, __ATOMIC_RELAXED);
    stats->rx_payload_bytes = __atomic_load_n(&counters->rx_payload_bytes, __ATOMIC_RELAXED);
    stats->tx_wire_bytes = __atomic_load_n(&counters->tx_wire_bytes, __ATOMIC_RELAXED);
    stats->rx_wire_bytes = __atomic_load_n(&counters->rx_wire_bytes, __ATOMIC_RELAXED);
    stats->ops_open = __atomic_load_n(&core->ops_open, __ATOMIC_RELAXED);
    stats->connections = __atomic_load_n(&core->connections, __ATOMIC_RELAXED);
}

/* Events */

static pccl_event op_event(const pccl_op *op, enum pccl_event_kind kind)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = kind;
    event.group = op->request.key.group;
    event.id = op->request.op;
    event.tx_bytes = op->tx_bytes;
    event.rx_bytes = op->rx_bytes;
    return event;
}

static void op_post(pccl_core *core, pccl_op *op, const pccl_event *event)
{
    PCCL_ASSERT(op->events_promised > 0);
    op->events_promised--;
    pccl_event_queue_post(core->events, event);
}

/* Links */

static pccl_link *link_find(const pccl_core *core, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&core->links_by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, by_id);
        if (link->id == id)
            return link;
    }
    return NULL;
}

static void link_note_pending(pccl_core *core, pccl_link *link)
{
    if (!link->is_failed && !pccl_list_is_member(&link->in_pending))
        pccl_list_append(&core->pending_links, &link->in_pending);
}

/* Takes all connections from a link, and the link from all that know it but the table. */
static void link_strip(pccl_core *core, pccl_link *link)
{
    for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        if (op->link_prev == link) {
            op->link_prev = NULL;
            pccl_list_remove(&op->in_ready);
        }
        if (op->link_next == link) {
            op->link_next = NULL;
            pccl_list_remove(&op->in_active);
        }
    }
    while (!pccl_list_is_empty(&link->conns)) {
        pccl_conn *conn = PCCL_CONTAINER_OF(link->conns.next, pccl_conn, in_conns);
        pccl_list_remove(&conn->in_conns);
        pccl_list_remove(&conn->in_free);
        pccl_poller_remove(core->host.poller, &conn->poll);
        pccl_fd_registry_close(core->fds, conn->poll.fd);
        pccl_conn_destroy(conn);
        __atomic_fetch_sub(&core->connections, 1, __ATOMIC_RELAXED);
    }
    pccl_announcements_forget_link(&core->announcements, link);
    pccl_list_remove(&link->in_pending);
    pccl_list_remove(&link->in_failed);
}

static void link_bury(pccl_core *core, pccl_link *link)
{
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_LINK_LOST;
    event.id = event.link = link->id;
    event.system_error = link->system_error;
    memcpy(event.detail, link->detail, sizeof event.detail);
    link_strip(core, link);
    pccl_event_queue_post(core->events, &event);
    pccl_event_queue_release(core->events, (link->conns_count - 1) * PCCL_EVENTS_PER_CONN);
    link->conns_count = 0;
}

static void link_remove(pccl_core *core, pccl_link *link)
{
    link_strip(core, link);
    pccl_event_queue_release(core->events, link->conns_count * PCCL_EVENTS_PER_CONN);
    pccl_table_remove(&core->links_by_id, &link->by_id);
    pccl_list_remove(&link->in_links);
    pccl_link_destroy(link);
}

/* Ops */

static pccl_op *op_find_by_id(const pccl_core *core, uint64_t id)
{
    pccl_table_node *node = pccl_table_first(&core->ops_by_id, pccl_hash_u64(0, id));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_id);
        if (op->request.op == id)
            return op;
    }
    return NULL;
}

/* Several ranks of one op may live in one engine; the link tells them apart. */
static pccl_op *op_find_by_key(
    const pccl_core *core, const pccl_op_key *key, const pccl_link *link, int is_from_prev, int *is_elsewhere)
{
    pccl_table_node *node = pccl_table_first(&core->ops_by_key, pccl_op_key_hash(key));
    *is_elsewhere = 0;
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, by_key);
        if (!pccl_op_key_equal(&op->request.key, key))
            continue;
        if ((is_from_prev ? op->request.link_prev : op->request.link_next) == link->id)
            return op;
        *is_elsewhere = 1;
    }
    return NULL;
}

/* Drops what is on its way to and from the op. Half-sent frames go on being sent, and so does the
 * announcement: a mismatch is for both sides to know. */
static void op_halt(pccl_op *op)
{
    pccl_op_stop(op);
    pccl_list_remove(&op->in_active);
    if (op->link_prev == NULL)
        return;
    pccl_list *conns = &op->link_prev->conns;
    for (pccl_list *node = conns->next; node != conns; node = node->next)
        pccl_conn_release_rx(PCCL_CONTAINER_OF(node, pccl_conn, in_conns), op);
}

static void op_activate(pccl_core *core, pccl_op *op)
{
    if (op->is_stopped || !op->is_peer_ready || op->link_next == NULL || op->link_next->is_failed)
        return;
    if (!pccl_op_has_sendable(op) || pccl_list_is_member(&op->in_active))
        return;
    pccl_list_append(&op->link_next->active_ops, &op->in_active);
    link_note_pending(core, op->link_next);
}

static void op_note_done(pccl_core *core, pccl_op *op)
{
    op->is_done = 1;
    pccl_event event = op_event(op, PCCL_EVENT_OP_DONE);
    op_post(core, op, &event);
}

/* Rank + 1 has said what it has submitted. An op without elements is done by that, so that it is checked
 * like any other. */
static void op_note_peer_ready(pccl_core *core, pccl_op *op, const pccl_op_shape *theirs)
{
    PCCL_ASSERT(!op->is_stopped);
    op->is_peer_ready = 1;
    if (!pccl_op_shape_equal(&op->request.shape, theirs)) {
        pccl_event event = op_event(op, PCCL_EVENT_OP_MISMATCH);
        event.link = op->request.link_next;
        event.mine = op->request.shape;
        event.theirs = *theirs;
        op->is_mismatched = 1;
        op_halt(op);
        op_post(core, op, &event);
        return;
    }
    if (op->segments_left == 0 && !op->is_done)
        op_note_done(core, op);
    op_activate(core, op);
}

/* Where the op uses the link: announces the op there, or finds what was announced. */
static void op_attach(pccl_core *core, pccl_op *op, pccl_link *link)
{
    pccl_op_shape theirs;
    if (link == NULL || link->is_failed || op->request.shape.world_size == 1)
        return;
    if (op->request.link_prev == link->id) {
        op->link_prev = link;
        if (!op->is_stopped) {
            pccl_list_append(&link->ready_ops, &op->in_ready);
            link_note_pending(core, link);
        }
    }
    if (op->request.link_next == link->id) {
        op->link_next = link;
        if (!op->is_stopped && pccl_announcements_take(&core->announcements, link, &op->request.key, &theirs))
            op_note_peer_ready(core, op, &theirs);
    }
}

/* Groups */

static pccl_group *group_find(const pccl_core *core, uint32_t number)
{
    pccl_table_node *node = pccl_table_first(&core->groups, pccl_hash_u64(0, number));
    for (; node != NULL; node = pccl_table_next(node)) {
        pccl_group *group = PCCL_CONTAINER_OF(node, pccl_group, by_number);
        if (group->number == number)
            return group;
    }
    return NULL;
}

static pccl_group *group_find_or_add(pccl_core *core, uint32_t number, pccl_group *spare)
{
    pccl_group *group = group_find(core, number);
    if (group != NULL) {
        free(spare);
        return group;
    }
    spare->number = number;
    pccl_table_insert(&core->groups, &spare->by_number, pccl_hash_u64(0, number));
    return spare;
}

static void group_forget_announcements(pccl_core *core, const pccl_group *group, uint64_t epoch)
{
    for (pccl_list *node = core->links.next; node != &core->links; node = node->next)
        pccl_announcements_forget_epochs(
            &core->announcements, PCCL_CONTAINER_OF(node, pccl_link, in_links), group->number, epoch);
}

static int group_has_frozen(const pccl_group *group, uint64_t epoch)
{
    return group->is_frozen && epoch <= group->frozen_epoch;
}

/* Commands */

void pccl_core_link_add(pccl_core *core, pccl_conn *conn, pccl_link *spare)
{
    pccl_link *link = link_find(core, spare->id);
    if (link == NULL) {
        link = spare;
        link->host = &core->host;
        pccl_table_insert(&core->links_by_id, &link->by_id, pccl_hash_u64(0, link->id));
        pccl_list_append(&core->links, &link->in_links);
        for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next)
            op_attach(core, PCCL_CONTAINER_OF(node, pccl_op, in_ops), link);
    } else {
        pccl_link_destroy(spare);
    }
    if (link->is_failed) {
        pccl_fd_registry_close(core->fds, conn->poll.fd);
        pccl_conn_destroy(conn);
        pccl_event_queue_release(core->events, PCCL_EVENTS_PER_CONN);
        return;
    }
    if (pccl_poller_add(core->host.poller, &conn->poll, conn->poll.fd, PCCL_POLL_IN) != 0) {
        int error = errno;
        pccl_fd_registry_close(core->fds, conn->poll.fd);
        pccl_conn_destroy(conn);
        link->conns_count++;
        pccl_link_fail(
            link, error, "connection %u: cannot be watched: %s", link->conns_added + 1, strerror(error));
        return;
    }
    __atomic_fetch_add(&core->connections, 1, __ATOMIC_RELAXED);
    pccl_link_adopt(link, conn);
    link_note_pending(core, link);
}

void pccl_core_link_close(pccl_core *core, uint64_t id)
{
    pccl_link *link = link_find(core, id);
    if (link != NULL)
        link_remove(core, link);
}

void pccl_core_submit(pccl_core *core, pccl_op *op, pccl_group *spare)
{
    const pccl_op_request *request = &op->request;
    op->events_promised = PCCL_EVENTS_PER_OP;
    pccl_list_append(&core->ops, &op->in_ops);
    pccl_table_insert(&core->ops_by_id, &op->by_id, pccl_hash_u64(0, request->op));
    pccl_table_insert(&core->ops_by_key, &op->by_key, pccl_op_key_hash(&request->key));
    __atomic_fetch_add(&core->ops_open, 1, __ATOMIC_RELAXED);

    pccl_group *group = group_find_or_add(core, request->key.group, spare);
    if (request->key.epoch > group->newest_epoch) {
        group->newest_epoch = request->key.epoch;
        group_forget_announcements(core, group, request->key.epoch - 1);
    }
    if (group_has_frozen(group, request->key.epoch))
        pccl_op_stop(op);
    if (request->shape.world_size == 1 && !op->is_stopped) {
        pccl_op_run_alone(op);
        op_note_done(core, op);
    }
    op_attach(core, op, link_find(core, request->link_prev));
    if (request->link_next != request->link_prev)
        op_attach(core, op, link_find(core, request->link_next));
}

void pccl_core_freeze(pccl_core *core, uint32_t number, uint64_t epoch, pccl_group *spare)
{
    pccl_group *group = group_find_or_add(core, number, spare);
    if (!group_has_frozen(group, epoch)) {
        group->is_frozen = 1;
        group->frozen_epoch = epoch;
        group_forget_announcements(core, group, epoch);
    }
    for (pccl_list *node = core->ops.next; node != &core->ops; node = node->next) {
        pccl_op *op = PCCL_CONTAINER_OF(node, pccl_op, in_ops);
        if (op->request.key.group == number && op->request.key.epoch <= epoch) {
            op_halt(op);
            pccl_list_remove(&op->in_ready);
        }
    }
    pccl_event event;
    memset(&event, 0, sizeof event);
    event.kind = PCCL_EVENT_GROUP_FROZEN;
    event.group = number;
    event.id = epoch;
    pccl_event_queue_post(core->events, &event);
}

static void op_end(pccl_core *core, pccl_op *op, int commit)
{
    op_halt(op);
    pccl_list_remove(&op->in_ready);
    if (op->link_next != NULL) {
        pccl_list *conns = &op->link_next->conns;
        for (pccl_list *node = conns->next; node != conns; node = node->next)
            pccl_conn_release_tx(PCCL_CONTAINER_OF(node, pccl_conn, in_conns), op);
    }
    if (!commit || !op->is_done)
        pccl_op_restore(op);
    pccl_event event = op_event(op, PCCL_EVENT_OP_ENDED);
    event.system_error = commit && !op->is_done ? EPROTO : 0;
    pccl_table_remove(&core->ops_by_id, &op->by_id);
    pccl_table_remove(&core->ops_by_key, &op->by_key);
    pccl_list_remove(&op->in_ops);
    op_post(core, op, &event);
    pccl_event_queue_release(core->events, op->events_promised);
    pccl_op_destroy(op);
    __atomic_fetch_sub(&core->ops_open, 1, __ATOMIC_RELAXED);
}

void pccl_core_end(pccl_core *core, uint64_t id, int commit)
{
    pccl_op *op = op_find_by_id(core, id);
    if (op != NULL)
        op_end(core, op, commit);
}

/* Frames */

static const char *core_on_ready(pccl_core *core, pccl_link *link, const pccl_frame *frame)
{
    int is_elsewhere;
    pccl_op *op = op_find_by_key(core, &frame->key, link, 0, &is_elsewhere);
    if (op != NULL) {
        if (op->is_stopped)
            return NULL;
        if (op->is_peer_ready)
            return "the same op announced twice";
        op_note_peer_ready(core, op, &frame->shape);
        return NULL;
    }
    if (is_elsewhere)
        return "an op announced by the wrong peer";
    pccl_group *group = group_find(core, frame->key.group);
    uint64_t epoch = frame->key.epoch;
    if (group != NULL && (group_has_frozen(group, epoch) || epoch < group->newest_epoch))
        return NULL;
    return pccl_announcements_keep(&core->announcements, link, &frame->key, &frame->shape);
}

static const char *core_on_segment(pccl_core *core, pccl_conn *conn, const pccl_frame *frame)
{
    int is_elsewhere;
    pccl_op_inbound inbound;
    pccl_op *op = op_find_by_key(core, &frame->key, conn->link, 1, &is_elsewhere);
    if (is_elsewhere && op == NULL)
        return "a segment from the wrong peer";
    if (op == NULL || op->is_stopped) {
        pccl_conn_expect_nothing_of_use(conn, frame->payload_bytes);
        return NULL;
    }
    const char *broken_rule = pccl_op_accept(op, frame, &inbound);
    if (broken_rule == NULL)
        pccl_conn_expect_segment(conn, op, &inbound);
    return broken_rule;
}

static const char *core_on_header(pccl_conn_host *host, pccl_conn *conn, const pccl_frame *frame)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    if (frame->type == PCCL_FRAME_READY)
        return core_on_ready(core, conn->link, frame);
    return core_on_segment(core, conn, frame);
}

static void core_on_arrived(pccl_conn_host *host, pccl_op *op, const pccl_op_inbound *inbound)
{
    pccl_core *core = PCCL_CONTAINER_OF(host, pccl_core, host);
    pccl_op_arrived(op, inbound);
    if (op->segments_left == 0)
        op_note_done(core, op);
    op_activate(core, op);
}

/* The loop's two halves */

static int core_send(pccl_core *core)
{
    pccl_list *last = core->pending_links.previous;
    int is_more = 0;
    while (!pccl_list_is_empty(&core->pending_links)) {
        pccl_list *node = core->pending_links.next;
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_pending);
        pccl_list_remove(node);
        if (pccl_link_send(link, SEND_BYTES_MAX)) {
            link_note_pending(core, link);
            is_more = 1;
        }
        if (node == last)
            break;
    }
    return is_more;
}

void pccl_core_on_poll(pccl_core *core, const pccl_poll_event *event)
{
    pccl_conn *conn = event->entry->owner;
    pccl_link *link = conn->link;
    if (link->is_failed)
        return;
    if (event->ready & PCCL_POLL_OUT && pccl_conn_flush(conn) && !pccl_list_is_member(&conn->in_free)) {
        pccl_list_append(&link->free_conns, &conn->in_free);
        link_note_pending(core, link);
    }
    if (event->ready & PCCL_POLL_IN)
        pccl_conn_receive(conn);
    core_send(core);
    if (!link->is_failed && pccl_list_is_member(&conn->in_free))
        pccl_poller_change(core->host.poller, &conn->poll, PCCL_POLL_IN);
}

int pccl_core_settle(pccl_core *core)
{
    int is_more = core_send(core);
    while (!pccl_list_is_empty(&core->host.failed_links))
        link_bury(core, PCCL_CONTAINER_OF(core->host.failed_links.next, pccl_link, in_failed));
    return is_more;
}

void pccl_core_destroy(pccl_core *core)
{
    while (!pccl_list_is_empty(&core->ops))
        op_end(core, PCCL_CONTAINER_OF(core->ops.next, pccl_op, in_ops), 0);
    while (!pccl_list_is_empty(&core->links))
        link_remove(core, PCCL_CONTAINER_OF(core->links.next, pccl_link, in_links));
    for (size_t i = 0; i <= core->groups.mask; i++) {
        pccl_table_node *next;
        for (pccl_table_node *node = core->groups.buckets[i]; node != NULL; node = next) {
            next = node->next;
            free(PCCL_CONTAINER_OF(node, pccl_group, by_number));
        }
    }
    pccl_announcements_free(&core->announcements);
    pccl_table_free(&core->groups);
    pccl_table_free(&core->links_by_id);
    pccl_table_free(&core->ops_by_id);
    pccl_table_free(&core->ops_by_key);
    free(core->host.staging);
    free(core);
}
