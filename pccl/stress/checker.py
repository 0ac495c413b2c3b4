"""Holds the reports of all peers against each other and against the library's promises.

Fed with reports in the order in which each peer made them; reports of different peers may come in any order. So
a step, named by (group, lineage, revision), is judged only once everybody who synced for it has told what became of it,
or has ended, and nothing more was heard of it for SETTLE_S. What one peer's reports show by themselves is judged at
once.

A *member* is one session of one peer: between connect() and an eviction, or the end. A peer that cannot know how an op
of its own has ended leaves its session in the middle of a step, so that both are allowed: the others may have its part
in their results, or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from pccl.stress.messages import Cut, Joined, Message, Outcome, SessionOver, Stepped, Synced, SyncFailed, Trouble
from pccl.stress.values import TAGS

SETTLE_S = 5.0
"""The longest time that a report may be under way in a pipe while later ones of other peers have come."""
EXCUSED_S = 6.0
"""The time after a freeze or a partition for which a peer may still be missed: connections need a while to go on."""

Member: TypeAlias = tuple[int, int]
"""(peer, session)"""
StepName: TypeAlias = tuple[int, int, int]
"""(group, lineage, revision)"""


@dataclass
class Counts:
    """Counts of what has happened so far, over all peers."""

    steps: int = 0
    """Steps of a peer in which all ops were committed."""
    steps_cut_short: int = 0
    """Steps in which a peer was left alone."""
    ops_committed: int = 0
    """Ops, each counted once however many peers took part."""
    ops_aborted: int = 0
    """Aborts that a caller was told of: once for each peer and attempt, where peers retry by hand."""
    results_checked: int = 0
    syncs: int = 0
    sync_failures: int = 0
    sync_bytes: int = 0
    sessions: int = 0
    cuts: int = 0
    evictions: int = 0
    sessions_left: int = 0
    """The sessions left by peers that could not know how a call of theirs had ended."""
    longest_step_s: float = 0.0
    participants_max: int = 0


@dataclass
class _Peer:
    slot: int
    group: int
    session: int = 0
    is_admitted: bool = False
    is_partitioned: bool = False
    """Whether the peer may lose its place because some are cut off from others."""
    is_excused: bool = False
    """Whether the peer was frozen or cut off, or may have lost its master for good, and has made no step since that
    shows that it has kept its place."""
    excused_at: float = 0.0
    """The last time at which that was so."""
    synced: Synced | None = None
    """The last sync of this session."""
    stepped: Stepped | None = None
    """The last step of this session, if it came after the last sync."""

    @property
    def is_in_step(self) -> bool:
        return self.synced is not None and self.stepped is None


@dataclass
class _Step:
    heard_at: float
    synced: dict[Member, Synced] = field(default_factory=dict)
    outcomes: dict[Member, dict[int, Outcome]] = field(default_factory=dict)
    slots: dict[int, list[Member]] = field(default_factory=dict)
    open: set[Member] = field(default_factory=set)


class Checker:
    """`problems` are sentences for people; empty as long as every promise was kept."""

    def __init__(self, ops: int = TAGS) -> None:
        """`ops` of a step."""
        self._ops = ops
        self.problems: list[str] = []
        self.counts = Counts()
        self._peers: dict[int, _Peer] = {}
        self._steps: dict[StepName, _Step] = {}

    # What is told.

    def started(self, peer: int, slot: int, group: int) -> None:
        self._peers[peer] = _Peer(slot, group)

    def excuse(self, peer: int, now: float) -> None:
        """Note that a peer may lose its place, as one that was stopped for a while."""
        known = self._peers[peer]
        known.is_excused, known.excused_at = True, now

    def partitioned(self, peer: int, may_be_lost: bool, now: float) -> None:
        """Whether it may be evicted for as long as nothing else is said, because some are cut off from others."""
        self._peers[peer].is_partitioned = may_be_lost
        if may_be_lost:
            self.excuse(peer, now)

    def ended(self, peer: int, now: float) -> None:
        """Nothing more will be heard of it."""
        self._close(peer, now)
        del self._peers[peer]

    def heard(self, peer: int, message: Message, now: float) -> None:
        match message:
            case Joined():
                self._joined(peer, message)
            case Synced():
                self._synced(peer, message, now)
            case SyncFailed():
                self._sync_failed(peer, message)
            case Stepped():
                self._stepped(peer, message, now)
            case SessionOver():
                self._session_over(peer, message, now)
            case Cut():
                self.counts.cuts += 1
            case Trouble():
                self._problem(peer, message.what)
            case _:
                pass

    def settle(self, now: float, is_over: bool = False) -> None:
        """Judges the steps that are complete; all of them when the run is over and every peer has ended."""
        for name, step in list(self._steps.items()):
            if is_over or (not step.open and now >= step.heard_at + SETTLE_S):
                del self._steps[name]
                self._judge(name, step)

    # One peer's reports.

    def _joined(self, peer: int, message: Joined) -> None:
        self.counts.sessions += 1
        known = self._peers[peer]
        known.session, known.is_admitted = message.session, True

    def _synced(self, peer: int, message: Synced, now: float) -> None:
        known = self._peers[peer]
        self.counts.syncs += 1
        self.counts.sync_bytes += message.rx_bytes
        if known.is_in_step:
            self._problem(peer, f"synced again in the middle of a step: {message}")
        before = known.synced
        if before is not None:
            if message.lineage != before.lineage or message.revision < before.revision:
                self._problem(
                    peer,
                    f"was in the last sync, and its state went from revision {before.revision} of lineage "
                    f"{before.lineage} to revision {message.revision} of lineage {message.lineage}",
                )
            elif message.revision != message.offered_revision or message.rx_bytes:
                self._problem(
                    peer,
                    f"was in the last sync and did every step since, and had to be brought from revision "
                    f"{message.offered_revision} to {message.revision} with {message.rx_bytes} bytes",
                )
        known.synced, known.stepped = message, None
        step = self._steps.setdefault((known.group, message.lineage, message.revision), _Step(now))
        member = peer, known.session
        step.heard_at = now
        step.synced[member] = message
        step.open.add(member)
        members = step.slots.setdefault(known.slot, [])
        if member not in members:
            members.append(member)

    def _sync_failed(self, peer: int, message: SyncFailed) -> None:
        self.counts.sync_failures += 1
        if message.is_spoiled and self._peers[peer].synced is not None:
            self._problem(peer, f"was in the last sync and was overwritten by one that failed: {message.reason}")

    def _stepped(self, peer: int, message: Stepped, now: float) -> None:
        known = self._peers[peer]
        before = known.synced
        if before is None or known.stepped is not None:
            self._problem(peer, f"a step without a sync: {message}")
            return
        assert (before.lineage, before.revision) == (message.lineage, message.revision)
        known.stepped = message
        member = peer, known.session
        step = self._steps[known.group, message.lineage, message.revision]
        step.heard_at = now
        step.open.discard(member)
        if not message.is_idle:
            step.outcomes[member] = {outcome.number: outcome for outcome in message.outcomes}
        if message.is_whole and sorted(step.outcomes[member]) != list(range(self._ops)):
            self._problem(peer, f"a whole step without all ops: {message}")
        if message.outcomes and not known.is_partitioned and now - message.seconds > known.excused_at + EXCUSED_S:
            known.is_excused = False
        counts = self.counts
        counts.steps += message.is_whole
        counts.steps_cut_short += not message.is_whole and not message.is_idle
        counts.ops_aborted += message.retries
        counts.results_checked += len(message.outcomes)
        counts.longest_step_s = max(counts.longest_step_s, message.seconds)

    def _session_over(self, peer: int, message: SessionOver, now: float) -> None:
        known = self._peers[peer]
        self.counts.evictions += not message.is_own
        self.counts.sessions_left += message.is_own
        # A newcomer has no place yet: where all others are gone, it is told to begin anew.
        if known.is_admitted and not known.is_excused and not message.is_own:
            self._problem(peer, f"lost its place without having been frozen or cut off: {message.reason}")
        self._close(peer, now)
        known.is_excused = known.is_partitioned
        known.is_admitted = False
        known.synced = known.stepped = None

    def _close(self, peer: int, now: float) -> None:
        known = self._peers[peer]
        if known.synced is None or not known.is_in_step:
            return
        step = self._steps[known.group, known.synced.lineage, known.synced.revision]
        step.open.discard((peer, known.session))
        step.heard_at = now

    # All peers' reports of one step.

    def _judge(self, name: StepName, step: _Step) -> None:
        digests = {synced.digest for synced in step.synced.values()}
        if len(digests) > 1:
            found = {member: synced.digest for member, synced in step.synced.items()}
            self._problem(None, f"{_step(name)}: the state differs after the sync: {found}")
        for number in range(self._ops):
            outcomes = {member: each[number] for member, each in step.outcomes.items() if number in each}
            if not outcomes:
                continue
            self.counts.ops_committed += 1
            for problem in self._judge_op(step, outcomes):
                self._problem(None, f"{_step(name)}, op {number}: {problem}")

    def _judge_op(self, step: _Step, outcomes: dict[Member, Outcome]) -> Iterator[str]:
        slot_of = {member: slot for slot, members in step.slots.items() for member in members}
        if len({(tuple(each.participants), each.digest) for each in outcomes.values()}) > 1:
            found = {_member(member): (each.participants, each.digest) for member, each in outcomes.items()}
            yield f"committed with different results (participants, digest): {found}"
        for member, outcome in outcomes.items():
            self.counts.participants_max = max(self.counts.participants_max, len(outcome.participants))
            if slot_of[member] not in outcome.participants:
                yield f"{_member(member)} in slot {slot_of[member]} is not in its own result: {outcome.participants}"
            if outcome.world_size not in (0, len(outcome.participants)):
                yield (
                    f"{_member(member)} was told of {outcome.world_size} peers, but slots {outcome.participants} are "
                    f"in the result"
                )
        participants = {slot for outcome in outcomes.values() for slot in outcome.participants}
        for slot in sorted(participants):
            if slot not in step.slots:
                yield f"slot {slot} is in the result, but nobody in it was in the sync before"
            for member in step.slots.get(slot, []):
                if member in step.outcomes and member not in outcomes:
                    yield f"{_member(member)} is in the result, but was told that the op was aborted"

    def _problem(self, peer: int | None, what: str) -> None:
        if peer is None:
            self.problems.append(what)
            return
        known = self._peers[peer]
        self.problems.append(f"{_member((peer, known.session))} (slot {known.slot}, group {known.group}): {what}")


def _step(name: StepName) -> str:
    group, lineage, revision = name
    return f"group {group}, lineage {lineage}, revision {revision}"


def _member(member: Member) -> str:
    peer, session = member
    return f"peer {peer}" if session <= 1 else f"peer {peer} in its session {session}"
