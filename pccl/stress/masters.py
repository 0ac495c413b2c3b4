"""When the master is killed, and what may be expected of the run then."""

from __future__ import annotations

from collections import deque
from random import Random

from pccl.stress.plan import Plan

START_S = 10.0
"""For so long after a kill whoever connects may find nobody."""
LOSS_S = 12.0
"""A peer that ended so long ago may still be in the last view."""


class Masters:
    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._every = plan.kill_master
        self._random = random
        self._lost: deque[float] = deque()
        self._killed_at = float("-inf")
        self.next_at = float("inf")
        """When to kill the next."""
        if self._every is not None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        assert self._every is not None
        self.next_at = now + self._random.uniform(self._every.least_s, self._every.most_s)

    def pause(self, now: float) -> None:
        """One was killed."""
        self._killed_at = now
        self._pause(now)

    def lost(self, now: float) -> None:
        """A peer has ended."""
        self._lost.append(now)

    def is_starting(self, now: float) -> bool:
        return now < self._killed_at + START_S

    def is_majority_there(self, now: float, sound: int, others: int) -> bool:
        """Whether those who are `sound` are more than half of the last view, as far as one can tell: it may have all
        `others` in it, and those that ended a moment ago."""
        while self._lost and self._lost[0] < now - LOSS_S:
            self._lost.popleft()
        return sound > others + len(self._lost)
