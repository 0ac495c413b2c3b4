"""Majorities of views, and the record that a master keeps on disk.

A run's only master may evict most of a view and continue. If that master dies, the evicted peers may form
a majority of the last view that they know. The record identifies the peers that continued, like the epoch with which a
storage system fences off a deposed leader:

    1  The record is written before a view is announced (Prepare) or a term starts (VoteRequest, Resumed). So if ops
       commit without a peer, the record does not contain that peer.
    2  A new master treats the recorded installed view as the last one, and a recorded prepared view as one that may be
       installed: see `recovery.quorum_of`.
    3  A peer with a higher term than the record's has followed a master that does not share the record. In that case
       the record is outdated, and only recovery reports count.

The record of a finished run lists the peers that may still return: lost peers that neither left nor were evicted.
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
    """A view whose majority could follow another master."""

    size: int
    """Number of its peers, excluding those that have deliberately left since."""
    here: frozenset[int]

    @property
    def lost(self) -> int:
        return self.size - len(self.here)


MASTER_TIMEOUT_S_MAX = 1e9


class RecordedView(msgspec.Struct, frozen=True):
    view: int
    peers: frozenset[int]

    @classmethod
    def of(cls, view: int, peers: Iterable[int]) -> RecordedView:
        return cls(view, frozenset(peers))


class RunRecord(msgspec.Struct, frozen=True):
    run: str
    secret: Secret
    """The run's `Welcome.secret`, which proves to peers that an eviction is genuine."""
    term: int
    installed: RecordedView | None
    prepared: list[RecordedView] = []
    is_over: bool = False
    master_timeout_s: float = MASTER_TIMEOUT_S
    """The longest time that a peer of the run searches for a master."""
    names: dict[int, str] = {}
    """The peers' own names, for texts."""

    @property
    def newest(self) -> RecordedView:
        if self.prepared:
            return self.prepared[-1]
        return self.installed or RecordedView(0, frozenset())

    def __str__(self) -> str:
        newest = self.newest
        return f"run {self.run} in term {self.term}, view {newest.view}, peers {sorted(newest.peers)}"


def bounded_s(seconds: float, otherwise: float) -> float:
    return min(max(seconds, 0.0), MASTER_TIMEOUT_S_MAX) if seconds == seconds else otherwise
