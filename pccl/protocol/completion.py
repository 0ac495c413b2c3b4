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

The master learns about such ops from `Report` (totals), `OpsStalled` and `OpsOver` (long waits), flushes after broken
links, and `TagsUsed`: a peer with very many tags starts no further op when it is idle, until a new epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

TAGS_MAX = 2**16
"""Number of different tags that a group may use in one epoch. Every peer counts the uses of each."""


def is_mutual(tag: int, is_meshed: bool) -> bool:
    """Whether the participants of an op complete it without the master: in a mesh, and for every pair."""
    return is_meshed or ranks_of(tag) is not None


def is_full(tags: int, is_idle: bool) -> bool:
    """Whether a new epoch is due for the number of used tags; earlier if no op is known to be in flight."""
    return tags > (TAGS_MAX // 2 if is_idle else TAGS_MAX)


# Tags of point-to-point ops. A send and its recv are one op of two peers. Its tag contains the pair and the direction,
# as ranks, which do not change within an epoch: bit 63 is 1, then 14 bits of the sender's rank, 14 bits of the
# receiver's rank, and 35 bits of the caller's tag.

PAIR_BIT = 1 << 63
RANK_BITS = 14
TAG_BITS = 35
PAIR_TAG_MAX = 2**TAG_BITS - 1


def pair_tag(sender: int, receiver: int, tag: int) -> int:
    assert 0 <= tag <= PAIR_TAG_MAX
    assert sender != receiver
    assert max(sender, receiver) < 2**RANK_BITS
    return PAIR_BIT | ((sender << RANK_BITS) | receiver) << TAG_BITS | tag


def ranks_of(tag: int) -> tuple[int, int] | None:
    if not tag & PAIR_BIT:
        return None
    ranks = (tag & ~PAIR_BIT) >> TAG_BITS
    return ranks >> RANK_BITS, ranks & (2**RANK_BITS - 1)


def callers_tag(tag: int) -> int:
    return tag & PAIR_TAG_MAX if tag & PAIR_BIT else tag


def call_of(tag: int, rank: int) -> str:
    """Return the call of the peer with this rank: "send", "recv", or "op" where all take part."""
    ranks = ranks_of(tag)
    return "op" if ranks is None else "send" if ranks[0] == rank else "recv"


def participants(tag: int, ring: Sequence[int]) -> frozenset[int]:
    """Return the participants of an op; none if its ranks do not exist."""
    ranks = ranks_of(tag)
    if ranks is None:
        return frozenset(ring)
    if max(ranks) >= len(ring) or ranks[0] == ranks[1]:
        return frozenset()
    return frozenset(ring[rank] for rank in ranks)
