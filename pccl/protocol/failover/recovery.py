"""Recovery reports, and how they determine the state of the run.

A run that loses its master loses the membership, the verdicts on ops and the results of group calls. A verdict that
any peer received must stand, and no two masters may lead. So a peer that searches for a master reports the views that
it knows (PreVote), and later everything that it has received (Vote). Pure functions decide from these reports
whether a master may lead and rebuild the run. As in Raft's joint consensus, each possible view needs its own quorum.

Quorum views:

    1  The highest view that any survivor has installed.
    2  Each newer prepared view that a missing peer may have installed. A view is ruled out if it changes a survivor's
       ring and that survivor has not acknowledged it or has received an even newer view from the same master.
    3  Survivors report all views that they have acknowledged, not only the newest, except those that a later master has
       ruled out (Resumed).

A master may lead if:

    4  A majority of each quorum view is connected. So no two masters lead: their majorities share a peer, and a peer
       follows only the highest term.
    5  With several masters, the peers of a quorum view that are missing or do not continue must not be a majority,
       because they may gather at another master.
    6  The only master of a run may evict any number of peers. So with one master address, the `RunRecord` replaces the
       majority of a view that evicted peers know:

       a  The recorded installed view counts, unless a survivor has installed a later one.
       b  A recorded prepared view counts like one that a survivor reports.
       c  If that view is not installed and the previous one lacks a majority, a majority of the prepared view suffices.
       d  Once DOUBT_TIMEOUTS have passed, a master with a record needs no majority: missing peers are lost.

Peers that continue:

    7  All survivors of the last view continue. Missing peers count as lost, as if they had died.
    8  If a prepared view has settled a survivor's ops, only the peers of that view continue.
    9  Newcomers report too, because the view that accepts them may be installed. If it is not, they start over.

Ops:

   10  If all peers of a group are connected and their ops run, these ops continue. Otherwise the group is flushed as
       after a loss.
   11  A verdict that a survivor received stands. Any other op is committed if all survivors have done it.

Group calls:

   12  Peers repeat the call that they wait in. They get its result if another accepted peer has received it.
   13  If only lost peers received a call's result, the call is repeated.

A new leader never reuses another leader's number for a view, a peer or a request. Terms are unique among masters that
know of each other; `block` keeps the numbers of all other masters apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, KeysView, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgspec

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.completion import participants
from pccl.protocol.failover.durable_state import QuorumView, RecordedView, RunRecord, majority
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Group, Ledger, MasterOptions, Member, Persist, RunState
from pccl.protocol.master.views import Leadership
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result


@dataclass(frozen=True)
class Quorum:
    """The views that count, and whether the connected peers suffice."""

    view: int
    """The last installed view; 0 if no survivor was ever accepted."""
    peers: frozenset[int]
    quorum_views: dict[int, frozenset[int]]
    """The peers of each quorum view by view number, starting with the last view in force."""
    expected: frozenset[int]
    has_majority: bool
    is_complete: bool
    here: int
    is_reduced: bool = False

    def __str__(self) -> str:
        if not self.peers:
            return "no peer of its last view has connected"
        return f"{self.here} of the {len(self.peers)} peers of view {self.view} have connected"


@dataclass
class RecoveredGroup:
    """The state of a group, as determined from recovery reports."""

    number: int
    epoch: int
    ring: list[int]
    former: list[int]
    is_steady: bool
    """Whether all its peers are connected and their ops run (rule 10)."""
    is_decided: bool = False
    """Whether a prepared view has settled all of the group's ops (rule 8)."""
    unsettled: dict[int, int] = field(default_factory=dict)
    """Peers whose ops must be flushed, each with the epoch of these ops."""
    commits: set[OpRef] = field(default_factory=set)
    """Committed ops whose commit some peers might not have received."""
    aborts: dict[OpRef, m.Aborted] = field(default_factory=dict)
    missing: set[tuple[int, int]] = field(default_factory=set)
    revision: int | None = None
    synced: set[int] = field(default_factory=set)
    results: dict[str, m.GroupCallOutcome] = field(default_factory=dict)


