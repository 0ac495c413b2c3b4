#include "completion.h"

#include "link.h"

#include <stdlib.h>

pccl_completion *pccl_completion_create(const pccl_op_request *request)
{
    uint32_t world = request->shape.world_size;
    pccl_completion *made = calloc(1, sizeof *made + (world - 1) * sizeof(pccl_participant));
    if (made == NULL)
        return NULL;
    made->key = request->key;
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rank == request->rank)
            continue;
        pccl_participant *participant = &made->participants[made->count++];
        participant->completion = made;
        participant->link_id = request->rank_links != NULL ? request->rank_links[rank] : request->link_next;
        pccl_list_init(&participant->in_dones);
    }
    made->unheard = made->count;
    return made;
}

static void completion_free_if_over(pccl_completion *completion)
{
    if (completion->is_ended && completion->waiting == 0)
        free(completion);
}

void pccl_completion_end(pccl_completion *completion)
{
    PCCL_ASSERT(!completion->is_ended);
    completion->is_ended = 1;
    completion_free_if_over(completion);
}

static void participant_queue_done(pccl_participant *participant)
{
    if (participant->link == NULL)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&participant->in_dones));
    participant->completion->waiting++;
    pccl_list_append(&participant->link->dones, &participant->in_dones);
    pccl_link_note_pending(participant->link);
}

pccl_participant *pccl_completion_find(pccl_completion *completion, const pccl_link *link)
{
    for (uint32_t i = 0; i < completion->count; i++)
        if (completion->participants[i].link_id == link->id)
            return &completion->participants[i];
    return NULL;
}

void pccl_completion_attach(pccl_completion *completion, pccl_link *link)
{
    pccl_participant *participant = pccl_completion_find(completion, link);
    if (participant == NULL || link->is_failed)
        return;
    participant->link = link;
    if (completion->is_done)
        participant_queue_done(participant);
}

void pccl_completion_detach(pccl_completion *completion, const pccl_link *link)
{
    pccl_participant *participant = pccl_completion_find(completion, link);
    if (participant == NULL)
        return;
    PCCL_ASSERT(!pccl_list_is_member(&participant->in_dones));
    participant->link = NULL;
}

void pccl_completion_send_done(pccl_completion *completion)
{
    PCCL_ASSERT(!completion->is_done);
    completion->is_done = 1;
    for (uint32_t i = 0; i < completion->count; i++)
        participant_queue_done(&completion->participants[i]);
}

void pccl_completion_note_done(pccl_participant *participant)
{
    PCCL_ASSERT(!participant->is_heard && participant->completion->unheard > 0);
    participant->is_heard = 1;
    participant->completion->unheard--;
}

int pccl_completion_is_reached(const pccl_completion *completion)
{
    return completion->is_done && completion->unheard == 0;
}

pccl_op_key pccl_completion_take_done(pccl_link *link)
{
    pccl_participant *participant = PCCL_CONTAINER_OF(link->dones.next, pccl_participant, in_dones);
    pccl_completion *completion = participant->completion;
    pccl_op_key key = completion->key;
    pccl_list_remove(&participant->in_dones);
    completion->waiting--;
    completion_free_if_over(completion);
    return key;
}
