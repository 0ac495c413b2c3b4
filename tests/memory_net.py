"""A run in memory: one real master and real peers, joined by queues of encoded bytes, with an engine that pretends.

Time is a number that the test moves. `World.step` delivers one pending thing, chosen by the caller's random generator (or
the oldest), so a schedule is replayed by its seed. The pretended engine reports an op done once every rank of its ring
has submitted it under the same key, which is what a ring all-reduce does on a perfect network.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from pccl.protocol import master as ms
from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.codec import Decoder, encode
from pccl.types import Result


@dataclass
class Node:
    """A peer with its side of the control connection and its pretended engine."""

    name: str
    connection: int
    machine: ps.Peer
    inbox: deque[bytes] = field(default_factory=deque)
    outbox: deque[bytes] = field(default_factory=deque)
    decoder: Decoder[m.FromMaster] = field(default_factory=lambda: Decoder(m.FromMaster))
    is_alive: bool = True
    is_cut: bool = False
    submitted: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Ops in the engine by (epoch, tag, sequence)."""
    done: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)
    links: dict[int, ps.MakeLink] = field(default_factory=dict)
    results: dict[int, ps.OpResult] = field(default_factory=dict)
    calls: dict[int, ps.CallResult] = field(default_factory=dict)
    views: list[ps.View] = field(default_factory=list)
    lost: list[tuple[int, str]] = field(default_factory=list)
    plans: list[ps.RunSync] = field(default_factory=list)
    ended: ps.Ended | None = None
    next_number: int = 1

    @property
    def view(self) -> ps.View:
        assert self.machine.view is not None
        return self.machine.view

    def number(self) -> int:
        self.next_number += 1
        return self.next_number


