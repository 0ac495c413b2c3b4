"""`wait_for_peers`: admit newcomers until enough peers are there, or until the others have gone on without waiting.

Every peer of the run asks whether newcomers wait (`are_peers_pending`), which has the same answer on all, and if so all
admit them (`update_topology`). Peers may enter and leave this loop at different moments:

1. Whoever sees enough peers leaves. Another peer may not see that any more, because one of them was lost in between: it
   would ask for ever, while the first waits for it in an op. Nor may a newcomer hold up peers that have long gone on
   with fewer than it was told to wait for. So the master answers a question that the others are past (`PendingAnswer`,
   two seconds after their op has begun), and whoever hears that they are elsewhere leaves, too.
2. A peer that was interrupted between question and admission finds the others waiting in update_topology: it hears that
   they admit, and joins them.
"""

from __future__ import annotations

import logging

import trio

from pccl._session_holder import SessionHolder
from pccl._timeouts import Timeout
from pccl.errors import integer_argument
from pccl.protocol.long_wait import where_to_look
from pccl.protocol.messages import Kind, PendingAnswer

FUNC_NAME = "wait_for_peers"
PAUSE_S_MIN = 0.01
PAUSE_S_MAX = 0.2
"""Pauses between two questions. All peers make them, so a newcomer waits no longer than this."""

logger = logging.getLogger("pccl")


async def wait_for_peers(holder: SessionHolder, count: int, timeout: Timeout) -> int:
    """Return how many peers the group has, once there are `count` or the others have gone on with fewer."""
    count = integer_argument("count", count, FUNC_NAME, 1)

    async def more() -> str:
        view = holder.view(FUNC_NAME)
        return (
            f"more peers to connect to {holder.address}: {view.world_size} of {count} are in group {view.group} so far"
        )

    async def gather() -> int:
        pause_s = PAUSE_S_MIN
        if holder.view(FUNC_NAME).world_size < count:
            holder.session(FUNC_NAME).require_no_ops()  # else it would leave the others when they admit
        while (world_size := holder.view(FUNC_NAME).world_size) < count:
            pending = await holder.joint(FUNC_NAME, Kind.ARE_PEERS_PENDING, None)
            if pending == PendingAnswer.ELSEWHERE:
                logger.info("wait_for_peers(%d): the others have gone on with %d peers", count, world_size)
                break
            if pending > 0 or pending == PendingAnswer.ADMITTING:
                await holder.joint(FUNC_NAME, Kind.UPDATE_TOPOLOGY, None)
                pause_s = PAUSE_S_MIN
                continue
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        return holder.view(FUNC_NAME).world_size

    return await holder.bounded(FUNC_NAME, timeout, gather, more, where_to_look(holder.address))
