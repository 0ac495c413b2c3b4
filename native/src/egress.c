#include "egress.h"

#include "link_send.h"
#include "link_watch.h"
#include "os.h"

#include <string.h>

enum {
    FIXED_ROUND_TRIP_US = 1000,
    LOOK_US = 500,
    CONNECTIONS_MAX = 16 /* of the only link: more of them crowd a queue as several links do */
};

void pccl_egress_init(pccl_egress *egress, uint64_t fixed_rate)
{
    memset(egress, 0, sizeof *egress);
    pccl_list_init(&egress->waiting);
    pccl_pacer_init(&egress->pacer, pccl_now_ns() / 1000);
    egress->is_fixed = egress->is_watched = fixed_rate != 0;
    if (fixed_rate != 0)
        pccl_pacer_limit(&egress->pacer, fixed_rate, FIXED_ROUND_TRIP_US);
}

static int64_t egress_now_us(void) { return pccl_now_ns() / 1000; }

static int egress_carries(const pccl_egress *egress, const pccl_link *link)
{
    return !link->is_failed && pccl_egress_carries(egress, link->is_local, link->round_trip_us);
}

void pccl_egress_tick(pccl_egress *egress, const pccl_list *links)
{
    unsigned far_count = 0;
    int has_many = 0;
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        const pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (!egress_carries(egress, link))
            continue;
        far_count++;
        has_many |= link->live_count > CONNECTIONS_MAX;
    }
    egress->is_watched = far_count > 1 || has_many || egress->is_fixed;
}

static uint64_t egress_under_way_bytes(const pccl_egress *egress, const pccl_list *links)
{
    uint64_t bytes = 0;
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (egress_carries(egress, link))
            bytes += pccl_link_look_under_way(link);
    }
    return bytes;
}

static pccl_pacer_round egress_round(const pccl_egress *egress, const pccl_list *links)
{
    pccl_pacer_round round;
    unsigned carrying_count = 0;
    int has_many = 0;
    memset(&round, 0, sizeof round);
    for (const pccl_list *node = links->next; node != links; node = node->next) {
        pccl_link *link = PCCL_CONTAINER_OF(node, pccl_link, in_links);
        if (!egress_carries(egress, link) || !pccl_link_add_to_round(link, &round))
            continue;
        round.round_trip_us += link->round_trip_us;
        carrying_count++;
        has_many |= link->live_count > CONNECTIONS_MAX;
    }
    if (carrying_count > 0)
        round.round_trip_us /= carrying_count;
    round.is_shared = (uint8_t)(carrying_count > 1 || has_many);
    return round;
}

static void egress_measure(pccl_egress *egress, const pccl_list *links, int64_t now_us)
{
    pccl_pacer *pacer = &egress->pacer;
    int is_looked_for = pccl_pacer_is_limiting(pacer) || pccl_egress_is_waiting(egress);
    if (is_looked_for && now_us - pacer->looked_us >= LOOK_US)
        pccl_pacer_look(pacer, now_us, egress_under_way_bytes(egress, links));
    if (!egress->is_fixed && pccl_pacer_is_round_over(pacer, now_us)) {
        pccl_pacer_round round = egress_round(egress, links);
        pccl_pacer_learn(pacer, now_us, &round);
    }
}

/* Returns the link that has least under way of those that can take a turn now, and waits for longest of those that have
 * equally much. NULL: none can. */
static pccl_link *egress_next(pccl_egress *egress)
{
    pccl_link *next = NULL;
    pccl_list *following;
    for (pccl_list *node = egress->waiting.next; node != &egress->waiting; node = following) {
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

static void egress_give_turn(pccl_egress *egress, pccl_link *link)
{
    pccl_list_remove(&link->in_waiting);
    pccl_list_append(&egress->waiting, &link->in_waiting);
    pccl_link_take_turn(link);
}

void pccl_egress_send(pccl_egress *egress, const pccl_list *links)
{
    if (!egress->is_watched && !pccl_egress_is_waiting(egress))
        return;
    egress_measure(egress, links, egress_now_us());
    pccl_link *next = egress_next(egress);
    for (; next != NULL && pccl_pacer_allows(&egress->pacer); next = egress_next(egress))
        egress_give_turn(egress, next);
    if (next != NULL)
        pccl_pacer_note_refused(&egress->pacer);
}