@dataclass
class Recovered:
    """The state of a run, as determined from recovery reports."""

    view: int
    known_view: int
    peers: frozenset[int]
    quorum_views: dict[int, frozenset[int]]
    """The peers of each quorum view by view number: the last view in force, and others that may be in force."""
    members: dict[int, m.RecoveryReport]
    newcomers: set[int]
    left_out: set[int]
    """Survivors that do not continue because they were lost earlier."""
    missing: list[int]
    groups: list[RecoveredGroup]
    is_unchanged: bool
    """Whether the run continues without a new view."""
    call_number: int
    in_force: RecordedView
    """The last view in force, for the new master's record."""
    possible: list[RecordedView]
    """Other views that may be in force, for the new master's record."""


def is_sound(peer: int, summary: Summary, views: Views | None = None) -> bool:
    """Return whether a peer's summary is consistent in everything that other peers rely on."""
    installed = summary.installed
    rings = (views or Views()).of(installed) if installed is not None else None
    groups = rings.groups_of.get(peer, []) if rings is not None else []
    if isinstance(summary, m.RecoveryReport):
        own = [summary.me.group] if installed is not None else []
        if summary.me.peer != peer or groups != own:
            return False
    if rings is None:
        return not (summary.has_decided or (isinstance(summary, m.RecoveryReport) and summary.is_running))
    return len(groups) == 1 and rings.are_peers


def _may_be_in_force(view: int, peers: frozenset[int], tally: SummaryTally[Any]) -> bool:
    return tally.have_answered(view, peers) and tally.count(peers) < len(peers)


def _in_force(installed: m.InstalledView, peers: frozenset[int], record: RunRecord | None) -> RecordedView:
    """Return the last installed view (rule 6a). `installed` is the last one that any survivor reports."""
    if record is not None and record.installed is not None and record.installed.view >= installed.view:
        return record.installed
    return RecordedView(installed.view, peers)


def quorum_of(
    summaries: SummaryTally[Any] | Mapping[int, Summary],
    has_rivals: bool = True,
    record: RunRecord | None = None,
    needs_majority: bool = True,
) -> Quorum:
    """Judge whether the connected peers suffice. A `record` does not count if the other peers may follow other masters
    (`has_rivals`). With a tally, the time does not depend on the number of peers."""
    tally = summaries if isinstance(summaries, SummaryTally) else SummaryTally.of(summaries)
    installed = tally.last_installed()
    if installed is None:
        return Quorum(0, frozenset(), {}, frozenset(), has_majority=False, is_complete=False, here=0)
    peers = tally.views.of(installed).peers
    last = _in_force(installed, peers, record)
    settled_by = tally.settled(after=installed.view, by=peers)
    settled = [] if settled_by is None else [tally.views.of(settled_by).peers]

    def judged(quorum_views: dict[int, frozenset[int]], is_reduced: bool) -> Quorum:
        expected = tally.common([peers, *quorum_views.values(), *settled])
        members = tally.count(expected)  # these peers are in all quorum views
        has_majority = members > 0 and all(
            not needs_majority
            or (
                tally.count(listed) >= majority(len(listed))
                and not (has_rivals and len(listed) - members >= majority(len(listed)))
            )
            for listed in quorum_views.values()
        )
        is_complete = has_majority and not is_reduced and members == len(expected)
        here = tally.count(peers)
        return Quorum(installed.view, peers, quorum_views, expected, has_majority, is_complete, here, is_reduced)

    quorum_views = {last.view: last.peers}
    for view, listed in _prepared(tally, last.view, record).items():
        if _may_be_in_force(view, listed, tally):
            quorum_views[view] = listed
    found = judged(quorum_views, is_reduced=False)
    if found.has_majority or record is None or record.newest.view <= last.view or record.newest.view in quorum_views:
        return found
    reduced = judged({record.newest.view: record.newest.peers}, is_reduced=True)
    return reduced if reduced.has_majority else found


def _prepared(tally: SummaryTally[Any], after: int, record: RunRecord | None) -> dict[int, frozenset[int]]:
    found = {view.view: view.peers for view in (record.prepared if record is not None else ()) if view.view > after}
    return found | {view.view: tally.views.of(view).peers for view in tally.prepared(after)}


