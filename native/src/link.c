#include "link.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

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
    pccl_list_init(&link->lost_frames);
    pccl_list_init(&link->resends);
    pccl_list_init(&link->dones);
    pccl_list_init(&link->ready_ops);
    pccl_list_init(&link->active_ops);
    pccl_list_init(&link->unexpected);
    return link;
}

void pccl_link_destroy(pccl_link *link)
{
    PCCL_ASSERT(pccl_list_is_empty(&link->conns) && pccl_list_is_empty(&link->unexpected));
    free(link);
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

/* Eager payload */

static uint64_t eager_charge(uint32_t payload_bytes) { return (uint64_t)payload_bytes + PCCL_EAGER_OVERHEAD_BYTES; }

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

void pccl_link_note_eager_sent(pccl_link *link, uint32_t payload_bytes)
{
    link->eager.sent_bytes += eager_charge(payload_bytes);
}

void pccl_link_note_eager_lost(pccl_link *link, uint32_t payload_bytes)
{
    link->eager.reserved_bytes -= eager_charge(payload_bytes);
    link->eager.sent_bytes -= eager_charge(payload_bytes);
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
    PCCL_ASSERT(link->eager.released_bytes <= link->eager.received_bytes);
}

void pccl_link_release_eager(pccl_link *link, uint32_t payload_bytes)
{
    pccl_link_eager *eager = &link->eager;
    eager->released_bytes += eager_charge(payload_bytes);
    PCCL_ASSERT(eager->released_bytes <= eager->received_bytes);
    if (eager->released_bytes - eager->reported_bytes < PCCL_EAGER_WINDOW_BYTES / 4)
        return;
    eager->is_credit_due = 1;
    pccl_link_note_pending(link);
}

uint64_t pccl_link_take_credit(pccl_link *link)
{
    link->eager.is_credit_due = 0;
    return link->eager.reported_bytes = link->eager.released_bytes;
}
