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
"""The time beyond a peer timeout that peers may take to go on once a new master listens, if nothing else happens."""
START_S = 10.0
"""The time after a kill for which a peer that connects may find nobody."""
LOSS_S = 12.0
"""The time for which a peer that has ended may still be in the last view."""
AFRESH_CHANCE = 0.3
"""The chance that a master comes back knowing nothing of the run though it could stand by."""


@dataclass
class _Loss:
    at: float
    group: int


class Masters:
    """The kills of masters in a run, and what follows from the last one."""

    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._every = plan.kill_master
        self._has_standbys = plan.standbys > 0
        self._random = random
        self._lost: list[_Loss] = []
        """The losses of peers that may still be in the last view."""
        self._killed_at = float("-inf")
        self._listens_at: float | None = None
        """When the master listens that replaces a killed one; None: none is waited for, or more has happened since."""
        self.next_at = float("inf")
        """When to call `kill` next."""
        if self._every is not None:
            self._pause(now)

    def _pause(self, now: float) -> None:
        assert self._every is not None
        self.next_at = now + self._random.uniform(self._every.least_s, self._every.most_s)

    def kill(self, now: float, is_founder_left: bool) -> bool:
        """Note that a master is killed, and return whether it is to come back as a standby. `is_founder_left`: there is
        another master that is no standby."""
        self._killed_at = now
        self._listens_at = now if self._has_standbys else float("inf")
        self._pause(now)
        return self._has_standbys and is_founder_left and self._random.random() >= AFRESH_CHANCE

    def any_of(self, seats: Sequence[T]) -> T:
        return self._random.choice(seats)

    def listens(self, now: float) -> None:
        """Note that the master that was started in place of a killed one listens."""
        if self._listens_at is not None:
            self._listens_at = min(self._listens_at, now)

    def disturbed(self) -> None:
        """Note that something else has happened since the kill: it may take longer to go on."""
        self._listens_at = None

    def stepped(self, group: int, begun_at: float) -> float | None:
        """Note that a peer has ended a step with others of its group that it began then.

        For the first such step after a kill, return when the new master listened, if nothing else has happened since;
        else None."""
        self._lost = [loss for loss in self._lost if loss.group != group or loss.at >= begun_at]
        listened_at = self._listens_at
        if listened_at is None or begun_at < listened_at:
            return None
        self._listens_at = None
        return listened_at

    @property
    def progress_due_at(self) -> float:
        """When a step must have ended."""
        return float("inf") if self._listens_at is None else self._listens_at + PEER_TIMEOUT_S + PROGRESS_S

    def lost(self, now: float, group: int) -> None:
        """Note that a peer has ended."""
        self._lost.append(_Loss(now, group))

    def is_starting(self, now: float) -> bool:
        return now < self._killed_at + START_S

    def may_run_end(self, now: float, sound: int, others: int) -> bool:
        """Whether the `sound` peers may be too few for a master to go on with.

        As far as one can tell the last view also has in it all `others`, and the peers that have ended and without
        which no step has been made."""
        if not self._has_standbys and not self.is_starting(now):
            return False
        self._lost = [loss for loss in self._lost if loss.at >= now - LOSS_S]
        return sound <= others + len(self._lost)
