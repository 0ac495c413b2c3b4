"""The master beside a model that is too naive to be wrong.

Peers are honest and answer at once, so after each step everything is at rest and the model can say outright who is
accepted, who waits, what each ring is, which ops have which verdict, and what every joint call was told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Effect, FindRings, Send
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import RunState
from pccl.protocol.messages import Kind, OpRef, PendingAnswer
from pccl.protocol.topology import linked_pairs
from pccl.runtime.master.ring_search import best_ring
from pccl.types import Result

GROUPS = (0, 1)
TAGS = (1, 2)
PEERS_MAX = 6
HEARTBEATS_FROM = 1_000_000
"""Peer n's heartbeats come on this connection + n."""
OFFER = m.SyncOffer("enforce_popular", 3, b"root", [])
ANSWERS = {Kind.SYNC: OFFER.revision}
"""The value of a joint call that succeeds; of are_peers_pending it is how many wait."""


@dataclass
class Peer:
    """An honest peer: what it was told, and nothing else."""

    number: int
    group: int
    epoch: int = 0
    verdicts: dict[OpRef, bool] = field(default_factory=dict)
    """Verdicts of the present epoch."""
    done: set[OpRef] = field(default_factory=set)
    history: list[dict[OpRef, bool]] = field(default_factory=list)
    """The verdicts of earlier epochs."""
    results: list[tuple[int, int]] = field(default_factory=list)
    """Code and value of each joint call."""

    def answer(self, message: m.FromMaster) -> m.FromPeer | None:
        if isinstance(message, m.Flush):
            assert message.epoch == self.epoch
            return m.FlushReply(message.flush, sorted(self.done - set(self.verdicts)))
        if isinstance(message, m.Prepare):
            return self._prepare(message)
        if isinstance(message, m.OpsCommit):
            self._hear(message.epoch, message.ops, True)
        elif isinstance(message, m.OpAbort):
            self._hear(message.epoch, [OpRef(message.tag, message.sequence)], False)
        elif isinstance(message, m.JointResult):
            self.results.append((message.code, message.value))
        elif isinstance(message, m.Probe):
            return m.Probes(message.probe, [m.LinkMetric(other, way, 1e6, 100) for other, way in message.links])
        else:
            assert isinstance(message, m.Welcome | m.Install), f"an honest peer is told {message}"
        return None

    def _hear(self, epoch: int, ops: list[OpRef], verdict: bool) -> None:
        assert epoch == self.epoch
        assert not set(self.verdicts).intersection(ops), "one verdict an op"
        self.verdicts |= dict.fromkeys(ops, verdict)

    def _prepare(self, message: m.Prepare) -> m.FromPeer:
        (ring,) = [ring for ring in message.rings if self.number in ring.peers]
        if ring.epoch == self.epoch:
            return m.LinksReady(message.view)
        for op in self.done - set(self.verdicts):
            self.verdicts[op] = op in message.commits
        if self.epoch:
            self.history.append(self.verdicts)
        self.epoch, self.verdicts, self.done = ring.epoch, {}, set()
        return m.LinksReady(message.view)


@dataclass
class Member:
    """The model's knowledge of an accepted or pending peer."""

    group: int
    verdicts: dict[OpRef, bool] = field(default_factory=dict)
    history: list[dict[OpRef, bool]] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)
    wait: str | None = None


