"""A machine where a master of a simulated run lives. The master may be killed there, and another one begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Effect, MasterOptions

if TYPE_CHECKING:
    from tests.simulation.node import Node

NUMBERS_PER_RUN = 10**12
"""Apart, so that peers, views and epochs of two runs are never mistaken for each other."""


class Memory(Enum):
    """The memory that outlasts a master's process."""

    NONE = "none"
    """The next master waits for all peers."""
    DISK = "disk"


@dataclass(eq=False)
class MasterHost:
    name: str
    machine: Failover
    is_frozen: bool = False
    is_dead: bool = False
    is_wedged: bool = False
    """It reads no messages and takes no peer in, but it sends and hears heartbeats, and its timers fire."""
    rate: float = 1.0
    """The seconds of its own clock in a second."""
    process: int = 0
    """The number of the process, of all that ever were."""
    unfinished: list[Effect] = field(default_factory=list)
    """The effects of its machine that it was stopped before."""
    is_going_on: bool = False
    """It is just carrying them out."""
    frozen_at: float = 0.0
    heartbeats: dict[int, Node] = field(default_factory=dict)
    """The heartbeat connections that it knows."""
    seen: Master | None = None
    """The leading machine, as last looked at."""
    record: RunRecord | None = None
    """The record that it keeps on disk."""

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
        hold_beside_s: float,
        is_standby: bool,
        memory: Memory = Memory.NONE,
    ) -> None:
        """Start a new process."""
        self.machine = Failover(
            f"run-{run}",
            options,
            is_standby=is_standby,
            secret=b"secret of run %d" % run,
            record=self.record,
            persists=memory is Memory.DISK,
        )
        self.machine.begin(now, hold_s, hold_beside_s)
        self.process = run
        self.unfinished = []
        self.is_dead = self.is_frozen = self.is_wedged = False
        self.number(run)

    def number(self, run: int) -> None:
        """Set apart the numbers of a run that may be founded here."""
        self.seen = self.machine.master
        assert self.seen.is_vacant
        self.seen.state.next_peer += (run - 1) * NUMBERS_PER_RUN
        self.seen.state.view += (run - 1) * NUMBERS_PER_RUN
