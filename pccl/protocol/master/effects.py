"""Effects: what a master's machine asks its runtime to carry out, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.topology import RingProblem


@dataclass(frozen=True)
class Send:
    connection: int
    message: m.FromMaster


@dataclass(frozen=True)
class Close:
    """Close the connection after what was sent before has left."""

    connection: int


@dataclass(frozen=True)
class TakeHeartbeats:
    """Answer Accepted, and use this connection for heartbeats only. It ends with `silent` or `disconnected`."""

    connection: int


@dataclass(frozen=True)
class FindRings:
    """Look for the best ring of each group, which takes time, then call `rings_found`."""

    search: int
    problems: dict[int, RingProblem]


@dataclass(frozen=True)
class MasterLog:
    level: str
    text: str
    is_unauthenticated: bool = False
    """Whether any unauthenticated client can cause this line at any rate."""
    about: Mapping[str, int] = field(default_factory=dict)
    """The peers, groups and ops that it is about, by the fields of `pccl.logs.FIELDS`."""


@dataclass(frozen=True)
class Persist:
    """Record this record before any effect that follows is carried out: on disk, where it shall outlast the process."""

    record: RunRecord


Effect = Send | Close | TakeHeartbeats | FindRings | MasterLog | Persist
