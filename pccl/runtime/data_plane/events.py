"""The events that an engine reports: one class for each kind, and functions that read them from the C library.

Handlers dispatch events by type through a table of functions and ignore types that are not in the table.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from pccl.protocol.peer.links import Limit
from pccl.runtime.data_plane.op_request import describe, describe_engine, size_bytes
from pccl.runtime.extension import lib, text
from pccl.types import Collective


class EngineFailedError(Exception):
    """An engine has failed because of this machine or process."""


@dataclass(frozen=True, slots=True)
class OpHandedOver:
    """The fast path has handed an op over to the session, which now owns it."""

    op: int
    sequence: int


@dataclass(frozen=True, slots=True)
class OpFastCompleted:
    """An op on the fast path is over. All participants are done, and the caller has the result."""

    op: int
    sequence: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpDone:
    """The op's result is complete here."""

    op: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpCompleted:
    """All participants are done."""

    op: int


@dataclass(frozen=True, slots=True)
class OpFrozen:
    """The op has stopped. If it is not done yet, it never will be."""

    op: int


@dataclass(frozen=True, slots=True)
class StepMismatch:
    """Two peers passed different steps to an op. None stands for a peer that passed no step."""

    verb: str
    """The verb that precedes the step in the text."""
    mine: int | None
    theirs: int | None

    def text(self, me: str, them: str) -> str:
        """Return the difference as text, naming the two peers."""
        if self.mine is None or self.theirs is None:
            mine, theirs = ("no step" if step is None else f"step {step}" for step in (self.mine, self.theirs))
            return f"{me} gives {mine} but {them} gives {theirs}; all peers must give the same step, or none"
        return (
            f"{me} {self.verb} step {self.mine} but {them} {self.verb} step {self.theirs}; "
            "one of them has missed or repeated a step"
        )


@dataclass(frozen=True, slots=True)
class OpDetached:
    """The engine has restored the caller's arrays and no longer uses them. Also reported for an unknown op."""

    op: int


@dataclass(frozen=True, slots=True)
class OpMismatch:
    """Another peer has launched a different op with the same key. `mine` and `theirs` describe the two ops."""

    op: int
    link: int
    mine: str
    theirs: str
    rank: int | None = None
    """The other peer's rank. None or this peer's own rank means the peer at the other end of the link."""
    is_other_call: bool = False
    """Whether the peers called different collectives, rather than the same one with different arguments."""
    size_bytes: tuple[int, int] = (0, 0)
    """Sizes of this peer's op and the other peer's."""
    steps: StepMismatch | None = None
    """The steps, if they differ."""


@dataclass(frozen=True, slots=True)
class OpEnded:
    """The engine has executed the verdict and returned the op's buffers."""

    op: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpRefused:
    """The engine has refused an op after its submission. The buffers are unchanged."""

    op: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupFrozen:
    """All ops of this epoch and earlier ones have stopped."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link has no connections left in one engine thread."""

    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinkDegraded:
    """The link has lost a connection and continues on the others."""

    link: int
    reason: str
    thread: int = 0
    """The engine thread of the connection."""
    over_udp: bool = False


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """The counters of one link in one engine thread."""

    link: int
    tx_bytes: int
    rx_bytes: int
    full_ms: int
    full_bytes: int
    thread: int = 0
    busy_ms: int = 0
    """Time during which the busiest connection had unacknowledged data."""
    sender_ms: int = 0
    """The part of `busy_ms` that this end's send buffer limited."""
    receiver_ms: int = 0
    """The part of `busy_ms` that the other end's receive window limited."""
    stuck_ms: int = 0
    """Time since the last acknowledgement, while data is unacknowledged."""
    delivered: int = 0
    """Number of acknowledged TCP segments; the next field counts the retransmitted ones."""
    resent: int = 0
    unacked_bytes: int = 0
    """Current number of unacknowledged bytes on all connections."""
    round_trip_us: int = 0
    """The longest current round trip of all connections; the next field is the shortest ever measured."""
    round_trip_us_min: int = 0
    unheard_ops: int = 0
    """Number of ops that the peer has not announced here."""
    inbound_ops: int = 0
    """The number of ops that wait for data which the peer sends or forwards."""
    undone_ops: int = 0
    """Number of ops that are done here but lack the peer's DONE."""
    is_udp: int = 0
    """1 while a connection over UDP carries the link's data."""


COUNTERS = [field.name for field in fields(LinkCounters) if field.name not in ("link", "thread")]


