"""Waiting times of callers in ops that they launched before, such as through handles.

The engine times an op from its launch only if the caller waits from then on. An op that overlaps with computation costs
no time until its handle is waited for; these waits are added to the engine's counters here, and the master finds
stragglers by the sum (`protocol.stragglers`).

A wait for an op on the fast path lasts some milliseconds at most, and counts as a whole (`joined`).

Callers append notes to a queue without a lock, because a signal handler may run in the middle of a wait. Any number of
waits at once count once, and only while the engine times no op anyway.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

BEGUN, LEFT, OVER, JOINED = range(4)
NS_PER_US = 1_000


def _never() -> bool:
    return False


@dataclass
class _Op:
    """An op with waiting callers."""

    since_ns: int
    is_over: Callable[[], bool]
    callers: int = 1


class OverlappedWaits:
    """The waits of one session, by ops. `begin`, `end` and `over` are for any thread and for signal handlers."""

    def __init__(self, in_ops_ns: Callable[[], int] = lambda: 0) -> None:
        """`in_ops_ns` returns the engine's time in ops by now. Any thread."""
        self._in_ops_ns = in_ops_ns
        self._notes: deque[tuple[int, int, Callable[[], bool], int, int]] = deque()
        """The kind of event, the op, a function that says whether that is over, and the time by both clocks."""
        self._taking = threading.Lock()
        self._ops: dict[int, _Op] = {}
        self._since = (0, 0)
        """Time since which `_ops` is not empty, by both clocks."""
        self._total_ns = 0
        """Time in waits before that."""

    def begin(self, op: int, is_over: Callable[[], bool]) -> None:
        """Note that a caller waits for an op from now on."""
        self._note(BEGUN, op, is_over)

    def end(self, op: int, is_over: bool) -> None:
        """Note that a caller waits no longer."""
        self._note(OVER if is_over else LEFT, op)

    def joined(self, began_ns: int) -> None:
        """Note that a caller has waited for an op on the fast path since `began_ns`."""
        self._notes.append((JOINED, 0, _never, time.monotonic_ns() - began_ns, 0))

    def _note(self, what: int, op: int, is_over: Callable[[], bool] = _never) -> None:
        self._notes.append((what, op, is_over, time.monotonic_ns(), self._in_ops_ns()))

    def added_to(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the engine's counters with these waits in `in_ops_us` and `op_wait_us`."""
        now_ns, in_ops_ns = time.monotonic_ns(), self._in_ops_ns()
        if self._taking.acquire(blocking=False):
            try:
                while self._notes:
                    self._take(*self._notes.popleft())
                for number in [number for number, op in self._ops.items() if op.is_over()]:
                    self._take(OVER, number, _never, now_ns, in_ops_ns)
            finally:
                self._taking.release()
        ops = list(self._ops.values())
        total_ns = self._total_ns + (self._spent_ns(now_ns, in_ops_ns) if ops else 0)
        wait_ns = max((now_ns - op.since_ns for op in ops), default=0)
        return {
            **stats,
            "in_ops_us": stats["in_ops_us"] + total_ns // NS_PER_US,
            "op_wait_us": max(stats["op_wait_us"], wait_ns // NS_PER_US),
        }

    def _take(self, what: int, number: int, is_over: Callable[[], bool], now_ns: int, in_ops_ns: int) -> None:
        if what == JOINED:
            self._total_ns += now_ns
            return
        op = self._ops.get(number)
        if what == BEGUN:
            if not self._ops:
                self._since = now_ns, in_ops_ns
            if op is None:
                self._ops[number] = _Op(now_ns, is_over)
            else:
                op.callers += 1
        elif op is not None:
            op.callers -= 1
            if what == OVER or not op.callers:
                del self._ops[number]
            if not self._ops:
                self._total_ns += self._spent_ns(now_ns, in_ops_ns)

    def _spent_ns(self, now_ns: int, in_ops_ns: int) -> int:
        """Return the time since `_since` when the engine timed no op."""
        since_ns, in_ops_before_ns = self._since
        return max(0, now_ns - since_ns - max(0, in_ops_ns - in_ops_before_ns))