def rebuild(
    summaries: SummaryTally[m.RecoveryReport] | Mapping[int, m.RecoveryReport],
    has_rivals: bool = True,
    record: RunRecord | None = None,
    needs_majority: bool = True,
) -> Recovered:
    tally = summaries if isinstance(summaries, SummaryTally) else SummaryTally.of(summaries)
    reports = tally.summaries
    quorum = quorum_of(tally, has_rivals, record, needs_majority)
    installed = tally.last_installed()
    assert installed is not None
    assert quorum.has_majority
    seats = {(peer, ring.group) for ring in installed.rings for peer in ring.peers if peer in quorum.expected}
    members = {peer: each for peer, each in reports.items() if (peer, each.me.group) in seats}
    others = {peer: each for peer, each in reports.items() if peer not in members}
    groups = [_group(ring, members) for ring in installed.rings]
    newer = _prepared(tally, installed.view, record)
    in_force, *possible = (RecordedView(view, listed) for view, listed in quorum.quorum_views.items())
    if quorum.is_reduced:
        in_force, possible = _in_force(installed, quorum.peers, record), [in_force]
    is_unchanged = (
        not newer
        and in_force.view == installed.view
        and all(each.installed is not None and each.installed.view == installed.view for each in members.values())
    )
    return Recovered(
        view=installed.view,
        known_view=max([installed.view, in_force.view, *newer]),
        peers=quorum.peers,
        quorum_views=quorum.quorum_views,
        members=members,
        newcomers={peer for peer, each in others.items() if each.installed is None},
        left_out={peer for peer, each in others.items() if each.installed is not None},
        missing=sorted(quorum.peers - set(members)),
        groups=[group for group in groups if group.ring],
        is_unchanged=is_unchanged and all(group.is_steady for group in groups),
        call_number=max((number for each in members.values() for number in _call_numbers(each)), default=0),
        in_force=in_force,
        possible=possible,
    )


def _call_numbers(report: m.RecoveryReport) -> list[int]:
    return [report.joined_after, *(outcome.call_number for outcome in report.outcomes)]


def _own_epoch(report: m.RecoveryReport) -> int:
    installed = report.installed
    rings = installed.rings if installed is not None else []
    return next((ring.epoch for ring in rings if ring.group == report.me.group), 0)


def _group(ring: m.Ring, members: Mapping[int, m.RecoveryReport]) -> RecoveredGroup:
    ours = {peer: members[peer] for peer in ring.peers if peer in members}
    is_steady = len(ours) == len(ring.peers) and all(
        each.is_running and _own_epoch(each) == ring.epoch for each in ours.values()
    )
    group = RecoveredGroup(ring.group, ring.epoch, list(ours), list(ring.peers), is_steady)
    for peer, each in ours.items():
        if not each.has_decided and each.installed is not None:
            group.unsettled[peer] = _own_epoch(each)
        if _own_epoch(each) == ring.epoch:
            group.is_decided = group.is_decided or each.has_decided
            group.commits.update(each.commits)
            group.aborts.update({OpRef(op.tag, op.sequence): op for op in each.aborts})
        # else: the last view has already decided these ops on all peers.
    _note_links(group, ring, ours)
    _note_group_calls(group, ours)
    return group


def _note_links(group: RecoveredGroup, ring: m.Ring, ours: Mapping[int, m.RecoveryReport]) -> None:
    is_mesh = all(each.installed is None or each.installed.is_meshed for each in ours.values())
    if is_mesh:
        return  # peers report the links that were lost since then
    group.missing = {(min(peer, other), max(peer, other)) for peer, each in ours.items() for other in each.unlinked}
    if not group.missing and len(ring.peers) > 1:
        # The links are up now, but Install declared that the group is not a mesh.
        low, high, *_ = sorted(ring.peers)
        group.missing = {(low, high)}


