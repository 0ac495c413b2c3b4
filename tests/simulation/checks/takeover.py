"""Checks of a master that takes a run over, by a reference of its own: what had to stand, by what its followers said.

The reference knows the reports in the votes of peers (Vote), and what they answer a flush with. From these, as
sets and without any code of the machines, follows what the new master has to say:

    survivors       exactly those that the last view in force has, every view that may be in force, and the newest view
                    in which one of them has settled its ops; and most of each of these views have come
    what may stand  a view that a peer was told of may be in force unless all its peers are here and none has it, or
                    one of them has not answered it although it had to, or has heard of a newer one
    steady groups   no peer stops them, and all hear what some had heard of their ops
    other groups    all whose ops are open are stopped; what a peer had heard stands in the next view, with its
                    reason; of the rest that is committed which all that were stopped are done with
    a new view      follows unless all are in the last one, no peer was told of a newer one, and all groups are steady
    group calls     a peer that waits in one whose end another has heard is told that end, and no end of before
                    otherwise

A master that has a record of the run, or has led it before, knows more than its followers say. Its
survivors and the views that may stand are not judged there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from tests.simulation.checks.facts import Facts
from tests.simulation.connections import Control
from tests.simulation.node import Key, Node

Ref = tuple[int, int]
"""The name of an op within its epoch: tag and sequence."""
NO_VIEW: tuple[int, frozenset[int]] = (0, frozenset())
COMMIT = 0
"""The verdict on an op that is committed; that on others is their code."""
Reports = Mapping[int, m.RecoveryReport]
"""Reports by peer."""


@dataclass
class _Stopped:
    """The ops of a group whose ring changes, as far as the new master has heard of them."""

    ring: m.Ring
    settled: bool
    """A view that was never in force has settled them."""
    asked: set[int]
    """The peers that have to say which are done."""
    verdicts: dict[Ref, int]
    """Those that a peer knows."""
    view: int = 0
    """The view that changes it; 0: none is announced."""
    done: dict[int, set[Ref]] = field(default_factory=dict)
    """The ops that each of these peers is done with."""


@dataclass
class _Takeover:
    """What a master has heard as it took a run over, and has said in that turn."""

    process: int
    run: str
    term: int
    reports: dict[int, m.RecoveryReport]
    """Those of all that follow."""
    heard_of: tuple[int, frozenset[int]]
    """The newest view in force that it was told of by anybody, with its peers; 0: of none."""
    is_informed: bool
    """It may know more of the run than peers have told it."""
    peers: dict[Control, int] = field(default_factory=dict)
    """Those that go on, by their connection."""
    resumed: dict[int, set[int]] = field(default_factory=dict)
    """The views that each is told may be in force."""
    flushed: dict[int, m.Flush] = field(default_factory=dict)
    told: dict[int, dict[Ref, int]] = field(default_factory=dict)
    """The verdicts that each hears."""
    loses: bool = False
    """It has put a peer out."""
    announced: list[tuple[int, m.Prepare]] = field(default_factory=list)
    has_announced: bool = False
    must_announce: bool = False
    decided: set[Key] = field(default_factory=set)
    """The ops of steady groups that had a verdict."""
    stopped: dict[int, _Stopped] = field(default_factory=dict)
    """The groups whose ring changes with the next view."""
    ends: dict[int, tuple[str, m.GroupCallOutcome]] = field(default_factory=dict)
    """The ends, known to others, of the calls where peers wait."""
    last_call: int = 0
    """The number of the last call that a peer knows."""
    answered_anew: set[int] = field(default_factory=set)
    """The peers whose call has ended since."""

    @property
    def members(self) -> dict[int, m.RecoveryReport]:
        return {peer: report for peer, report in self.reports.items() if peer in self.resumed}


class Takeovers:
    def __init__(self, facts: Facts, is_fenced: bool) -> None:
        self._facts = facts
        self._is_recorded = is_fenced
        self._votes: dict[int, dict[Control, m.Vote]] = {}
        """The last votes of those that follow, by the master's process."""
        self._heard_of: dict[tuple[int, str], tuple[int, frozenset[int]]] = {}
        """The newest view in force that each process was told of, by run."""
        self._has_led: set[tuple[int, str]] = set()
        """The processes that have led a run."""
        self._last: dict[int, _Takeover] = {}
        """The last takeover of each process."""
        self._here: dict[int, dict[Control, int]] = {}
        """The views in force of all that have come to each process."""
        self._voters: dict[Control, m.Vote] = {}
        """Those that follow the master whose turn it is."""
        self._company: dict[Control, int] = {}
        """The views in force of all that have come to it."""
        self._torn: set[tuple[int, int]] = set()
        """The takeovers during which a master was stopped, by its process and the term."""
        self._now: _Takeover | None = None
        """The one of this turn."""

    # What masters hear.

    def received(self, control: Control, process: int, message: m.Message) -> None:
        """Note what a master hears over a connection, if it has not closed that before."""
        if control.is_over:
            return
        if isinstance(message, m.PreVote | m.Vote):
            summary = message.report if isinstance(message, m.Vote) else message
            if summary.installed is not None:
                self._here.setdefault(process, {})[control] = summary.installed.view
                key = process, control.node.run
                if summary.installed.view > self._heard_of.get(key, NO_VIEW)[0]:
                    self._heard_of[key] = summary.installed.view, _peers(summary.installed.rings)
            if isinstance(message, m.Vote):
                self._votes.setdefault(process, {})[control] = message
        elif isinstance(message, m.FlushReply):
            found = self._of(control)
            if found is not None:
                self._replied(found, found.peers[control], message)

    def gone(self, control: Control) -> None:
        """Note that a connection is over at its master."""
        self._votes.get(control.host.process, {}).pop(control, None)
        self._here.get(control.host.process, {}).pop(control, None)

    def told_of(self, process: int, run: str) -> tuple[int, frozenset[int]]:
        """Return the newest view in force of a run that a process was told of since it led it last, with its peers."""
        return self._heard_of.get((process, run), NO_VIEW)

    def _of(self, control: Control | None) -> _Takeover | None:
        """Return the takeover of a master that has taken on a peer that is at a connection."""
        found = self._last.get(control.host.process) if control is not None else None
        return found if found is not None and control in found.peers else None

    def _replied(self, found: _Takeover, peer: int, reply: m.FlushReply) -> None:
        asked = found.flushed.get(peer)
        for group in found.stopped.values():
            if peer in group.asked and asked is not None and asked.flush == reply.flush:
                group.done[peer] = {(op.tag, op.sequence) for op in reply.ops}
                group.verdicts |= _verdicts(reply.commits, reply.aborts)

    # What masters say.

    def turn_begins(self, process: int) -> None:
        """Note that a master is about to say what one event has led to. It lets go of some before it says the rest."""
        self._now = None
        self._voters = dict(self._votes.get(process, {}))
        self._company = dict(self._here.get(process, {}))

    def says(self, control: Control, process: int, message: m.Message) -> None:
        """Note what a master says over a connection, and check it."""
        if isinstance(message, m.Resumed):
            self._resumes(control, process, message)
            return
        if isinstance(message, m.Elsewhere):
            self._voters.pop(control, None)
            self._company.pop(control, None)
        elif isinstance(message, m.Welcome):
            self._has_led.add((process, message.run))
        found = self._of(control)
        if found is None:
            return
        peer = found.peers[control]
        if isinstance(message, m.Prepare):
            found.has_announced = True
            if found is self._now:
                found.announced.append((peer, message))
            else:
                self._prepares(found, peer, message)
        elif isinstance(message, m.Install):
            found.stopped.clear()
        elif isinstance(message, m.GroupCallResult):
            self._ends(found, peer, control.node.kinds[message.call], message)
        elif isinstance(message, m.Goodbye):
            found.loses = True
        elif found is not self._now:
            self._decides(found, control.node.group, message)
        else:
            told = found.told.setdefault(peer, {})
            if isinstance(message, m.Flush):
                found.flushed[peer] = message
            elif isinstance(message, m.OpsCommit):
                told |= _verdicts(message.ops, [])
            elif isinstance(message, m.OpAbort):
                told[message.tag, message.sequence] = message.code

    def _resumes(self, control: Control, process: int, message: m.Resumed) -> None:
        if (process, message.term) in self._torn:
            return
        votes, run = self._voters, control.node.run
        if self._now is None:
            reports = {
                vote.report.me.peer: vote.report
                for voter, vote in votes.items()
                if vote.term == message.term and voter.node.run == run
            }
            key = process, run
            is_informed = self._is_recorded or self._facts.is_one_name or key in self._has_led
            self._has_led.add(key)
            self._now = _Takeover(process, run, message.term, reports, self._heard_of.pop(key, NO_VIEW), is_informed)
            self._last[process] = self._now
        vote = votes.get(control)
        assert vote is not None, f"{control.node} is led on and has not voted"
        assert vote.term == message.term, f"{control.node} is led in term {message.term} and has voted in {vote.term}"
        peer = vote.report.me.peer
        self._now.peers[control] = peer
        self._now.resumed[peer] = set(message.in_force)

    def turn_ends(self, is_whole: bool) -> None:
        """Check what a master has said as it took a run over. `is_whole`: it was not stopped before it had said all."""
        found, self._now = self._now, None
        if found is None:
            return
        self._votes.pop(found.process, None)
        if not is_whole:
            del self._last[found.process]
            self._torn.add((found.process, found.term))
            return
        last = _last_installed(found.reports.values())
        assert last is not None, "a run is led on in which no peer was ever accepted"
        known = max(view for control, view in self._company.items() if control.node.run == found.run)
        assert known <= last.view, f"a run is led on from view {last.view}, and a peer here reports view {known}"
        if not found.is_informed:
            self._check_members(found, last)
        if found.loses:
            return  # the rest of a site
        is_steady = True
        for ring in last.rings:
            ours = {peer: each for peer, each in found.members.items() if peer in ring.peers}
            is_steady = bool(ours) and self._check_group(found, ring, ours) and is_steady
        newest = max([last.view, found.heard_of[0], *_told(found.reports.values())])
        views = {each.installed.view if each.installed is not None else 0 for each in found.members.values()}
        found.must_announce = not is_steady or views != {last.view} or newest > last.view
        if not any(group.asked for group in found.stopped.values()):
            assert found.announced or not found.must_announce, (
                f"a new view has to follow {last.view}, and there is none"
            )
        assert found.must_announce or not found.announced or found.is_informed, f"no change in {last.view}"
        self._note_calls(found)
        for peer, message in found.announced:
            self._prepares(found, peer, message)

    def _check_members(self, found: _Takeover, last: m.InstalledView) -> None:
        """Check the survivors, and which views may be in force."""
        reports = found.reports
        standing = {last.view: _peers(last.rings)}
        if self._facts.addresses == 1 and found.heard_of[0] > last.view:
            standing = dict([found.heard_of])
        after = max(standing)
        for view, rings in _told(reports.values()).items():
            if view > after and _may_stand(view, rings, reports):
                standing[view] = _peers(rings)
        for peer, in_force in found.resumed.items():
            assert in_force == standing.keys(), f"peer {peer} hears that {in_force} may be in force: {sorted(standing)}"
        able = frozenset.intersection(_peers(last.rings), *standing.values())
        settled = {
            each.prepared.view: each.prepared.rings
            for peer, each in reports.items()
            if each.has_decided
            and each.prepared is not None
            and each.prepared.view > last.view
            and peer in _peers(last.rings)
        }
        if settled:
            able &= _peers(settled[max(settled)])
        members = able & reports.keys()
        assert found.resumed.keys() == members, f"{sorted(found.resumed)} go on, and {sorted(members)} could"
        for view, peers in standing.items():
            assert 2 * len(peers & reports.keys()) > len(peers), f"few of view {view} have come"
            if self._facts.addresses > 1:
                assert 2 * len(peers - members) <= len(peers), f"most of view {view} may follow another master"

    def _check_group(self, found: _Takeover, ring: m.Ring, ours: Reports) -> bool:
        """Check what is done with the ops of a group. Return whether it is steady."""
        heard: dict[Ref, int] = {}
        for each in ours.values():
            if _epoch(each) == ring.epoch:
                heard |= _verdicts(each.commits, each.aborts)
        runs = [peer for peer, each in ours.items() if each.is_running and _epoch(each) == ring.epoch]
        if len(runs) == len(ring.peers):
            for peer in runs:
                told = found.told.get(peer, {})
                due = {ref: verdict for ref, verdict in heard.items() if self._concerns(ring, ref, peer)}
                assert told == due, f"peer {peer} is told {told} of its ops, and some have heard {due}"
                assert peer not in found.flushed, f"the ops of peer {peer} are stopped, and its group is whole"
            found.decided |= {(ring.group, ring.epoch, *ref) for ref in heard}
            return True
        asked = {
            peer: _epoch(each) for peer, each in ours.items() if each.installed is not None and not each.has_decided
        }
        late = [peer for peer, each in ours.items() if each.is_running and _epoch(each) != ring.epoch]
        late += [peer for peer, epoch in asked.items() if epoch != ring.epoch]
        assert not late, f"the ops of {late} are open, and the last view, which they have answered, has another ring"
        told_to = {peer: found.flushed[peer].epoch for peer in ours if peer in found.flushed}
        assert told_to == asked, f"ops are stopped of {told_to}, by peer and epoch, and are open with {asked}"
        has_decided = any(each.has_decided and _epoch(each) == ring.epoch for each in ours.values())
        found.stopped[ring.group] = _Stopped(ring, has_decided, set(asked), heard)
        return False

    def _concerns(self, ring: m.Ring, ref: Ref, peer: int) -> bool:
        return peer in self._facts.numbers_of((ring.group, ring.epoch, *ref))

    def _prepares(self, found: _Takeover, peer: int, message: m.Prepare) -> None:
        """Check the verdicts of the first view that changes the ring of a peer's group."""
        group = next((each for each in found.stopped.values() if peer in each.ring.peers), None)
        if group is None:
            return
        old, new = group.ring, next(ring for ring in message.rings if peer in ring.peers)
        assert new.epoch != old.epoch, f"the group of peer {peer} was to be formed again, and keeps its epoch"
        group.view = group.view or message.view
        if group.view != message.view:
            return
        stay = set(new.peers) & set(old.peers)
        silent = stay & group.asked - group.done.keys()
        assert not silent, f"view {message.view} is announced before {silent} have said what they are done with"
        told = _verdicts(message.commits, message.aborts)
        both = {(op.tag, op.sequence) for op in message.commits} & {(op.tag, op.sequence) for op in message.aborts}
        assert not both, f"peer {peer} hears two verdicts on {both} of {old}"
        done = set().union(*group.done.values())
        for ref in {*done, *told, *(ref for ref, verdict in group.verdicts.items() if verdict != COMMIT)}:
            holders = [each for each in stay if self._concerns(old, ref, each)]
            is_by_all = ref in done and all(ref in group.done.get(each, ()) for each in holders)
            verdict = group.verdicts.get(ref, COMMIT if is_by_all and not group.settled else None)
            assert told.get(ref) == verdict, (
                f"peer {peer} hears {told.get(ref)} of op {ref} of {old}, and not {verdict}"
            )

    def _decides(self, found: _Takeover, group: int, message: m.Message) -> None:
        """Check that what had a verdict gets no other one."""
        if isinstance(message, m.OpsCommit):
            refs = [(op.tag, op.sequence) for op in message.ops]
        elif isinstance(message, m.OpAbort | m.AbortVoteRequest):
            refs = [(message.tag, message.sequence)]
        else:
            return
        again = {(group, message.epoch, *ref) for ref in refs} & found.decided
        assert not again, f"{message} is about what had a verdict when this master took over: {again}"

    # Group calls.

    def _note_calls(self, found: _Takeover) -> None:
        members = found.members
        numbers = [0]
        for each in members.values():
            numbers += [each.joined_after, *(outcome.call_number for outcome in each.outcomes)]
        found.last_call = max(numbers)
        for peer, each in members.items():
            kind = each.waits_in
            known = [
                outcome
                for other in members.values()
                if kind in m.Kind.GLOBAL or other.me.group == each.me.group
                for outcome in other.outcomes
                if outcome.kind == kind
            ]
            own = [outcome.call_number for outcome in each.outcomes if outcome.kind == kind]
            last = max(known, key=lambda outcome: outcome.call_number, default=None)
            if each.installed is not None and last is not None and last.call_number > max([each.joined_after, *own]):
                found.ends[peer] = kind, last

    def _ends(self, found: _Takeover, peer: int, kind: str, result: m.GroupCallResult) -> None:
        """Check how the first call of a peer ends under a new master."""
        if peer in found.answered_anew:
            return
        found.answered_anew.add(peer)
        if peer not in found.ends:
            is_old = 0 < result.call_number <= found.last_call
            assert not is_old, f"peer {peer} hears the end of a call that ended before it made this one: {result}"
            return
        waits_in, end = found.ends[peer]
        known, said = (end.call_number, end.code, end.value), (result.call_number, result.code, result.value)
        assert kind == waits_in, f"peer {peer} waits in {waits_in}, and hears of {kind}"
        assert said == known, f"peer {peer} hears that {kind} ended with {said}, and others have heard {known}"

    # At rest.

    def rest(self, accepted: Iterable[Node]) -> None:
        """Check that all has come that had to."""
        for node in accepted:
            found = self._of(node.control)
            if found is not None:
                assert found.has_announced or not found.must_announce, f"{node} needs a new view, and there is none"


