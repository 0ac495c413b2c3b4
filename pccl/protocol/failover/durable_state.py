"""Majorities of views, by which masters are told apart: any two majorities of one view have a peer in common.

The record: what a master has to remember so that nobody whom it left out leads its run on.

A master that is its run's only one may lose most of a view and go on with the rest. If it dies, those whom it lost may
be a majority of the last view that they know of, and a majority is all that recovery reports can show. What tells them
from the peers that went on is the master's memory, or its disk. It serves like the epoch number with which a storage
system fences off a leader that was replaced:

    1  Before a view is announced (Prepare) or a term is begun (VoteRequest, Resumed), the record that names it is
       written. So if something was committed without a peer, there is a record that does not name that peer.
    2  A new master that has the record takes the recorded view in force for the last one, and a recorded prepared view
       for one that may be in force, even if no survivor tells of it: see `recovery_report.quorum_of`.
    3  A peer that has followed a higher term than the record's has followed a master that does not share the record.
       Then the record is outdated, and recovery reports decide alone.

The record of a run is over when nobody is in the run any more. It then names those who may still come back: peers whose
connection was lost, and which were neither evicted nor left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pccl.protocol.messages import MASTER_TIMEOUT_S, Secret


def majority(peers: int) -> int:
    return peers // 2 + 1


@dataclass
class QuorumView:
    """The peers of a view, a majority of whom could go on with another master."""

    size: int
    """Number of its peers, without those who have left it on purpose since."""
    here: frozenset[int]
    """Peers that are neither lost nor have left."""

    @property
    def lost(self) -> int:
        return self.size - len(self.here)


MASTER_TIMEOUT_S_MAX = 1e9


class RecordedView(msgspec.Struct, frozen=True):
    """A view, as far as it decides who may lead the run on: its number and its peers."""

    view: int
    peers: frozenset[int]

    @classmethod
    def of(cls, view: int, peers: Iterable[int]) -> RecordedView:
        return cls(view, frozenset(peers))


class RunRecord(msgspec.Struct, frozen=True):
    """The record of one run."""

    run: str
    secret: Secret
    """The run's `Welcome.secret`. By it the run's peers know who may send them away."""
    term: int
    installed: RecordedView | None
    """The last view in force, as far as it was recorded."""
    prepared: list[RecordedView] = []
    """Newer views that may be in force, the newest last."""
    is_over: bool = False
    """Whether nobody is in the run any more."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """The longest time for which a peer of the run looks for a master."""

    @property
    def newest(self) -> RecordedView:
        """The view that the run goes on with, if nobody tells of a later one."""
        if self.prepared:
            return self.prepared[-1]
        return self.installed or RecordedView(0, frozenset())

    def __str__(self) -> str:
        newest = self.newest
        return f"run {self.run} in term {self.term}, view {newest.view}, peers {sorted(newest.peers)}"


def bounded_s(seconds: float, otherwise: float) -> float:
    """Return the seconds that a peer claims, or `otherwise` where they make no sense, within bounds."""
    return min(max(seconds, 0.0), MASTER_TIMEOUT_S_MAX) if seconds == seconds else otherwise
