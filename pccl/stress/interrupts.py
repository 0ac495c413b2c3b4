"""Decides whom to interrupt and when. No I/O; time and the generator are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pccl.stress.plan import Plan


class Interrupts:
    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._every = plan.interrupts
        self._random = random
        self.next_at = float("inf")
        """When to call `target`."""
        self._pause(now)

    def _pause(self, now: float) -> None:
        if self._every is not None:
            self.next_at = now + self._random.uniform(self._every.least_s, self._every.most_s)

    def target(self, now: float, peers: Sequence[int]) -> int | None:
        """One of the peers that can be interrupted, if there is any."""
        self._pause(now)
        return self._random.choice(peers) if peers else None