def _note_group_calls(group: RecoveredGroup, ours: Mapping[int, m.RecoveryReport]) -> None:
    for each in ours.values():
        for outcome in each.outcomes:
            if outcome.kind not in group.results or group.results[outcome.kind].call_number < outcome.call_number:
                group.results[outcome.kind] = outcome
    synced = {peer: each.synced for peer, each in ours.items() if each.synced is not None}
    last = max(synced.values(), default=None)
    sync = group.results.get(Kind.SYNC)
    if last is not None:
        group.revision = last[1]
        group.synced = {peer for peer, each in synced.items() if each == last}
        if sync is not None and sync.call_number == last[0] and sync.code == Result.SUCCESS:
            # Accepted peers that lack the sync's result took part in it, unless they joined later.
            group.synced |= {
                peer for peer, each in ours.items() if each.installed is not None and each.joined_after < last[0]
            }


def missed_end(report: m.RecoveryReport, recovered: Recovered) -> m.GroupCallOutcome | None:
    """Return the result of the group call that this peer waits in, if another peer received it (rule 12)."""
    kind = report.waits_in
    heard = [outcome.call_number for outcome in report.outcomes if outcome.kind == kind]
    known = [
        group.results[kind]
        for group in recovered.groups
        if kind in group.results and (kind in Kind.GLOBAL or group.number == report.me.group)
    ]
    last = max(known, key=lambda outcome: outcome.call_number, default=None)
    if last is None or report.installed is None or last.call_number <= max([*heard, report.joined_after]):
        return None
    return last


VIEWS_PER_TERM = 10**6
PEERS_PER_TERM = 10_000
"""Size of a block of peer numbers. It keeps newcomers' numbers apart from those that only the last master knew."""
TERMS = 100
SALTS = 1000
"""Number of terms and salts that `block` separates."""
NUMBERS_PER_TERM = 2**40
"""Size of a block of request numbers. Answers to a dead master never match a new request."""


@dataclass
class RecoveringPeer:
    connection: int
    host: str
    resume: m.Resume
    since: float
    asked: int = 0
    """The last term in which this peer's vote was requested."""

    @property
    def peer(self) -> int:
        return self.resume.peer

    @property
    def run(self) -> str:
        return self.resume.run


GONE = "did not come back after the loss of the master"


def take_over(
    run: str,
    term: int,
    options: MasterOptions,
    recovered: Recovered,
    survivors: Mapping[int, RecoveringPeer],
    now: float,
    name: str,
    names: Mapping[int, str],
) -> Master:
    """Return a master that leads this run. `name` is unique to this leader; `names` are the known names of peers. The
    first effects are Persist, and Resumed for all peers that continue."""
    state = _run_state(run, term, options, recovered, survivors, now, name)
    for peer in recovered.missing:
        group_number = next((group.number for group in recovered.groups if peer in group.former), 0)
        state.history.lost(now, peer, names.get(peer, ""), group_number, GONE)
    leadership = Leadership(
        state,
        recovered.in_force,
        recovered.possible,
        [QuorumView(len(peers), peers & recovered.members.keys()) for peers in recovered.quorum_views.values()],
        has_rivals=any(survivor.resume.masters > 1 for survivor in survivors.values()),
    )
    ends = {peer: missed_end(report, recovered) for peer, report in recovered.members.items()}
    master = Master(
        state,
        leadership,
        {peer: end for peer, end in ends.items() if end is not None},
        f"a peer of its site {GONE}" if recovered.missing else "",
    )
    state.outbox.append(Persist(leadership.record()))
    for survivor in survivors.values():
        state.send(survivor.connection, m.Resumed(term, options.peer_timeout_s, list(recovered.quorum_views)))
    for group in recovered.groups:
        if group.is_steady:
            _send_verdicts(state, group)
        else:
            _flush(state, group)
    how = "in the same view" if recovered.is_unchanged else "in a new view"
    without = f", without peers {recovered.missing}" if recovered.missing else ""
    state.log(options.takeover_level, f"leads run {run} in term {term}, after view {recovered.view}: {how}{without}")
    return master


