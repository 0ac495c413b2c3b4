"""Completion: how the participants of an op commit it without the master.

An op must end in the same way on all peers, whichever peers and masters die. If all participants have links with
each other, they commit by mutual completion: a peer whose engine is done sends DONE to all participants, and commits
once it has received DONE from all of them. This takes one one-way delay and no message to the master. It applies to
all ops in a mesh and to every point-to-point op (`is_mutual`). Other ops wait for the master (`master.verdicts`).

    1  An engine sends DONE only once it has the complete result and can no longer lose it.
    2  A peer that commits by itself has received DONE from all participants.
    3  Only the machine commits, in the order of its events, and never an op that it has promised not to commit (abort
       vote). The fast path commits only if the machine would too (`Ops.plain_start`).

So all surviving peers reach the same end:

    4  If a peer is lost, each survivor stops its ops for the flush. It reports which of them are done and which ops it
       has committed in this epoch. The master commits the ops that any survivor has committed or all have done, and
       aborts the rest. By 2, an op that a lost peer committed is done at all survivors. A survivor with DONE from all
       participants commits even after its reply, unless it has promised not to: the master must commit that op too.
    5  A commit from the master (6) may arrive before the peer's own engine is done. Survivors report it as committed.
    6  If a participant gives up an op, its engine first stops the op.

       a  If the op is not done, no peer has committed it or ever will (2), and the master aborts it at once.
       b  If it is done, the peer promises not to commit it by itself, and the master asks the other participants. Each
          reports a commit or makes the same promise. If any has committed, the master commits; otherwise it aborts once
          all have answered. If a participant is lost before that, the flush decides.
       c  The master holds the same vote before it aborts an op that some peers have apparently never launched.

    7  If the master dies, the peers' recovery reports contain their commits. A peer that has promised not to commit
       reports to the next master again that it has given up the op.

The master learns about such ops only from `Report` (totals), `OpsStalled` and `OpsOver` (long waits), flushes after
broken links, and `TagsUsed`. A peer that has sent `TagsUsed` starts no op until a new epoch.
"""

from __future__ import annotations

from collections.abc import Sequence

TAGS_MAX = 2**16
"""Maximum number of different tags that a group may use in one epoch. Every peer keeps a use count per tag."""


def is_mutual(tag: int, is_meshed: bool) -> bool:
    """Return whether an op's participants complete it without the master: in a mesh, or if it is point-to-point."""
    return is_meshed or ranks_of(tag) is not None


def is_full(tags: int, is_idle: bool) -> bool:
    """Return whether a new epoch is due because of the number of tags. The limit is lower if no op is in flight."""
    return tags > (TAGS_MAX // 2 if is_idle else TAGS_MAX)


# Tags of point-to-point ops. A send and its recv are one op with two participants. Its tag contains both ranks, which
# do not change within an epoch: bit 63 is 1, followed by the sender's rank (14 bits), the receiver's rank (14 bits),
# and the caller's tag (35 bits).

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


TRAINING_TAGS = 1 << 62
"""The first of the tags that `pccl.training` uses by itself, eight for each tag of an object."""
_TRAINING = ("digests", "objects", "buffers", "samples", "last digests", "objects", "objects", "objects")


def tag_named(tag: int) -> str:
    """Return a tag of `callers_tag` for use in a sentence: `tag 5`, or what `pccl.training` uses it for."""
    if tag < TRAINING_TAGS:
        return f"tag {tag}"
    return f"pccl.training's tag for {_TRAINING[tag % 8] if tag < PAIR_BIT - 1 else 'options'}"


def call_of(tag: int, rank: int) -> str:
    """Return what the peer with this rank called: "send", "recv", or "op" if all take part."""
    ranks = ranks_of(tag)
    return "op" if ranks is None else "send" if ranks[0] == rank else "recv"


def participants(tag: int, ring: Sequence[int]) -> frozenset[int]:
    """Return the participants of an op, or an empty set if its ranks do not exist."""
    ranks = ranks_of(tag)
    if ranks is None:
        return frozenset(ring)
    if max(ranks) >= len(ring) or ranks[0] == ranks[1]:
        return frozenset()
    return frozenset(ring[rank] for rank in ranks)
