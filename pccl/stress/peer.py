"""The supervisor's knowledge of one peer."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.launcher import Child
from pccl.stress.churn import Hit
from pccl.stress.messages import At, Stepped


@dataclass
class Peer:
    """One peer's process, what it said last, and what is being done to it."""

    number: int
    slot: int
    group: int
    process: Child
    at: At
    heard_at: float
    is_joined: bool = False
    stepped: Stepped | None = None
    """The peer's last step; None since something was done to it."""
    hit: Hit | None = None
    """The disturbance that it waits for, or has had."""
    hit_at: float | None = None
    thaw_at: float | None = None
    """When it goes on, if it is frozen."""
    is_dismissed: bool = False
    has_left: bool = False

    @property
    def is_killed(self) -> bool:
        return self.hit is not None and self.hit.freeze_s is None and self.hit_at is None

    @property
    def is_doomed(self) -> bool:
        """Whether it is about to end, or has ended."""
        return self.is_dismissed or (self.hit is not None and self.hit.freeze_s is None)

    @property
    def is_sound(self) -> bool:
        """Whether it takes part in ops, as far as is known."""
        return self.is_joined and not self.is_doomed and self.thaw_at is None and self.stepped is not None

    @property
    def name(self) -> str:
        """The name by which the run knows it."""
        return f"peer {self.number}"

    def __str__(self) -> str:
        return f"{self.name} (slot {self.slot}, group {self.group})"
