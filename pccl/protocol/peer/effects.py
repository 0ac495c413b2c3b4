"""Effects that a peer's machine requests from its connections, engine, links and callers; and their outbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.link_metrics import UNKNOWN
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.view import View
from pccl.types import Result


@dataclass(frozen=True)
class ToMaster:
    message: m.FromPeer


@dataclass(frozen=True)
class SubmitOp:
    op: int
    """Local number. Other peers identify the op by epoch, tag and sequence."""
    epoch: int
    tag: int
    sequence: int
    rank: int
    world_size: int
    links: tuple[int, ...]
    """The link to each rank; 0 stands for this peer itself or a missing link."""
    is_meshed: bool
    is_mutual: bool
    """Whether its participants complete it without the master (`completion`): the engines notify each other, and
    `op_completed` reports that all are done."""
    ring: tuple[int, ...] = field(default=(), compare=False)
    direct_limit: int = UNKNOWN
    is_local: bool = False


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
    """Pass the verdict to the engine, then call `op_ended`."""

    op: int
    commit: bool


@dataclass(frozen=True)
class ForgetOp:
    """Drop all state of a committed op that every peer has completed."""

    op: int


@dataclass(frozen=True)
class ForgetUnlaunched:
    """Drop uses of a tag that ended before this peer launched them. They are never submitted."""

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
    """Make a link with this number of connections: dial `member`, or wait until it dials.

    Report each connection with `link_connected`. Report `link_failed` if some are missing after `timeout_s`, or if no
    dialled connection gets an answer within `reach_s`.
    """

    link: int
    member: m.PeerInfo
    made_in: int
    connections: int
    dial: bool
    reach_s: float
    timeout_s: float


@dataclass(frozen=True)
class AddConnections:
    """Dial `member` to add connections to an established link, and report each with `link_connected`.

    Retry a failed replacement until the link is closed. If no connection over UDP can be opened, report its loss.
    """

    link: int
    member: m.PeerInfo
    made_in: int
    indices: range
    is_replacement: bool
    timeout_s: float
    over_udp: bool = False


@dataclass(frozen=True)
class TryLinks:
    """Connect to each of these peers once as a test, then call `tried`."""

    members: list[m.PeerInfo]
    timeout_s: float


@dataclass(frozen=True)
class CloseLink:
    link: int


@dataclass(frozen=True)
class RunSync:
    """Take part in a shared-state transfer. If this peer has to fetch state, call `sync_ended` at the end."""

    plan: m.SyncPlan
    donors: list[m.PeerInfo]


@dataclass(frozen=True)
class RunProbe:
    probe: int
    links: list[ProbedLink]


@dataclass(frozen=True)
class ProbedLink:
    member: m.PeerInfo
    is_inbound: bool
    connections: int
    """Number of connections of the link, existing or planned."""


@dataclass(frozen=True)
class Installed:
    view: View
    lost: list[tuple[int, str]]
    """Lost peers of the previous view, each with its reason."""


@dataclass(frozen=True)
class Ended:
    """The session is over. Calls get their results once the engine has returned the ops."""

    code: Result
    reason: str


@dataclass(frozen=True)
class PeerLog:
    level: str
    text: str
    about: Mapping[str, int] = field(default_factory=dict)
    link: int = 0
    """The link that the line is about, or 0. A line about a link is delayed, and dropped if the link closes first."""


@dataclass(frozen=True)
class StartEngine:
    """Start the engine with this number of threads, before the first link."""

    threads: int


@dataclass(frozen=True)
class KeepHeartbeats:
    """Exchange heartbeats with the master over a separate connection, and reconnect it when it closes.

    Call `master_lost` after `timeout_s` of silence. The next KeepHeartbeats or SeekMaster ends this effect.
    """

    timeout_s: float


@dataclass(frozen=True)
class SeekMaster:
    """Close the control connection and connect to the same or another master.

    Send the message that `resume()` returns, or Hello if it returns None. Call `give_up` if the search fails.
    """

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
    | ForgetUnlaunched
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


class Outbox:
    """Collects one peer's effects in order, and its reports to the master.

    Messages to an absent master are dropped, because the machine's parts keep their content as state and repeat it to
    the next master. Reports from one batch of events are combined into one message.
    """

    def __init__(self) -> None:
        self.is_led = True
        self.is_closed = False
        self._effects: list[Effect] = []
        self._epoch = 0
        self.done: list[OpRef] = []
        self.stalled: list[OpRef] = []
        self.over: list[OpRef] = []

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, message: m.FromPeer) -> None:
        """Send a message to the leading master, if there is one."""
        if self.is_led and not self.is_closed:
            self._effects.append(ToMaster(message))

    def answer(self, message: m.FromPeer) -> None:
        """Send a message to a master even if it does not lead yet."""
        self._effects.append(ToMaster(message))

    def report_ops_of(self, epoch: int) -> None:
        """Report ops of this epoch from now on; 0 stops reports."""
        self._epoch = epoch
        self.discard_reports()

    def send_reports(self) -> None:
        if self._epoch:
            if self.done:
                self.send(m.OpsDone(self._epoch, self.done))
            if self.stalled:
                self.send(m.OpsStalled(self._epoch, self.stalled))
            if self.over:
                self.send(m.OpsOver(self._epoch, self.over))
        self.discard_reports()

    def discard_reports(self) -> None:
        self.done, self.stalled, self.over = [], [], []

    def drain(self) -> list[Effect]:
        if self.done or self.stalled or self.over:
            self.send_reports()
        effects, self._effects = self._effects, []
        return effects
