"""The cost of one master with many peers in one group: messages, bytes and milliseconds of an op, a join, a loss and a
failover, where all peers of a master that has died come to a fresh one.

    python -m tests.simulation.scale [PEERS ...]

The real master, with its codec, and as many pretended peers that answer at once. Milliseconds are the master's process
time alone: machine, encoding and decoding, without sockets. An op's cost has to grow with the number of peers and no
faster. What a loss, a join and a failover take also is that every peer is told, or tells, of the whole ring.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from itertools import count

from pccl.protocol import messages as m
from pccl.protocol.codec import FrameCache, decode_body, encode
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Effect, MasterOptions, RunState, Send

PEERS = (10, 100, 1000)
OPS = 20
"""The number of ops whose mean is taken."""
HEARTBEATS_FROM = 1_000_000
OPTIONS = MasterOptions(connections_max=2**15, pending_max=2**14)
"""Room for more peers than a master takes unasked."""


@dataclass
class Cost:
    received: int = 0
    sent: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))


@dataclass
class Group:
    """A run of one group whose peers do at once what the master asks of them."""

    master: Master = field(default_factory=lambda: Master(RunState("run-1", OPTIONS)))
    cost: Cost = field(default_factory=Cost)
    calls: count[int] = field(default_factory=lambda: count(1))
    peers: dict[int, int] = field(default_factory=dict)
    """Peer numbers by connection."""
    epoch: int = 0
    now: float = 0.0

    def join(self, number: int) -> None:
        """Add peers, all at once."""
        for connection in range(len(self.peers) + 1, len(self.peers) + 1 + number):
            self.master.connected(connection, f"10.0.{connection // 256}.{connection % 256}", self.now)
            self.say(connection, m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000 + connection, 1))
            heartbeats = HEARTBEATS_FROM + connection
            self.master.connected(heartbeats, "10.0.0.1", self.now)
            self.say(heartbeats, m.HeartbeatHello(m.PROTOCOL_VERSION, "run-1", self.peers[connection]))
        self.update()

    def update(self) -> None:
        accepted = set(self.master.state.accepted)
        for connection, peer in self.peers.items():
            if peer in accepted:
                self.say(connection, m.GroupCall(next(self.calls), m.Kind.UPDATE_TOPOLOGY))
        assert not self.master.state.pending

    def reduce(self, tag: int) -> None:
        for connection in self.peers:
            self.say(connection, m.OpsDone(self.epoch, [m.OpRef(tag, 0)]))

    def lose(self, connection: int) -> None:
        del self.peers[connection]
        began = time.process_time()
        effects = self.master.disconnected(connection, "connection reset", self.now)
        self.cost.seconds += time.process_time() - began
        self.answer(effects)
        assert len(self.master.state.accepted) == len(self.peers)

    def say(self, connection: int, message: m.FromPeer) -> None:
        """Have the master hear a message, and then the peers' answers to what it says."""
        frame = encode(message)
        self.now += 0.001
        began = time.process_time()
        heard = decode_body(frame[4:], m.FromPeer)
        effects = self.master.received(connection, heard, self.now)
        self.master.deadline()
        self.cost.seconds += time.process_time() - began
        self.cost.received += 1
        self.cost.received_bytes += len(frame)
        self.answer(effects)

    def answer(self, effects: list[Effect]) -> None:
        sends = [effect for effect in effects if isinstance(effect, Send)]
        began = time.process_time()
        cache = FrameCache()
        self.cost.sent_bytes += sum(len(cache.frame(send.message)) for send in sends)
        self.cost.seconds += time.process_time() - began
        self.cost.sent += len(sends)
        for send in sends:
            message = send.message
            if isinstance(message, m.Welcome):
                self.peers[send.connection] = message.peer
            elif isinstance(message, m.Prepare):
                self.epoch = message.rings[0].epoch
        for send in sends:
            message = send.message
            if isinstance(message, m.Prepare):
                self.say(send.connection, m.LinksReady(message.view))
            elif isinstance(message, m.Flush):
                self.say(send.connection, m.FlushReply(message.flush, []))


