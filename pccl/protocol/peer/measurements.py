"""Measurements of links that this peer has made, remembered for a master after this one."""

from __future__ import annotations

from collections.abc import Collection

from pccl.protocol.messages import METRICS_KEPT_MAX, LinkMetric

Link = tuple[int, bool]
"""The other peer, and whether it is the one that sends."""


class Measurements:
    """The last measurement of each link, the oldest first."""

    def __init__(self) -> None:
        self._found: dict[Link, tuple[LinkMetric, float]] = {}

    def add(self, found: list[LinkMetric], now: float) -> None:
        for metric in found:
            self._found[metric.peer, metric.is_inbound] = metric, now
        for oldest in list(self._found)[:-METRICS_KEPT_MAX]:
            del self._found[oldest]

    def discard(self, links: list[Link]) -> None:
        """Forget links that are about to be measured: of one that cannot be measured nothing is known."""
        for link in links:
            self._found.pop(link, None)

    def keep(self, peers: Collection[int]) -> None:
        """Forget the links with all peers but these."""
        self._found = {link: metric for link, metric in self._found.items() if link[0] in peers}

    def aged(self, now: float) -> list[tuple[LinkMetric, int]]:
        """Return all measurements, each with its age in seconds."""
        return [(metric, max(0, round(now - at))) for metric, at in self._found.values()]
