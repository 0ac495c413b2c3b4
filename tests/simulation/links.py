"""Links between the peers of a simulated run: `Wire`s that are dialled, offered, accepted and closed one by one. A link
breaks when its last wire is closed, or one before all of them stand."""

from __future__ import annotations

from functools import partial

from pccl.protocol.peer import effects as ps
from tests.simulation.connections import Link, Wire
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import Scene


class Links:
    def __init__(self, scene: Scene, peers: Peers) -> None:
        self._scene = scene
        self._peers = peers
        peers.on(ps.MakeLink, self._make)
        peers.on(ps.AddConnections, self._add_connections)
        peers.on(ps.TryLinks, lambda node, effect: scene.events.later(node, lambda: self._try(node, effect)))
        peers.on(ps.CloseLink, self._close)

    def is_up(self, a: Node, a_link: int, b: Node, b_link: int) -> bool:
        """Whether both ends stand and belong together."""
        if a_link not in a.links or b_link not in b.links:
            return False
        ours, theirs = a.links[a_link], b.links[b_link]
        return (
            ours.is_complete
            and theirs.is_complete
            and set(ours.wires) == set(theirs.wires)
            and not any(wire.closed_by for wire in ours.wires)
        )

    def break_all(self, a: Node, b: Node) -> None:
        """Reset all connections between two peers; each end finds it at its own time."""
        for wire in [wire for link in a.links.values() for wire in link.wires if wire.other(a) is b]:
            self.close_wire(wire, a)
            self.close_wire(wire, b)

    def break_one(self, a: Node, b: Node) -> None:
        """Reset one of the connections of a link, which goes on with the others."""
        wires = [wire for link in a.links.values() for wire in link.wires if wire.other(a) is b]
        if wires:
            wire = self._scene.pick(wires)
            self.close_wire(wire, a)
            self.close_wire(wire, b)

    def close_wire(self, wire: Wire, node: Node) -> None:
        wire.closed_by.add(node.name)
        other = wire.other(node)
        self._scene.events.later(other, lambda: self._find_closed(wire, other), node)

    def due(self) -> list[float]:
        """Return the time when links will be given up, as things are."""
        return [
            link.expires_at
            for node in self._scene.alive
            for link in node.links.values()
            if not node.is_frozen and not link.is_complete
        ]

    def expire(self, node: Node) -> None:
        """Give up the links that were not made in time."""
        for number, link in list(node.links.items()):
            if self._scene.now >= link.expires_at and not link.is_complete:
                node.machine.link_failed(number, "no connection within the time")
                self._peers.settle(node)
                if node.unfinished or not node.is_alive:
                    return  # it was stopped within that
                assert number not in node.links

    def find_stalled(self) -> None:
        """Have engines give up links where bytes have lain for too long that do not get across."""
        now = self._scene.now
        for node in self._scene.alive:
            for number, link in list(node.links.items()):
                if node.is_frozen or not self._is_stalled(node, link):
                    link.stalled_since = None
                elif link.stalled_since is None:
                    link.stalled_since = now
                elif (now - link.stalled_since) * node.rate >= node.machine.links.timeout_s:
                    del node.links[number]
                    for wire in link.wires:
                        self.close_wire(wire, node)
                    node.reports.append(("lost", number))

    def _is_stalled(self, node: Node, link: Link) -> bool:
        if not link.is_complete:
            return False
        if not self._scene.network.is_cut(node, self._scene.node_of(link.effect.member.peer)):
            return False
        open_ops = [effect for key, effect in node.submitted.items() if key not in node.held]
        return any(
            link.effect.link
            in (
                effect.links
                if effect.is_meshed
                else (effect.links[effect.rank - 1], effect.links[(effect.rank + 1) % effect.world_size])
            )
            for effect in open_ops
        )

    # What machines decide.

    def _make(self, node: Node, effect: ps.MakeLink) -> None:
        now = self._scene.now
        patience_s = effect.reach_s if effect.dial else effect.timeout_s
        node.links[effect.link] = Link(effect, now + patience_s / node.rate, now + effect.timeout_s / node.rate)
        if effect.dial:
            self._dial_some(node, effect.member.peer, effect.link, range(effect.connections))

    def _add_connections(self, node: Node, effect: ps.AddConnections) -> None:
        self._dial_some(node, effect.member.peer, effect.link, effect.indices)

    def _dial_some(self, node: Node, peer: int, number: int, indices: range) -> None:
        other = self._scene.node_of(peer)
        for index in indices:
            wire = Wire(node, other, index)
            self._scene.events.later(node, partial(self._dial, wire, number), other, is_answered=True)

    def _close(self, node: Node, effect: ps.CloseLink) -> None:
        closed = node.links.pop(effect.link, None)
        for wire in closed.wires if closed is not None else ():
            self.close_wire(wire, node)

    def _try(self, node: Node, effect: ps.TryLinks) -> None:
        if not node.is_reachable:
            return
        network = self._scene.network
        failed = []
        for other in (self._scene.node_of(member.peer) for member in effect.members):
            if network.is_unreachable(node, other) or network.is_cut(node, other) or not other.is_reachable:
                failed.append((other.number, "no answer"))
        node.machine.tried(failed)
        self._peers.settle(node)

    # Connections.

    def _dial(self, wire: Wire, number: int) -> None:
        """Have a connection of the dialer's link `number` reach the other side."""
        node, other = wire.dialer, wire.acceptor
        scene, later = self._scene, self._scene.events.later
        link = node.links.get(number)
        if link is None or not node.is_reachable:
            return
        if scene.network.is_cut(node, other):
            return  # its padding does not get there, or none comes back
        link.expires_at = link.ends_at
        is_another = other.number != link.effect.member.peer  # it has restarted
        if is_another or not other.is_reachable or scene.network.is_unreachable(node, other):
            later(node, lambda: self._refused(node, number, "connection refused"))
            return
        offered = None if other.is_frozen else other.machine.link_offered(node.number, link.effect.made_in)
        self._peers.settle(other)
        if offered is None:
            other.deferred.append(lambda: self._dial(wire, number))
        elif isinstance(offered, str):
            refusal = offered
            later(node, lambda: self._refused(node, number, refusal))
        else:
            assert (node.number, link.effect.made_in) not in other.lost_links, (
                f"{other} takes up a link that it has lost"
            )
            self._attach(wire, other, offered)
            later(node, lambda: self._attach(wire, node, number), other)

    def _refused(self, node: Node, number: int, reason: str) -> None:
        if node.is_reachable and number in node.links:
            node.machine.link_failed(number, reason)
            self._peers.settle(node)

    def _attach(self, wire: Wire, node: Node, number: int) -> None:
        """Give a connection that stands, as seen from one side, to its engine if it is still wanted."""
        if node.is_reachable and node.machine.link_connected(number) and number in node.links:
            wire.ends[node.name] = number
            link = node.links[number]
            other = wire.other(node)
            theirs = other.links.get(wire.ends.get(other.name, 0))
            made_in = theirs.effect.made_in if theirs is not None else link.effect.made_in
            assert made_in == link.effect.made_in, f"a link of {node} and {other} has ends of different views"
            link.wires.append(wire)
            link.is_complete = link.is_complete or len(link.wires) == link.effect.connections
            if wire.closed_by:
                self._scene.events.later(node, lambda: self._find_closed(wire, node))
            wire.release()
        else:
            self.close_wire(wire, node)
        self._peers.settle(node)

    def _find_closed(self, wire: Wire, node: Node) -> None:
        """Have an engine find a connection closed, and its link lost if it was the last one or the link never stood."""
        number = wire.ends.get(node.name, 0)
        link = node.links.get(number)
        if link is None or wire not in link.wires or not node.is_alive:
            return
        link.wires.remove(wire)
        if link.wires and link.is_complete:
            node.reports.append(("connection", number))
            wire.release()
            return
        del node.links[number]
        for each in link.wires:
            self.close_wire(each, node)
        node.broken[number] = link.effect.member.peer, link.effect.made_in
        node.reports.append(("lost", number))
