"""One peer's group calls: the current one, the queue, and the last outcome of each kind.

All peers of a group or of the run make a group call together. A peer can be in only one at a time. It keeps the last
outcomes for the next master, which sends them to peers that have not received them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import Kind
from pccl.protocol.peer.effects import CallResult, Outbox
from pccl.protocol.peer.ops import Ops
from pccl.types import Result, SharedStateSyncStrategy


def in_flight(tags: Sequence[int]) -> str:
    """Return the error text for a call that is refused because of open ops."""
    return f"ops with tags {list(tags[:10])} are in flight; wait for their handles first"


@dataclass
class _Call:
    call: int
    kind: str
    offer: m.SyncOffer | None
    held: m.SyncOffer | None = None
    """The offer at the time the plan arrived."""
    is_cancelled: bool = False
    plan: m.SyncPlan | None = None
    is_fetched: bool = False
    """Whether the plan's data has arrived."""

    def current_offer(self) -> m.SyncOffer | None:
        """Return the current offer. It differs from the caller's if a transfer under an earlier master has overwritten
        the state."""
        offer, plan = self.offer, self.plan
        if offer is None or plan is None:
            return offer
        if not (plan.fetch_content or plan.fetch_loose):
            return self.held
        if self.is_fetched:
            return msgspec.structs.replace(offer, revision=plan.revision, root=plan.root)
        if plan.fetch_content:
            return msgspec.structs.replace(offer, root=b"", strategy=SharedStateSyncStrategy.RECEIVE_ONLY.value)
        return self.held


class GroupCalls:
    def __init__(self, outbox: Outbox, ops: Ops) -> None:
        self._outbox = outbox
        self._ops = ops
        self._call: _Call | None = None
        self._waiting: deque[_Call] = deque()
        self._outcomes: dict[str, m.GroupCallOutcome] = {}
        self._admission: int | None = None
        """The number of the last update_topology whose view was installed before its result arrived."""
        self.joined_after = 0
        """Number of the last group call that ended before this peer was accepted."""
        self.synced: tuple[int, int] | None = None
        """Number and revision of this peer's last successful sync."""

    @property
    def kind(self) -> str:
        return self._call.kind if self._call is not None else ""

    @property
    def is_exclusive(self) -> bool:
        """Whether the current call forbids ops in flight."""
        return self._call is not None and self._call.kind in Kind.EXCLUSIVE

    @property
    def outcomes(self) -> list[m.GroupCallOutcome]:
        return list(self._outcomes.values())

    def enter(self, call: int, kind: str, offer: m.SyncOffer | None) -> None:
        """Enter a call, or queue it after the others. The call ends with a CallResult."""
        self._waiting.append(_Call(call, kind, offer))
        self._enter_next()

    def cancel(self, call: int) -> None:
        for waiting in self._waiting:
            if waiting.call == call:
                self._waiting.remove(waiting)
                self._outbox.emit(CallResult(call, Result.TIMEOUT, "cancelled by its caller", 0))
                return
        if self._call is not None and self._call.call == call:
            self._call.is_cancelled = True
            self._outbox.send(m.GroupCallCancel(call))

    def _enter_next(self) -> None:
        while self._call is None and self._waiting:
            call = self._waiting.popleft()
            tags = self._ops.tags if call.kind in Kind.EXCLUSIVE else ()
            if tags:
                self._outbox.emit(CallResult(call.call, Result.PENDING_ASYNC_OPS, in_flight(tags), 0))
                continue
            self._call = call
            self.restate()

    def restate(self) -> None:
        call = self._call
        if call is None:
            return
        open_ops = self._ops.undecided if call.kind == Kind.ARE_PEERS_PENDING else []
        self._outbox.send(m.GroupCall(call.call, call.kind, call.current_offer(), open_ops))
        if call.is_cancelled:
            self._outbox.send(m.GroupCallCancel(call.call))

    def on_result(self, message: m.GroupCallResult) -> None:
        call = self._call
        if call is None or call.call != message.call:
            raise ProtocolError(f"the result of group call {message.call}, which is not in progress")
        if message.code != Result.SUCCESS and message.code not in m.FAILURES:
            raise ProtocolError(f"the result of a group call with code {message.code}")
        self._call = None
        if message.call_number:
            ended = m.GroupCallOutcome(call.kind, message.call_number, message.code, message.reason, message.value)
            self._outcomes[call.kind] = ended
            if call.kind == Kind.SYNC and message.code == Result.SUCCESS:
                self.synced = message.call_number, message.value
        self._outbox.emit(CallResult(call.call, Result(message.code), message.reason, message.value))
        self._enter_next()

    def on_plan(self, plan: m.SyncPlan) -> None:
        if self._call is not None:
            self._call.held = self._call.current_offer()
            self._call.plan = plan
            self._call.is_fetched = False

    def fetched(self, sync: int, success: bool) -> None:
        call = self._call
        if call is not None and call.plan is not None and call.plan.sync == sync:
            call.is_fetched = success

    def admitted(self, call_number: int) -> None:
        """Record that group call `call_number` installed a view with newcomers."""
        self._outcomes[Kind.UPDATE_TOPOLOGY] = m.GroupCallOutcome(
            Kind.UPDATE_TOPOLOGY, call_number, Result.SUCCESS, "", 0
        )
        if self._call is not None and self._call.kind == Kind.UPDATE_TOPOLOGY:
            self._admission = self._call.call

    def end_admission(self) -> None:
        """End an update_topology whose view was installed before its master died."""
        call = self._call
        if call is not None and call.kind == Kind.UPDATE_TOPOLOGY and self._admission == call.call:
            call_number = self._outcomes[Kind.UPDATE_TOPOLOGY].call_number
            self.on_result(m.GroupCallResult(call.call, Result.SUCCESS, call_number=call_number))

    def end(self, code: Result, reason: str) -> None:
        for call in [*([self._call] if self._call else []), *self._waiting]:
            self._outbox.emit(CallResult(call.call, code, reason, 0))
        self._call = None
        self._waiting.clear()
