"""The connections of a simulated run: those of a link between two peers, and those between a peer and a master."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol.codec import OPENING_BYTES_MAX, ControlSession, Decoder
from pccl.protocol.peer import effects as ps

if TYPE_CHECKING:
    from tests.simulation.master_host import MasterHost
    from tests.simulation.node import Node


@dataclass(eq=False)
class Wire:
    """One connection of a link."""

    dialer: Node
    acceptor: Node
    index: int = 0
    """Among the connections of its link, the same on both sides."""
    ends: dict[str, int] = field(default_factory=dict)
    """Link numbers by node name, for the ends that an engine has."""
    closed_by: set[str] = field(default_factory=set)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Payload that arrives once its dialer has taken the connection over, unless that is lost before."""

    def other(self, node: Node) -> Node:
        return self.acceptor if node is self.dialer else self.dialer

    def release(self) -> None:
        """Send out what waits, once more."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


@dataclass
class Link:
    """One side's end of a link."""

    effect: ps.MakeLink
    expires_at: float
    """The time when it is given up as things are."""
    ends_at: float
    """The time when it is given up at the latest."""
    stalled_since: float | None = None
    """The time since which bytes lie on it that do not get across."""
    wires: list[Wire] = field(default_factory=list)
    attached: int = 0
    """The connections that it ever had."""
    is_complete: bool = False
    """All its connections stood at one time. It goes on with those that are left."""


@dataclass(eq=False)
class Control:
    """A control connection. Each end finds it closed when it comes to an empty string in its queue."""

    number: int
    node: Node
    host: MasterHost
    opened_at: float
    inbox: deque[bytes] = field(default_factory=deque)
    """Bytes on their way to the node."""
    outbox: deque[bytes] = field(default_factory=deque)
    """Bytes on their way to the master."""
    decoder: Decoder[m.FromMaster | m.Ack] = field(default_factory=lambda: Decoder(m.FromMaster | m.Ack))
    opening_decoder: Decoder[m.FromPeer | m.Ack] = field(
        default_factory=lambda: Decoder(m.FromPeer | m.Ack, OPENING_BYTES_MAX)
    )
    at_node: ControlSession = field(default_factory=lambda: ControlSession(b""))
    """The node's end of its session."""
    at_master: ControlSession = field(default_factory=lambda: ControlSession(b""))
    has_opened: bool = False
    """The master has heard the opening of the session."""
    is_reset: bool = False
    """It carries no byte until another connection carries the session on; each end finds that at its own time."""
    sent: list[bytes] = field(default_factory=list)
    """All frames that the master has sent."""
    is_known: bool = False
    """The master has accepted it."""
    is_hung_up_on: bool = False
    """The master's end is closed; so says the last thing in `inbox`."""
    is_closed_by_node: bool = False
    """The node's end is closed; so says the last thing in `outbox`."""
    is_over: bool = False
    """The master has closed it or heard of its end."""

    def hang_up(self) -> None:
        """Close the master's end."""
        if not self.is_hung_up_on:
            self.is_hung_up_on = True
            self.inbox.append(b"")

    def hang_up_by_node(self, lost_bytes: int = 0) -> None:
        """Close the node's end. The last `lost_bytes` of what it had sent do not arrive."""
        if self.is_over or self.is_reset or self.is_closed_by_node:
            return
        self.is_closed_by_node = True
        while lost_bytes and self.outbox:
            data = self.outbox.pop()
            if len(data) > lost_bytes:
                self.outbox.append(data[: len(data) - lost_bytes])
            lost_bytes -= min(lost_bytes, len(data))
        self.outbox.append(b"")

    def reset(self, keep_inbox: int, keep_outbox: int) -> None:
        """Break it. That many bytes of what is under way still arrive."""
        self.is_reset = True
        for queue, keep in ((self.inbox, keep_inbox), (self.outbox, keep_outbox)):
            data = b"".join(queue)[:keep]
            queue.clear()
            queue.extend(filter(None, [data]))
            queue.append(b"")

    def reattach(self) -> None:
        """Let another connection carry the session on."""
        self.is_reset = False
        self.inbox = deque(self.at_master.reattach(self.at_node.received))
        self.outbox = deque(self.at_node.reattach(self.at_master.received))
        self.decoder = Decoder(m.FromMaster | m.Ack)
        self.opening_decoder = Decoder(m.FromPeer | m.Ack)

    @property
    def name(self) -> str:
        return self.node.name
