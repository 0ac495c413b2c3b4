"""Checks of what a master says, by what it has heard and said before: it gives reasons that are true, and each
step has one.

    a view comes into force when all whose ring it changes have answered, and at least half of the view before
    its verdicts are about ops of the epoch that it ends, its new links are between its peers; it takes the place of
    one that is not in force only for something that has happened since; no op is told to be both committed and
    aborted, and no peer gets two ends of one
    a link that has been replaced since it was lost stops no op, and one that breaks again and again is given up
    no peer is put out for a link before the end that dials has said so under this view, while one of the two is absent,
    or, while others may still say more, before some time has passed; nor for a newcomer that fails with one peer only
    calls are called hopeless once all wait and no view changes; none is complete while one does
    a peer told of an op as made has its call ended for it; the number of an admission is that of the call
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from pccl.protocol import messages as m
from pccl.types import Result
from tests.simulation.checks.facts import Epoch, Facts, Leader
from tests.simulation.node import Node

Pair = tuple[int, int]
Ref = tuple[int, int]
BROKEN = re.compile(
    r"evicted: peers (\d+) and (\d+) cannot connect to each other: (?:their link broke (\d+) times in)?"
)
HOPELESS = "these calls can never complete: "
PEER = re.compile(r"peer (\d+) \(")
RELINKS_MAX = 3
"""The number of times that a link is replaced while no op goes through."""
EVIDENCE_S = 0.45
"""The shortest time that a master gathers failures while more may come."""
MESH_PEERS_MAX = 16


@dataclass
class _Reign:
    """What one leader has heard and said."""

    view: int = 0
    """The last view that it has announced."""
    rings: dict[int, m.Ring] = field(default_factory=dict)
    """The rings of that view by group."""
    in_force: int = 0
    """The last view that it has put in force."""
    is_changing: bool = False
    """It has stopped ops or announced a view, which is not in force."""
    changing_since: int = 0
    """The turn when that began."""
    stopped: set[int] = field(default_factory=set)
    """Groups that it has flushed since."""
    ready: set[int] = field(default_factory=set)
    """The peers that have answered the view."""
    failed: dict[Pair, set[int]] = field(default_factory=dict)
    """The pairs that cannot connect in that view, and the peers that say so."""
    failed_at: float = 0.0
    """The time of the first of these."""
    lost: set[Pair] = field(default_factory=set)
    """The pairs whose link was lost since that view was announced."""
    relinks: Counter[Pair] = field(default_factory=Counter)
    """The number of times that links were lost and replaced while no op went through."""
    optional: set[Pair] = field(default_factory=set)
    """The pairs whose link was lost at some time when no ring needed it."""
    made_in: dict[Pair, int] = field(default_factory=dict)
    """The view where a link was last replaced."""
    admits: bool = False
    """The view in force has newcomers."""
    broken: set[Pair] = field(default_factory=set)
    """Those whose link the last view replaces because it was lost."""
    flushed: set[int] = field(default_factory=set)
    """Groups that were flushed since that view was announced."""
    settled: set[int] = field(default_factory=set)
    """Groups whose ops the last view ends, and that have heard of no commit in it."""
    put_out: set[int] = field(default_factory=set)
    """The peers that it has sent away."""
    left: set[int] = field(default_factory=set)
    """The peers that have said that they leave."""
    waits: dict[int, m.GroupCall] = field(default_factory=dict)
    """The calls that peers wait in."""
    decided: set[tuple[Node, int, int, int]] = field(default_factory=set)
    """The verdicts that it has told by themselves: peer, epoch, tag and use."""


class Conduct:
    def __init__(self, facts: Facts, now: Callable[[], float], founders: int) -> None:
        self._facts = facts
        self._now = now
        self._founders = founders
        self._reigns: dict[Leader, _Reign] = {}
        self._epochs: dict[Node, int] = {}
        """The epoch that each peer was last told is in force."""
        self._mentioned: dict[Epoch, set[Ref]] = {}
        """The ops that anybody has said anything about."""
        self._flushes: dict[tuple[int, int], Epoch] = {}
        self.absent: set[Node] = set()
        """The peers whose control connection their master has found broken."""
        self.strangers: set[Node] = set()
        """Those in whose name something is said that a peer does not say."""
        self._founded: set[str] = set()
        self._worn: set[Pair] = set()
        """The pairs whose link is replaced in this turn though it has broken too often."""
        self._stale: str = ""
        """What this turn may not stop ops for."""
        self._reported: dict[tuple[Node, int], int] = {}
        """The epoch that each peer has said it is in, by the master's process that asked it to follow."""
        self._turn = 0
        """The number of the present turn."""
        self._is_noted = False
        """Something of it is noted below."""
        self._numbers: dict[Node, int] = {}
        self._made: dict[Node, m.OpAbort] = {}
        self._others: dict[Node, set[str]] = {}
        self._ended: dict[Node, m.GroupCallResult] = {}

    def _of(self, leader: Leader) -> _Reign:
        reign = self._reigns.get(leader)
        if reign is None:
            reign = self._reigns[leader] = _Reign()
        return reign

    # Turns.

    def turn_begins(self) -> None:
        self._turn += 1
        if self._is_noted:
            self._is_noted = False
            self._numbers.clear()
            self._made.clear()
            self._ended.clear()
            self._others.clear()

    def turn_ends(self, is_whole: bool) -> None:
        self._stale = ""
        worn = set(self._worn)
        self._worn.clear()
        if not is_whole:
            return
        assert not worn, f"the links of {worn} are made more than {RELINKS_MAX} times"
        for node, abort in self._made.items():
            ended = self._ended.get(node)
            assert ended is not None, f"{node} hears that {abort} counts as made, and its call goes on"
        for node, result in self._ended.items():
            is_told = result.reason in self._others.get(node, ())
            assert not is_told, f"{node} hears of an op as of one of its own for which its call is ended: {result}"

    # What it hears.

    def received(self, node: Node, process: int, message: m.Message) -> None:
        """Note what a master hears."""
        leader = node.leader
        if leader is None or leader.process != process:
            return
        reign = self._of(leader)
        self._note_ops(node, process, message)
        if isinstance(message, m.LinksReady) and message.view == reign.view:
            reign.ready.add(node.number)
            for other, _ in [*message.failed, *message.missing]:
                self._note_failed(reign, node.number, other)
        elif isinstance(message, m.LinkFailed) and message.view == reign.view:
            self._note_failed(reign, node.number, message.peer)
        elif isinstance(message, m.LinkLost):
            self._link_lost(node, reign, message)
        elif isinstance(message, m.FlushReply):
            epoch = self._flushes.get((process, message.flush))
            if message.commits and epoch in {(ring.group, ring.epoch) for ring in reign.rings.values()}:
                self._went_through(reign, node)
        elif isinstance(message, m.Leave):
            reign.left.add(node.number)
        elif isinstance(message, m.GroupCall):
            reign.waits[node.number] = message

    def _note_failed(self, reign: _Reign, by: int, other: int) -> None:
        if not reign.failed:
            reign.failed_at = self._now()
        reign.failed.setdefault(_pair(by, other), set()).add(by)

    def _link_lost(self, node: Node, reign: _Reign, message: m.LinkLost) -> None:
        pair = _pair(node.number, message.peer)
        if message.made_in < reign.made_in.get(pair, 0):
            self._stale = f"{node} lost a link that was replaced since: {message}"
            return
        reign.lost.add(pair)

    def _goes_through(self, reign: _Reign, ring: Iterable[int]) -> None:
        for pair in [pair for pair in reign.relinks if pair not in reign.lost and {*pair} <= {*ring}]:
            del reign.relinks[pair]

    def _went_through(self, reign: _Reign, node: Node) -> None:
        """Note that ops of a peer's group were committed in the epoch that ends: its links broke after that."""
        ring = {*reign.rings[node.group].peers}
        if node.number in ring - reign.put_out:
            for pair in [pair for pair in reign.relinks if {*pair} <= ring]:
                del reign.relinks[pair]
                if pair in reign.broken:
                    reign.relinks[pair] = 1
                    self._worn.discard(pair)

    def _note_ops(self, node: Node, process: int, message: m.Message) -> None:
        if isinstance(message, m.OpsDone | m.OpsStalled | m.OpsOver):
            self._mention((node.group, message.epoch), message.ops)
        elif isinstance(message, m.OpFailed | m.AbortVote):
            self._mention((node.group, message.epoch), [m.OpRef(message.tag, message.sequence)])
        elif isinstance(message, m.FlushReply) and (process, message.flush) in self._flushes:
            epoch = self._flushes[process, message.flush]
            self._mention(epoch, [*message.ops, *message.commits, *message.aborts])

    def reported(self, node: Node, process: int, report: m.RecoveryReport) -> None:
        """Note what a peer tells a master that may lead it."""
        rings = report.installed.rings if report.installed is not None else []
        for ring in rings:
            if ring.group == node.group:
                self._mention((ring.group, ring.epoch), [*report.commits, *report.aborts])
                self._reported[node, process] = ring.epoch

    def resumed(self, node: Node, process: int) -> None:
        """Note that a master leads a peer on, from where that has said it is: the peer may not have heard that a later
        epoch is in force."""
        epoch = self._reported.pop((node, process), None)
        if epoch is not None:
            self._epochs[node] = epoch

    def _mention(self, epoch: Epoch, ops: Iterable[m.OpRef | m.Aborted]) -> None:
        self._mentioned.setdefault(epoch, set()).update((op.tag, op.sequence) for op in ops)

    # What it says.

    def says(self, node: Node, process: int, message: m.Message) -> None:
        """Check what a master says to a peer that it leads."""
        leader = node.leader
        if leader is None or leader.process != process:
            return
        reign = self._of(leader)
        if isinstance(message, m.Flush):
            self._flushes[process, message.flush] = node.group, message.epoch
            assert not self._stale, f"ops are stopped though {self._stale}"
            self._changes(reign)
            reign.stopped.add(node.group)
            reign.flushed.add(node.group)
            reign.broken.clear()
        elif isinstance(message, m.Prepare):
            self._prepare(node, leader, reign, message)
        elif isinstance(message, m.Install):
            self._install(node, leader, reign, message)
        elif isinstance(message, m.OpsCommit):
            self._mention((node.group, message.epoch), message.ops)
            self._decides(node, reign, message.epoch, message.ops)
            if node.group in reign.rings:
                self._goes_through(reign, reign.rings[node.group].peers)
        elif isinstance(message, m.OpAbort | m.AbortVoteRequest):
            op = m.OpRef(message.tag, message.sequence)
            self._mention((node.group, message.epoch), [op])
            if isinstance(message, m.OpAbort):
                self._decides(node, reign, message.epoch, [op])
            if isinstance(message, m.OpAbort) and message.counts_as_made:
                self._made[node] = message
                self._is_noted = True
            elif isinstance(message, m.OpAbort):
                self._others.setdefault(node, set()).add(message.reason)
                self._is_noted = True
        elif isinstance(message, m.GroupCallResult):
            self._result(node, reign, message)
        elif isinstance(message, m.Goodbye):
            self._goodbye(node, leader, reign, message)

    @staticmethod
    def _decides(node: Node, reign: _Reign, epoch: int, ops: Iterable[m.OpRef]) -> None:
        for op in ops:
            verdict = node, epoch, op.tag, op.sequence
            assert verdict not in reign.decided, f"{node} hears a second verdict on {op} in epoch {epoch}"
            reign.decided.add(verdict)

    def _changes(self, reign: _Reign) -> None:
        if not reign.is_changing:
            reign.is_changing, reign.changing_since = True, self._turn

    def _prepare(self, node: Node, leader: Leader, reign: _Reign, message: m.Prepare) -> None:
        rings = {ring.group: ring for ring in message.rings}
        if message.view != reign.view:
            assert not self._stale, f"view {message.view} is announced though {self._stale}"
            self._has_reason(leader, reign, message)
            needed = {pair for ring in reign.rings.values() for pair in _neighbours(ring.peers)}
            for ring in message.rings:
                still = reign.lost & needed & _neighbours(ring.peers)
                assert still <= set(message.relink), f"the links of {still} were lost, and are not replaced"
            reign.view, reign.rings = message.view, rings
            self._changes(reign)
            reign.ready.clear()
            reign.failed.clear()
            for pair in message.relink:
                assert any({*pair} <= {*ring.peers} for ring in message.rings), f"a link with a stranger: {pair}"
                reign.made_in[pair] = message.view
            self._count_relinks(reign, message, needed)
            reign.broken, reign.lost = reign.lost, set()
            reign.settled, reign.flushed = reign.flushed, set()
            if leader.run not in self._founded:
                self._founded.add(leader.run)
                size = len(self._facts.listed[message.view])
                assert size >= self._founders or self._facts.has_failed_over, f"{size} of {self._founders} found a run"
        if message.commits and node.group in reign.settled:
            # All that are left are done with these, whether or not one has committed them.
            reign.settled.discard(node.group)
            self._went_through(reign, node)
        epoch = self._epochs.get(node)
        if epoch is not None and rings[node.group].epoch != epoch:
            told = {(op.tag, op.sequence) for op in [*message.commits, *message.aborts]}
            both = {*message.commits} & {m.OpRef(op.tag, op.sequence) for op in message.aborts}
            assert not both, f"{node} hears that {both} are committed and aborted"
            unknown = told - self._mentioned.get((node.group, epoch), set())
            assert not unknown or not self._is_last(node, epoch), f"{node} hears of ops that never were: {unknown}"

    def _has_reason(self, leader: Leader, reign: _Reign, message: m.Prepare) -> None:
        """Check that a view takes the place of another one that is not in force because something has happened since
        that was announced."""
        if reign.view in (0, reign.in_force) or reign.lost or reign.flushed:
            return
        is_same = self._facts.listed[message.view] == self._facts.listed[reign.view]
        assert not is_same, f"view {message.view} takes the place of view {reign.view} for nothing"

    def _count_relinks(self, reign: _Reign, message: m.Prepare, needed: set[Pair]) -> None:
        """Count how often links are replaced that were lost. One that was ever gone without is made again together
        with others of its ends, or once it is needed, any number of times. `needed`: those of the last view."""
        given_up, others = [], 0
        reign.lost.intersection_update(message.relink)
        for pair in reign.lost:
            reign.relinks[pair] += 1
            if pair not in needed or not any(pair in _neighbours(ring.peers) for ring in message.rings):
                reign.optional.add(pair)
            if pair in reign.optional or reign.relinks[pair] <= RELINKS_MAX:
                others += 1
            else:
                given_up.append(pair)
        if not others:
            self._worn.update(given_up)

    def _is_last(self, node: Node, epoch: int) -> bool:
        """Whether no peer of a node's group is in a later epoch than it."""
        return all(self._epochs.get(other, 0) <= epoch for other in self._facts.nodes if other.group == node.group)

    def _install(self, node: Node, leader: Leader, reign: _Reign, message: m.Install) -> None:
        self._numbers[node] = message.call_number
        self._is_noted = True
        if reign.in_force != message.view:
            self._puts_in_force(leader, reign, message.view)
        self._epochs[node] = reign.rings[node.group].epoch

    def _puts_in_force(self, leader: Leader, reign: _Reign, view: int) -> None:
        here = {node.number: node for node in self._facts.nodes if node.leader is leader and node.is_known}
        for ring in reign.rings.values():
            changed = {peer for peer in ring.peers if peer in here and self._epochs.get(here[peer]) != ring.epoch}
            assert changed <= reign.ready, f"view {view} is put in force without {changed - reign.ready}"
        listed = self._facts.listed
        before = listed.get(reign.in_force, set())
        unaware = (listed[view] & here.keys()) - reign.ready
        if unaware:
            stayed = before - reign.left
            others = stayed - reign.ready
            assert 2 * len(others) <= len(stayed), f"view {view} is put in force, and {others} of {stayed} do not know"
        reign.admits = bool(before) and bool(listed[view] - before)
        reign.in_force, reign.is_changing = view, False
        reign.stopped.clear()

    def _result(self, node: Node, reign: _Reign, result: m.GroupCallResult) -> None:
        waits = reign.waits
        if result.reason.startswith(HOPELESS):
            named = {int(peer) for peer in PEER.findall(result.reason)}
            ring = {peer for peer in reign.rings[node.group].peers if self._is_here(peer)} if reign.rings else set()
            assert named >= ring, f"calls are hopeless though {ring - named} may come: {result.reason}"
            assert not reign.is_changing, f"calls are hopeless while the view changes: {result.reason}"
        if result.code == Result.SUCCESS and node.kinds[result.call] == m.Kind.UPDATE_TOPOLOGY:
            # What follows from the end of this call, such as a new epoch, may begin first in the same turn.
            is_changing = reign.is_changing and reign.changing_since < self._turn
            assert not is_changing, f"update_topology of {node} ends while the view changes"
            number = self._numbers.get(node)
            is_of_view = number is None or not reign.admits or number == result.call_number
            assert is_of_view, f"{node} has view with number {number}, and its call has {result.call_number}"
        elif result.code == Result.INVALID_USAGE:
            self._ended[node] = result
            self._is_noted = True
        if result.reason:
            self._ended[node] = result
            self._is_noted = True
        waits.pop(node.number, None)

    def _is_here(self, peer: int) -> bool:
        return any(node.number == peer and node.is_known for node in self._facts.nodes)

    def _goodbye(self, node: Node, leader: Leader, reign: _Reign, message: m.Goodbye) -> None:
        assert message.code != Result.INVALID_USAGE or node in self.strangers, f"{node} is sent away: {message.reason}"
        reign.put_out.add(node.number)
        found = BROKEN.match(message.reason)
        if found is None:
            return
        pair = _pair(int(found[1]), int(found[2]))
        others = {each.number: each for each in self._facts.nodes if each.leader is leader}
        if found[3]:
            times = reign.relinks[pair] + 1
            assert int(found[3]) <= times, f"the link of {pair} broke {times} times, and not {found[3]}"
            return
        absent = [others[peer] for peer in pair if peer in others and others[peer] in self.absent]
        assert not absent, f"{node} is evicted for its link with one that is absent: {absent}, {message.reason}"
        said_by = reign.failed.get(pair, set())
        assert said_by, f"{node} is evicted for {pair}, of whom none says so in view {reign.view}"
        high = pair[1]
        has_word = high in said_by or high in reign.ready or not self._is_here(high)
        assert has_word, f"{node} is evicted before peer {high}, who dials, has said anything: {message.reason}"
        if self._now() < reign.failed_at + EVIDENCE_S:
            open_pairs = [each for each in self._pairs(reign) if not self._is_settled(reign, each)]
            assert not open_pairs, f"{node} is evicted before more is known of {open_pairs}"
        partners = [each for each in reign.failed if node.number in each]
        if node.is_accepted and partners == [pair]:
            other = others.get(pair[0] if pair[1] == node.number else pair[1])
            is_newcomer = other is not None and not other.is_accepted and other.is_known
            assert not is_newcomer, f"{node} is evicted for {other}, a newcomer"

    def _pairs(self, reign: _Reign) -> list[Pair]:
        """Return the pairs that make links for the view that is announced."""
        rings = [ring.peers for ring in reign.rings.values() if ring.epoch == reign.view]
        return [_pair(*each) for ring in rings if len(ring) <= MESH_PEERS_MAX for each in combinations(ring, 2)]

    def _is_settled(self, reign: _Reign, pair: Pair) -> bool:
        """Whether the end that dials has said what became of a link, or the other that it stands."""
        low, high = pair
        said_by = reign.failed.get(pair, set())
        is_gone = any(not self._is_here(peer) for peer in pair)
        return is_gone or high in reign.ready or high in said_by or (low in reign.ready and not said_by)


def _neighbours(ring: Sequence[int]) -> set[Pair]:
    return {_pair(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)}


def _pair(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
