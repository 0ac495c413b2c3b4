"""Waits: who waits in which joint call, and how such calls end.

A peer waits in one joint call at a time. Counts of waiting peers are kept as they come and go, so that a judgement does
not go through all peers. Calls that ended for all who were to make them are numbered (the joint-call number): when a
master has died, and some have heard the end of a call and others not, a recovery report tells whose wait is for that
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import Member, RunState, Wait
from pccl.protocol.messages import Kind
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