def _may_stand(view: int, rings: list[m.Ring], reports: Reports) -> bool:
    """Whether a view that was prepared may be in force at a peer that has not come."""
    here = _peers(rings) & reports.keys()
    return len(here) < len(_peers(rings)) and not any(_rules_out(peer, reports[peer], view, rings) for peer in here)


def _rules_out(peer: int, report: m.RecoveryReport, view: int, rings: list[m.Ring]) -> bool:
    """Whether a view is in force nowhere, by the word of one of its peers."""
    told = [each for each in [report.prepared, *report.answered] if each is not None]
    if any(each.view == view and each.answered for each in told):
        return False
    if any(each.view >= view for each in told) or report.installed is None:
        return True
    before, after = (
        {(ring.group, ring.epoch) for ring in each if peer in ring.peers} for each in (report.installed.rings, rings)
    )
    return before != after  # otherwise it need not have answered


def _told(reports: Iterable[m.RecoveryReport]) -> dict[int, list[m.Ring]]:
    """Return the rings of all views that anybody was told of and has not installed, by number."""
    return {view.view: view.rings for each in reports for view in [each.prepared, *each.answered] if view is not None}


def _last_installed(reports: Iterable[m.RecoveryReport]) -> m.InstalledView | None:
    installed = [each.installed for each in reports if each.installed is not None]
    return max(installed, key=lambda view: view.view, default=None)


def _peers(rings: Iterable[m.Ring]) -> frozenset[int]:
    return frozenset(peer for ring in rings for peer in ring.peers)


def _epoch(report: m.RecoveryReport) -> int:
    rings = report.installed.rings if report.installed is not None else []
    return next((ring.epoch for ring in rings if report.me.peer in ring.peers), 0)


def _verdicts(commits: Iterable[m.OpRef], aborts: Iterable[m.Aborted]) -> dict[Ref, int]:
    found = {(op.tag, op.sequence): COMMIT for op in commits}
    return found | {(op.tag, op.sequence): op.code for op in aborts}
