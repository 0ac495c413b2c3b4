"""Effects: what a peer's machine asks its control connection, its engine, its links and its callers to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.protocol.direct_limit import UNKNOWN
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.view import View
from pccl.types import Result


@dataclass(frozen=True)
class ToMaster:
    """Send this message to the master."""

    message: m.FromPeer


@dataclass(frozen=True)
class SubmitOp:
    """Have the engine run an op."""

    op: int
    """The number by which this peer's callers and engine know it. Others know it by epoch, tag and sequence."""
    epoch: int
    tag: int
    sequence: int
    rank: int
    world_size: int
    links: tuple[int, ...]
    """The link to each rank; 0 for this peer itself and where there is no link."""
    is_meshed: bool
    is_mutual: bool
    """Whether its participants complete it by themselves (`completion`). Then engines tell each other when they are
    done, and this one calls `op_completed` when all are."""
    ring: tuple[int, ...] = field(default=(), compare=False)
    """The peers of the group by rank."""
    direct_limit: int = UNKNOWN
    """The `Install.direct_limit` of the view."""
    is_local: bool = False
    """The `Install.is_local` of the view."""

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
    """Give up all that is kept of an op: it is committed, every peer is done with it, and nothing has to be reported
    any more."""

    op: int


@dataclass(frozen=True)
class ForgetUnmade:
    """Forget uses of a tag that have ended before they were made here. They will never be submitted."""

    epoch: int
    tag: int
    uses: range


@dataclass(frozen=True)
class OpResult:
    """Tell the caller of an op its end."""

    op: int
    code: Result
    reason: str
    world_size: int
    tx_bytes: int = 0
    rx_bytes: int = 0


@dataclass(frozen=True)
class CallResult:
    """Tell the caller of a joint call its end."""

    call: int
    code: Result
    reason: str
    value: int


@dataclass(frozen=True)
class MakeLink:
    """Make a link of `connections` connections: dial `member`, or expect it to dial.

    Report each connection that is handed to the engine with `link_connected`. Report `link_failed` if not all are there
    after `timeout_s`, or if by dialing no word got through to the other side and back within `reach_s`.
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
    """Dial `member` for more connections of a link that stands, and report each with `link_connected`.

    One that is to replace another is tried again after a while if it cannot be made, until the link is closed.
    """

    link: int
    member: m.PeerInfo
    made_in: int
    indices: range
    is_replacement: bool
    timeout_s: float


@dataclass(frozen=True)
class TryLinks:
    """Connect to each of these peers once, only to see whether that works, and call `tried`."""

    members: list[m.PeerInfo]
    timeout_s: float


@dataclass(frozen=True)
class CloseLink:
    """Close all connections of the link and stop trying to make more."""

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
    """One direction of a link that is to be measured."""

    member: m.PeerInfo
    is_inbound: bool
    connections: int
    """Number of connections that the link has, or would have once it is used."""


@dataclass(frozen=True)
class Installed:
    """A view is in force."""

    view: View
    lost: list[tuple[int, str]]
    """Peers that the view before had and this one has not, each with the reason."""


@dataclass(frozen=True)
class Ended:
    """The session is over; all calls have their results once the engine has given the ops back."""

    code: Result
    reason: str


@dataclass(frozen=True)
class PeerLog:
    """Write a line to the peer's log."""

    level: str
    text: str
    about: Mapping[str, int] = field(default_factory=dict)
    """The fields of the line: see `pccl.logs.FIELDS`."""
    link: int = 0
    """The link that the line is about, else 0. It is logged only after that link has stood for a moment longer, and not
    once it is closed."""


@dataclass(frozen=True)
class StartEngine:
    """Start the engine with this number of threads. There are no links before."""

    threads: int


@dataclass(frozen=True)
class KeepHeartbeats:
    """Exchange heartbeats with the master over a connection of their own, which is made anew when it is closed.

    After `timeout_s` of silence `master_lost` is called. This ends with the next KeepHeartbeats and with SeekMaster.
    """

    timeout_s: float


@dataclass(frozen=True)
class SeekMaster:
    """Close the control connection, and make one to a master, the same or another.

    Say `resume()` if it returns a message, else Hello. If no master is found for long, `give_up` is called.
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


# Outbox: the effects of a peer's machine in order, and what of them its master hears.


class Outbox:
    """All that one peer does and says."""

    def __init__(self) -> None:
        self.is_led = True
        """Whether a master hears what is said."""
        self.is_closed = False
        """Whether the session is over: nothing is said any more."""
        self._effects: list[Effect] = []
        self._epoch = 0
        """The epoch whose ops are reported; 0: none."""
        self._done: list[OpRef] = []
        self._stalled: list[OpRef] = []
        self._over: list[OpRef] = []

    def act(self, effect: Effect) -> None:
        """Have this carried out."""
        self._effects.append(effect)

    def say(self, message: m.FromPeer) -> None:
        """Tell the master that leads, if one does."""
        if self.is_led and not self.is_closed:
            self._effects.append(ToMaster(message))

    def answer(self, message: m.FromPeer) -> None:
        """Tell whichever master asks, also one that does not lead yet."""
        self._effects.append(ToMaster(message))

    def report_ops_of(self, epoch: int) -> None:
        """Report ops of this epoch from here on; 0: ops do not run, and there is nothing to report."""
        self._epoch = epoch
        self.discard_reports()

    def report_done(self, op: OpRef) -> None:
        """Report that all result bytes of this op are here."""
        self._done.append(op)

    def report_stalled(self, op: OpRef) -> None:
        """Report that this op takes long."""
        self._stalled.append(op)

    def report_over(self, op: OpRef) -> None:
        """Report that this op, which was reported as stalled, is committed."""
        self._over.append(op)

    def send_reports(self) -> None:
        """Say all that has been reported."""
        if self._epoch:
            if self._done:
                self.say(m.OpsDone(self._epoch, self._done))
            if self._stalled:
                self.say(m.OpsStalled(self._epoch, self._stalled))
            if self._over:
                self.say(m.OpsOver(self._epoch, self._over))
        self.discard_reports()

    def discard_reports(self) -> None:
        self._done, self._stalled, self._over = [], [], []

    def drain(self) -> list[Effect]:
        """Return the effects of all events since the last call, in order."""
        self.send_reports()
        effects, self._effects = self._effects, []
        return effects
