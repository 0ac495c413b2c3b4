"""When masters are killed, what comes back in their place, and what may be expected of the run then. No I/O; time and
the generator are arguments.

With one address the next master must be found there by a majority of the last view. With standbys there is always
another one, so one that leads gives up, too, when it loses a majority at once: `is_majority_there` says whether that
may be so at any moment.

Runs are founded at masters that are no standbys, so one of these is always there. The one that was killed comes back as
a standby if it need not be that one; else, or by chance, as a master that knows nothing of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from pccl.stress.plan import Plan

T = TypeVar("T")
PEER_TIMEOUT_S = 5.0
PROGRESS_S = 1.0
"""So much longer than a peer timeout after a successor listens peers may take to go on, if nothing else happens."""
START_S = 10.0
"""For so long after a kill whoever connects may find nobody."""
LOSS_S = 12.0
"""A peer that ended so long ago may still be in the last view."""
AFRESH_CHANCE = 0.3
"""That the one that comes back knows nothing of the run though it could stand by."""


@dataclass
class _Loss:
    at: float
    group: int


class Masters:
    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._every = plan.kill_master
        self._has_standbys = plan.standbys > 0
        self._random = random
        self._lost: list[_Loss] = []
        """Of the last view, perhaps."""
        self._killed_at = float("-inf")
        self._listens_at: float | None = None
        """The successor of the one that was killed; None: nobody is waited for, or not undisturbed."""
        self.next_at = float("inf")
        """When to kill the next."""
        if self._every is not None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        assert self._every is not None
        self.next_at = now + self._random.uniform(self._every.least_s, self._every.most_s)

    def kill(self, now: float, is_founder_left: bool) -> bool:
        """One is killed. Whether it comes back as a standby; `is_founder_left`: another one is none."""
        self._killed_at = now
        self._listens_at = now if self._has_standbys else float("inf")
        self._pause(now)
        return self._has_standbys and is_founder_left and self._random.random() >= AFRESH_CHANCE

    def any_of(self, seats: Sequence[T]) -> T:
        return self._random.choice(seats)

    def listens(self, now: float) -> None:
        """The one that was started in its place does."""
        if self._listens_at is not None:
            self._listens_at = min(self._listens_at, now)

    def disturbed(self) -> None:
        """Something else happened since: it may take longer to go on."""
        self._listens_at = None

    def stepped(self, group: int, begun_at: float) -> float | None:
        """A peer has ended a step with others of its group, that it began then. What the first such step after a kill
        took from the moment that a successor listened, if nothing else has happened meanwhile."""
        self._lost = [loss for loss in self._lost if loss.group != group or loss.at >= begun_at]
        listened_at = self._listens_at
        if listened_at is None or begun_at < listened_at:
            return None
        self._listens_at = None
        return listened_at

    @property
    def progress_due_at(self) -> float:
        """A step must have ended by then."""
        return float("inf") if self._listens_at is None else self._listens_at + PEER_TIMEOUT_S + PROGRESS_S

    def lost(self, now: float, group: int) -> None:
        """A peer has ended."""
        self._lost.append(_Loss(now, group))

    def is_starting(self, now: float) -> bool:
        return now < self._killed_at + START_S

    def may_run_end(self, now: float, sound: int, others: int) -> bool:
        """Whether those who are `sound` may be too few for a master to go on with: as far as one can tell the last view
        has all `others` in it, and those that ended and that no step was made without."""
        if not self._has_standbys and not self.is_starting(now):
            return False
        self._lost = [loss for loss in self._lost if loss.at >= now - LOSS_S]
        return sound <= others + len(self._lost)
