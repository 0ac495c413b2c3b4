"""The time that callers spend in waits for ops that were launched before.

An op that its caller waits for from the launch on is timed by the engine. An op that is launched while its caller goes
on to compute is not timed there: only the waits for its handle count. The master compares both sums between peers
(`protocol.diagnosis`).

Callers append notes to a queue without a lock, since a signal handler may close the communicator during a wait. The
thread that reads the sum processes the notes. Rules:

1. Concurrent waits count once, and not while the engine times an op: each note holds the engine's time in ops.
2. Waits for an op with short pauses between them (at most the length of the wait before, within PAUSE_S_MIN and
   PAUSE_S) are one wait. A caller that polls with a timeout waits all that time; one that looks now and then while it
   computes does not. The pauses do not count as time in ops.
3. All waits for an op end with the op: a signal may have interrupted a caller before its note.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PAUSE_S_MIN, PAUSE_S = 0.25, 2.0
"""Bounds of the pause between two waits for an op that count as one."""
BEGUN, LEFT, OVER = range(3)
NS_PER_US = 1_000
NS_PER_S = 1_000_000_000


def _never() -> bool:
    """A placeholder for notes that do not use `is_over`."""
    return False


@dataclass
class _Op:
    """An op that was waited for."""

    since_ns: int
    """Start of the first wait."""
    is_over: Callable[[], bool]
    callers: int = 0
    entered_ns: int = 0
    """Start of the oldest of these waits."""
    back_by_ns: int = 0
    """Until when a new wait continues the last one, which has been given up."""


class OverlappedWaits:
    """The waits of one session, by op. `begin`, `end` and `over` are for any thread and for signal handlers."""

    def __init__(self, in_ops_ns: Callable[[], int] = lambda: 0) -> None:
        """`in_ops_ns` returns the engine's time in ops so far, in any thread."""
        self._in_ops_ns = in_ops_ns
        self._notes: deque[tuple[int, int, Callable[[], bool], int, int]] = deque()
        """For each note: what (BEGUN, ...), the op, its `is_over`, the time, and the engine's time in ops."""
        self._taking = threading.Lock()
        """Held while notes are processed, and only tried elsewhere."""
        self._ops: dict[int, _Op] = {}
        self._callers = 0
        """Number of callers that wait now."""
        self._since = (0, 0)
        """Start of the present waits, and the engine's time in ops at the start."""
        self._total_ns = 0
        """Time of earlier waits."""

    def begin(self, op: int, is_over: Callable[[], bool]) -> None:
        """Note that a caller starts to wait for an op. `is_over` returns whether the op is over."""
        self._note(BEGUN, op, is_over)

    def end(self, op: int, is_over: bool) -> None:
        """Note that a wait has ended, with the op or without."""
        self._note(LEFT, op)
        if is_over:
            self._note(OVER, op)

    def over(self, op: int) -> None:
        """Note that an op is over, whether or not a caller waits for it."""
        self._note(OVER, op)

    def _note(self, what: int, op: int, is_over: Callable[[], bool] = _never) -> None:
        self._notes.append((what, op, is_over, time.monotonic_ns(), self._in_ops_ns()))

    def added_to(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the engine's counters with these waits added to the times in ops."""
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
        """Return the time of the present waits, less the engine's time in ops (rule 1)."""
        since_ns, in_ops_before_ns = self._since
        waited_ns = max(0, now_ns - since_ns)
        return min(waited_ns, max(0, waited_ns - (in_ops_ns - in_ops_before_ns)))

    @staticmethod
    def _is_waited_for(op: _Op, now_ns: int) -> bool:
        """Return whether a caller waits, or did a moment ago (rule 2)."""
        return op.callers > 0 or now_ns < op.back_by_ns
