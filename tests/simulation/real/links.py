"""Links between real engines: each connection is a pair of simulated sockets, made when the first side takes it over.

Engines find by themselves what becomes of connections. So no report here tells them, and a connection counts as one of
a link's for as long as this side's socket is open.
"""

from __future__ import annotations

from pccl.protocol.peer import effects as ps
from tests.simulation.connections import Wire
from tests.simulation.links import Links
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.real.engines import RealEngines
from tests.simulation.scene import Scene


class RealLinks(Links):
    def __init__(self, scene: Scene, peers: Peers, engines: RealEngines) -> None:
        super().__init__(scene, peers)
        self._engines = engines
        self._fds: dict[Wire, dict[str, int]] = {}

    def is_up(self, a: Node, a_link: int, b: Node, b_link: int) -> bool:
        self._prune(a)
        self._prune(b)
        if a_link not in a.links or b_link not in b.links:
            return False
        ours, theirs = a.links[a_link], b.links[b_link]
        return ours.is_complete and theirs.is_complete and set(ours.wires) == set(theirs.wires) != set()

    def break_all(self, a: Node, b: Node) -> None:
        for wire in self._wires(a, b):
            self._engines.break_socket(self._fds[wire][a.name])

    def break_one(self, a: Node, b: Node) -> None:
        wires = self._wires(a, b)
        if wires:
            self._engines.break_socket(self._fds[self._scene.pick(wires)][a.name])

    def _wires(self, a: Node, b: Node) -> list[Wire]:
        self._prune(a)
        return [wire for link in a.links.values() for wire in link.wires if wire.other(a) is b]

    def close_wire(self, wire: Wire, node: Node) -> None:
        wire.closed_by.add(node.name)
        if node.name not in wire.ends and wire in self._fds:
            self._engines.abandon(self._fds[wire][node.name])

    def find_stalled(self) -> None:
        """Engines find that by themselves."""

    def _close(self, node: Node, effect: ps.CloseLink) -> None:
        node.links.pop(effect.link, None)
        self._engines.close_link(node, effect.link)

    def _attach(self, wire: Wire, node: Node, number: int) -> None:
        if node.is_reachable and node.machine.link_connected(number) and number in node.links:
            wire.ends[node.name] = number
            link = node.links[number]
            link.wires.append(wire)
            link.attached += 1
            link.is_complete = link.is_complete or link.attached == link.effect.connections
            if wire not in self._fds:
                self._fds[wire] = self._engines.connect(node, wire.other(node))
                for name in wire.closed_by:
                    self._engines.abandon(self._fds[wire][name])
            self._engines.add_connection(node, number, wire.index, self._fds[wire][node.name])
        else:
            self.close_wire(wire, node)
        self._peers.settle(node)

    def _find_closed(self, wire: Wire, node: Node) -> None:
        raise AssertionError("engines find that by themselves")

    def _prune(self, node: Node) -> None:
        """Forget connections that this side has closed."""
        for link in node.links.values():
            link.wires = [wire for wire in link.wires if not self._engines.is_closed(self._fds[wire][node.name])]
