"""Heartbeats of a simulated run. None travel: when time passes, each node's last heartbeats are looked up."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.liveness import QUIET_SHARE
from pccl.protocol.master.run_state import Close, Send, TakeHeartbeats
from pccl.protocol.peer import effects as ps
from tests.simulation.master_host import MasterHost
from tests.simulation.masters import HEARTBEATS_FROM, Masters
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import Scene


class Heartbeats:
    def __init__(self, scene: Scene, masters: Masters, peers: Peers) -> None:
        self._scene = scene
        self._masters = masters
        self._peers = peers
        self._next_connection = HEARTBEATS_FROM
        masters.on_heartbeats(self._answer)
        peers.on(ps.KeepHeartbeats, self._keep)

    def note(self) -> None:
        """Note which nodes hear each other until now. To be called before anything changes that has to do with it."""
        for node in self._scene.nodes:
            if self._is_heard(node):
                node.heard_at = self._scene.now
            if self._hears(node):
                node.master_heard_at = self._scene.now

    def due(self) -> list[float]:
        """Return the time when a peer will have been silent for too long, as things are."""
        self.note()
        due = []
        for node in self._scene.alive:
            host, timeout_s = node.heartbeat_host, node.heartbeat_timeout_s
            if timeout_s is None:
                continue
            if not self._is_heard(node) and host and not host.is_frozen:
                due.append(node.heard_at + timeout_s / host.rate)
            if not self._hears(node) and not node.is_frozen:
                due.append(node.master_heard_at + timeout_s / node.rate)
        return [at for at in due if at > self._scene.now]

    def time_out(self) -> None:
        """Have masters and peers find nodes that have been silent for too long."""
        scene = self._scene
        self.note()
        for host in scene.hosts:
            for connection, node in list(host.heartbeats.items()):
                silent_s = (scene.now - node.heard_at) * host.rate
                if host.is_away or connection not in host.heartbeats:
                    continue
                if node.heartbeat != connection and scene.network.passes(node.name, host.name):
                    self.find_closed(host, connection)
                elif silent_s >= scene.peer_timeout_s:
                    self.note_quiet(host, connection)
                    self.lose(host, connection)
                    self._masters.carry_out(host, host.machine.silent(connection, silent_s, scene.clock(host)))
        for node in scene.alive:
            if node.heartbeat_timeout_s is None or node.is_frozen:
                continue
            silent_s = (scene.now - node.master_heard_at) * node.rate
            if silent_s >= node.heartbeat_timeout_s:
                self._peers.take_over(node)
                node.machine.master_lost(f"the master was silent for {silent_s:.1f} s")
                self._peers.settle(node)
            elif not node.heartbeat:
                scene.events.later(node, lambda node=node: self._dial(node))  # type: ignore[misc]

    def note_quiet(self, host: MasterHost, *silent: int) -> None:
        """Tell a master that has not been heard for a while, as the runtime does before the machine judges what is
        lost."""
        late = [
            connection
            for connection, node in host.heartbeats.items()
            if not self._is_heard(node)
            and (self._scene.now - node.heard_at) * host.rate >= QUIET_SHARE * self._scene.peer_timeout_s
        ]
        host.machine.note_quiet([*late, *silent])

    def closed(self) -> list[tuple[MasterHost, int]]:
        """Return the connections that a master may find closed by its peer."""
        return [
            (host, connection)
            for host in self._scene.hosts
            for connection, node in host.heartbeats.items()
            if (node.heartbeat != connection or not node.is_reachable) and self._scene.reaches(node, host)
        ]

    def find_closed(self, host: MasterHost, connection: int) -> None:
        self.lose(host, connection)
        disconnected = host.machine.disconnected(connection, "closed by the other side", self._scene.clock(host))
        self._masters.carry_out(host, disconnected)

    def lose(self, host: MasterHost, connection: int) -> None:
        node = host.heartbeats.pop(connection)
        if node.heartbeat == connection:
            node.heartbeat = 0

    def reset(self, node: Node) -> None:
        """Reset a node's connection. It makes another when time passes."""
        self.note()
        host = node.heartbeat_host
        if node.heartbeat and host is not None:
            connection = node.heartbeat
            self.lose(host, connection)
            disconnected = host.machine.disconnected(connection, "connection reset", self._scene.clock(host))
            self._masters.carry_out(host, disconnected)

    def _keep(self, node: Node, effect: ps.KeepHeartbeats) -> None:
        assert node.control is not None
        node.heartbeat, node.heartbeat_host = 0, node.control.host
        node.heartbeat_timeout_s = effect.timeout_s
        node.master_heard_at = self._scene.now
        self._scene.events.later(node, lambda: self._dial(node))

    def _dial(self, node: Node) -> None:
        scene, host = self._scene, node.heartbeat_host
        if node.heartbeat or node.is_walled_in or not node.is_reachable or host is None:
            return
        if scene.is_one_name:
            host = scene.hosts[node.route]
        if not (scene.reaches(node, host) and scene.network.passes(host.name, node.name)):
            return
        connection = self._next_connection
        self._next_connection += 1
        host.heartbeats[connection] = node
        self._masters.carry_out(host, host.machine.connected(connection, f"10.0.0.{node.port}", scene.clock(host)))
        hello = m.HeartbeatHello(m.PROTOCOL_VERSION, node.machine.run, node.machine.peer)
        self._masters.carry_out(host, host.machine.received(connection, hello, scene.clock(host)))

    def _answer(self, host: MasterHost, effect: Send | Close | TakeHeartbeats) -> None:
        node = host.heartbeats[effect.connection]
        if isinstance(effect, TakeHeartbeats):
            node.heartbeat = effect.connection
            node.heard_at = node.master_heard_at = self._scene.now
        elif isinstance(effect, Close):
            self.lose(host, effect.connection)

    def _is_heard(self, node: Node) -> bool:
        is_beating = node.is_reachable and (node.is_hung or not node.is_frozen)
        host = node.heartbeat_host
        return node.heartbeat != 0 and host is not None and is_beating and self._scene.reaches(node, host)

    def _hears(self, node: Node) -> bool:
        host = node.heartbeat_host
        if node.heartbeat == 0 or host is None or host.is_frozen:
            return False
        return self._scene.network.passes(host.name, node.name)
