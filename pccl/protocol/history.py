"""What has happened in a run so far, in bounded memory: totals, the last minutes step by step, the last losses and log
lines.

The master tells it what happens; it decides nothing. All moments are the master's `now`.
"""

from __future__ import annotations

from collections import deque
from operator import add, sub

import msgspec

from pccl.protocol.status import Course, Event, Loss, Totals

STEP_S = 2.0
STEPS_MAX = 300
LOSSES_MAX = 50
EVENTS_MAX = 200
TEXT_CHARACTERS_MAX = 300
"""Length of a reason or a line that is kept."""


class History:
    """The events of one run, as far as they are kept."""

    def __init__(self) -> None:
        self.totals = Totals()
        self._steps: dict[int, Totals] = {}
        """Steps by their numbers; those in which nothing happened are left out."""
        self._losses: deque[tuple[float, Loss]] = deque(maxlen=LOSSES_MAX)
        self._events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)

    def happened(self, since: float, now: float, more: Totals) -> None:
        """Note what happened at some time between two moments: at an even rate, as far as the steps go."""
        last = int(now // STEP_S)
        first = max(int(since // STEP_S), last - STEPS_MAX + 1)
        left = more
        for number in range(first, last):
            share = _fraction(left, (number + 1) * STEP_S - max(since, number * STEP_S), now - since)
            self._add(number, share)
            left, since = _minus(left, share), (number + 1) * STEP_S
        self._add(last, left)
        self.totals = _sum(self.totals, more)

    def joined(self, now: float) -> None:
        self._count(now, Totals(joins=1))

    def left(self, now: float) -> None:
        self._count(now, Totals(leaves=1))

    def lost(self, now: float, peer: int, name: str, group: int, reason: str) -> None:
        self._count(now, Totals(losses=1))
        self._losses.append((now, Loss(0.0, peer, name, group, _short(reason))))

    def logged(self, now: float, level: str, text: str) -> None:
        self._events.append((now, level, _short(text)))

    def course(self, now: float) -> Course:
        """Return the last minutes, up to `now`."""
        current = int(now // STEP_S)
        first = max(min(self._steps, default=current), current - STEPS_MAX + 1)
        return Course(STEP_S, [self._steps.get(number, NOTHING) for number in range(first, current + 1)])

    def losses(self, now: float) -> list[Loss]:
        return [msgspec.structs.replace(loss, age_s=now - at) for at, loss in self._losses]

    def events(self, now: float) -> list[Event]:
        return [Event(now - at, level, text) for at, level, text in self._events]

    def _count(self, now: float, more: Totals) -> None:
        self.totals = _sum(self.totals, more)
        self._add(int(now // STEP_S), more)

    def _add(self, number: int, more: Totals) -> None:
        if more == NOTHING:
            return
        self._steps[number] = _sum(self._steps.get(number, NOTHING), more)
        if len(self._steps) > STEPS_MAX:
            del self._steps[min(self._steps)]


NOTHING = Totals()


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals(*map(add, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _minus(a: Totals, b: Totals) -> Totals:
    return Totals(*map(sub, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _fraction(of: Totals, part_s: float, whole_s: float) -> Totals:
    share = min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0
    return Totals(*(int(share * count) for count in msgspec.structs.astuple(of)))


def _short(text: str) -> str:
    text = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()
