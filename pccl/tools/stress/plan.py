"""The options of a stress run, and the messages between its processes."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

from pccl.tools.report import PlanError

SLOTS = 16
"""The maximum number of peer processes. Each has a slot, a number in [0, SLOTS)."""
PEERS_MAX = SLOTS - 4
"""Less than SLOTS, so that a slot is not reused while reports from its last peer may still arrive."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A time in seconds, drawn uniformly between two bounds."""

    least_s: float
    most_s: float

    def __str__(self) -> str:
        return f"{self.least_s:g}..{self.most_s:g}"


def parse_interval(text: str) -> Interval:
    """Return the interval of `0.5..3` or of a single number, or raise ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\.(\d+(?:\.\d+)?))?", text)
    if match is None or float(match[2] or match[1]) < float(match[1]) or not float(match[2] or match[1]):
        raise ValueError(f"{text!r} is not an interval in seconds such as 0.5..3")
    return Interval(float(match[1]), float(match[2] or match[1]))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    minutes: float = 2.0
    seed: int = 0
    peers: int = 4
    peers_max: int = 8
    groups: int = 1
    disturb_every: Interval = Interval(0.5, 3.0)
    kill: bool = True
    join: bool = True
    leave: bool = True
    freeze: bool = True
    freeze_for: Interval = Interval(0.1, 10.0)
    cut: bool = False
    kill_master: Interval | None = None
    """The time between kills of the leading master, or None for no kills."""
    state: bool | None = None
    """Whether masters record their run on disk. By default, only if they are killed and there is no standby."""
    standbys: int = 0
    timeouts: bool = False
    threads: int = 0
    """The number of threads on peers that reduce with several threads."""
    interrupts: Interval | None = None
    hang_s: float = 30.0
    token: bool = False
    encrypt: bool = False
    state_bytes: int = 4 << 20
    reduce_bytes_max: int = 6 << 20

    @property
    def keeps_state(self) -> bool:
        return self.kill_master is not None and self.standbys == 0 if self.state is None else self.state

    def check(self) -> None:
        limits = {"peers_max": (2, PEERS_MAX), "groups": (1, 4), "standbys": (0, 3), "threads": (0, 16)}
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise PlanError(f"{option}: must be from {least} to {most}")
        if not 1 <= self.peers <= self.peers_max:
            raise PlanError(f"--peers {self.peers}: must be from 1 to --peers-max {self.peers_max}")
        if not self.minutes > 0:
            raise PlanError(f"--minutes {self.minutes:g}: must be positive")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed}: must not be negative")
        if self.hang_s <= 0:
            raise PlanError(f"--hang {self.hang_s:g}: must be positive")


# Messages.

Doing: TypeAlias = Literal[
    "starting", "connecting", "asking", "updating", "syncing", "optimizing", "reducing", "resting", "leaving"
]


class WorkerOptions(msgspec.Struct, frozen=True):
    """The argument of `python -m pccl.tools.stress.worker`, as JSON."""

    masters: str
    peer: int
    """The number of the peer's process in the run."""
    slot: int
    group: int
    plan: Plan


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The peer ends its step and closes."""


class At(msgspec.Struct, tag=True, frozen=True):
    """The peer begins an activity."""

    doing: Doing
    revision: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """connect() has returned. A session lasts until the master is lost, the peer is evicted, or the run ends."""

    session: int


class Synced(msgspec.Struct, tag=True, frozen=True):
    """sync_shared_state has returned. A step begins."""

    lineage: int
    revision: int
    digest: str
    offered_lineage: int
    offered_revision: int
    rx_bytes: int


class SyncFailed(msgspec.Struct, tag=True, frozen=True):
    """The sync failed with NO_SHARED_STATE_AVAILABLE, because all peers that could send the state were lost."""

    reason: str
    is_spoiled: bool


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A committed op."""

    tag: int
    participants: list[int]
    """The participants' slots, read from the result."""
    world_size: int
    """The world size that the library reported; 0 if unknown."""
    digest: str
    aborts: int
    """The number of earlier aborts that the peer itself retried."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """A step is over: all its ops were committed, or the peer was left alone."""

    lineage: int
    revision: int
    outcomes: list[Outcome]
    is_whole: bool
    """Whether all ops were committed. If not, the peer is alone in its group."""
    is_idle: bool
    """Whether the peer was alone from the start and keeps its revision."""
    retries: int
    seconds: float


class Cut(msgspec.Struct, tag=True, frozen=True):
    """The peer has cut one of its own connections."""


class SessionOver(msgspec.Struct, tag=True, frozen=True):
    """The peer was evicted or could not connect, and reconnects."""

    reason: str
    is_own: bool = False
    """Whether the peer left by itself because the outcome of one of its calls is unknown."""


class Trouble(msgspec.Struct, tag=True, frozen=True):
    """The peer has detected a violated guarantee."""

    what: str


class Left(msgspec.Struct, tag=True, frozen=True):
    """close() has returned; the process ends."""


Message: TypeAlias = At | Joined | Synced | SyncFailed | Stepped | Cut | SessionOver | Trouble | Left
