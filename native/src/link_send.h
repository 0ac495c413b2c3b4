/* link_send.h: how what is to be sent to a peer is given to the connections that lead there.
 *
 * DONE, announcements and segments take precedence in this order; active ops take turns segment by segment, so that a
 * large op does not hold up a small one. Whichever connection is free, that is drained and between frames, takes the
 * next frames. A slow connection is seldom free and so carries less. Segments to other machines may have to wait for
 * their link's turn (egress.h). What was on its way on a lost connection is sent again before all that
 * (conn.h). */
#ifndef PCCL_LINK_SEND_H
#define PCCL_LINK_SEND_H

#include "conn.h"
#include "link.h"

/* Can the link take a turn of the egress scheduler? NEVER: it has no segments, or no connection for them, and will ask
 * again. */
enum pccl_link_turn { PCCL_TURN_NEVER, PCCL_TURN_LATER, PCCL_TURN_NOW };
enum pccl_link_turn pccl_link_turn(const pccl_link *link);

/* Sends segments while the egress scheduler allows, no more than a connection takes at once. */
void pccl_link_take_turn(pccl_link *link);

/* Sends up to bytes_max or until no connection is free. Nonzero if there is more to do now. */
int pccl_link_send(pccl_link *link, size_t bytes_max);

#endif
