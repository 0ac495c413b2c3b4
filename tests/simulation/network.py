"""The network of a simulated run: which nodes reach each other, how slowly, and what a measurement of a link would
find.

Peers and masters are known here by their names. A direction is blocked from one moment to another: what was sent before
waits, as TCP would have it. From a node to itself goes what its engine reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.node import Node

Direction = tuple[str, str]
"""A sender and a receiver."""


class Network:
    def __init__(self) -> None:
        self.blocked: set[Direction] = set()
        """Blocked directions."""
        self.slow: set[Direction] = set()
        """Directions where things mostly get through only when little else is under way."""
        self.slow_machines: set[str] = set()
        """Nodes and masters where events mostly happen only when little else is under way."""
        self.unreachable: set[frozenset[str]] = set()
        """Pairs between which no connection can be made; those that are stay."""
        self.costs: dict[frozenset[str], int] = {}
        """Round trips in microseconds; 100 by default."""
        self.rates: dict[Direction, float] = {}
        """Bytes per second; a million by default."""

    @property
    def is_anything_slow(self) -> bool:
        return bool(self.slow or self.slow_machines)

    def passes(self, sender: str, receiver: str) -> bool:
        return not self.blocked or (sender, receiver) not in self.blocked

    def is_cut(self, a: Node, b: Node) -> bool:
        """Whether no message that needs an answer gets through between two nodes, or no large message."""
        if not self.blocked:
            return False
        ways = {(a.name, b.name), (b.name, a.name), (large_packets(a), b.name), (large_packets(b), a.name)}
        return not self.blocked.isdisjoint(ways)

    def stops_large(self, sender: Node, receiver: Node) -> bool:
        """Whether large packets do not get through."""
        return (large_packets(sender), receiver.name) in self.blocked

    def is_unreachable(self, a: Node, b: Node) -> bool:
        return frozenset((a.name, b.name)) in self.unreachable


def large_packets(node: Node) -> str:
    """The name under which a node sends large packets, in `Network.blocked`."""
    return f"large packets of {node}"


def end_of_heartbeats(node: Node) -> Direction:
    """What stands for the end of a node's heartbeats in `Network.slow`, which gets to any master."""
    return f"heartbeats of {node}", ""