class Model:
    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.pending: list[int] = []
        self.rings: dict[int, list[int]] = {}
        self.done: dict[int, dict[OpRef, set[int]]] = {}
        """Peers that are done with each op that has no verdict, by group."""
        self.uses: dict[tuple[int, int], int] = {}
        """Number of uses that have had their verdict in this epoch, by group and tag."""

    @property
    def accepted(self) -> list[int]:
        return [peer for ring in self.rings.values() for peer in ring]

    def ring_of(self, peer: int) -> list[int]:
        return self.rings[self.members[peer].group]

    def op(self, peer: int, tag: int) -> OpRef:
        return OpRef(tag, self.uses.get((self.members[peer].group, tag), 0))

    def open_ops(self, peer: int) -> list[OpRef]:
        return [op for op, holders in self.done.get(self.members[peer].group, {}).items() if peer in holders]

    def hello(self, peer: int, group: int) -> None:
        self.members[peer] = Member(group)
        self.pending.append(peer)

    def admit(self) -> None:
        for group in sorted({self.members[peer].group for peer in self.pending}):
            self.end_epoch(group)
            self.rings.setdefault(group, []).extend(p for p in self.pending if self.members[p].group == group)
        self.pending = []

    def end_epoch(self, group: int) -> None:
        ring = self.rings.get(group, [])
        for op, holders in self.done.pop(group, {}).items():
            for peer in holders:
                self.members[peer].verdicts[op] = holders == set(ring)
        for peer in ring:
            self.members[peer].history.append(self.members[peer].verdicts)
            self.members[peer].verdicts = {}
        for tag in TAGS:
            self.uses.pop((group, tag), None)

    def lose(self, peer: int) -> None:
        group = self.members.pop(peer).group
        if peer in self.pending:
            self.pending.remove(peer)
            return
        self.rings[group].remove(peer)
        for holders in self.done.get(group, {}).values():
            holders.discard(peer)
        self.end_epoch(group)
        if not self.rings[group]:
            del self.rings[group]

    def say_done(self, peer: int, op: OpRef) -> None:
        holders = self.done.setdefault(self.members[peer].group, {}).setdefault(op, set())
        holders.add(peer)
        if holders == set(self.ring_of(peer)):
            self.decide(peer, op, True)

    def decide(self, peer: int, op: OpRef, verdict: bool) -> None:
        group = self.members[peer].group
        self.done.get(group, {}).pop(op, None)
        self.uses[group, op.tag] = op.sequence + 1
        for each in self.rings[group]:
            self.members[each].verdicts[op] = verdict

    def settle(self) -> None:
        """Everything happens that can."""
        if not self.accepted:
            self.admit()
        while self.end_a_call():
            pass

    def end_a_call(self) -> bool:
        """Ends joint calls that are complete, or that nothing could end."""
        accepted = self.accepted
        for kind in Kind.GLOBAL:
            if accepted and all(self.members[peer].wait == kind for peer in accepted):
                self.end(accepted, Result.SUCCESS, len(self.pending) if kind == Kind.ARE_PEERS_PENDING else 0)
                if kind == Kind.UPDATE_TOPOLOGY:
                    self.admit()
                return True
        for ring in [*self.rings.values(), accepted]:
            waits = [self.members[peer].wait for peer in ring]
            if set(waits) == {Kind.SYNC}:
                if ring is not accepted:
                    self.end(ring, Result.SUCCESS, OFFER.revision)
                    return True
            elif (
                ring and None not in waits and (ring is not accepted or Kind.SYNC not in waits) and len(set(waits)) > 1
            ):
                asking = [peer for peer in ring if self.members[peer].wait == Kind.ARE_PEERS_PENDING]
                others = set(waits) - {Kind.ARE_PEERS_PENDING}
                no = PendingAnswer.ADMITTING if others == {Kind.UPDATE_TOPOLOGY} else PendingAnswer.ELSEWHERE
                self.end(asking or ring, Result.SUCCESS if asking else Result.INVALID_USAGE, no if asking else 0)
                return True
        return False

    def end(self, peers: list[int], code: Result, value: int) -> None:
        for peer in peers:
            self.members[peer].results.append((code, value))
            self.members[peer].wait = None


class MasterBesideModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.master = Master(RunState("run"))
        self.peers: dict[int, Peer] = {}
        self.model = Model()
        self.broken: set[frozenset[int]] = set()
        """Pairs whose link broke. Only once each: what follows after more is told elsewhere."""
        self.next_peer = 1

    def carry_out(self, effects: list[Effect]) -> None:
        waiting = deque(effects)
        while waiting:
            effect = waiting.popleft()
            if isinstance(effect, FindRings):
                rings = {group: best_ring(problem) for group, problem in effect.problems.items()}
                waiting += self.master.rings_found(effect.search, rings, 0.0)
            if isinstance(effect, Send) and effect.connection in self.peers:
                answer = self.peers[effect.connection].answer(effect.message)
                if answer is not None:
                    waiting += self.master.received(effect.connection, answer, 0.0)

    def say(self, peer: int, message: m.FromPeer) -> None:
        self.model.settle()
        self.carry_out(self.master.received(peer, message, 0.0))

    @precondition(lambda self: len(self.peers) < PEERS_MAX)
    @rule(group=st.sampled_from(GROUPS))
    def somebody_comes(self, group: int) -> None:
        number = self.next_peer
        self.next_peer += 1
        self.peers[number] = Peer(number, group)
        self.model.hello(number, group)
        assert self.master.connected(number, "10.0.0.1", 0.0) == []
        self.say(number, m.Hello(m.PROTOCOL_VERSION, "1.0", group, [], 5000, 2))
        assert self.master.connected(HEARTBEATS_FROM + number, "10.0.0.1", 0.0) == []
        self.say(HEARTBEATS_FROM + number, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", number))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), by_leave=st.booleans())
    def somebody_goes(self, data: st.DataObject, by_leave: bool) -> None:
        peer = data.draw(st.sampled_from(sorted(self.peers)))
        if by_leave:
            del self.peers[peer]
            self.model.lose(peer)
            self.say(peer, m.Leave())
        else:
            self.lose(peer)

    def lose(self, peer: int) -> None:
        del self.peers[peer]
        self.model.lose(peer)
        self.model.settle()
        self.carry_out(self.master.disconnected(peer, "reset", 0.0))

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def an_op_is_done(self, data: st.DataObject, tag: int) -> None:
        self.finish(data.draw(st.sampled_from(self.model.accepted)), tag)

    def finish(self, peer: int, tag: int) -> None:
        op = self.model.op(peer, tag)
        if self.model.members[peer].wait not in Kind.EXCLUSIVE and op not in self.peers[peer].done:
            self.peers[peer].done.add(op)
            self.model.say_done(peer, op)
            self.say(peer, m.OpsDone(self.peers[peer].epoch, [op]))

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def somebody_goes_who_alone_was_not_done(self, data: st.DataObject, tag: int) -> None:
        peer = data.draw(st.sampled_from(self.model.accepted))
        for other in [other for other in self.model.ring_of(peer) if other != peer]:
            self.finish(other, tag)
        self.lose(peer)

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def an_op_fails(self, data: st.DataObject, tag: int) -> None:
        peer = data.draw(st.sampled_from(self.model.accepted))
        if self.model.members[peer].wait in Kind.EXCLUSIVE:
            return
        op = self.model.op(peer, tag)
        self.model.decide(peer, op, False)
        self.say(peer, m.OpFailed(self.peers[peer].epoch, *op, Result.TIMEOUT, "late"))

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data())
    def a_link_breaks(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.model.accepted))
        ring = self.model.ring_of(peer)
        other = data.draw(st.sampled_from(ring))
        if frozenset((peer, other)) in self.broken:
            return
        if (min(peer, other), max(peer, other)) in linked_pairs(ring):
            self.broken.add(frozenset((peer, other)))
            self.model.end_epoch(self.model.members[peer].group)
        self.say(peer, m.LinkLost(self.master.state.view, other, "reset"))

    @precondition(lambda self: self.model.accepted)
    @rule(data=st.data(), kind=st.sampled_from(Kind.ALL))
    def somebody_calls(self, data: st.DataObject, kind: str) -> None:
        peer = data.draw(st.sampled_from(self.model.accepted))
        member = self.model.members[peer]
        if member.wait is not None or (kind in Kind.EXCLUSIVE and self.model.open_ops(peer)):
            return
        member.wait = kind
        self.say(peer, m.JointCall(len(member.results), kind, OFFER if kind == Kind.SYNC else None))

    @rule(kind=st.sampled_from(Kind.ALL))
    def all_call(self, kind: str) -> None:
        """Peers that are free come to a call one after the other."""
        for peer in list(self.model.accepted):
            member = self.model.members.get(peer)
            if member is not None and member.wait is None and not self.model.open_ops(peer):
                member.wait = kind
                self.say(peer, m.JointCall(len(member.results), kind, OFFER if kind == Kind.SYNC else None))

    @precondition(lambda self: any(member.wait for member in self.model.members.values()))
    @rule(data=st.data())
    def a_caller_gives_up(self, data: st.DataObject) -> None:
        waiting = [peer for peer, member in self.model.members.items() if member.wait]
        peer = data.draw(st.sampled_from(waiting))
        call = len(self.model.members[peer].results)
        self.model.end([peer], Result.TIMEOUT, 0)
        self.say(peer, m.JointCancel(call))

    @invariant()
    def the_master_is_at_rest(self) -> None:
        assert not self.master.is_changing

    @invariant()
    def membership_is_as_the_model_says(self) -> None:
        assert sorted(self.master.accepted) == sorted(self.model.accepted)
        assert self.master.pending == self.model.pending
        for group in GROUPS:
            assert self.master.ring(group) == self.model.rings.get(group, [])

    @invariant()
    def every_peer_was_told_what_the_model_says(self) -> None:
        for number, peer in self.peers.items():
            member = self.model.members[number]
            assert peer.verdicts == member.verdicts
            assert peer.history == member.history
            assert peer.results == member.results

    @invariant()
    def time_is_wanted_only_for_those_who_wait(self) -> None:
        waits = any(member.wait for member in self.model.members.values())
        assert (self.master.deadline() is not None) == waits


TestMasterBesideModel = MasterBesideModel.TestCase
TestMasterBesideModel.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