def _run_state(
    run: str,
    term: int,
    options: MasterOptions,
    recovered: Recovered,
    survivors: Mapping[int, RecoveringPeer],
    now: float,
    name: str,
) -> RunState:
    threads = max(each.engine_threads for each in recovered.members.values())
    secrets = Counter(each.secret for each in recovered.members.values())
    secret = max(secrets, key=lambda each: (secrets[each], each))
    state = RunState(run, replace(options, engine_threads=threads), term, secret)
    state.now = now
    salt = crc32(name.encode())
    state.next_number = term * NUMBERS_PER_TERM + 1
    state.next_peer = block(_highest_peer(recovered), term, PEERS_PER_TERM, salt) + 1
    state.view = block(recovered.known_view, term, VIEWS_PER_TERM, salt)
    state.installed_view = recovered.view
    state.group_calls_ended = recovered.call_number
    for peer, report in sorted(recovered.members.items()):
        state.add(_member(peer, report, survivors[peer], now))
    _add_link_metrics(state, recovered, survivors)
    for group in recovered.groups:
        _add_group(state, group)
    if recovered.is_unchanged:
        state.introduced = set(recovered.members)
    else:
        state.change.is_renewing = True
    state.lost = [(peer, GONE) for peer in recovered.missing]
    return state


def block(heard: int, term: int, size: int, salt: int) -> int:
    """Return the number above which a new leader allocates numbers. It exceeds the known number `heard` and starts a
    block of `size` numbers that is unique to the term (modulo TERMS) and the `salt` (modulo SALTS)."""
    period = SALTS * TERMS * size
    begin = heard - heard % period + (salt % SALTS * TERMS + (term - 1) % TERMS) * size
    return begin if begin > heard else begin + period


def _highest_peer(recovered: Recovered) -> int:
    return max({*recovered.peers, *recovered.members, *recovered.newcomers, *recovered.left_out})


def _member(peer: int, report: m.RecoveryReport, survivor: RecoveringPeer, now: float) -> Member:
    me = report.me
    # A loopback address denotes the dead master's machine, so drop it.
    known = [host for host in me.hosts if not (host.startswith("127.") or host == "::1")]
    hosts = list(dict.fromkeys([*known, survivor.host]))
    hello = m.Hello(
        m.PROTOCOL_VERSION,
        __version__,
        me.group,
        hosts,
        me.port,
        me.connections,
        me.name,
        site=report.site,
        site_size=report.site_size,
        masters=survivor.resume.masters,
        master_timeout_s=survivor.resume.master_timeout_s,
        run_name=survivor.resume.run_name,
    )
    is_accepted = report.installed is not None
    return Member(peer, survivor.connection, hello, hosts, survivor.host, now, accepted=is_accepted, has_heartbeat=True)


def _add_link_metrics(state: RunState, recovered: Recovered, survivors: Mapping[int, RecoveringPeer]) -> None:
    members = recovered.members
    found = [
        (survivors[peer].since - age_s, metric.link_of(peer), metric)
        for peer, report in members.items()
        for metric, age_s in report.link_metrics
        if metric.peer in members and metric.peer != peer
    ]
    for at, link, metric in sorted(found, key=lambda each: each[0]):  # between two hosts, the metric added last counts
        state.link_metrics.measured(link, metric.bytes_per_s, metric.round_trip_us / 1e6, at)


def _add_group(state: RunState, found: RecoveredGroup) -> None:
    group = state.groups[found.number] = Group(found.number, list(found.ring), found.epoch)
    group.accepted = sum(state.members[peer].accepted for peer in found.ring)
    pairs = topology.linked_pairs(found.former)
    group.missing = pairs.intersection(found.missing)
    group.linked = pairs - group.missing
    group.is_mutual = group.is_meshed
    group.ledger = Ledger(()) if found.is_decided else Ledger(found.former, group.is_mutual)
    group.running = found.is_steady
    group.revision = found.revision
    group.synced = found.synced & set(found.ring)
    group.ledger.forget([*found.commits, *found.aborts])
    if not found.is_steady:
        group.commits = sorted(found.commits)
        group.aborts = dict(found.aborts)


def _send_verdicts(state: RunState, found: RecoveredGroup) -> None:
    for peer in found.ring:
        commits = [op for op in sorted(found.commits) if peer in participants(op.tag, found.former)]
        if commits:
            state.send_to(peer, m.OpsCommit(found.epoch, commits))
        for op in found.aborts.values():
            if peer in participants(op.tag, found.former):
                state.send_to(peer, m.OpAbort(found.epoch, op.tag, op.sequence, op.code, op.reason))


