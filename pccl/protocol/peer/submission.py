"""Submission of an op to the engine: the name by which all its participants know it, and what the engine is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pccl.protocol.messages import OpRef
from pccl.protocol.peer.effects import SubmitOp
from pccl.protocol.peer.op import Failure, Op
from pccl.protocol.peer.view import View, alone_in
from pccl.protocol.point_to_point import pair_tag
from pccl.protocol.topology import neighbours
from pccl.types import Result

LinkTo = Callable[[int], int]
"""A function that returns the number of the link to a peer; 0, which is no link, where it has just been lost. Then the
op waits for the flush that must follow."""


def refusal(view: View, pair: tuple[int, bool] | None) -> Failure | None:
    """Return why an op cannot start in this view, or None. The other peer of a point-to-point op is refused for the
    same reason, or is gone."""
    if view.world_size < 2:
        return Result.TOO_FEW_PEERS, alone_in(view.group)
    if pair is None:
        return None
    other = pair[0]
    if other not in view.ring:
        return Result.RANK_CONNECTION_LOST, f"peer {other} has left; call again with a rank of the present group"
    if not view.is_meshed and other not in neighbours(view.ring, view.peer):
        return (
            Result.INVALID_USAGE,
            f"there is no link with peer {other}: in a group that is no mesh only neighbours of the ring have one",
        )
    return None


def shared_tag(view: View, tag: int, pair: tuple[int, bool] | None) -> int:
    """Return the tag by which all participants know an op with a caller's tag."""
    if pair is None:
        return tag
    own, other = view.ring.index(view.peer), view.ring.index(pair[0])
    return pair_tag(own, other, tag) if pair[1] else pair_tag(other, own, tag)


def would_have_tag(view: View, op: Op, tag: int) -> bool:
    """Whether an op that has not started would be known by this tag if it started in this view."""
    return (op.pair is None or op.pair[0] in view.ring) and shared_tag(view, op.tag, op.pair) == tag


def submission(view: View, op: Op, ref: OpRef, link_to: LinkTo) -> SubmitOp:
    """Return the submission of an op in this view."""
    participants = view.ring
    if op.pair is not None:
        other, is_sender = op.pair
        participants = (view.peer, other) if is_sender else (other, view.peer)
    links = tuple(map(link_to, participants))
    return _submission(view, op.op, ref, participants, links, op.is_mutual)


def plain_submission(view: View, link_to: LinkTo) -> SubmitOp | None:
    """Return the submission of an op of the whole group that its participants complete by themselves, without its
    number, tag and use count. None: a link is missing."""
    links = tuple(0 if peer == view.peer else link_to(peer) for peer in view.ring)
    return None if links.count(0) > 1 else _submission(view, 0, OpRef(0, 0), view.ring, links, is_mutual=True)


def pair_start(start: SubmitOp, pair: tuple[int, bool]) -> SubmitOp | None:
    """Return the submission of a point-to-point op where ops of the whole group are submitted by `start`.

    Its tag is the one by which both peers know an op with the tag 0 of its caller. None: the other peer has left.
    """
    other, is_sender = pair
    if other not in start.ring:
        return None
    rank = start.ring.index(other)
    link = start.links[rank]
    tag = pair_tag(start.rank, rank, 0) if is_sender else pair_tag(rank, start.rank, 0)
    links = (0, link) if is_sender else (link, 0)
    return replace(start, tag=tag, rank=0 if is_sender else 1, world_size=2, links=links)


def _submission(
    view: View, op: int, ref: OpRef, participants: tuple[int, ...], links: tuple[int, ...], is_mutual: bool
) -> SubmitOp:
    return SubmitOp(
        op=op,
        epoch=view.epoch,
        tag=ref.tag,
        sequence=ref.sequence,
        rank=participants.index(view.peer),
        world_size=len(participants),
        links=links,
        is_meshed=view.is_meshed,
        is_mutual=is_mutual,
        ring=view.ring,
        direct_limit=view.direct_limit,
        is_local=view.is_local,
    )
