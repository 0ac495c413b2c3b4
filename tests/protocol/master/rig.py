"""A master's machine whose peers are spoken for, for tests of its parts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Effect, FindRings, MasterLog, MasterOptions, RunState, Send
from pccl.protocol.messages import Kind, OpRef
from pccl.runtime.master.ring_search import best_ring

TAG = 7


HEARTBEATS_FROM = 1_000_000
"""Peer n's heartbeats come on this connection + n."""


HELLO = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 2)


class Rig:
    """A master whose peers are spoken for. Peer n is on connection n."""

    def __init__(self, *groups: int, options: MasterOptions | None = None) -> None:
        self.master = Master(RunState("run", options))
        self.now = 0.0
        self.effects: list[Effect] = []
        """Effects of the last event."""
        for group in groups:
            self.hello(group)
        if groups:
            self.update()

    @property
    def peers(self) -> list[int]:
        return [*self.master.state.accepted, *self.master.state.pending]

    def hello(self, group: int = 0, place: int = -1) -> int:
        connection = self.master.state.next_peer
        self.effects = self.master.connected(connection, f"10.0.0.{connection}", self.now)
        self.hear(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", group, [], 5000, 2, f"n{connection}", place=place))
        self.heartbeat(connection)
        self.answer()
        return connection

    def heartbeat(self, peer: int, connection: int = 0) -> int:
        """Makes a connection for heartbeats. `effects` becomes what it led to, after what was there."""
        connection = connection or HEARTBEATS_FROM + peer
        before = self.effects + self.master.connected(connection, f"10.0.0.{peer}", self.now)
        self.hear(connection, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", peer))
        self.effects = before + self.effects
        return connection

    def hear(self, connection: int, *messages: m.FromPeer) -> None:
        self.effects = []
        for message in messages:
            self.effects += self.master.received(connection, message, self.now)

    def lose(self, peer: int, reason: str = "reset") -> None:
        self.effects = self.master.disconnected(peer, reason, self.now)

    def tick(self, now: float) -> None:
        self.now = now
        self.effects = self.master.tick(now)

    def answer(self, done: dict[int, list[OpRef]] | None = None) -> None:
        """Peers answer Flush and Prepare, and who is asked for rings finds them, until nothing is asked any more.
        `effects` becomes all that came of it."""
        waiting = list(self.effects)
        everything = list(waiting)
        while waiting:
            effect = waiting.pop(0)
            if isinstance(effect, FindRings):
                rings = {group: best_ring(problem) for group, problem in effect.problems.items()}
                self.effects = self.master.rings_found(effect.search, rings, self.now)
                waiting += self.effects
                everything += self.effects
            if not isinstance(effect, Send) or effect.connection not in self.peers:
                continue
            said: m.FromPeer
            if isinstance(effect.message, m.Flush):
                said = m.FlushReply(effect.message.flush, (done or {}).get(effect.connection, []))
            elif isinstance(effect.message, m.Prepare):
                said = m.LinksReady(effect.message.view)
            else:
                continue
            self.hear(effect.connection, said)
            waiting += self.effects
            everything += self.effects
        self.effects = everything

    def update(self) -> None:
        if self.master.state.pending:
            for peer in self.master.state.accepted:
                self.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
            self.answer()

    def told(self, peer: int) -> list[m.FromMaster]:
        """Return what a peer was told, without the group-call numbers, which tests/protocol/test_failover.py looks
        at."""
        sent = [effect.message for effect in self.effects if isinstance(effect, Send) and effect.connection == peer]
        numbered = m.Install | m.GroupCallResult
        return [msgspec.structs.replace(each, call_number=0) if isinstance(each, numbered) else each for each in sent]

    @property
    def logged(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, MasterLog)]


def flush_of(rig: Rig) -> int:
    return rig.master.state.groups[0].flush


def measure(rig: Rig, rate: Callable[[int, int], float]) -> list[FindRings]:
    """Peers measure what they are asked for. Returns what is to be searched then."""
    while asked := [each for each in rig.effects if isinstance(each, Send) and isinstance(each.message, m.Probe)]:
        came: list[Effect] = []
        for send in asked:
            assert isinstance(send.message, m.Probe)
            me = send.connection
            found = [
                m.LinkMetric(peer, inbound, rate(peer, me) if inbound else rate(me, peer), 1000)
                for peer, inbound in send.message.links
            ]
            rig.hear(me, m.Probes(send.message.probe, found))
            came += rig.effects
        rig.effects = came
    return [effect for effect in rig.effects if isinstance(effect, FindRings)]
