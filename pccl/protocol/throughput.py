"""What ops show of the links they use, as peers report it: a measurement that costs nothing.

Most of what a link carries says little of what it could carry: a ring waits for its slowest link, and small ops wait
for answers. It says something where the link itself was what held up the ops. The engine looks every tenth of a second:
a link was the limit if, look after look for half a second, all its connections had more to send than TCP let them, and
no other link of this peer had. For what comes in bursts fills a link now and then that could carry more, and several
that are full at once share what they have. Only such time and what was acknowledged in it are reported and counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol.messages import Report

FULL_MS_MIN = 500
"""Added up, since the last metric."""


class Throughput:
    def __init__(self) -> None:
        self._used: dict[int, dict[int, tuple[int, int]]] = {}
        """By peer and the peer at the other end: milliseconds and bytes that are in a metric already."""
        self._inherited: set[int] = set()

    def inherit(self, peers: Iterable[int]) -> None:
        """What these report first is of the time of a master before this one."""
        self._inherited.update(peers)

    def reported(self, peer: int, report: Report) -> list[tuple[int, float]]:
        """Of which links, named by the peer at the other end, there is a new metric: bytes per second."""
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
