"""Insertion of newcomers into a ring that otherwise stays as it is: where they slow it down least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pccl.protocol.link_metrics import LinkMetrics
from pccl.protocol.topology import ring_links


def with_newcomers(ring: Sequence[int], newcomers: Iterable[int], metrics: LinkMetrics) -> list[int]:
    """Insert newcomers in the order of their numbers: each beside peers of its host unless more is known, at the end if
    nothing is.

    All others keep their order, and so their links but one for each newcomer.
    """
    found = list(ring)
    rates = [metric.bytes_per_s for pair in ring_links(ring) if (metric := metrics.get(pair)) is not None]
    slowest = min(rates, default=float("inf"))
    for peer in sorted(newcomers):
        found.insert(_place(found, peer, metrics, slowest), peer)
    return found


def _place(ring: Sequence[int], peer: int, metrics: LinkMetrics, slowest: float) -> int:
    """Return the place in the ring before which a newcomer comes. `slowest` is the rate of the ring's slowest link so
    far, in bytes per second."""
    if not metrics.knows_host_of(peer):
        hosts = metrics.hosts(peer)
        beside = [at for at, other in enumerate(ring) if metrics.hosts(other) == hosts]
        return beside[-1] + 1 if beside else len(ring)

    def harm(at: int) -> tuple[int, int, float, float, int]:
        """Return the damage that a place would do to the ring. Slow links count only as far as they are slower than the
        ring is."""
        new = [(ring[at - 1], peer), (peer, ring[at % len(ring)])]
        unreachable = sum(metrics.is_unreachable(pair) for pair in new)
        known = [metric for pair in new if (metric := metrics.get(pair)) is not None]
        rate = min([slowest, *(metric.bytes_per_s for metric in known)])
        replaced = metrics.get((ring[at - 1], ring[at % len(ring)]))
        more_s = sum(metric.latency_s for metric in known) - (replaced.latency_s if replaced is not None else 0.0)
        return unreachable, 2 - len(known), -rate, more_s, -at

    return min(range(1, len(ring) + 1), key=harm, default=0)
