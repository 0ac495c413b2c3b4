"""Throughput: what ops show of the links they use, as peers report it. It is a measurement that costs nothing.

Most of what a link carries says little of what it could carry: a ring waits for its slowest link, and small ops wait
for answers. It says something where the link itself held up the ops, as BBR takes delivery rates for a path's bandwidth
only while the sender is not limited by the application. The engine looks every tenth of a second: a link was the limit
if, look after look for half a second, all its connections had more to send than TCP let them, and no other link of this
peer had. Traffic that comes in bursts fills a link now and then that could carry more, and several links that are full
at once share what they have. Only such time, and what was acknowledged in it, is reported and counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol.messages import Report

FULL_MS_MIN = 500
"""Milliseconds that must add up before there is a new metric."""


class Throughput:
    """The time in which links were full, and what they carried in it."""

    def __init__(self) -> None:
        self._used: dict[int, dict[int, tuple[int, int]]] = {}
        """Milliseconds and bytes that are in a metric already, by peer and the peer at the other end."""
        self._inherited: set[int] = set()

    def inherit(self, peers: Iterable[int]) -> None:
        """Take what these peers report first for a time before this master."""
        self._inherited.update(peers)

    def reported(self, peer: int, report: Report) -> list[tuple[int, float]]:
        """Return the links that have a new metric, each as the peer at the other end and bytes per second."""
        if peer in self._inherited:
            self._inherited.discard(peer)
            self._used[peer] = {link.peer: (link.full_ms, link.full_bytes) for link in report.links}
            return []
        used = self._used.setdefault(peer, {})
        found = []
        for link in report.links:
            before_ms, before_bytes = used.get(link.peer, (0, 0))
            if link.full_ms < before_ms or link.full_bytes < before_bytes:
                before_ms = before_bytes = 0  # another link to the same peer
            over_ms, moved_bytes = link.full_ms - before_ms, link.full_bytes - before_bytes
            if over_ms >= FULL_MS_MIN:
                used[link.peer] = link.full_ms, link.full_bytes
                found.append((link.peer, moved_bytes / over_ms * 1e3))
        for gone in used.keys() - {link.peer for link in report.links}:
            del used[gone]
        return found

    def forget(self, peer: int) -> None:
        self._used.pop(peer, None)
        self._inherited.discard(peer)