class World:
    def __init__(self, rng: random.Random | None = None, cut_bytes: bool = False) -> None:
        self.rng = rng
        self.cut_bytes = cut_bytes
        self.now = 0.0
        self.master = ms.Master("run-1")
        self.nodes: list[Node] = []
        self.by_connection: dict[int, Node] = {}
        self.decoders: dict[int, Decoder[m.FromPeer]] = {}
        self.log: list[str] = []
        self.unreachable: set[frozenset[str]] = set()
        self.verdicts: dict[tuple[int, int, int, int], dict[str, Result]] = {}
        """Of every op by (group, epoch, tag, sequence), what each peer heard."""
        self.keys: dict[tuple[str, int], tuple[int, int, int, int]] = {}
        self._events: deque[tuple[str, Node, object]] = deque()

    # What a test does.

    def add(self, group: int = 0, connections: int = 2) -> Node:
        number = len(self.nodes) + 1
        node = Node(f"n{number}", number, ps.Peer(group, connections))
        self.nodes.append(node)
        self.by_connection[number] = node
        self.decoders[number] = Decoder(m.FromPeer)
        self._master(self.master.connected(number, f"10.0.0.{number}", self.now))
        hello = m.Hello(m.PROTOCOL_VERSION, "test", group, [], 1000 + number, connections, node.name)
        node.outbox.append(encode(hello))
        return node

    def kill(self, node: Node) -> None:
        """As by SIGKILL: what it had sent may still arrive, then the connection ends."""
        node.is_alive = False
        self._events.append(("eof", node, None))
        for other in self.nodes:
            for link, effect in list(other.links.items()):
                if other.is_alive and effect.member.peer == node.machine.peer:
                    self._events.append(("link lost", other, link))

    def launch(self, node: Node, tag: int) -> int:
        op = node.number()
        node.machine.launch(op, tag, self.now)
        self._peer(node)
        return op

    def joint(self, node: Node, kind: str, offer: m.SyncOffer | None = None) -> int:
        call = node.number()
        node.machine.joint(call, kind, offer)
        self._peer(node)
        return call

    def run(self, steps_max: int = 100_000) -> None:
        """Delivers until nothing is left to deliver."""
        for _ in range(steps_max):
            if not self.step():
                return
        raise AssertionError("the run does not come to rest")

    def wait(self, seconds: float) -> None:
        """Moves the clock and lets every timer fire."""
        self.now += seconds
        self._master(self.master.tick(self.now))
        for node in self.alive:
            node.machine.tick(self.now)
            self._peer(node)

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.is_alive and node.ended is None]

    def admit_all(self) -> None:
        """Everybody accepted calls update_topology until nobody waits any more."""
        self.run()
        while self.master.pending:
            for node in [node for node in self.alive if node.machine.view is not None]:
                self.joint(node, m.Kind.UPDATE_TOPOLOGY)
            self.run()

    # Delivery.

    def step(self) -> bool:
        """Delivers one pending thing; False if there is none."""
        choices: list[tuple[str, Node]] = []
        for node in self.nodes:
            if node.outbox:
                choices.append(("to master", node))
            if node.inbox and node.is_alive:
                choices.append(("to peer", node))
        for kind, node, _ in self._events:
            if kind != "eof" or not node.outbox:
                choices.append(("event", node))
        if not choices:
            return False
        kind, node = self.rng.choice(choices) if self.rng else choices[0]
        if kind == "to master":
            self._deliver_to_master(node)
        elif kind == "to peer":
            self._deliver_to_peer(node)
        else:
            index = next(i for i, e in enumerate(self._events) if e[1] is node and (e[0] != "eof" or not node.outbox))
            event = self._events[index]
            del self._events[index]
            self._handle_event(*event)
        return True

    def _take(self, queue: deque[bytes]) -> bytes:
        data = queue.popleft()
        if self.cut_bytes and len(data) > 1:
            queue.appendleft(data[1:])
            data = data[:1]
        return data

    def _deliver_to_master(self, node: Node) -> None:
        data = self._take(node.outbox)
        for message in self.decoders[node.connection].feed(data):
            self._master(self.master.received(node.connection, message, self.now))

    def _deliver_to_peer(self, node: Node) -> None:
        for message in node.decoder.feed(self._take(node.inbox)):
            node.machine.received(message)
        self._peer(node)

    def _handle_event(self, kind: str, node: Node, detail: object) -> None:
        if kind == "eof":
            self._master(self.master.disconnected(node.connection, "connection reset", self.now))
            return
        if not node.is_alive:
            return
        if kind == "link lost":
            assert isinstance(detail, int)
            if node.links.pop(detail, None) is not None:
                node.machine.link_lost(detail, "connection reset")
        elif kind == "link":
            assert isinstance(detail, ps.MakeLink)
            self._try_link(node, detail)
        elif kind == "done":
            assert isinstance(detail, int)
            if detail in node.submitted.values() and detail not in node.done:
                epoch = next(key[0] for key, op in node.submitted.items() if op == detail)
                if epoch not in node.frozen:
                    node.done.add(detail)
                    node.machine.op_done(detail)
        elif kind == "frozen":
            assert isinstance(detail, int)
            node.machine.frozen(detail)
        elif kind == "ended":
            assert isinstance(detail, int)
            node.machine.op_ended(detail, 10, 20)
        elif kind == "master gone":
            node.machine.master_lost("the master closed the connection")
        self._peer(node)

    def _try_link(self, node: Node, effect: ps.MakeLink) -> None:
        if effect.link not in node.links:
            return
        other = next((n for n in self.nodes if n.machine.peer == effect.member.peer), None)
        if other is None or not other.is_alive or frozenset((node.name, other.name)) in self.unreachable:
            node.links.pop(effect.link)
            node.machine.link_failed(effect.link, "connection refused")
            if other is not None and other.is_alive:
                for link, theirs in list(other.links.items()):
                    if theirs.member.peer == node.machine.peer and theirs.made_in == effect.made_in:
                        other.links.pop(link)
                        other.machine.link_failed(link, "nobody dialled")
                self._peer(other)
            return
        offered = other.machine.link_offered(node.machine.peer, effect.made_in)
        self._peer(other)
        if offered is None:
            self._events.append(("link", node, effect))
        elif isinstance(offered, str):
            node.links.pop(effect.link)
            node.machine.link_failed(effect.link, offered)
        else:
            for _ in range(effect.connections):
                other.machine.link_connected(offered)
                node.machine.link_connected(effect.link)
            self._peer(other)

    # Effects.

    def _master(self, effects: list[ms.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ms.Log):
                self.log.append(effect.text)
                continue
            node = self.by_connection[effect.connection]
            if isinstance(effect, ms.Send):
                if node.is_alive:
                    node.inbox.append(encode(effect.message))
            elif node.is_alive:
                self._events.append(("master gone", node, None))

    def _peer(self, node: Node) -> None:
        for effect in node.machine.drain():
            if isinstance(effect, ps.ToMaster):
                node.outbox.append(encode(effect.message))
            elif isinstance(effect, ps.SubmitOp):
                self._submit(node, effect)
            elif isinstance(effect, ps.FreezeOps):
                node.frozen.add(effect.epoch)
                self._events.append(("frozen", node, effect.epoch))
            elif isinstance(effect, ps.EndOp):
                key = next((key for key, op in node.submitted.items() if op == effect.op), None)
                if key is not None:
                    del node.submitted[key]
                self._events.append(("ended", node, effect.op))
            elif isinstance(effect, ps.OpResult):
                assert effect.op not in node.results
                node.results[effect.op] = effect
                op_key = self.keys.get((node.name, effect.op))
                if op_key is not None and effect.code is not Result.MASTER_CONNECTION_FAILED:
                    self.verdicts.setdefault(op_key, {})[node.name] = effect.code
            elif isinstance(effect, ps.CallResult):
                assert effect.call not in node.calls
                node.calls[effect.call] = effect
            elif isinstance(effect, ps.MakeLink):
                node.links[effect.link] = effect
                if effect.dial:
                    self._events.append(("link", node, effect))
            elif isinstance(effect, ps.CloseLink):
                self._close_link(node, effect.link)
            elif isinstance(effect, ps.Installed):
                assert not node.views or effect.view.view > node.views[-1].view
                node.views.append(effect.view)
                node.lost += effect.lost
            elif isinstance(effect, ps.RunSync):
                node.plans.append(effect)
            elif isinstance(effect, ps.RunProbe):
                node.machine.probed(effect.probe, [(member.peer, 100) for member in effect.members])
                self._peer(node)
            elif isinstance(effect, ps.Ended):
                node.ended = effect

    def _close_link(self, node: Node, link: int) -> None:
        effect = node.links.pop(link, None)
        if effect is None:
            return
        for other in self.nodes:
            for theirs in list(other.links.values()):
                if (
                    other.is_alive
                    and other.machine.peer == effect.member.peer
                    and theirs.member.peer == node.machine.peer
                    and theirs.made_in == effect.made_in
                ):
                    self._events.append(("link lost", other, theirs.link))

    def _submit(self, node: Node, effect: ps.SubmitOp) -> None:
        key = (effect.epoch, effect.tag, effect.sequence)
        assert key not in node.submitted
        node.submitted[key] = effect.op
        self.keys[node.name, effect.op] = (node.machine.group, *key)
        ring = node.view.ring
        ranks = [n for n in self.nodes if n.machine.peer in ring]
        if all(key in n.submitted for n in ranks):
            for each in ranks:
                self._events.append(("done", each, each.submitted[key]))
