#include "uplink.h"

#include "link.h"
#include "thread.h"

#include <string.h>

enum {
    FAR_US = 2000, /* round trip */
    LOOK_US = 500,
    FIXED_ROUND_TRIP_US = 1000
};

static int64_t uplink_now_us(void) { return pccl_now_ns() / 1000; }

void pccl_uplink_init(pccl_uplink *uplink, uint64_t fixed_rate)
{
    memset(uplink, 0, sizeof *uplink);
    pccl_list_init(&uplink->waiting);
    pccl_pacer_init(&uplink->pacer, uplink_now_us());
    uplink->is_fixed = uplink->is_watched = fixed_rate != 0;
    if (fixed_rate != 0)
        pccl_pacer_limit(&uplink->pacer, fixed_rate, FIXED_ROUND_TRIP_US);
}

static int uplink_carries(const pccl_uplink *uplink, const pccl_link *link)
{
    int is_far = !link->is_local && link->round_trip_us >= FAR_US;
    return !link->is_failed && (is_far || uplink->is_fixed);
}

int pccl_uplink_is_limiting(const pccl_uplink *uplink, const pccl_link *link)
{
    return pccl_pacer_is_limiting(&uplink->pacer) && uplink_carries(uplink, link);
}

void pccl_uplink_tick(pccl_uplink *uplink, const pccl_list *links)
{
    unsigned far_count = 0;
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        const pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        far_count += (unsigned)uplink_carries(uplink, link);
    }
    uplink->is_watched = far_count > 1 || uplink->is_fixed;
}

static uint64_t uplink_under_way_bytes(const pccl_uplink *uplink, const pccl_list *links)
{
    uint64_t bytes = 0;
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (uplink_carries(uplink, link))
            bytes += pccl_link_look_under_way(link);
    }
    return bytes;
}

static pccl_pacer_round uplink_round(const pccl_uplink *uplink, const pccl_list *links)
{
    pccl_pacer_round round;
    unsigned carrying_count = 0;
    memset(&round, 0, sizeof round);
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (!uplink_carries(uplink, link) || !pccl_link_add_to_round(link, &round))
            continue;
        round.round_trip_us += link->round_trip_us;
        carrying_count++;
    }
    if (carrying_count > 0)
        round.round_trip_us /= carrying_count;
    round.is_shared = carrying_count > 1;
    return round;
}

static void uplink_measure(pccl_uplink *uplink, const pccl_list *links, int64_t now_us)
{
    pccl_pacer *pacer = &uplink->pacer;
    int is_looked_for = pccl_pacer_is_limiting(pacer) || pccl_uplink_is_waiting(uplink);
    if (is_looked_for && now_us - pacer->looked_us >= LOOK_US)
        pccl_pacer_look(pacer, now_us, uplink_under_way_bytes(uplink, links));
    if (!uplink->is_fixed && pccl_pacer_is_round_over(pacer, now_us)) {
        pccl_pacer_round round = uplink_round(uplink, links);
        pccl_pacer_learn(pacer, now_us, &round);
    }
}

/* Of those that can take a turn now, the link that has least under way. NULL: none can. */
static pccl_link *uplink_next(pccl_uplink *uplink)
{
    pccl_link *next = NULL;
    pccl_list *following;
    for (pccl_list *node = uplink->waiting.next; node != &uplink->waiting; node = following) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_waiting);
        enum pccl_link_turn turn = pccl_link_turn(link);
        following = node->next;
        if (turn == PCCL_TURN_NEVER)
            pccl_list_remove(node);
        else if (turn == PCCL_TURN_NOW && (next == NULL || link->under_way_bytes < next->under_way_bytes))
            next = link;
    }
    return next;
}

void pccl_uplink_send(pccl_uplink *uplink, const pccl_list *links)
{
    if (!uplink->is_watched && !pccl_uplink_is_waiting(uplink))
        return;
    uplink_measure(uplink, links, uplink_now_us());
    pccl_link *next = uplink_next(uplink);
    for (; next != NULL && pccl_pacer_allows(&uplink->pacer); next = uplink_next(uplink))
        pccl_link_take_turn(next);
    if (next != NULL)
        pccl_pacer_note_refused(&uplink->pacer);
}
