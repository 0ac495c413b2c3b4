"""The undecided ops of one group in one epoch, with the peers that reported done.

An op enters with the first peer that reports done, and leaves with its verdict. Ops that peers complete by themselves
(`completion`) enter only if they take long. An op commits when every peer of the ring has reported done, a
point-to-point op when both its peers have. At a flush only survivors count.

A peer has at most one op of a tag in flight, so uses of a tag are decided in order and one number per tag separates
late reports. Where peers complete ops by themselves, a later use may enter before an earlier one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from pccl.protocol.completion import is_mutual
from pccl.protocol.messages import OpRef
from pccl.protocol.point_to_point import call_of, participants, ranks_of

DECIDED_TAGS_MAX = 100_000
"""Number of tags whose last verdict is remembered. Late messages only concern the most recent verdicts."""


class Ledger:
    def __init__(self, ring: Sequence[int], is_meshed: bool = False) -> None:
        self.ring = frozenset(ring)
        self._is_meshed = is_meshed
        self._order = tuple(ring)
        self.stalled: dict[OpRef, set[int]] = {}
        """Undecided ops that peers have waited in for long, and these peers."""
        self._done: dict[OpRef, set[int]] = {}
        self._decided: dict[int, int] = {}
        self._verdicts: dict[OpRef, None] = {}
        """Ops that peers complete by themselves and that were decided here, the oldest first."""

    def done(self, peer: int, ops: Iterable[OpRef]) -> list[OpRef]:
        """Note that `peer` is done; return the ops that are committed by that."""
        assert peer in self.ring
        committed = []
        for op in ops:
            needed = self.ring if ranks_of(op.tag) is None else participants(op.tag, self._order)
            if self.is_decided(op) or peer not in needed:
                continue
            holders = self._done.setdefault(op, set())
            holders.add(peer)
            if len(holders) == len(needed):
                self._decide(op)
                committed.append(op)
        return committed

    def decide(self, op: OpRef) -> bool:
        """Note the verdict on one op; return False if it has one already. What peers say of it is ignored from here
        on."""
        if self.is_decided(op):
            return False
        self._decide(op)
        return True

    def forget(self, ops: Iterable[OpRef]) -> None:
        for op in ops:
            if not self.is_decided(op):
                self._decide(op)

    def stall(self, peer: int, ops: Iterable[OpRef]) -> None:
        for op in ops:
            if not self.is_decided(op):
                self.stalled.setdefault(op, set()).add(peer)

    def over(self, peer: int, ops: Iterable[OpRef]) -> None:
        """Note that these ops are over for `peer`, which had reported them as stalled."""
        for op in ops:
            for book in (self.stalled, self._done):
                if op in book:
                    book[op].discard(peer)
                    if not book[op]:
                        del book[op]

    def settle(self, survivors: Collection[int]) -> list[OpRef]:
        """Return the ops to commit at the end of a flush; all others are aborted. The book is closed afterwards."""
        alive = self.ring.intersection(survivors)
        commits = [op for op, holders in self._done.items() if alive & participants(op.tag, self._order) <= holders]
        self._done.clear()
        self.stalled.clear()
        return commits

    def holders(self, op: OpRef) -> frozenset[int]:
        return frozenset(self._done.get(op, ()))

    def missing(self, op: OpRef, peer: int) -> tuple[str, Iterator[int]]:
        """Return as what a peer has called the op that it waits in, and which others are not done with it."""
        holders, ranks = self.holders(op), ranks_of(op.tag)
        if ranks is None:
            return "op", (each for each in self._order if each not in holders and each != peer)
        needed = participants(op.tag, self._order)
        rank = self._order.index(peer) if peer in needed else -1
        return call_of(op.tag, rank), (each for each in self._order if each in needed - holders - {peer})

    @property
    def undecided(self) -> int:
        return len(self._done)

    @property
    def tags(self) -> int:
        """Number of tags that have had a verdict, as far as they are remembered."""
        return len(self._decided)

    @property
    def entries(self) -> int:
        return len(self._done) + len(self.stalled)

    @property
    def heaviest(self) -> int:
        """The peer that is named in most of these entries."""
        named = Counter(peer for holders in (*self._done.values(), *self.stalled.values()) for peer in holders)
        return max(named, key=lambda peer: (named[peer], peer))

    def is_decided(self, op: OpRef) -> bool:
        if is_mutual(op.tag, self._is_meshed):
            return op in self._verdicts
        return op.sequence <= self._decided.get(op.tag, -1)

    def _decide(self, op: OpRef) -> None:
        self._done.pop(op, None)
        self.stalled.pop(op, None)
        self._decided.pop(op.tag, None)
        self._decided[op.tag] = op.sequence
        if len(self._decided) > DECIDED_TAGS_MAX:
            del self._decided[next(iter(self._decided))]
        if is_mutual(op.tag, self._is_meshed):
            self._verdicts[op] = None
        if len(self._verdicts) > DECIDED_TAGS_MAX:
            del self._verdicts[next(iter(self._verdicts))]
