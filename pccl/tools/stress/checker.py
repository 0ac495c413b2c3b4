"""Compares the reports of all peers with each other and with the library's guarantees.

Reports from one peer arrive in order; reports from different peers arrive in any order. A step, named by (group,
lineage, revision), is judged once all peers that synced for it have reported on it or ended, and SETTLE_S have passed.
A member is one session of one peer. A peer that does not know the outcome of its own op leaves its session in the
middle of a step; the other peers' results may or may not contain its contribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from pccl.tools.stress.plan import Cut, Joined, Message, Outcome, SessionOver, Stepped, Synced, SyncFailed, Trouble
from pccl.tools.stress.values import TAGS

SETTLE_S = 5.0
"""The maximum delay of a report in a pipe relative to other peers' reports."""
EXCUSED_S = 6.0
"""A peer may still be evicted for this long after a fault, because connections take time to recover."""

Member: TypeAlias = tuple[int, int]
"""(peer, session)"""
StepName: TypeAlias = tuple[int, int, int]
"""(group, lineage, revision)"""


@dataclass
class Counts:
    steps: int = 0
    steps_cut_short: int = 0
    """Steps that a peer ended alone."""
    ops_committed: int = 0
    ops_aborted: int = 0
    """Aborts that the peers themselves retried."""
    results_checked: int = 0
    syncs: int = 0
    sync_failures: int = 0
    sync_bytes: int = 0
    sessions: int = 0
    cuts: int = 0
    evictions: int = 0
    sessions_left: int = 0
    """Sessions left because the outcome of a call was unknown."""
    longest_step_s: float = 0.0
    participants_max: int = 0


@dataclass
class _Peer:
    slot: int
    group: int
    session: int = 0
    is_admitted: bool = False
    is_excused: bool = False
    """The peer was frozen or cut off, or may have lost its master, and has completed no step since."""
    excused_at: float = 0.0
    synced: Synced | None = None
    """The last sync of this session."""
    stepped: Stepped | None = None
    """The last step of this session, if it came after the last sync."""

    @property
    def is_in_step(self) -> bool:
        return self.synced is not None and self.stepped is None


@dataclass
class _Step:
    updated_at: float
    synced: dict[Member, Synced] = field(default_factory=dict)
    outcomes: dict[Member, dict[int, Outcome]] = field(default_factory=dict)
    slots: dict[int, list[Member]] = field(default_factory=dict)
    open: set[Member] = field(default_factory=set)


class Checker:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self.counts = Counts()
        self._peers: dict[int, _Peer] = {}
        self._steps: dict[StepName, _Step] = {}

    # Input.

    def started(self, peer: int, slot: int, group: int) -> None:
        self._peers[peer] = _Peer(slot, group)

    def excuse(self, peer: int, now: float) -> None:
        """Record that a peer may now be evicted, for example because it was frozen."""
        known = self._peers[peer]
        known.is_excused, known.excused_at = True, now

    def excuse_all(self, now: float) -> None:
        """Record that every peer may now be evicted, because the master was killed or a standby leads."""
        for peer in self._peers:
            self.excuse(peer, now)

    def ended(self, peer: int, now: float) -> None:
        self._close(peer, now)
        del self._peers[peer]

    def receive(self, peer: int, message: Message, now: float) -> None:
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
        """Judge the complete steps, or all steps if the run is over and every peer has ended."""
        for name, step in list(self._steps.items()):
            if is_over or (not step.open and now >= step.updated_at + SETTLE_S):
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
                    f"was in the last sync, but its state went from revision {before.revision} of lineage "
                    f"{before.lineage} to revision {message.revision} of lineage {message.lineage}",
                )
            elif message.revision != message.offered_revision or message.rx_bytes:
                self._problem(
                    peer,
                    f"was in the last sync and did every step since, but had to be brought from revision "
                    f"{message.offered_revision} to {message.revision} with {message.rx_bytes} bytes",
                )
        known.synced, known.stepped = message, None
        step = self._steps.setdefault((known.group, message.lineage, message.revision), _Step(now))
        member = peer, known.session
        step.updated_at = now
        step.synced[member] = message
        step.open.add(member)
        members = step.slots.setdefault(known.slot, [])
        if member not in members:
            members.append(member)

    def _sync_failed(self, peer: int, message: SyncFailed) -> None:
        self.counts.sync_failures += 1
        if message.is_spoiled and self._peers[peer].synced is not None:
            self._problem(peer, f"was in the last sync but was overwritten by a failed one: {message.reason}")

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
        step.updated_at = now
        step.open.discard(member)
        if not message.is_idle:
            step.outcomes[member] = {outcome.tag: outcome for outcome in message.outcomes}
        if message.is_whole and sorted(step.outcomes[member]) != list(range(TAGS)):
            self._problem(peer, f"a whole step without all ops: {message}")
        if message.outcomes and now - message.seconds > known.excused_at + EXCUSED_S:
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
        # A newcomer is not in the run yet; if all other peers are gone, it must reconnect.
        if known.is_admitted and not known.is_excused and not message.is_own:
            self._problem(peer, f"was evicted, but was neither frozen nor cut off: {message.reason}")
        self._close(peer, now)
        known.is_excused = known.is_admitted = False
        known.synced = known.stepped = None

    def _close(self, peer: int, now: float) -> None:
        known = self._peers[peer]
        if known.synced is None or not known.is_in_step:
            return
        step = self._steps[known.group, known.synced.lineage, known.synced.revision]
        step.open.discard((peer, known.session))
        step.updated_at = now

    # All peers' reports of one step.

    def _judge(self, name: StepName, step: _Step) -> None:
        digests = {synced.digest for synced in step.synced.values()}
        if len(digests) > 1:
            found = {member: synced.digest for member, synced in step.synced.items()}
            self._problem(None, f"{_step(name)}: the state differs after the sync: {found}")
        for tag in range(TAGS):
            outcomes = {member: each[tag] for member, each in step.outcomes.items() if tag in each}
            if not outcomes:
                continue
            self.counts.ops_committed += 1
            for problem in self._judge_op(step, outcomes):
                self._problem(None, f"{_step(name)}, op {tag}: {problem}")

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
                    f"{_member(member)} reported {outcome.world_size} peers, but slots {outcome.participants} are "
                    f"in the result"
                )
        participants = {slot for outcome in outcomes.values() for slot in outcome.participants}
        for slot in sorted(participants):
            if slot not in step.slots:
                yield f"slot {slot} is in the result, but no peer in that slot was in the preceding sync"
            for member in step.slots.get(slot, []):
                if member in step.outcomes and member not in outcomes:
                    yield f"{_member(member)} is in the result, but got the verdict abort"

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
