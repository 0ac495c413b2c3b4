"""Waits for ops that were launched before: how long callers have waited for them, however many at once.

An op that its caller waits for from the launch on is timed by the engine. One that is launched while its caller goes on
to compute is not: it may lie there for long, and nobody loses any time by that. What counts is when its handle is
waited for. From both the master tells who has the others wait (`protocol.diagnosis`).

Theory of operation. Callers note what they do in a queue, without a lock: a signal handler may close the communicator
from within any wait, and the trio thread must not wait for the thread that the handler has interrupted. Whoever asks
for the sum takes the notes in.

    1  What callers wait for counts once, however many wait, and not while the engine times an op anyway: each note has
       the engine's time in ops by then.
    2  An op is waited for, for as long as somebody does, until it is over, with pauses that are no longer than the wait
       before (but for PAUSE_S_MIN) and PAUSE_S. A caller that asks again and again, with a timeout each time, waits for
       all that time, and one that looks now and then while it computes does not. Only what it really waits counts as
       time in ops.
    3  With its op all waits end: a signal may have taken a caller away before it could note that it waits no more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_S_MIN, PAUSE_S = 0.25, 2.0
"""Time between two waits for an op that does not make them two, however short or long the first is."""
BEGUN, LEFT, OVER = range(3)
NS_PER_US = 1_000
NS_PER_S = 1_000_000_000


def _never() -> bool:
    """Stands for what tells whether an op is over, in notes that need not know."""
    return False


@dataclass
class _Op:
    """An op that was waited for."""

    since_ns: int
    """When it was waited for first."""
    is_over: Callable[[], bool]
    callers: int = 0
    entered_ns: int = 0
    """When the first of them came."""
    back_by_ns: int = 0
    """When somebody has to be back for it to be the same wait, once the last caller has given up."""


class OverlappedWaits:
    """The waits of one session, by ops. `begin`, `end` and `over` are for any thread, and signal handlers."""

    def __init__(self, in_ops_ns: Callable[[], int] = lambda: 0) -> None:
        """`in_ops_ns` returns the engine's time in ops by now. For any thread."""
        self._in_ops_ns = in_ops_ns
        self._notes: deque[tuple[int, int, Callable[[], bool], int, int]] = deque()
        """What has happened (BEGUN, ...), to which op, what tells whether that is over, when, and the engine's time in
        ops then."""
        self._taking = threading.Lock()
        """Held by whoever takes notes in; nobody waits for it."""
        self._ops: dict[int, _Op] = {}
        self._callers = 0
        """Number of all that wait now."""
        self._since = (0, 0)
        """Since when somebody waits, and the engine's time in ops by then."""
        self._total_ns = 0
        """The time before that."""

    def begin(self, op: int, is_over: Callable[[], bool]) -> None:
        """Note that a caller waits for an op from now on. `is_over` tells whether the op is over."""
        self._note(BEGUN, op, is_over)

    def end(self, op: int, is_over: bool) -> None:
        """Note that a caller waits no longer, because the op is over, or though it is not."""
        self._note(LEFT, op)
        if is_over:
            self._note(OVER, op)

    def over(self, op: int) -> None:
        """Note that an op is over. It need not have been waited for."""
        self._note(OVER, op)

    def _note(self, what: int, op: int, is_over: Callable[[], bool] = _never) -> None:
        self._notes.append((what, op, is_over, time.monotonic_ns(), self._in_ops_ns()))

    def added_to(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the counters of the engine, in which these waits count like ops that were waited for from the launch
        on."""
        if self._taking.acquire(blocking=False):
            try:
                while self._notes:
                    self._take(*self._notes[0])
                    self._notes.popleft()
                now_ns, in_ops_ns = time.monotonic_ns(), self._in_ops_ns()
                for number in [number for number, op in self._ops.items() if op.is_over()]:
                    self._take(OVER, number, _never, now_ns, in_ops_ns)
            finally:
                self._taking.release()
        now_ns = time.monotonic_ns()
        total_ns = self._total_ns + (self._spent_ns(now_ns, self._in_ops_ns()) if self._callers else 0)
        since_ns = min((op.since_ns for op in list(self._ops.values()) if self._is_waited_for(op, now_ns)), default=0)
        in_ops_us = stats["in_ops_us"] + total_ns // NS_PER_US
        op_wait_us = max(stats["op_wait_us"], (now_ns - since_ns) // NS_PER_US if since_ns else 0)
        return {**stats, "in_ops_us": in_ops_us, "op_wait_us": op_wait_us}

    def _take(self, what: int, number: int, is_over: Callable[[], bool], now_ns: int, in_ops_ns: int) -> None:
        op = self._ops.get(number)
        if what == BEGUN:
            if op is None:
                op = self._ops[number] = _Op(now_ns, is_over)
            elif not self._is_waited_for(op, now_ns):
                op.since_ns = now_ns
            if not op.callers:
                op.entered_ns = now_ns
            op.callers += 1
            self._callers += 1
            if self._callers == 1:
                self._since = now_ns, in_ops_ns
            return
        if op is None:
            return
        gone = op.callers if what == OVER else min(1, op.callers)
        if what == OVER:
            del self._ops[number]
        if gone:
            op.callers -= gone
            pause_ns = max(PAUSE_S_MIN * NS_PER_S, min(PAUSE_S * NS_PER_S, now_ns - op.entered_ns))
            op.back_by_ns = now_ns + int(pause_ns)
            self._callers -= gone
            if not self._callers:
                self._total_ns += self._spent_ns(now_ns, in_ops_ns)

    def _spent_ns(self, now_ns: int, in_ops_ns: int) -> int:
        """Return the time since somebody waits for which the engine times no op (rule 1)."""
        since_ns, in_ops_before_ns = self._since
        waited_ns = max(0, now_ns - since_ns)
        return min(waited_ns, max(0, waited_ns - (in_ops_ns - in_ops_before_ns)))

    @staticmethod
    def _is_waited_for(op: _Op, now_ns: int) -> bool:
        """Whether somebody waits for it, or has until a moment ago (rule 2)."""
        return op.callers > 0 or now_ns < op.back_by_ns
