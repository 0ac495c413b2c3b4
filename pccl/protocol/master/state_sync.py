"""sync_shared_state of a group: who sends, who receives, and how it ends.

The call is complete when all accepted peers of the group wait in it. The content is elected (`state_election`),
receivers fetch it, and the call ends when all of them have reported. A peer that is lost meanwhile is taken out of it;
how the sync then ends is told after the Prepare that leaves the lost one out, so that no later master takes it for one
of those that have the state.
"""

from __future__ import annotations

from collections.abc import Iterable

from pccl.protocol import messages as m
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.op_verdicts import OpVerdicts
from pccl.protocol.master.run_state import Group, Member, RunState, Sync
from pccl.protocol.master.waits import Waits
from pccl.protocol.messages import Kind
from pccl.protocol.state_election import NotElected, elect
from pccl.types import Result


class StateSync:
    """The syncs of all groups."""

    def __init__(self, state: RunState, waits: Waits, verdicts: OpVerdicts, link_failures: LinkFailures) -> None:
        self._state = state
        self._waits = waits
        self._verdicts = verdicts
        self._link_failures = link_failures

    def report(self, member: Member, message: m.SyncReport) -> None:
        """Hear that a receiver has ended its transfer."""
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
        """Begin or end the syncs of all groups that have come so far. Return False if there are none."""
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
        """Elect a state among the offers of a group and tell all who fetches it from whom."""
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
            self._state.tell(peer, plan)
        return True

    def _succeeded(self, group: Group, members: Iterable[Member], revision: int) -> None:
        waiting = [member for member in members if member.wait is not None]
        group.revision = revision
        group.synced = {member.peer for member in waiting}
        self._verdicts.renew_at_rest(group)
        self._waits.finish(waiting, Kind.SYNC, value=revision)
