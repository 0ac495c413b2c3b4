"""The time that callers spend waiting for ops that they launched earlier, for example through handles.

The engine times an op from its launch only if its caller waits from then on. An op that overlaps with computation costs
no time until a caller waits for its handle. This module adds these waits to the engine's counters; the master uses the
sum to find stragglers (`protocol.stragglers`). Concurrent waits count once, and only while the engine times no op.

Callers append notes to a queue without a lock, because a signal handler may run in the middle of a wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

JOINED = 0
NS_PER_US = 1_000


class OverlappedWaits:
    """The waits of one session. `new`, `begin`, `end` and `joined` are for any thread and for signal handlers."""

    def __init__(self, in_ops_ns: Callable[[], int] = lambda: 0) -> None:
        """`in_ops_ns` returns the time that the engine has spent in ops so far; it may be called in any thread."""
        self._in_ops_ns = in_ops_ns
        self._numbers = itertools.count(1)
        self._notes: deque[tuple[int, int, int]] = deque()
        """Waits that begin (number, both clocks) or end (-number, both clocks), and joins (JOINED, duration, 0)."""
        self._taking = threading.Lock()
        self._begun: dict[int, int] = {}
        """The time when each open wait began."""
        self._since = (0, 0)
        """The time when the current period of open waits began, on both clocks."""
        self._total_ns = 0
        """Time spent in waits before that period."""

    def new(self) -> int:
        """Return the number of a new wait."""
        return next(self._numbers)

    def begin(self, number: int) -> None:
        self._notes.append((number, time.monotonic_ns(), self._in_ops_ns()))

    def end(self, number: int) -> None:
        """Record the end of a wait. This has no effect if the wait has not begun."""
        self._notes.append((-number, time.monotonic_ns(), self._in_ops_ns()))

    def joined(self, began_ns: int) -> None:
        """Record that a caller has waited for an op on the fast path since `began_ns`."""
        self._notes.append((JOINED, time.monotonic_ns() - began_ns, 0))

    def added_to(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the engine's counters with these waits in `in_ops_us` and `op_wait_us`."""
        now_ns, in_ops_ns = time.monotonic_ns(), self._in_ops_ns()
        if self._taking.acquire(blocking=False):
            try:
                while self._notes:
                    self._take(*self._notes.popleft())
            finally:
                self._taking.release()
        begun = list(self._begun.values())
        total_ns = self._total_ns + (self._spent_ns(now_ns, in_ops_ns) if begun else 0)
        wait_ns = max((now_ns - begun_ns for begun_ns in begun), default=0)
        return {
            **stats,
            "in_ops_us": stats["in_ops_us"] + total_ns // NS_PER_US,
            "op_wait_us": max(stats["op_wait_us"], wait_ns // NS_PER_US),
        }

    def _take(self, number: int, now_ns: int, in_ops_ns: int) -> None:
        if number == JOINED:
            self._total_ns += now_ns
        elif number > 0:
            if not self._begun:
                self._since = now_ns, in_ops_ns
            self._begun[number] = now_ns
        elif self._begun.pop(-number, None) is not None and not self._begun:
            self._total_ns += self._spent_ns(now_ns, in_ops_ns)

    def _spent_ns(self, now_ns: int, in_ops_ns: int) -> int:
        """Return the time since `_since` when the engine timed no op."""
        since_ns, in_ops_before_ns = self._since
        return max(0, now_ns - since_ns - max(0, in_ops_ns - in_ops_before_ns))
