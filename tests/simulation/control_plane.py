"""The control connections of a simulated run: byte queues that may be cut anywhere, lose their tail, or break.

Each end finds that at its own time. A session goes on over the next connection (`ControlSession`, the real one).

A peer that has lost its master asks all of them in turn, once, and again when time has passed. A newcomer asks them in
turn whatever happens, as sessions do: it may found a run once it has asked as many times as there are.
"""

from __future__ import annotations

from collections import deque

from pccl.protocol import messages as m
from pccl.protocol.codec import ControlSession, ProtocolError, encode
from pccl.protocol.master.run_state import Close, Send
from pccl.protocol.peer import effects as ps
from pccl.runtime.network.addresses import FIRST_SHARE, LEAD_TIMEOUTS, OTHER_SHARE
from pccl.runtime.session.control import WELCOME_TIMEOUT_S
from pccl.types import Result
from tests.simulation.connections import Control
from tests.simulation.heartbeats import Heartbeats
from tests.simulation.master_host import MasterHost
from tests.simulation.masters import Masters
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import MASTER_TIMEOUT_S, Scene

ROUNDS = 2
"""The number of times that a newcomer asks each master before time passes."""


class ControlPlane:
    def __init__(self, scene: Scene, masters: Masters, peers: Peers, heartbeats: Heartbeats) -> None:
        self._scene = scene
        self._masters = masters
        self._peers = peers
        self._heartbeats = heartbeats
        peers.on(ps.ToMaster, self._to_master)
        peers.on(ps.SeekMaster, self._seek_master)
        peers.on(ps.Ended, self._ended)

    # Connections as such.

    def connect(self, node: Node, host: MasterHost) -> None:
        number = len(self._scene.controls) + 1
        control = node.control = self._scene.controls[number] = Control(number, node, host, self._scene.now)
        node.leaves_at = self._scene.now + WELCOME_TIMEOUT_S / node.rate
        if not (host.is_away or host.is_wedged):
            self.accept(control)

    def accept(self, control: Control) -> None:
        control.is_known = True
        connected = control.host.machine.connected(
            control.number, control.node.host or f"10.0.0.{control.number}", self._scene.clock(control.host)
        )
        self._masters.carry_out(control.host, connected)

    def send(self, node: Node, message: m.Message | bytes) -> None:
        """Send a message, or bytes instead of one, in a peer's name."""
        control = node.control
        if control is None:
            return
        frame = message if isinstance(message, bytes) else encode(message)
        if not isinstance(message, m.Hello | m.Resume):
            control.at_node.keep(frame)
        if not control.is_reset:
            control.outbox.append(frame)

    def reset(self, node: Node) -> None:
        """Reset a living peer's connection, from some byte on in each direction. It dials again."""
        control, rng = node.control, self._scene.rng
        if control is None or control.is_over or control.is_reset or control.is_hung_up_on or not control.has_opened:
            return
        sizes = [sum(map(len, queue)) for queue in (control.inbox, control.outbox)]
        control.reset(*(rng.randint(0, size) if rng else 0 for size in sizes))

    # The master's end.

    def deliver_to_master(self, control: Control) -> None:
        data = self._scene.take(control.outbox)
        host, node = control.host, control.node
        if not control.is_known:
            self.accept(control)
        if not data:
            control.outbox.clear()
            self.lose(control)
            return
        try:
            for message in control.opening_decoder.feed(data):
                if isinstance(message, m.Ack):
                    control.at_master.acknowledge(message.received)
                    continue
                if control.has_opened:
                    _acknowledge(control, control.at_master, control.inbox)
                control.has_opened = True
                self._scene.from_peers.append((node.name, message))
                self._scene.checks.received(control, host.process, message)
                if isinstance(message, m.Resume):
                    self._heartbeats.note_quiet(host)
                received = host.machine.received(control.number, message, self._scene.clock(host))
                self._masters.carry_out(host, received)
                if host.is_dead:
                    return
        except ProtocolError as error:
            # As the server does.
            goodbye = Send(control.number, m.Goodbye(Result.MASTER_CONNECTION_FAILED, str(error)))
            self._masters.carry_out(host, [] if control.is_over else [goodbye, Close(control.number)])
            self._end(control, str(error))
            control.outbox.clear()

    def lose(self, control: Control) -> None:
        """Have the master find a connection closed whose session may go on."""
        if control.has_opened and not control.is_over:
            host = control.host
            if control is control.node.control:
                self._scene.checks.absent.add(control.node)
            detached = host.machine.detached(control.number, "connection reset", self._scene.clock(host))
            self._masters.carry_out(host, detached)
        else:
            self._end(control, "connection reset")

    def _end(self, control: Control, reason: str) -> None:
        control.is_over = True
        self._scene.checks.gone(control)
        host = control.host
        disconnected = host.machine.disconnected(control.number, reason, self._scene.clock(host))
        self._masters.carry_out(host, disconnected)

    # The peer's end.

    def deliver_to_peer(self, node: Node) -> None:
        control = node.control
        assert control is not None
        is_sent_away = False
        self._peers.take_over(node)
        for _ in range(self._scene.batch(len(control.inbox))):
            data = self._scene.take(control.inbox)
            if not data and control.is_reset and node.machine.is_led:
                control.inbox.clear()
                node.reattaching_since = self._scene.now
                break
            if not data:
                node.machine.master_lost("the master closed the connection")
                break
            for message in control.decoder.feed(data):
                if isinstance(message, m.Ack):
                    control.at_node.acknowledge(message.received)
                    continue
                _acknowledge(control, control.at_node, control.outbox)
                assert encode(message) == control.sent[control.at_node.received - 1], "lost, doubled or out of order"
                node.heard(message)
                self._scene.checks.heard(node, message)
                node.machine.received(message)
                node.leaves_at = self._leaves_at(node, message)
                if isinstance(message, m.StartOver):
                    node.asked = 0
                    node.tried.clear()
                if isinstance(message, m.Welcome | m.Resumed):
                    node.masterless_since = None
                    node.tried.clear()
                is_sent_away = is_sent_away or isinstance(message, m.Elsewhere | m.StartOver)
            if is_sent_away:
                break
        self._peers.settle(node)
        self._scene.checks.has_heard(node)
        node.resume_deferred()

    def _leaves_at(self, node: Node, message: m.FromMaster) -> float | None:
        """Return the time until which a node waits at a master that has said this, as `MasterAddresses.patience_s`."""
        if not isinstance(message, m.PreVoteRequest | m.VoteRequest) or self._scene.addresses == 1:
            return None
        timeouts = OTHER_SHARE if node.has_waited else FIRST_SHARE
        if isinstance(message, m.VoteRequest):
            timeouts = LEAD_TIMEOUTS
        else:
            node.has_waited = True
        return self._scene.now + timeouts * self._scene.peer_timeout_s / node.rate

    def may_reattach(self, control: Control) -> bool:
        host, node = control.host, control.node
        if host.is_wedged or node.is_walled_in:
            return False
        return host.is_dead or (self._scene.reaches(node, host) and self._scene.network.passes(host.name, node.name))

    def reattach(self, node: Node) -> None:
        """Go on over another connection, if the master knows the session."""
        control = node.control
        assert control is not None
        node.reattaching_since = None
        host = control.host
        is_elsewhere = self._scene.is_one_name and host not in self._scene.hosts_of(node)
        if host.is_dead or is_elsewhere or control.is_over or not self._masters.is_member(control):
            self._lose_master(node, "the master does not know the session")
            return
        control.reattach()
        self._scene.checks.absent.discard(node)
        self._masters.carry_out(host, host.machine.reattached(control.number, self._scene.clock(host)))

    def may_dial(self, node: Node) -> bool:
        """Whether a node without a master asks one before time passes: each once, and a newcomer twice, since it may
        found a run after it has asked all."""
        addresses = self._scene.addresses
        return len(node.tried) < addresses or (not node.run and node.asked < ROUNDS * addresses)

    def dial(self, node: Node) -> None:
        """Ask the next master that has not been asked in this round."""
        scene = self._scene
        if len(node.tried) >= scene.addresses:
            node.tried.clear()
            node.has_waited = False
        host = next(host for host in scene.hosts_of(node) if host.name not in node.tried)
        node.tried.add(host.name)
        node.asked += 1
        passes = scene.network.passes
        if host.is_dead or not (passes(node.name, host.name) and passes(host.name, node.name)):
            return
        self.connect(node, host)
        resume = node.machine.resume(scene.addresses, scene.clock(node), b"", MASTER_TIMEOUT_S)
        self.send(node, resume or self.hello(node))

    def hello(self, node: Node) -> m.Hello:
        scene = self._scene
        return m.Hello(
            m.PROTOCOL_VERSION,
            "test",
            node.group,
            [],
            node.port,
            node.machine.connections,
            node.alias or node.name,
            masters=scene.addresses,
            may_found=node.asked >= scene.addresses,
            site=node.site,
            site_size=node.site_size,
            master_timeout_s=MASTER_TIMEOUT_S,
        )

    def time_out(self) -> None:
        """Have those without a master try all again, and give up in the end."""
        scene = self._scene
        for node in scene.nodes:
            if not scene.searches_in_turn and node.machine.peer:
                node.tried.clear()
            elif len(node.tried) >= scene.addresses:
                node.tried.clear()
                node.has_waited = False
        for node in scene.alive:
            since, control = node.masterless_since, node.control
            if node.is_frozen:
                continue
            if (
                node.reattaching_since is not None
                and (scene.now - node.reattaching_since) * node.rate >= scene.peer_timeout_s
            ):
                self._lose_master(node, "no other connection")
            if since is None:
                continue
            self._peers.take_over(node)
            if (scene.now - since) * node.rate >= MASTER_TIMEOUT_S:
                node.machine.give_up("no master")
                self._peers.settle(node)
            elif control is not None and scene.addresses > 1 and self._is_impatient(node, control):
                node.machine.master_lost("no answer")
                self._peers.settle(node)

    def _is_impatient(self, node: Node, control: Control) -> bool:
        """Whether a node waits no longer at a master that leads no run."""
        scene = self._scene
        if scene.options.founders > 1 or scene.searches_in_turn:
            return node.leaves_at is not None and scene.now >= node.leaves_at
        return (scene.now - control.opened_at) * node.rate >= 2 * scene.peer_timeout_s

    def _lose_master(self, node: Node, reason: str) -> None:
        self._peers.take_over(node)
        node.machine.master_lost(reason)
        self._peers.settle(node)

    # What the peer's machine decides.

    def _to_master(self, node: Node, effect: ps.ToMaster) -> None:
        message = effect.message
        if node.control is not None:
            self._scene.checks.says(node, message)
        self.send(node, message)
        if isinstance(message, m.GroupCall):
            assert node.in_call is None or node.machine.term > 1
            node.in_call = message.kind
            # Where a call is stated again, ops may have been launched since, which wait for its end.
            queued = node.machine.ops.queued if node.machine.term > 1 else 0
            assert node.in_call not in m.Kind.EXCLUSIVE or node.machine.open_ops == queued
        elif isinstance(message, m.LinksReady):
            node.ready = message.view

    def _seek_master(self, node: Node, effect: ps.SeekMaster) -> None:
        if node.control is not None:
            node.control.hang_up_by_node()
        node.control = node.heartbeat_host = node.heartbeat_timeout_s = node.reattaching_since = None
        node.heartbeat = 0
        if node.masterless_since is None:
            node.masterless_since = self._scene.now
            node.asked = 0

    def _ended(self, node: Node, effect: ps.Ended) -> None:
        assert not node.links
        node.ended = effect
        if node.control is not None:
            node.control.hang_up_by_node()
        node.resume_deferred()


def _acknowledge(control: Control, session: ControlSession, back: deque[bytes]) -> None:
    """Note that this end has received a message, which it may have to tell the other."""
    ack = session.receive()
    if ack is not None and not control.is_reset and not control.is_over:
        back.append(encode(ack))
