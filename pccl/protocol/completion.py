"""Completion: how the participants of an op commit it without the master.

Every peer must see the same end of an op, whichever peers and masters die. Where all participants have links with each
other they commit by mutual completion: a peer whose engine is done sends DONE to all participants, and commits once it
is done and has DONE from all of them. That costs one one-way delay and no message to the master. It applies to all ops
of a mesh and to every point-to-point op (`is_mutual`). Other ops wait for the master (`master.verdicts`).

    1  An engine sends DONE only with the complete result, which it cannot lose.
    2  A peer that commits by itself has DONE from all participants.
    3  Only the machine commits, in the order of its events, and never an op that it has promised not to commit (abort
       vote). The fast path commits only where the machine would do the same (`Ops.plain_start`).

So all surviving peers reach the same end:

    4  A peer is lost. In the flush each survivor stops its ops and reports the done ones and those that it has
       committed in this epoch. The master commits what any survivor has committed or all have done, and aborts the
       rest. By 2, what a lost peer committed is done at all survivors. A survivor with DONE from all participants
       commits even after its answer, unless it has promised not to: the master can only commit too, and may be gone.
    5  A commit of the master (6) may arrive before the peer's own engine is done. Survivors report it as committed.
    6  A participant gives an op up. Its engine stops the op first.

       a  If the op is not done, no peer has committed it or will (2), and the master aborts it at once.
       b  If it is done, the peer promises not to commit it by itself, and the master asks the other participants: each
          reports a commit, or promises the same. With one commit the master commits; otherwise it aborts when all have
          answered. If a participant is lost before, the flush decides.
       c  The master holds the same vote before it aborts an op that some peers seem never to have launched.

    7  The master dies. Commits of peers are in their recovery reports. A peer that has promised not to commit gives the
       op up again at the next master.
    8  A peer has one op per tag in flight, so its last commit of a tag decides all earlier uses. The last commit and
       the aborts since then suffice per tag.

The master learns about such ops from `Report` (totals), `OpsStalled` and `OpsOver` (long waits), flushes after broken
links, and `TagsUsed`: a peer with very many tags starts no further op when it is idle, until a new epoch.
"""

from __future__ import annotations

from pccl.protocol.point_to_point import ranks_of

TAGS_MAX = 2**16
"""Number of different tags that a group may use in one epoch. Every peer counts the uses of each."""


def is_mutual(tag: int, is_meshed: bool) -> bool:
    """Whether the participants of an op complete it by themselves. `is_meshed`: their group is a mesh. Two peers
    without a link have no point-to-point op, so those that there are always do."""
    return is_meshed or ranks_of(tag) is not None


def is_full(tags: int, is_idle: bool) -> bool:
    """Whether a new epoch is due for the number of used tags; earlier if no op is known to be in flight."""
    return tags > (TAGS_MAX // 2 if is_idle else TAGS_MAX)
