"""Peers that have followed a master from the one that they lost, and have not connected for signs of life yet.

Each has a peer timeout for that, counted from the last one that did so: as long as they go on coming it is the master
that is busy, with thousands of them, and nobody is late. RETURN_TIMEOUTS bound the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

RETURN_TIMEOUTS = 3.0


class Returning:
    def __init__(self, peers: Iterable[int] = (), now: float = 0.0, timeout_s: float = 0.0) -> None:
        self.peers = dict.fromkeys(peers)
        """Who has not come yet, as an ordered set."""
        self.since = now
        self.until = now + timeout_s
        """Whoever has not come by then is lost."""
        self._timeout_s = timeout_s

    def came(self, peer: int, now: float) -> None:
        """Others are ignored."""
        if peer in self.peers:
            del self.peers[peer]
            self.until = min(now + self._timeout_s, self.since + RETURN_TIMEOUTS * self._timeout_s)

    def gone(self, peer: int) -> None:
        """It is lost, or has left. Others are ignored."""
        self.peers.pop(peer, None)

    def late(self, now: float) -> list[int]:
        return list(self.peers) if now >= self.until else []