def _flush(state: RunState, found: RecoveredGroup) -> None:
    group = state.groups[found.number]
    group.changed = True
    group.flush = state.number()
    group.awaiting_flush = set(found.unsettled)
    for peer, epoch in found.unsettled.items():
        state.request(peer, m.Flush(group.flush, epoch))


Summary = m.PreVote | m.RecoveryReport
VIEWS_MAX = 64
COUNTS_MAX = 64
"""Limits of the remembered views and counts. Only forged views exceed them; a forgotten count is recomputed."""

S = TypeVar("S", bound=Summary)
View = TypeVar("View", m.InstalledView, m.PreparedView)


class Rings:
    def __init__(self, rings: list[m.Ring]) -> None:
        self.rings = rings
        self.groups_of: dict[int, list[int]] = {}
        for ring in rings:
            for peer in dict.fromkeys(ring.peers):
                self.groups_of.setdefault(peer, []).append(ring.group)
        self.peers = frozenset(self.groups_of)
        self.epochs = {ring.group: ring.epoch for ring in rings}
        self.are_peers = all(peer > 0 for peer in self.peers)
        """Whether all numbers in the rings are valid peer numbers."""


class Views:
    """The rings of the last VIEWS_MAX different views."""

    def __init__(self) -> None:
        self._known: dict[int, list[Rings]] = {}
        """Rings by view number. Only forged views share a number."""
        self._order: deque[int] = deque()

    def of(self, view: m.InstalledView | m.PreparedView) -> Rings:
        """Return the rings of a view. Equal rings from several peers become one object."""
        known = self._known.setdefault(view.view, [])
        for rings in known:
            if rings.rings is view.rings:
                return rings
        for rings in known:
            if rings.rings == view.rings:
                return rings
        found = Rings(view.rings)
        known.append(found)
        self._order.append(view.view)
        if len(self._order) > VIEWS_MAX:
            oldest = self._order.popleft()
            del self._known[oldest][0]
            if not self._known[oldest]:
                del self._known[oldest]
        return found

    def shared(self, summary: S) -> S:
        """Return the same summary with shared rings."""
        installed, prepared = summary.installed, summary.prepared
        return msgspec.structs.replace(
            summary,
            installed=None if installed is None else self._shared(installed),
            prepared=None if prepared is None else self._shared(prepared),
            answered=[self._shared(view) for view in summary.answered],
        )

    def _shared(self, view: View) -> View:
        return msgspec.structs.replace(view, rings=self.of(view).rings)


@dataclass
class _Count:
    """Counts for one view: the connected peers, and those among them whose summaries allow the view to be in force."""

    here: int = 0
    answered: int = 0


