"""The record that fences a run: what a master has to remember so that nobody whom it left out leads the run on.

A master that is its run's only one may lose most of a view and go on with the rest. If it dies, those whom it lost may
be a majority of the last view that they know of. What tells them from the others is the master's memory, or its disk:

    1  Before a view is announced (Prepare) or a term is begun (VoteRequest, Resumed), the record that names it is
       written. So whoever may have committed something without a peer is named by a record that does not name that
       peer.
    2  A successor that has the record takes the recorded view in force for the last one, and a recorded prepared view
       for one that may be in force, also if no survivor tells of it: see `recovery_report.quorum_of`.
    3  Whoever has followed a higher term than the record's has followed a master that does not share it. The record is
       outdated then, and recovery reports decide alone.

The record of a run is over when nobody is in the run any more. It names those who may still come back then: whose
connection was lost, and who was neither evicted nor left.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pccl.protocol.messages import MASTER_TIMEOUT_S, Secret

MASTER_TIMEOUT_S_MAX = 1e9


class FencedView(msgspec.Struct, frozen=True):
    """A view, as far as it decides who may lead the run on."""

    view: int
    peers: frozenset[int]

    @classmethod
    def of(cls, view: int, peers: Iterable[int]) -> FencedView:
        return cls(view, frozenset(peers))


class Fence(msgspec.Struct, frozen=True):
    run: str
    secret: Secret
    """The secret of Welcome: by it the run's peers know who may send them away."""
    term: int
    installed: FencedView | None
    """The last view in force, as far as it was recorded."""
    prepared: list[FencedView] = []
    """Newer ones that may be in force, the newest last."""
    is_over: bool = False
    master_timeout_s: float = MASTER_TIMEOUT_S
    """The longest that a peer of the run looks for a master."""

    @property
    def newest(self) -> FencedView:
        """The view that the run goes on with, if nobody tells of a later one."""
        if self.prepared:
            return self.prepared[-1]
        return self.installed or FencedView(0, frozenset())

    def __str__(self) -> str:
        newest = self.newest
        return f"run {self.run} in term {self.term}, view {newest.view}, peers {sorted(newest.peers)}"


def bounded_s(seconds: float, otherwise: float) -> float:
    """The patience that a peer claims, made harmless."""
    return min(max(seconds, 0.0), MASTER_TIMEOUT_S_MAX) if seconds == seconds else otherwise
