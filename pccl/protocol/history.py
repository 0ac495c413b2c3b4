"""What has happened in a run so far, in bounded memory: totals, the last minutes step by step, the last losses and log
lines.

The master tells it what happens; it decides nothing. All moments are the master's `now`.
"""

from __future__ import annotations

from collections import deque
from operator import add

import msgspec

from pccl.protocol.status import Course, Event, Loss, Totals

STEP_S = 2.0
STEPS_MAX = 300
LOSSES_MAX = 50
EVENTS_MAX = 200
TEXT_CHARACTERS_MAX = 300
"""Of a reason or line that is kept."""


class History:
    def __init__(self) -> None:
        self.totals = Totals()
        self._steps: deque[tuple[int, Totals]] = deque(maxlen=STEPS_MAX)
        """By number of the step; those in which nothing happened are left out."""
        self._losses: deque[tuple[float, Loss]] = deque(maxlen=LOSSES_MAX)
        self._events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)

    def ops_ended(self, now: float, committed: int = 0, aborted: int = 0) -> None:
        if committed or aborted:
            self._count(now, Totals(ops_committed=committed, ops_aborted=aborted))

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
        """Up to `now`."""
        current = int(now // STEP_S)
        known = dict(self._steps)
        first = max(next(iter(known), current), current - STEPS_MAX + 1)
        return Course(STEP_S, [known.get(number, NOTHING) for number in range(first, current + 1)])

    def losses(self, now: float) -> list[Loss]:
        return [msgspec.structs.replace(loss, age_s=now - at) for at, loss in self._losses]

    def events(self, now: float) -> list[Event]:
        return [Event(now - at, level, text) for at, level, text in self._events]

    def _count(self, now: float, more: Totals) -> None:
        self.totals = _sum(self.totals, more)
        number = int(now // STEP_S)
        if self._steps and self._steps[-1][0] == number:
            self._steps[-1] = number, _sum(self._steps[-1][1], more)
        else:
            self._steps.append((number, more))


NOTHING = Totals()


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals(*map(add, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _short(text: str) -> str:
    text = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()