@dataclass
class SummaryTally(Generic[S]):
    """The last summary of each peer, with counts that are updated incrementally, so that a decision costs the same for
    any number of peers. Tallies may share `views`. Of two views with the same number, the first counts."""

    views: Views = field(default_factory=Views)
    summaries: dict[int, S] = field(default_factory=dict)
    _installed: dict[int, dict[int, m.InstalledView]] = field(default_factory=dict)
    """The views that peers report as installed, by view and peer; `_reported` and `_settled` are keyed alike."""
    _reported: dict[int, dict[int, m.PreparedView]] = field(default_factory=dict)
    _settled: dict[int, dict[int, m.PreparedView]] = field(default_factory=dict)
    _counts: dict[tuple[int, frozenset[int]], _Count] = field(default_factory=dict)
    _common: dict[tuple[frozenset[int], ...], frozenset[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, summaries: Mapping[int, S]) -> SummaryTally[S]:
        tally: SummaryTally[S] = cls()
        for peer, summary in summaries.items():
            tally.add(peer, summary)
        return tally

    def add(self, peer: int, summary: S) -> None:
        """Replace a peer's summary."""
        self.discard(peer)
        self.summaries[peer] = summary
        if summary.installed is not None:
            self._installed.setdefault(summary.installed.view, {})[peer] = summary.installed
        for view in _prepared_views(summary):
            if view.view not in self._reported:
                self._forget_counts(view.view)
            self._reported.setdefault(view.view, {})[peer] = view
        if summary.has_decided and summary.prepared is not None:
            self._settled.setdefault(summary.prepared.view, {})[peer] = summary.prepared
        self._count(peer, summary, 1)

    def discard(self, peer: int) -> None:
        summary = self.summaries.pop(peer, None)
        if summary is None:
            return
        self._count(peer, summary, -1)
        if summary.installed is not None:
            _forget(self._installed, summary.installed.view, peer)
        for view in _prepared_views(summary):
            _forget(self._reported, view.view, peer)
            if view.view not in self._reported:
                self._forget_counts(view.view)
        if summary.has_decided and summary.prepared is not None:
            _forget(self._settled, summary.prepared.view, peer)

    def _count(self, peer: int, summary: S, by: int) -> None:
        for (view, peers), count in self._counts.items():
            if peer in peers:
                count.here += by
                count.answered += by if self._leaves_open(peer, summary, view) else 0

    def _forget_counts(self, view: int) -> None:
        """Forget the counts of a view whose rings have become known or unknown."""
        for key in [key for key in self._counts if key[0] == view]:
            del self._counts[key]

    def _leaves_open(self, peer: int, summary: S, view: int) -> bool:
        """Return whether a view may be in force according to this peer's summary: the peer has acknowledged it, or the
        view keeps the peer's ring and the peer knows no newer view."""
        told = _prepared_views(summary)
        if any(each.view >= view for each in told):
            return any(each.view == view and each.answered for each in told)
        if summary.installed is None or view not in self._reported:
            return False
        before = self.views.of(summary.installed)
        after = self.views.of(next(iter(self._reported[view].values())))
        groups = before.groups_of.get(peer, [])
        return bool(groups) and all(
            group in after.groups_of.get(peer, []) and after.epochs[group] == before.epochs[group] for group in groups
        )

    @property
    def peers(self) -> KeysView[int]:
        return self.summaries.keys()

    def last_installed(self) -> m.InstalledView | None:
        return next(iter(self._installed[max(self._installed)].values())) if self._installed else None

    def prepared(self, after: int) -> list[m.PreparedView]:
        """Return the prepared views newer than `after`, each as reported by one of the peers."""
        return [next(iter(told.values())) for view, told in self._reported.items() if view > after]

    def settled(self, after: int, by: frozenset[int]) -> m.PreparedView | None:
        """Return the newest view after `after` that has decided the ops of a peer in `by`, or None."""
        for view in sorted((view for view in self._settled if view > after), reverse=True):
            for peer, prepared in self._settled[view].items():
                if peer in by:
                    return prepared
        return None

    def count(self, peers: frozenset[int]) -> int:
        return self._counted(0, peers).here

    def have_answered(self, view: int, peers: frozenset[int]) -> bool:
        """Return whether the summaries of all these peers allow a view to be in force."""
        count = self._counted(view, peers)
        return count.answered == count.here

    def _counted(self, view: int, peers: frozenset[int]) -> _Count:
        count = self._counts.get((view, peers))
        if count is None:
            if len(self._counts) >= COUNTS_MAX:
                self._counts.clear()
            here = [(peer, summary) for peer, summary in self.summaries.items() if peer in peers]
            answered = sum(self._leaves_open(peer, summary, view) for peer, summary in here)
            count = self._counts[view, peers] = _Count(len(here), answered)
        return count

    def common(self, sets: Iterable[frozenset[int]]) -> frozenset[int]:
        key = tuple(sets)
        found = self._common.get(key)
        if found is None:
            if len(self._common) >= COUNTS_MAX:
                self._common.clear()
            found = frozenset.intersection(*key)
            found = next((each for each in key if each == found), found)  # comparing identical sets is faster
            self._common[key] = found
        return found


def _prepared_views(summary: Summary) -> list[m.PreparedView]:
    return summary.answered if summary.prepared is None else [summary.prepared, *summary.answered]


def _forget(found: dict[int, dict[int, View]], view: int, peer: int) -> None:
    told = found.get(view, {})
    told.pop(peer, None)
    if not told:
        found.pop(view, None)
