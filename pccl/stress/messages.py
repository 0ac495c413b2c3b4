"""The reports of peers, one JSON object per line of their standard output, and the commands to processes, one per line
of their standard input."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pccl.stress.packet_filter import Place
from pccl.stress.plan import Plan

Doing: TypeAlias = Literal[
    "starting", "connecting", "asking", "updating", "syncing", "optimizing", "reducing", "resting", "leaving"
]


class WorkerOptions(msgspec.Struct, frozen=True):
    """The one argument of `python -m pccl.stress.worker`, as JSON."""

    masters: str
    """Addresses, with commas between."""
    peer: int
    """Counts the processes of a run."""
    slot: int
    group: int
    plan: Plan
    place: Place | None = None
    """The place that the peer must take, if some are cut off from others."""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The peer is to end its step and close."""


class DropFrom(msgspec.Struct, tag=True, frozen=True):
    """The process, be it a peer or a master, is to drop what these places send, and nothing else."""

    senders: list[Place]


Command: TypeAlias = Leave | DropFrom


def line(command: Command) -> str:
    """Return a command as a line that `commands` reads."""
    return msgspec.json.encode(command).decode()


class At(msgspec.Struct, tag=True, frozen=True):
    """The peer begins to do something."""

    doing: Doing
    revision: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """connect() has returned. A session is what lies between it and the loss of the master, an eviction, or the end."""

    session: int
    world_size: int


class Synced(msgspec.Struct, tag=True, frozen=True):
    """sync_shared_state has returned. A step begins."""

    lineage: int
    """The lineage of the state that everybody has: whose initial state it grew from."""
    revision: int
    digest: str
    offered_lineage: int
    offered_revision: int
    rx_bytes: int


class SyncFailed(msgspec.Struct, tag=True, frozen=True):
    """NO_SHARED_STATE_AVAILABLE: the donors, or all who may send, were lost."""

    reason: str
    is_spoiled: bool


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A committed op."""

    number: int
    """The op's number in its step."""
    participants: list[int]
    """Slots, as read off the result."""
    world_size: int
    """The world size that the library says; 0 where it says none."""
    digest: str
    aborts: int
    """The number of aborts before, where the peer retries by hand."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """A step is over: all its ops were committed, or the peer was left alone."""

    lineage: int
    revision: int
    """The revision at the beginning of the step."""
    outcomes: list[Outcome]
    is_whole: bool
    """Everything was committed. If not, the peer is alone in its group."""
    is_idle: bool
    """Whether the peer was alone from the beginning and did nothing, so that it will be at this revision again."""
    retries: int
    seconds: float


class Cut(msgspec.Struct, tag=True, frozen=True):
    """The peer has broken one of its own connections."""


class SessionOver(msgspec.Struct, tag=True, frozen=True):
    """A call failed because the peer was evicted, or could not connect. It connects again."""

    reason: str
    is_own: bool = False
    """The peer has left by itself: it cannot know how a call of its own has ended, being interrupted or told so."""


class Trouble(msgspec.Struct, tag=True, frozen=True):
    """A promise was broken before this peer's own eyes."""

    what: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """close() has returned; the process ends."""

    revision: int


Message: TypeAlias = At | Joined | Synced | SyncFailed | Stepped | Cut | SessionOver | Trouble | Left