@dataclass(frozen=True, slots=True)
class LinkLimited:
    """More connections would let the link send faster."""

    link: int
    thread: int = 0
    limit: Limit = Limit.WINDOWS
    round_trip_s: float = 0.0
    """The shortest seen."""


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine has failed because of this machine or process, and can only be closed."""

    reason: str


EngineEvent = (
    OpHandedOver
    | OpFastCompleted
    | OpDone
    | OpCompleted
    | OpFrozen
    | OpDetached
    | OpMismatch
    | OpEnded
    | OpRefused
    | GroupFrozen
    | LinkDown
    | LinkDegraded
    | LinkLimited
    | LinkCounters
    | EngineFailed
)


def _read_mismatch(event: Any) -> OpMismatch:
    mine, theirs = event.mine, event.theirs
    has_other_shape = mine.dimensions != theirs.dimensions
    texts = describe(mine, has_other_shape, is_mine=True), describe(theirs, has_other_shape)
    if texts[0] == texts[1] and mine.step == theirs.step:
        texts = texts[0] + describe_engine(mine), texts[1] + describe_engine(theirs)
    return OpMismatch(
        event.id,
        event.link,
        *texts,
        rank=event.sequence,
        is_other_call=mine.collective != theirs.collective,
        size_bytes=(size_bytes(mine), size_bytes(theirs)),
        steps=_compare_steps(mine, theirs),
    )


def _compare_steps(mine: Any, theirs: Any) -> StepMismatch | None:
    if mine.step == theirs.step:
        return None
    is_reduce = mine.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
    steps = (shape.step - 1 if shape.step else None for shape in (mine, theirs))
    return StepMismatch("reduces" if is_reduce else "is at", *steps)


def _loss_reason(event: Any) -> str:
    reason = text(event.detail)
    if event.system_error:
        error = os.strerror(event.system_error)
        return f"{reason}: {error}" if reason else error
    return reason or "closed by the other side"


def _failure_reason(event: Any) -> str:
    detail = text(event.detail)
    if event.system_error == errno.ENOMEM:
        return f"this process is out of memory: {detail}"
    return (
        f"the engine has ended: {detail}: {os.strerror(event.system_error)}; something in this process closes "
        "descriptors that are not its own"
    )


LIMITS = {
    lib.PCCL_LIMIT_RECOVERY: Limit.RECOVERY,
    lib.PCCL_LIMIT_WINDOWS: Limit.WINDOWS,
    lib.PCCL_LIMIT_START: Limit.START,
    lib.PCCL_LIMIT_LOSS: Limit.LOSS,
}
READERS: dict[int, Callable[[Any], EngineEvent]] = {
    lib.PCCL_EVENT_OP_FAST_COMPLETED: lambda event: OpFastCompleted(
        event.id, event.sequence, event.tx_bytes, event.rx_bytes
    ),
    lib.PCCL_EVENT_OP_HANDED_OVER: lambda event: OpHandedOver(event.id, event.sequence),
    lib.PCCL_EVENT_OP_DONE: lambda event: OpDone(event.id, event.tx_bytes, event.rx_bytes),
    lib.PCCL_EVENT_OP_COMPLETED: lambda event: OpCompleted(event.id),
    lib.PCCL_EVENT_OP_FROZEN: lambda event: OpFrozen(event.id),
    lib.PCCL_EVENT_OP_DETACHED: lambda event: OpDetached(event.id),
    lib.PCCL_EVENT_OP_ENDED: lambda event: OpEnded(event.id, event.tx_bytes, event.rx_bytes),
    lib.PCCL_EVENT_OP_REFUSED: lambda event: OpRefused(event.id, text(event.detail)),
    lib.PCCL_EVENT_OP_MISMATCH: _read_mismatch,
    lib.PCCL_EVENT_GROUP_FROZEN: lambda event: GroupFrozen(event.id),
    lib.PCCL_EVENT_LINK_LIMITED: lambda event: LinkLimited(
        event.id, event.engine, LIMITS[event.limit], event.round_trip_us_min / 1e6
    ),
    lib.PCCL_EVENT_LINK_METRICS: lambda event: LinkCounters(
        link=event.id, thread=event.engine, **{name: getattr(event, name) for name in COUNTERS}
    ),
    lib.PCCL_EVENT_CONNECTION_LOST: lambda event: LinkDegraded(
        event.id, _loss_reason(event), event.engine, bool(event.is_udp)
    ),
    lib.PCCL_EVENT_LINK_LOST: lambda event: LinkDown(event.id, _loss_reason(event)),
    lib.PCCL_EVENT_ENGINE_FAILED: lambda event: EngineFailed(_failure_reason(event)),
}
"""Functions that convert a `pccl_event` of the C library to an event, by its kind."""
