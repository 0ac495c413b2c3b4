"""Point-to-point ops: tags and participants.

A send and its recv are one op of two peers. Its tag contains the pair and the direction, as ranks, which do not change
within an epoch:

    bit 63    1, unlike tags of callers
    49 .. 62  the sender's rank
    35 .. 48  the receiver's rank
     0 .. 34  the caller's tag
"""

from __future__ import annotations

from collections.abc import Sequence

PAIR_BIT = 1 << 63
RANK_BITS = 14
TAG_BITS = 35
PAIR_TAG_MAX = 2**TAG_BITS - 1
"""The largest tag that a caller may give to a send."""


def pair_tag(sender: int, receiver: int, tag: int) -> int:
    assert 0 <= tag <= PAIR_TAG_MAX
    assert sender != receiver
    assert max(sender, receiver) < 2**RANK_BITS
    return PAIR_BIT | ((sender << RANK_BITS) | receiver) << TAG_BITS | tag


def ranks_of(tag: int) -> tuple[int, int] | None:
    """Return the ranks of sender and receiver, or None if it is an op of the whole group."""
    if not tag & PAIR_BIT:
        return None
    ranks = (tag & ~PAIR_BIT) >> TAG_BITS
    return ranks >> RANK_BITS, ranks & (2**RANK_BITS - 1)


def callers_tag(tag: int) -> int:
    return tag & PAIR_TAG_MAX if tag & PAIR_BIT else tag


def call_of(tag: int, rank: int) -> str:
    """Return as what the peer with this rank has called an op: "send", "recv", or "op" where all take part."""
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
