"""Effects: what a peer's machine wants done, by its control connection, its engine, its links and its callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.direct_limit import UNKNOWN
from pccl.protocol.peer.view import View
from pccl.types import Result


@dataclass(frozen=True)
class ToMaster:
    message: m.FromPeer


@dataclass(frozen=True)
class SubmitOp:
    op: int
    epoch: int
    tag: int
    sequence: int
    rank: int
    world_size: int
    links: tuple[int, ...]
    """The link to each rank; 0 to oneself and to those without."""
    is_meshed: bool
    agrees: bool
    """The engines tell each other when they are done, and this one calls `op_agreed` when all are."""
    ring: tuple[int, ...] = field(default=(), compare=False)
    """The peer of each rank."""
    direct_limit: int = UNKNOWN
    is_local: bool = False

    @property
    def link_prev(self) -> int:
        return self.links[self.rank - 1]

    @property
    def link_next(self) -> int:
        return self.links[(self.rank + 1) % self.world_size]


@dataclass(frozen=True)
class FreezeOps:
    """Stop all ops of this epoch, then call `frozen`."""

    epoch: int


@dataclass(frozen=True)
class FreezeOp:
    """Stop this op, then call `op_frozen`."""

    op: int


@dataclass(frozen=True)
class EndOp:
    """Give the verdict to the engine, then call `op_ended`."""

    op: int
    commit: bool


@dataclass(frozen=True)
class ForgetOp:
    """Every peer is done with it: it is committed, and nothing has to be reported any more."""

    op: int


@dataclass(frozen=True)
class ForgetUnmade:
    """These uses of a tag have ended before they were made here, and never will be submitted."""

    epoch: int
    tag: int
    uses: range


@dataclass(frozen=True)
class OpResult:
    op: int
    code: Result
    reason: str
    world_size: int
    tx_bytes: int = 0
    rx_bytes: int = 0


@dataclass(frozen=True)
class CallResult:
    call: int
    code: Result
    reason: str
    value: int


@dataclass(frozen=True)
class MakeLink:
    """Make a link of `connections` connections: dial `member`, or expect it to dial. Report each connection that is
    handed to the engine with `link_connected`, or `link_failed`: if not all are there after `timeout_s`, or if by
    dialing no word got through to the other side and back within `reach_s`."""

    link: int
    member: m.PeerInfo
    made_in: int
    connections: int
    dial: bool
    reach_s: float
    timeout_s: float


@dataclass(frozen=True)
class AddConnections:
    """Dial `member` for more connections of a link that stands, and report each with `link_connected`. One that cannot
    be made is tried again after a while if it is to replace one, until the link is closed."""

    link: int
    member: m.PeerInfo
    made_in: int
    indices: range
    is_replacement: bool
    timeout_s: float


@dataclass(frozen=True)
class TryLinks:
    """Connect to each once, to no other end than to see whether that works, and call `tried`."""

    members: list[m.PeerInfo]
    timeout_s: float


@dataclass(frozen=True)
class CloseLink:
    """Close what there is of it and stop trying."""

    link: int


@dataclass(frozen=True)
class RunSync:
    """Take part in a shared-state transfer; call `sync_ended` if there is something to fetch."""

    plan: m.SyncPlan
    donors: list[m.PeerInfo]


@dataclass(frozen=True)
class RunProbe:
    """Measure these links, then call `probed`."""

    probe: int
    links: list[ProbedLink]


@dataclass(frozen=True)
class ProbedLink:
    member: m.PeerInfo
    is_inbound: bool
    connections: int
    """The number that the link has, or would have once it is used."""


@dataclass(frozen=True)
class Installed:
    view: View
    lost: list[tuple[int, str]]


@dataclass(frozen=True)
class Ended:
    """The session is over; all calls have their results once the engine has given the ops back."""

    code: Result
    reason: str


@dataclass(frozen=True)
class PeerLog:
    level: str
    text: str
    about: Mapping[str, int] = field(default_factory=dict)
    """Fields of the record: see `pccl.logs.FIELDS`."""
    link: int = 0
    """The link that it is about, else 0: not to be logged before that has stood for a moment longer, nor once it is
    closed."""


@dataclass(frozen=True)
class StartEngine:
    """The engine shall have so many threads. There are no links before."""

    threads: int


@dataclass(frozen=True)
class KeepHeartbeats:
    """Exchange heartbeats with the master over a connection of their own, made anew when closed. After `timeout_s`
    of silence: `master_lost`. Ends with the next one and with SeekMaster."""

    timeout_s: float


@dataclass(frozen=True)
class SeekMaster:
    """Close the control connection, and make one to a master, the same or another. Say Hello, or `resume()` if there is
    one. If none is found for long: `give_up`."""

    reason: str


Effect = (
    ToMaster
    | StartEngine
    | KeepHeartbeats
    | SeekMaster
    | SubmitOp
    | FreezeOps
    | FreezeOp
    | EndOp
    | ForgetOp
    | ForgetUnmade
    | OpResult
    | CallResult
    | MakeLink
    | AddConnections
    | TryLinks
    | CloseLink
    | RunSync
    | RunProbe
    | Installed
    | Ended
    | PeerLog
)