@dataclass
class Takeover:
    """The peers of a dead master come to a fresh one, and do at once what it asks of them."""

    peers: int
    step_s: float = 0.0001
    """The time that the master takes for a message."""
    machine: Failover = field(default_factory=lambda: Failover("run-2", OPTIONS))
    cost: Cost = field(default_factory=Cost)
    led_s: float = 0.0
    """The master's time for the last report, with all that came of it."""
    now: float = 0.0
    _sends: list[Send] = field(default_factory=list)
    _cache: FrameCache = field(default_factory=FrameCache)

    def report(self, peer: int) -> m.RecoveryReport:
        view = m.InstalledView(7, [m.Ring(0, 7, list(range(1, self.peers + 1)))], is_meshed=False)
        me = m.PeerInfo(peer, 0, [f"10.0.{peer // 256}.{peer % 256}"], 1000, 1)
        return m.RecoveryReport(me, view, None, True, False, [], [], "", [], 1, None, [], OPTIONS.peer_timeout_s, 1)

    def run(self) -> None:
        """All come, then all pre-vote, then all vote, then all connect for heartbeats."""
        for peer in range(1, self.peers + 1):
            self._count(self.machine.connected(peer, "10.0.0.1", self.now))
            self.say(peer, m.Resume(m.PROTOCOL_VERSION, "run-1", 1, peer))
        while self._sends:
            sends, self._sends = self._sends, []
            self._cache = FrameCache()
            for send in sends:
                self.answer(send)

    def answer(self, send: Send) -> None:
        peer = send.connection
        if isinstance(send.message, m.PreVoteRequest):
            report = self.report(peer)
            self.say(peer, m.PreVote(report.installed, None, False))
        elif isinstance(send.message, m.VoteRequest):
            before_s = self.cost.seconds
            self.say(peer, m.Vote(send.message.term, self.report(peer)))
            self.led_s = self.cost.seconds - before_s
        elif isinstance(send.message, m.Resumed):
            self._count(self.machine.connected(HEARTBEATS_FROM + peer, "10.0.0.1", self.now))
            self.say(HEARTBEATS_FROM + peer, m.HeartbeatHello(m.PROTOCOL_VERSION, "run-1", peer))

    def say(self, connection: int, message: m.FromPeer) -> None:
        frame = encode(message)
        self.now += self.step_s
        began = time.process_time()
        heard = decode_body(frame[4:], m.FromPeer)
        effects = self.machine.received(connection, heard, self.now)
        deadline = self.machine.deadline()
        if deadline is not None and deadline <= self.now:
            effects += self.machine.tick(self.now)
        self.cost.seconds += time.process_time() - began
        self.cost.received += 1
        self.cost.received_bytes += len(frame)
        self._count(effects)

    def _count(self, effects: list[Effect]) -> None:
        sends = [effect for effect in effects if isinstance(effect, Send)]
        began = time.process_time()
        self.cost.sent_bytes += sum(len(self._cache.frame(send.message)) for send in sends)
        self.cost.seconds += time.process_time() - began
        self.cost.sent += len(sends)
        self._sends += sends


def fail_over(peers: int, step_s: float = 0.0001) -> Takeover:
    """AssertionError unless all go on, in the view that they had."""
    failover = Takeover(peers, step_s)
    failover.run()
    master = failover.machine.master
    assert master.state.accepted == list(range(1, peers + 1))
    assert master.state.installed_view == 7
    return failover


def measure(peers: int) -> dict[str, Cost]:
    group = Group()
    group.join(1)
    group.join(peers - 1)
    costs = {}
    before = Cost(**vars(group.cost))
    for tag in range(OPS):
        group.reduce(tag)
    of_ops = group.cost - before
    costs["op"] = Cost(*(value / OPS for value in vars(of_ops).values()))
    before = Cost(**vars(group.cost))
    group.lose(peers)
    costs["loss"] = group.cost - before
    before = Cost(**vars(group.cost))
    group.join(1)
    costs["join"] = group.cost - before
    costs["failover"] = fail_over(peers).cost
    return costs


def main() -> None:
    print(f"{'peers':>6}  {'':8} {'messages':>9} {'KiB in':>9} {'KiB out':>9} {'ms':>9} {'us/peer':>9}")
    for peers in [int(each) for each in sys.argv[1:]] or PEERS:
        for name, cost in measure(peers).items():
            messages = cost.received + cost.sent
            print(
                f"{peers:6}  {name:8} {messages:9.0f} {cost.received_bytes / 1024:9.1f} {cost.sent_bytes / 1024:9.1f} "
                f"{cost.seconds * 1e3:9.2f} {cost.seconds * 1e6 / peers:9.1f}"
            )


if __name__ == "__main__":
    main()
