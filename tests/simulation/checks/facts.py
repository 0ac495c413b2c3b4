"""Facts: what the messages of a simulated run have shown, the base of several checks.

A *leader* is a master's process that has taken peers in (Welcome) or on (Resumed), with the run and the term that it
has named to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from tests.simulation.connections import Control
from tests.simulation.node import Key, Node

PAIR_BIT = 1 << 63
RANK_BITS = 14
TAG_BITS = 35
"""The layout of the tags of point-to-point ops, as it is on the wire."""
Epoch = tuple[int, int]
"""The name of a ring: its group and its epoch."""


@dataclass(eq=False)
class Leader:
    process: int
    """The number of the process, of all that ever were."""
    run: str
    term: int
    followers: set[tuple[Node, int]] = field(default_factory=set)
    """The peers that it has taken in or on, with their numbers then."""
    prepared: int = 0
    """The last view that it has announced."""

    def __repr__(self) -> str:
        return f"master process {self.process}, which leads {self.run} in term {self.term}"


class Facts:
    def __init__(self, nodes: list[Node], addresses: int, is_one_name: bool) -> None:
        self.nodes = nodes
        self.addresses = addresses
        """The number of master addresses that nodes know."""
        self.is_one_name = is_one_name
        """Several masters are behind one name, and neither may know of the other."""
        self.rings: dict[Epoch, tuple[int, ...]] = {}
        """Every ring."""
        self.listed: dict[int, set[int]] = {}
        """All peers that a view was to have, by its number."""
        self.leaders: dict[tuple[int, str, int], Leader] = {}
        """All leaders, by process, run and term."""
        self.has_failed_over = False
        """Some master has led a run that another had led before."""

    def prepare(self, leader: Leader | None, message: m.Prepare) -> None:
        """Note a view that was announced."""
        if leader is not None:
            leader.prepared = max(leader.prepared, message.view)
        self.listed[message.view] = {peer for ring in message.rings for peer in ring.peers}
        for ring in message.rings:
            known = self.rings.setdefault((ring.group, ring.epoch), tuple(ring.peers))
            assert known == tuple(ring.peers), f"group {ring.group} has two rings in epoch {ring.epoch}"

    def led(self, node: Node, control: Control, process: int, run: str, term: int) -> tuple[Leader, bool]:
        """Note that a master has taken a peer in or on. Return the leader, and whether it is new."""
        key = process, run, term
        is_new = key not in self.leaders
        leader = self.leaders.setdefault(key, Leader(process, run, term))
        node.run, node.leader, node.led_over, node.is_known = run, leader, control, True
        leader.followers.add((node, node.number))
        return leader, is_new

    def known(self, epoch: Epoch, by: Leader | None = None) -> list[Node]:
        """Return the peers of a ring that a master leads and has not lost: any, or where there is one name, `by`."""
        ring = self.rings[epoch]
        return [
            node
            for node in self.nodes
            if node.is_known and node.number in ring and (not self.is_one_name or by is None or node.leader is by)
        ]

    def participants(self, key: Key, nodes: Iterable[Node]) -> list[Node]:
        """Return those of `nodes` that take part in an op."""
        numbers = self.numbers_of(key)
        return [node for node in nodes if node.number in numbers]

    def numbers_of(self, key: Key) -> frozenset[int]:
        """Return the peers that take part in an op."""
        tag, ring = key[2], self.rings[key[:2]]
        if not tag & PAIR_BIT:
            return frozenset(ring)
        sender, receiver = (tag & ~PAIR_BIT) >> TAG_BITS + RANK_BITS, tag >> TAG_BITS & 2**RANK_BITS - 1
        if max(sender, receiver) >= len(ring) or sender == receiver:
            return frozenset()
        return frozenset((ring[sender], ring[receiver]))


IsLinked = Callable[[Node, int, Node, int], bool]
"""Whether both ends of a link stand and belong together: a node and its link's number, twice."""
