"""Detects which group calls are complete and which are deadlocked.

A peer waits in one group call at a time. Ended calls are numbered, so that a recovery report after the death of a
master identifies the call that a peer waits in.

1  A call is complete when all accepted peers of the run wait in it, or for sync_shared_state those of the group. Lost
   peers no longer count.
2  A call that ended under an earlier master ends in the same way for a peer that has not received the result.
3  Calls are deadlocked if the peers of a group or of the run all wait, but in different calls, or if one peer waits in
   a call while another has long waited in an op that the first has not launched. Then are_peers_pending ends with a
   `PendingAnswer` that describes the others' calls, so that its caller can join their update_topology. If no peer is
   in are_peers_pending, the calls and the op fail with INVALID_USAGE and a list of the waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.completion import callers_tag, tag_named
from pccl.protocol.master.admission import Admission
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.ring import RingChange
from pccl.protocol.master.run_state import Group, Member, OpenAbortVote, RunState, Sync, Wait
from pccl.protocol.master.verdicts import OpVerdicts
from pccl.protocol.messages import Kind, OpRef, PendingAnswer, SyncOffer, TensorOffer
from pccl.types import Result, SharedStateSyncStrategy

OVER_S = 1.0
"""The time after which a waiting op of other peers ends an are_peers_pending. Peers report an op only after its
completion, so the next call of a faster peer may arrive first."""


class GroupCalls:
    def __init__(
        self,
        state: RunState,
        admission: Admission,
        verdicts: OpVerdicts,
        link_failures: LinkFailures,
        ring_change: RingChange,
        evict: Callable[[int, str, Result], None],
        missed_ends: Mapping[int, m.GroupCallOutcome] | None = None,
    ) -> None:
        """`missed_ends` maps peers to the result of the group call that they wait in, if it ended under an earlier
        master."""
        self._state = state
        self._waiting: Counter[str] = Counter()
        self._admission = admission
        self._verdicts = verdicts
        self._link_failures = link_failures
        self._ring_change = ring_change
        self._evict = evict
        self._missed_ends = dict(missed_ends or {})
        self.is_updating = False

    # Messages from peers.

    def enter(self, member: Member, message: m.GroupCall) -> None:
        if message.kind not in Kind.ALL or (message.kind == Kind.SYNC) != (message.offer is not None):
            self._evict(member.peer, f"malformed group call {message.kind!r}", Result.INVALID_USAGE)
        elif member.wait is not None:
            self._evict(member.peer, "a group call out of turn", Result.INVALID_USAGE)
        else:
            member.wait = Wait(message.call, message.kind, message.offer, message.open_ops, self._state.now)
            self._count(member, message.kind, 1)

    def cancel(self, member: Member, message: m.GroupCallCancel) -> None:
        wait = member.wait
        if wait is None or wait.call != message.call:
            return
        begun = (
            (wait.kind == Kind.UPDATE_TOPOLOGY and self.is_updating)
            or (wait.kind == Kind.OPTIMIZE_TOPOLOGY and self._ring_change.is_under_way)
            or (wait.kind == Kind.SYNC and self._state.group_of(member).sync is not None)
            or member.peer in self._missed_ends
        )
        if not begun:
            self._answer(member, Result.TIMEOUT, "cancelled by its caller")

    def forget(self, member: Member) -> None:
        self._missed_ends.pop(member.peer, None)
        if member.wait is not None:
            self._count(member, member.wait.kind, -1)

    def _answer(self, member: Member, code: Result, reason: str = "", value: int = 0, number: int = 0) -> None:
        assert member.wait is not None
        self._state.send(member.connection, m.GroupCallResult(member.wait.call, code, reason, value, number))
        self._count(member, member.wait.kind, -1)
        member.wait = None

    def _finish(
        self, members: Iterable[Member], kind: str, code: Result = Result.SUCCESS, reason: str = "", value: int = 0
    ) -> None:
        self._state.group_calls_ended += 1
        for member in members:
            if member.wait is not None and member.wait.kind == kind:
                self._answer(member, code, reason, value, self._state.group_calls_ended)

    def _waits_of(self, peers: Iterable[int]) -> dict[int, Wait]:
        found = {peer: self._state.members[peer].wait for peer in peers}
        return {peer: wait for peer, wait in found.items() if wait is not None}

    def _count(self, member: Member, kind: str, change: int) -> None:
        for waiting in (self._waiting, self._state.group_of(member).waiting):
            waiting[kind] += change
            if not waiting[kind]:
                del waiting[kind]

    # Complete calls.

    def step(self) -> bool:
        state = self._state
        if not state.accepted_count:
            self._ring_change.forget_all()
            return False
        if state.accepted_count < sum(len(group.ring) for group in state.groups.values()):
            # Peers whose view is not installed yet take part in the next call.
            return False
        if any(state.members[peer].wait is not None for peer in self._missed_ends):
            # A call that has ended must not be mistaken for a new one, so all other calls wait too.
            if state.is_changing:
                return False
            if self._send_missed_ends():
                return True
        kind = next((kind for kind, number in self._waiting.items() if number == state.accepted_count), None)
        if kind == Kind.ARE_PEERS_PENDING:
            self._finish_all(kind, value=len(self._admission.admissible))
            return True
        if kind == Kind.UPDATE_TOPOLOGY and not state.is_changing and not self.is_updating:
            admissible = set(self._admission.admissible)
            if admissible:
                self.is_updating = True
                state.change.admitting = admissible
            else:
                self._finish_all(kind)
            return True
        if kind == Kind.OPTIMIZE_TOPOLOGY and not state.is_changing:
            is_over = self._ring_change.step()
            if is_over:
                self._finish_all(kind)
            return is_over is not None
        return self._advance_syncs()

    def view_installed(self) -> None:
        if self.is_updating:
            self.is_updating = False
            self._finish_all(Kind.UPDATE_TOPOLOGY)

    def _send_missed_ends(self) -> bool:
        progress = False
        for peer, end in list(self._missed_ends.items()):
            member = self._state.members[peer]
            if member.wait is not None:
                del self._missed_ends[peer]
                if member.wait.kind == end.kind:
                    self._answer(member, Result(end.code), end.reason, end.value, end.call_number)
                    progress = True
        return progress

    def _finish_all(self, kind: str, value: int = 0) -> None:
        for group in self._state.groups.values() if kind in Kind.EXCLUSIVE else ():
            self._verdicts.renew_at_rest(group)
        self._finish(self._state.members.values(), kind, value=value)

    # Deadlocked calls.

    def deadlines(self) -> list[float]:
        waits = (
            wait
            for group in self._state.groups.values()
            if group.running and group.ledger.stalled and group.waiting[Kind.ARE_PEERS_PENDING]
            for wait in self._waits_of(group.ring).values()
        )
        return [
            wait.since + OVER_S
            for wait in waits
            if wait.kind == Kind.ARE_PEERS_PENDING and not self._is_past(wait, OVER_S)
        ]

    def _is_past(self, wait: Wait, delay_s: float) -> bool:
        return self._state.now >= wait.since + delay_s  # as `deadlines` adds, since subtracting may round differently

    def end_deadlocked(self) -> None:
        if self._state.is_changing or self.is_updating or self._ring_change.is_under_way:
            return
        while self._end_first_deadlocked():
            pass

    def _end_first_deadlocked(self) -> bool:
        state = self._state
        for group in state.groups.values():
            waiting = group.waiting.total()
            if not waiting:
                continue
            if waiting == len(group.ring) and waiting not in group.waiting.values():
                self._end_all(group.ring)
                return True
            stalled = group.ledger.stalled.items() if group.running else ()
            if any(self._end_behind(group, op, stuck) for op, stuck in list(stalled)):
                return True
        if 0 < state.accepted_count == sum(self._waiting[kind] for kind in Kind.GLOBAL):
            # If they were all in the same call, it would be complete.
            self._end_all(state.accepted)
            return True
        return False

    def _listing(self, waits: Mapping[int, Wait]) -> str:
        members = self._state.members
        return ", ".join(f"{members[peer]} in {wait.kind}" for peer, wait in sorted(waits.items()))

    def _end_all(self, peers: Iterable[int]) -> None:
        waits = self._waits_of(peers)
        others = {wait.kind for wait in waits.values()} - {Kind.ARE_PEERS_PENDING}
        answer = PendingAnswer.ADMITTING if others == {Kind.UPDATE_TOPOLOGY} else PendingAnswer.ELSEWHERE
        self._end(waits, f"these calls can never complete: {self._listing(waits)}", answer)

    def _end_behind(self, group: Group, op: OpRef, stuck: set[int]) -> bool:
        """End the group calls of peers that have not launched an op of the waiting `stuck` peers. Return False if there
        are no such calls."""
        waits = self._behind(group, op, stuck)
        if not waits or op in group.votes:
            return False
        members = ", ".join(str(self._state.members[peer]) for peer in sorted(stuck))
        what = f"{members} in the op with {tag_named(callers_tag(op.tag))}, which the others never launched"
        reason = f"these calls cannot meet: {what}; {self._listing(waits)}"
        if all(wait.kind in Kind.EXCLUSIVE for wait in waits.values()):
            if completion.is_mutual(op.tag, group.is_mutual):
                # The peers may have launched the op and completed it by themselves.
                self._verdicts.call_vote(group, op, Result.INVALID_USAGE, reason, is_deadlocked=True)
                return False
            self._verdicts.abort(group, op, Result.INVALID_USAGE, reason, without=waits)
        self._end(waits, reason)
        return True

    def abort_deadlocked(self, group: Group, op: OpRef, vote: OpenAbortVote) -> None:
        """Abort a deadlocked op after its abort vote has shown that no peer has committed it."""
        waits = self._behind(group, op, group.ledger.stalled.get(op, set()))
        waits = {peer: wait for peer, wait in waits.items() if wait.kind in Kind.EXCLUSIVE}
        self._verdicts.abort(group, op, vote.code, vote.reason, without=waits)
        if waits:
            self._end(waits, vote.reason)

    def _behind(self, group: Group, op: OpRef, stuck: set[int]) -> dict[int, Wait]:
        delay_s = OVER_S if completion.is_mutual(op.tag, group.is_mutual) else 0.0
        return {
            peer: wait
            for peer, wait in self._waits_of(group.participants(op)).items()
            if peer not in stuck
            and (
                wait.kind in Kind.EXCLUSIVE
                or (wait.kind == Kind.ARE_PEERS_PENDING and op not in wait.open_ops and self._is_past(wait, delay_s))
            )
        }

    def _end(self, waits: Mapping[int, Wait], reason: str, answer: int = PendingAnswer.ELSEWHERE) -> None:
        members = self._state.members
        asking = [peer for peer, wait in waits.items() if wait.kind == Kind.ARE_PEERS_PENDING]
        self._state.log("info" if asking else "warning", reason)
        for peer in asking or waits:
            if asking:
                self._answer(members[peer], Result.SUCCESS, reason, answer)
            else:
                self._answer(members[peer], Result.INVALID_USAGE, reason)

    # sync_shared_state.

    def sync_reported(self, member: Member, message: m.SyncReport) -> None:
        sync = self._state.group_of(member).sync if member.accepted else None
        if sync is None or sync.number != message.sync or member.peer not in sync.receivers:
            return
        sync.receivers.discard(member.peer)
        for donor, reason in message.suspects:
            about = {**member.about, "other": donor}
            self._state.log("warning", f"{member} could not use donor {donor}: {reason}", about)
        if not message.success:
            sync.failures[member.peer] = f"{member} could not fetch the shared state: {message.reason}"
            if message.suspects:
                self._link_failures.doubt_links(member)

    def _advance_syncs(self) -> bool:
        progress = False
        for group in self._state.groups.values():
            progress = self._advance_group(group) or progress
        return progress

    def _advance_group(self, group: Group) -> bool:
        sync = group.sync
        if group.changed or (sync is not None and sync.failures and not group.running):
            return False  # a peer that could not fetch the state may be lost soon
        if sync is not None:
            return not sync.receivers and self._end_sync(group, sync)
        return 0 < group.accepted == group.waiting[Kind.SYNC] and self._begin_sync(group)

    def _end_sync(self, group: Group, sync: Sync) -> bool:
        group.sync = None
        waiting = [self._state.members[peer] for peer in group.ring if peer in sync.members]
        if sync.failures:
            failure = next(iter(sync.failures.values()))
            self._finish(waiting, Kind.SYNC, Result.NO_SHARED_STATE_AVAILABLE, failure)
        else:
            self._sync_succeeded(group, waiting, sync.revision)
        return True

    def _begin_sync(self, group: Group) -> bool:
        members = [self._state.members[peer] for peer in group.ring]
        offers = {
            member.peer: member.wait.offer
            for member in members
            if member.accepted and member.wait is not None and member.wait.offer is not None
        }
        assert len(offers) == group.accepted
        losses = self._state.history.losses(self._state.now)
        lost = [(loss.peer, loss.reason) for loss in losses if loss.group == group.number]
        elected = elect(offers, group.synced, group.revision, lost)
        if isinstance(elected, NotElected):
            self._finish(members, Kind.SYNC, elected.code, elected.reason)
            return True
        text = f"group {group.number} syncs to revision {elected.revision}: {elected.reason}"
        self._state.log("info", text, {"group": group.number})
        loose = elected.loose_receivers if any(t.loose for t in offers[elected.donors[0]].tensors) else frozenset()
        receivers = set(elected.content_receivers | loose)
        if not receivers:
            self._sync_succeeded(group, members, elected.revision)
            return True
        number = self._state.number()
        group.sync = Sync(number, elected.revision, receivers, set(offers))
        for peer in offers:
            plan = m.SyncPlan(
                number,
                elected.revision,
                elected.root,
                elected.donors,
                peer in elected.content_receivers,
                peer in loose,
            )
            self._state.send_to(peer, plan)
        return True

    def _sync_succeeded(self, group: Group, members: Iterable[Member], revision: int) -> None:
        waiting = [member for member in members if member.wait is not None]
        group.revision = revision
        group.synced = {member.peer for member in waiting}
        self._verdicts.renew_at_rest(group)
        self._finish(waiting, Kind.SYNC, value=revision)


# The election of a shared state.

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
LOST_NAMED_MAX = 4


@dataclass(frozen=True)
class Elected:
    revision: int
    root: bytes
    donors: list[int]
    """Peers that hold the elected content and may send it, in order of acceptance."""
    content_receivers: frozenset[int]
    """Peers that fetch the content because their digest differs."""
    loose_receivers: frozenset[int]
    """Peers that also fetch the loose tensors because their revision is lower."""
    reason: str


@dataclass(frozen=True)
class NotElected:
    code: Result
    reason: str


def elect(
    offers: Mapping[int, SyncOffer],
    incumbents: Collection[int],
    floor: int | None,
    lost: Sequence[tuple[int, str]] = (),
) -> Elected | NotElected:
    """Elect one of a group's offers, keyed by peer number; lower numbers were accepted earlier. `incumbents` took part
    in the last sync, which elected revision `floor`. `lost` lists the peers that were lost most recently, with the
    reasons."""
    assert offers
    difference = _schema_difference(offers)
    if difference is not None:
        return NotElected(Result.INVALID_ARGUMENT, difference)
    # Of two newcomers, the one with the higher number may be accepted first and sync alone.
    by_age = sorted(offers.items(), key=lambda each: (each[0] not in incumbents, each[0]))
    candidates = {peer: offer for peer, offer in by_age if offer.strategy != RECEIVE_ONLY}
    if not candidates:
        return NotElected(Result.NO_SHARED_STATE_AVAILABLE, _nobody_sends(offers, lost))
    seniors = [peer for peer in candidates if peer in incumbents]
    voters = seniors or list(candidates)
    revision = max(candidates[peer].revision for peer in voters)
    if floor is not None and revision < floor and any(peer in incumbents for peer in offers):
        newest = next(peer for peer in voters if candidates[peer].revision == revision)
        return NotElected(
            Result.NO_SHARED_STATE_AVAILABLE,
            f"the group has already agreed on revision {floor}, but the newest that may be sent now is {revision}, "
            f"from peer {newest}; a revision must never be lowered",
        )
    at_revision = [peer for peer, offer in candidates.items() if offer.revision == revision]
    protected = [peer for peer, offer in candidates.items() if offer.strategy == SEND_ONLY]
    conflict = _send_only_conflict(candidates, protected, revision)
    if conflict is not None:
        return NotElected(Result.INVALID_USAGE, conflict)
    if protected:
        root = candidates[protected[0]].root
        reason = f"peer {protected[0]} is SEND_ONLY"
    else:
        votes = Counter(candidates[peer].root for peer in at_revision)
        most = max(votes.values())
        root = next(candidates[peer].root for peer in at_revision if votes[candidates[peer].root] == most)
        reason = f"{most} of {len(at_revision)} at revision {revision}"
    return Elected(
        revision=revision,
        root=root,
        donors=[peer for peer in at_revision if candidates[peer].root == root],
        content_receivers=frozenset(peer for peer, offer in offers.items() if offer.root != root),
        loose_receivers=frozenset(peer for peer, offer in offers.items() if offer.revision < revision),
        reason=reason,
    )


def _nobody_sends(offers: Mapping[int, SyncOffer], lost: Sequence[tuple[int, str]]) -> str:
    overwritten = sorted(peer for peer, offer in offers.items() if not offer.root)
    if not overwritten:
        return "all peers called with RECEIVE_ONLY; at least one must be able to send"
    gone = "; ".join(f"peer {peer} was lost: {reason}" for peer, reason in lost[-LOST_NAMED_MAX:])
    return (
        f"no peer is left to send the state: the contents of peers {overwritten} were being overwritten when "
        f"the senders were lost{f' ({gone})' if gone else ''}; reload the state on one of them and call again"
    )


def _send_only_conflict(candidates: Mapping[int, SyncOffer], protected: list[int], revision: int) -> str | None:
    for peer in protected[1:]:
        a, b = candidates[protected[0]], candidates[peer]
        if a.root != b.root or a.revision != b.revision:
            return (
                f"peers {protected[0]} and {peer} are both SEND_ONLY but hold different contents (revisions "
                f"{a.revision} and {b.revision}); neither may be overwritten"
            )
    if protected and candidates[protected[0]].revision != revision:
        return (
            f"peer {protected[0]} is SEND_ONLY at revision {candidates[protected[0]].revision}, but the group is at "
            f"revision {revision} and would have to overwrite it"
        )
    return None


def _schema_difference(offers: Mapping[int, SyncOffer]) -> str | None:
    first, *others = sorted(offers)
    schema = offers[first].tensors
    for peer in others:
        other = offers[peer].tensors
        if other == schema:
            continue
        for mine, theirs in zip(schema, other, strict=False):
            if mine != theirs:
                return (
                    f"peer {first} offers {describe(mine)}, but peer {peer} offers {describe(theirs)}; all peers must "
                    f"list the same tensors in the same order"
                )
        return (
            f"peer {first} offers {len(schema)} tensors, but peer {peer} offers {len(other)}; all peers must list the "
            f"same tensors in the same order"
        )
    return None


def describe(tensor: TensorOffer) -> str:
    loose = ", content may differ" if tensor.loose else ""
    return f"{tensor.name!r} ({tensor.dtype} {list(tensor.shape)}{loose})"
