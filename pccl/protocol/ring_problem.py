"""Ring problem: all that a search for a better ring has to know, as plain values that may go to another thread."""

from __future__ import annotations

from dataclasses import dataclass, field

Known = tuple[float, float]
"""Bytes per second and latency in seconds of one direction of a link."""


@dataclass(frozen=True)
class RingProblem:
    """A ring, and all that is known of links between its peers."""

    ring: tuple[int, ...]
    """The ring as it is."""
    links: dict[tuple[int, int], Known]
    """Metrics of links by sender and receiver."""
    unreachable: frozenset[tuple[int, int]] = frozenset()
    hosts: tuple[int, ...] = ()
    """The number, from 0, of each peer's host, in the order of the ring; empty if all are on different ones."""
    between_hosts: dict[tuple[int, int], Known] = field(default_factory=dict)
    """Metrics of links between hosts, for pairs of which `links` has none."""
