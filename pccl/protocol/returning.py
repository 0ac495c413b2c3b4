"""Peers that have followed a new master, and have not yet connected to it for heartbeats.

Each has a peer timeout for that, counted from the last one that did so. As long as they go on coming it is the master
that is busy, with thousands of them, and nobody is late. RETURN_TIMEOUTS bounds the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

RETURN_TIMEOUTS = 3.0


class Returning:
    """Peers that are still expected."""

    def __init__(self, peers: Iterable[int] = (), now: float = 0.0, timeout_s: float = 0.0) -> None:
        self.peers = dict.fromkeys(peers)
        """Peers that have not come yet, as an ordered set."""
        self.since = now
        self.until = now + timeout_s
        """The time after which peers that have not come are lost."""
        self._timeout_s = timeout_s

    def came(self, peer: int, now: float) -> None:
        """Expect this peer no more, and the others for longer. A peer that was not expected is ignored."""
        if peer in self.peers:
            del self.peers[peer]
            self.until = min(now + self._timeout_s, self.since + RETURN_TIMEOUTS * self._timeout_s)

    def gone(self, peer: int) -> None:
        """Expect this peer no more: it is lost, or has left."""
        self.peers.pop(peer, None)

    def late(self, now: float) -> list[int]:
        """Return the peers that are lost because they have not come in time."""
        return list(self.peers) if now >= self.until else []
