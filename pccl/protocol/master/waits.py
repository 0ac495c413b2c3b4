"""Waits: who waits in which joint call, and how such calls end.

A peer waits in one joint call at a time. Counts of waiting peers are kept as they come and go, so that a judgement does
not go through all peers. Calls that ended for all who were to make them are numbered (the joint-call number): when a
master has died, and some have heard the end of a call and others not, a recovery report tells whose wait is for that
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import Group, Member, RunState, Wait
from pccl.protocol.messages import Kind
from pccl.protocol.quorum import majority
from pccl.protocol.stragglers import GroupScene, Scene
from pccl.types import Result

LONG_WAIT_S = 10.0
"""Seconds after which a wait is logged once, with the peers that it waits for."""


class Waits:
    """The waits of all peers of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self.waiting: Counter[str] = Counter()
        """Number of accepted peers that wait in each kind of joint call."""
        self._unlogged: dict[int, float] = {}
        """Peers that wait and whose wait was not logged, and the time since which they do, longest first."""

    def enter(self, member: Member, message: m.JointCall) -> None:
        now = self._state.now
        member.wait = Wait(message.call, message.kind, message.offer, message.open_ops, now)
        self._unlogged[member.peer] = now
        self._count(member, message.kind, 1)

    def answer(self, member: Member, code: Result, reason: str = "", value: int = 0, number: int = 0) -> None:
        """End one peer's wait."""
        assert member.wait is not None
        self._state.send(member.connection, m.JointResult(member.wait.call, code, reason, value, number))
        self._count(member, member.wait.kind, -1)
        self._unlogged.pop(member.peer, None)
        member.wait = None

    def finish(
        self, members: Iterable[Member], kind: str, code: Result = Result.SUCCESS, reason: str = "", value: int = 0
    ) -> None:
        """End a call for all who were to make it."""
        self._state.joint_calls_ended += 1
        for member in members:
            if member.wait is not None and member.wait.kind == kind:
                self.answer(member, code, reason, value, self._state.joint_calls_ended)

    def of(self, peers: Iterable[int]) -> dict[int, Wait]:
        """Return the waits of those of these peers that have one."""
        found = {peer: self._state.members[peer].wait for peer in peers}
        return {peer: wait for peer, wait in found.items() if wait is not None}

    def forget(self, member: Member) -> None:
        """Forget a peer that is gone. Its group still has it in the ring."""
        self._unlogged.pop(member.peer, None)
        if member.wait is not None:
            self._count(member, member.wait.kind, -1)

    def _count(self, member: Member, kind: str, change: int) -> None:
        for waiting in (self.waiting, self._state.group_of(member).waiting):
            waiting[kind] += change
            if not waiting[kind]:
                del waiting[kind]

    def log_long(self) -> None:
        """Log once for each peer that has waited for long whom it waits for."""
        state = self._state
        missing: dict[tuple[str, int], list[int]] = {}
        """The peers that a call waits for, by kind and, for sync_shared_state, group."""
        for peer, since in list(self._unlogged.items()):
            if state.now < since + LONG_WAIT_S:
                break
            del self._unlogged[peer]
            member = state.members[peer]
            assert member.wait is not None
            kind = member.wait.kind
            call = kind, member.hello.group if kind == Kind.SYNC else 0
            if call not in missing:
                missing[call] = state.missing(
                    state.group_of(member).ring if kind == Kind.SYNC else state.accepted, kind
                )
            if missing[call]:
                names = ", ".join(str(state.members[other]) for other in missing[call])
                state.log("info", f"{member} has waited {LONG_WAIT_S:g} s in {kind} for {names}", member.about)

    def deadlines(self) -> list[float]:
        """Return the time of the next line to log."""
        return [since + LONG_WAIT_S for since in islice(self._unlogged.values(), 1)]


def name_stragglers(state: RunState, silent_s: Mapping[int, float]) -> None:
    """Log the peers for which the others wait. `silent_s` are peers without heartbeats, and for how many seconds."""
    if state.accepted_count > 1 and len(silent_s) >= majority(state.accepted_count):
        silent_s = {}  # more likely, this master receives nothing
    groups = [_group_scene(state, group) for group in state.groups.values() if len(group.ring) > 1]
    scene = Scene(groups, silent_s, lambda peer: str(state.members.get(peer, f"peer {peer}")))
    for change in state.stragglers.judge(scene, state.now):
        about = {"group": change.suspect.group, "peer": change.suspect.peer}
        if change.is_over:
            state.log("info", f"over after {change.for_s:.1f} s: {change.suspect.text}", about)
        else:
            state.log("warning", change.suspect.text, about)


def _group_scene(state: RunState, group: Group) -> GroupScene:
    waits = {}
    for kind in (Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY, Kind.SYNC):
        if not group.waiting[kind] or (kind == Kind.SYNC and group.sync is not None):
            continue
        peers = group.ring if kind == Kind.SYNC else state.accepted
        missing = state.missing((peer for peer in peers if state.is_accepted(peer)), kind)
        since = [
            member.wait.since
            for peer in group.ring
            if (member := state.members.get(peer)) is not None and member.wait is not None and member.wait.kind == kind
        ]
        if missing and since:
            waits[kind] = state.now - min(since), len(since), missing
    is_running = group.running and not state.is_changing
    return GroupScene(group.number, group.ring, group.epoch, is_running, waits, group.ledger.stalled)
