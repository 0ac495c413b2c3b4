"""The numbers of a stress run: what the command line sets, and their limits."""

from __future__ import annotations

import re

import msgspec

from pccl.stress.values import SLOTS

STANDBYS_MAX = 3
THREADS_MAX = 16
PEERS_MAX = SLOTS - 4
"""Some slots stay free, so that one is not used again while reports of its last user are on their way."""


class PlanError(ValueError):
    """Options that cannot be; the text names them as the command line does."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """A time drawn evenly between two bounds, in seconds."""

    least_s: float
    most_s: float


def parse_interval(text: str) -> Interval:
    """`0.5..3`, or a single number. ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\.\.(\d+(?:\.\d+)?))?", text)
    if match is None or float(match[2] or match[1]) < float(match[1]) or not float(match[2] or match[1]):
        raise ValueError(f"{text!r} is no interval in seconds such as 0.5..3")
    return Interval(float(match[1]), float(match[2] or match[1]))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    minutes: float = 2.0
    seed: int = 0
    peers: int = 4
    """The number of peers at the start."""
    peers_max: int = 8
    groups: int = 1
    disturb_every: Interval = Interval(0.5, 3.0)
    kill: bool = True
    join: bool = True
    leave: bool = True
    freeze: bool = True
    freeze_for: Interval = Interval(0.1, 10.0)
    cut: bool = False
    """Peers break connections of their own."""
    partition: Interval | None = None
    """The interval between partitions. None: never."""
    partition_for: Interval = Interval(0.1, 12.0)
    kill_master: Interval | None = None
    """The interval after which the master that leads is killed, and another one started at its address. None: never."""
    state: bool | None = None
    """Masters keep their run on disk. None: where they are killed and there is one address."""
    standbys: int = 0
    """Masters beside the first, at addresses that all peers know, too."""
    timeouts: bool = False
    """Some ops are given up after a few milliseconds, on all peers."""
    threads: int = 0
    """The threads of each peer that take turns on tags of their own, with calls that wait and calls that do not. 0:
    none."""
    interrupts: Interval | None = None
    """The interval after which some peer is sent SIGINT. None: never."""
    hang_s: float = 30.0
    """No call may last longer."""
    token: bool = False
    """Everybody has to know one."""
    encrypt: bool = False
    """Whether peers encrypt what they send to each other; there is a token then."""
    state_bytes: int = 4 << 20
    reduce_bytes_max: int = 6 << 20

    @property
    def asks(self) -> bool:
        """Whether peers ask are_peers_pending before update_topology, or call it in every step."""
        return self.seed % 4 != 3

    @property
    def keeps_state(self) -> bool:
        return self.kill_master is not None and self.standbys == 0 if self.state is None else self.state

    def check(self) -> None:
        """PlanError if this cannot be run."""
        if not self.minutes > 0:
            raise PlanError(f"--minutes {self.minutes:g}: must be positive")
        if not 1 <= self.peers <= self.peers_max:
            raise PlanError(f"--peers {self.peers}: must be from 1 to --peers-max {self.peers_max}")
        if not 2 <= self.peers_max <= PEERS_MAX:
            raise PlanError(f"--peers-max {self.peers_max}: must be from 2 to {PEERS_MAX}")
        if not 1 <= self.groups <= 4:
            raise PlanError(f"--groups {self.groups}: must be from 1 to 4")
        if not 0 <= self.standbys <= STANDBYS_MAX:
            raise PlanError(f"--standbys {self.standbys}: must be from 0 to {STANDBYS_MAX}")
        if not 0 <= self.threads <= THREADS_MAX:
            raise PlanError(f"--threads {self.threads}: must be from 0 to {THREADS_MAX}")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed}: must not be negative")
        if self.hang_s <= 0:
            raise PlanError(f"--hang {self.hang_s:g}: must be positive")
