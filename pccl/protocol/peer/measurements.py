"""Measurements of links that this peer has made, remembered for a master after this one."""

from __future__ import annotations

from collections.abc import Collection

from pccl.protocol.messages import FIGURES_KEPT_MAX, LinkFigure

Link = tuple[int, bool]
"""The other peer, and whether it is the one that sends."""


class Measurements:
    """The last measurement of each link, the oldest first."""

    def __init__(self) -> None:
        self._found: dict[Link, tuple[LinkFigure, float]] = {}

    def add(self, found: list[LinkFigure], now: float) -> None:
        for figure in found:
            self._found[figure.peer, figure.is_inbound] = figure, now
        for oldest in list(self._found)[:-FIGURES_KEPT_MAX]:
            del self._found[oldest]

    def discard(self, links: list[Link]) -> None:
        """Forget links that are about to be measured: of one that cannot be measured nothing is known."""
        for link in links:
            self._found.pop(link, None)

    def keep(self, peers: Collection[int]) -> None:
        """Forget the links with all others."""
        self._found = {link: figure for link, figure in self._found.items() if link[0] in peers}

    def aged(self, now: float) -> list[tuple[LinkFigure, int]]:
        """All measurements, and how many seconds old they are."""
        return [(figure, max(0, round(now - at))) for figure, at in self._found.values()]
