"""sync_shared_state of a group: the election of a state, and the call.

`elect` is a pure function of the peers' offers:

1. Peers must offer the same tensors (names, dtypes, shapes, looseness), or the call fails on all.
2. RECEIVE_ONLY offers, and offers of content that was being overwritten, are not candidates.
3. While a candidate is an incumbent (it took part in the last sync), the revision is the highest of an incumbent. It
   must not be below the revision of the last sync.
4. Otherwise the newest offered revision wins. If incumbents remain but may not send, the floor of rule 3 stays.
5. Among the candidates at that revision the most frequent digest wins, then that of the longest-accepted peer. The
   digest of a SEND_ONLY peer always wins.
6. SEND_ONLY peers with different contents fail the call on all.

The call is complete when all accepted peers of the group wait in it; it ends when all receivers have reported. Its
end follows the Prepare that leaves out peers lost during the call, so a later master does not count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pccl.protocol import messages as m
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.run_state import Group, Member, RunState, Sync, Waits
from pccl.protocol.master.verdicts import OpVerdicts
from pccl.protocol.messages import Kind, SyncOffer, TensorOffer
from pccl.types import Result, SharedStateSyncStrategy

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
LOST_NAMED_MAX = 4


@dataclass(frozen=True)
class Elected:
    revision: int
    root: bytes
    donors: list[int]
    """Peers that hold the elected content and may send, longest accepted first."""
    content_receivers: frozenset[int]
    """Peers whose digest differs. They fetch the content."""
    loose_receivers: frozenset[int]
    """Peers whose revision is behind: they also take the loose tensors."""
    reason: str


@dataclass(frozen=True)
class NotElected:
    """The reason why the offers cannot be brought together."""

    code: Result
    reason: str


def elect(
    offers: Mapping[int, SyncOffer],
    incumbents: Collection[int],
    floor: int | None,
    lost: Sequence[tuple[int, str]] = (),
) -> Elected | NotElected:
    """Elect among the offers of a group by peer number (lower: longer accepted). `incumbents` took part in the last
    sync, which elected revision `floor`; `lost` are the last lost peers with reasons."""
    assert offers
    difference = _schema_difference(offers)
    if difference is not None:
        return NotElected(Result.INVALID_ARGUMENT, difference)
    # Of two that say Hello at once, the one with the higher number may be accepted first, and sync alone.
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
            f"the group has already agreed on revision {floor}, and the newest that may be sent now is {revision}, "
            f"of peer {newest}; a revision must never be lowered",
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
    gone = "; ".join(f"peer {peer} is lost: {reason}" for peer, reason in lost[-LOST_NAMED_MAX:])
    return (
        f"no peer is left to send the state: the contents of peers {overwritten} were being overwritten when "
        f"its senders were lost{f' ({gone})' if gone else ''}; load it again on one of them, and call again"
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
                    f"peer {first} offers {describe(mine)} where peer {peer} offers {describe(theirs)}; all peers must "
                    f"list the same tensors in the same order"
                )
        return (
            f"peer {first} offers {len(schema)} tensors and peer {peer} offers {len(other)}; all peers must list the "
            f"same tensors in the same order"
        )
    return None


def describe(tensor: TensorOffer) -> str:
    loose = ", content may differ" if tensor.loose else ""
    return f"{tensor.name!r} ({tensor.dtype} {list(tensor.shape)}{loose})"


class StateSync:
    def __init__(self, state: RunState, waits: Waits, verdicts: OpVerdicts, link_failures: LinkFailures) -> None:
        self._state = state
        self._waits = waits
        self._verdicts = verdicts
        self._link_failures = link_failures

    def report(self, member: Member, message: m.SyncReport) -> None:
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

    def step(self) -> bool:
        """Start or end the syncs that are complete. Return False if there are none."""
        progress = False
        for group in self._state.groups.values():
            progress = self._step(group) or progress
        return progress

    def _step(self, group: Group) -> bool:
        sync = group.sync
        if group.changed or (sync is not None and sync.failures and not group.running):
            return False  # a peer that could not fetch it may be about to go
        if sync is not None:
            return not sync.receivers and self._end(group, sync)
        return 0 < group.accepted == group.waiting[Kind.SYNC] and self._begin(group)

    def _end(self, group: Group, sync: Sync) -> bool:
        group.sync = None
        waiting = [self._state.members[peer] for peer in group.ring if peer in sync.members]
        if sync.failures:
            failure = next(iter(sync.failures.values()))
            self._waits.finish(waiting, Kind.SYNC, Result.NO_SHARED_STATE_AVAILABLE, failure)
        else:
            self._succeeded(group, waiting, sync.revision)
        return True

    def _begin(self, group: Group) -> bool:
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
            self._waits.finish(members, Kind.SYNC, elected.code, elected.reason)
            return True
        text = f"group {group.number} syncs to revision {elected.revision}: {elected.reason}"
        self._state.log("info", text, {"group": group.number})
        loose = elected.loose_receivers if any(t.loose for t in offers[elected.donors[0]].tensors) else frozenset()
        receivers = set(elected.content_receivers | loose)
        if not receivers:
            self._succeeded(group, members, elected.revision)
            return True
        number = self._state.number()
        group.sync = Sync(number, elected.revision, receivers, set(offers), elected.donors)
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

    def _succeeded(self, group: Group, members: Iterable[Member], revision: int) -> None:
        waiting = [member for member in members if member.wait is not None]
        group.revision = revision
        group.synced = {member.peer for member in waiting}
        self._verdicts.renew_at_rest(group)
        self._waits.finish(waiting, Kind.SYNC, value=revision)
