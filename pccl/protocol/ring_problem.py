"""What a search for a better ring needs to know, as plain values that may go to another thread."""

from __future__ import annotations

from dataclasses import dataclass, field

Known = tuple[float, float]
"""Of a link: bytes per second, and the latency in seconds."""


@dataclass(frozen=True)
class RingProblem:
    ring: tuple[int, ...]
    """As it is."""
    links: dict[tuple[int, int], Known]
    """By sender and receiver."""
    unreachable: frozenset[tuple[int, int]] = frozenset()
    hosts: tuple[int, ...] = ()
    """The number, from 0, of each peer's host, in the order of the ring; empty if all are on different ones."""
    between_hosts: dict[tuple[int, int], Known] = field(default_factory=dict)
    """What is known of the links of their peers, where `links` has nothing."""
