"""A master of a run in memory, and the control connections that peers make to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol.codec import OPENING_BYTES_MAX, Decoder
from pccl.protocol.control_session import ControlSession
from pccl.protocol.failover import Failover
from pccl.protocol.fence import Fence
from pccl.protocol.master.machine import Master
from pccl.protocol.master.options import MasterOptions

if TYPE_CHECKING:
    from tests.simulation.node import Node

NUMBERS_PER_RUN = 10**12
"""Apart, so that peers, views and epochs of two runs are never mistaken for each other."""


class Memory(Enum):
    """What outlasts a master's process."""

    NONE = "none"
    """A successor waits for all."""
    DISK = "disk"
    WAIVED = "waived"
    """Nothing, and a successor waits for a majority only."""


@dataclass(eq=False)
class Seat:
    """Where a master lives. It may be killed, and another one begin there."""

    name: str
    machine: Failover
    is_frozen: bool = False
    is_dead: bool = False
    frozen_at: float = 0.0
    heartbeats: dict[int, Node] = field(default_factory=dict)
    """Connections for signs of life that it knows."""
    seen: Master | None = None
    """The leader, as last looked at."""
    run: str = ""
    """Of the machine, as last looked at."""
    fence: Fence | None = None
    """On disk."""

    @property
    def is_away(self) -> bool:
        return self.is_frozen or self.is_dead

    @property
    def is_leading(self) -> bool:
        return not self.is_dead and self.machine.is_leading

    def begin(
        self,
        run: int,
        options: MasterOptions | None,
        now: float,
        hold_s: float,
        is_standby: bool,
        memory: Memory = Memory.NONE,
    ) -> None:
        """A new process."""
        self.machine = Failover(
            f"run-{run}",
            options,
            is_standby=is_standby,
            secret=b"secret of run %d" % run,
            fence=self.fence,
            persists=memory is Memory.DISK,
            resumes_any=memory is Memory.WAIVED,
        )
        self.machine.begin(now, hold_s)
        self.is_dead = self.is_frozen = False
        self.number(run)

    def number(self, run: int) -> None:
        """A new run may be founded."""
        self.seen = self.machine.master
        assert self.seen.is_vacant
        self.seen.state.next_peer += (run - 1) * NUMBERS_PER_RUN
        self.seen.state.view += (run - 1) * NUMBERS_PER_RUN


@dataclass(eq=False)
class Control:
    """A control connection. Each end finds it closed when it comes to an empty piece."""

    number: int
    node: Node
    seat: Seat
    opened_at: float
    inbox: deque[bytes] = field(default_factory=deque)
    """To the node."""
    outbox: deque[bytes] = field(default_factory=deque)
    """To the master."""
    decoder: Decoder[m.FromMaster | m.Ack] = field(default_factory=lambda: Decoder(m.FromMaster | m.Ack))
    opening_decoder: Decoder[m.FromPeer | m.Ack] = field(
        default_factory=lambda: Decoder(m.FromPeer | m.Ack, OPENING_BYTES_MAX)
    )
    at_node: ControlSession = field(default_factory=lambda: ControlSession(b""))
    """The ends of its session."""
    at_seat: ControlSession = field(default_factory=lambda: ControlSession(b""))
    has_opened: bool = False
    """The master has heard the opening, with which the session begins."""
    is_reset: bool = False
    """Nothing gets through until another connection carries the session on; each end finds that at its own time."""
    told: list[bytes] = field(default_factory=list)
    """All frames that the master has sent."""
    is_known: bool = False
    """The master has accepted it."""
    is_hung_up_on: bool = False
    """The master's end is closed; so says the last thing in `inbox`."""
    is_over: bool = False
    """The master has closed it or heard of its end."""

    def reset(self, keep_inbox: int, keep_outbox: int) -> None:
        """Of what is under way so many bytes still arrive."""
        self.is_reset = True
        for queue, keep in ((self.inbox, keep_inbox), (self.outbox, keep_outbox)):
            data = b"".join(queue)[:keep]
            queue.clear()
            queue.extend(filter(None, [data]))
            queue.append(b"")

    def reattach(self) -> None:
        """Another connection carries the session on."""
        self.is_reset = False
        self.inbox = deque(self.at_seat.reattach(self.at_node.received))
        self.outbox = deque(self.at_node.reattach(self.at_seat.received))
        self.decoder = Decoder(m.FromMaster | m.Ack)
        self.opening_decoder = Decoder(m.FromPeer | m.Ack)

    @property
    def name(self) -> str:
        return self.node.name
