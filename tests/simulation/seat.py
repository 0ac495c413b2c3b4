"""A master of a run in memory, and the control connections that peers make to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pccl.protocol import messages as m
from pccl.protocol.codec import OPENING_BYTES_MAX, Decoder
from pccl.protocol.master import Master, MasterOptions
from pccl.protocol.succession import Succession

if TYPE_CHECKING:
    from tests.simulation.node import Node

NUMBERS_PER_RUN = 10**12
"""Apart, so that peers, views and epochs of two runs are never mistaken for each other."""


@dataclass(eq=False)
class Seat:
    """Where a master lives. It may be killed, and another one begin there."""

    name: str
    machine: Succession
    is_frozen: bool = False
    is_dead: bool = False
    frozen_at: float = 0.0
    beats: dict[int, Node] = field(default_factory=dict)
    """Connections for signs of life that it knows."""
    seen: Master | None = None
    """The leader, as last looked at."""
    run: str = ""
    """Of the machine, as last looked at."""

    @property
    def is_away(self) -> bool:
        return self.is_frozen or self.is_dead

    @property
    def is_leading(self) -> bool:
        return not self.is_dead and self.machine.is_leading

    def begin(self, run: int, options: MasterOptions | None, birth_at: float, is_standby: bool) -> None:
        """A new process."""
        self.machine = Succession(f"run-{run}", options, birth_at, is_standby, secret=b"secret of run %d" % run)
        self.is_dead = self.is_frozen = False
        self.number(run)

    def number(self, run: int) -> None:
        """A new run may be founded."""
        self.seen = self.machine.master
        assert self.seen.is_vacant
        self.seen._next_peer += (run - 1) * NUMBERS_PER_RUN
        self.seen.view += (run - 1) * NUMBERS_PER_RUN


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
    decoder: Decoder[m.FromMaster] = field(default_factory=lambda: Decoder(m.FromMaster))
    opening_decoder: Decoder[m.FromPeer] = field(default_factory=lambda: Decoder(m.FromPeer, OPENING_BYTES_MAX))
    is_known: bool = False
    """The master has accepted it."""
    is_hung_up_on: bool = False
    """The master's end is closed; so says the last thing in `inbox`."""
    is_over: bool = False
    """The master has closed it or heard of its end."""

    @property
    def name(self) -> str:
        return self.node.name
