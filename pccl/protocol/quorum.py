"""Majorities of views, by which masters are told apart: any two majorities of one view have a peer in common."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Number of peers that were lost."""
        return self.size - len(self.here)
