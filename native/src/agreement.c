#include "agreement.h"

#include "link.h"

#include <stdlib.h>

pccl_agreement *pccl_agreement_create(const pccl_op_request *request)
{
    uint32_t world = request->shape.world_size;
    pccl_agreement *made = calloc(1, sizeof *made + (world - 1) * sizeof(pccl_party));
    if (made == NULL)
        return NULL;
    made->key = request->key;
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rank == request->rank)
            continue;
        pccl_party *party = &made->parties[made->count++];
        party->agreement = made;
        party->link_id = request->rank_links != NULL ? request->rank_links[rank] : request->link_next;
        pccl_list_init(&party->in_dones);
    }
    made->unheard = made->count;
    return made;
}

static void agreement_free_if_over(pccl_agreement *agreement)
{
    if (agreement->is_ended && agreement->waiting == 0)
        free(agreement);
}

void pccl_agreement_end(pccl_agreement *agreement)
{
    PCCL_ASSERT(!agreement->is_ended);
    agreement->is_ended = 1;
    agreement_free_if_over(agreement);
}

static void party_tell(pccl_party *party)
{
    if (party->link == NULL || party->is_told)
        return;
    party->is_told = 1;
    party->agreement->waiting++;
    pccl_list_append(&party->link->dones, &party->in_dones);
    pccl_link_note_pending(party->link);
}

pccl_party *pccl_agreement_find(pccl_agreement *agreement, const pccl_link *link)
{
    for (uint32_t i = 0; i < agreement->count; i++)
        if (agreement->parties[i].link_id == link->id)
            return &agreement->parties[i];
    return NULL;
}

void pccl_agreement_attach(pccl_agreement *agreement, pccl_link *link)
{
    pccl_party *party = pccl_agreement_find(agreement, link);
    if (party == NULL || link->is_failed)
        return;
    party->link = link;
    if (agreement->is_done)
        party_tell(party);
}

void pccl_agreement_detach(pccl_agreement *agreement, const pccl_link *link)
{
    pccl_party *party = pccl_agreement_find(agreement, link);
    if (party == NULL)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&party->in_dones));
    party->link = NULL;
}

void pccl_agreement_say(pccl_agreement *agreement)
{
    PCCL_ASSERT(!agreement->is_done);
    agreement->is_done = 1;
    for (uint32_t i = 0; i < agreement->count; i++)
        party_tell(&agreement->parties[i]);
}

void pccl_agreement_hear(pccl_party *party)
{
    PCCL_ASSERT(!party->is_heard && party->agreement->unheard > 0);
    party->is_heard = 1;
    party->agreement->unheard--;
}

int pccl_agreement_is_reached(const pccl_agreement *agreement)
{
    return agreement->is_done && agreement->unheard == 0;
}

pccl_op_key pccl_agreement_take(pccl_link *link)
{
    pccl_party *party = PCCL_CONTAINER_OF(link->dones.next, pccl_party, in_dones);
    pccl_agreement *agreement = party->agreement;
    pccl_op_key key = agreement->key;
    pccl_list_remove(&party->in_dones);
    agreement->waiting--;
    agreement_free_if_over(agreement);
    return key;
}
