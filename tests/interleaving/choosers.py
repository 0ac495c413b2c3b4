"""Choosers of schedules: which thread goes on at a hand-over.

    Straight    the present thread for as long as it can, then the next in order. For set-up, which is not examined
    Walk        at each hand-over another thread, with some probability: a random walk
    Priorities  the thread of highest priority. Priorities are random and different, and at `depth - 1` steps chosen
                beforehand the thread that runs gets the lowest of all

The last is PCT (Burckhardt, Kothari, Musuvathi, Nagarakatte: A Randomized Scheduler with Probabilistic Guarantees of
Finding Bugs, ASPLOS 2010). A fault that `depth` orderings bring about is found in one schedule with probability
1 / (threads * steps ** (depth - 1)) at least, where a walk would have to guess right at every step.
"""

from __future__ import annotations

import random

from tests.interleaving.scheduler import ManagedThread


class Straight:
    """Each thread runs for as long as it can."""

    def born(self, thread: ManagedThread) -> None:
        pass

    def pick(self, ready: list[ManagedThread], current: ManagedThread | None) -> ManagedThread:
        if current in ready:
            return current
        return min(ready, key=lambda thread: thread.number)

    def lets_time_pass(self) -> bool:
        return False


class Walk:
    """A random walk: each hand-over switches with this probability."""

    def __init__(self, rng: random.Random, switch: float, early: float = 0.0) -> None:
        """`early` is the probability that time passes at a hand-over."""
        self._rng = rng
        self._switch = switch
        self._early = early

    def born(self, thread: ManagedThread) -> None:
        pass

    def pick(self, ready: list[ManagedThread], current: ManagedThread | None) -> ManagedThread:
        if current is not None and self._rng.random() >= self._switch:
            return current
        return self._rng.choice(ready)

    def lets_time_pass(self) -> bool:
        return self._early > 0 and self._rng.random() < self._early


class Priorities:
    """PCT: the highest priority goes on, and a few steps lower the running thread's."""

    def __init__(self, rng: random.Random, depth: int, steps: int, early: float = 0.0) -> None:
        """`steps` is about how many there will be."""
        self._rng = rng
        self._early = early
        self._step = 0
        self._lowest = 0
        self._changes = {rng.randrange(max(1, steps)) for _ in range(depth - 1)}

    def born(self, thread: ManagedThread) -> None:
        thread.priority = self._rng.randrange(1, 1 << 30)

    def pick(self, ready: list[ManagedThread], current: ManagedThread | None) -> ManagedThread:
        self._step += 1
        best = max(ready, key=lambda thread: thread.priority)
        if self._step in self._changes:
            self._lowest -= 1
            best.priority = self._lowest
            best = max(ready, key=lambda thread: thread.priority)
        return best

    def lets_time_pass(self) -> bool:
        return self._early > 0 and self._rng.random() < self._early


class Switching:
    """A chooser that another takes over from, once set-up is done."""

    def __init__(self, now: Straight | Walk | Priorities, later: Walk | Priorities) -> None:
        self._chooser: Straight | Walk | Priorities = now
        self._later = later

    def switch(self) -> None:
        """Have the other chooser decide from now on."""
        self._chooser = self._later

    def settle(self) -> None:
        """Let the rest run straight."""
        self._chooser = Straight()

    def born(self, thread: ManagedThread) -> None:
        self._later.born(thread)

    def pick(self, ready: list[ManagedThread], current: ManagedThread | None) -> ManagedThread:
        return self._chooser.pick(ready, current)

    def lets_time_pass(self) -> bool:
        return self._chooser.lets_time_pass()
