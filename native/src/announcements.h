/* announcements.h: READY frames that came before their op was submitted here.
 *
 * They are kept per link and key until the op is submitted, the link goes, or their epoch is over. How many
 * a link may leave is bounded. */
#ifndef PCCL_ANNOUNCEMENTS_H
#define PCCL_ANNOUNCEMENTS_H

#include "link.h"
#include "pccl_native.h"
#include "table.h"

enum { PCCL_ANNOUNCEMENTS_PER_LINK_MAX = 65536 };

typedef struct {
    pccl_table by_key;
} pccl_announcements;

void pccl_announcements_init(pccl_announcements *announcements);
void pccl_announcements_free(pccl_announcements *announcements); /* all links must have been forgotten */

/* NULL, or the rule that the frame breaks. */
const char *pccl_announcements_keep(
    pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key, const pccl_op_shape *shape);

/* Nonzero if there was one: it is now in `shape`, and no longer here. */
int pccl_announcements_take(
    pccl_announcements *announcements, pccl_link *link, const pccl_op_key *key, pccl_op_shape *shape);

void pccl_announcements_forget_link(pccl_announcements *announcements, pccl_link *link);

/* Those of the group with epochs up to this one. */
void pccl_announcements_forget_epochs(
    pccl_announcements *announcements, pccl_link *link, uint32_t group, uint64_t epoch);

uint64_t pccl_op_key_hash(const pccl_op_key *key);

#endif
