"""Waits for ops that were launched before: how long callers have waited for them, however many at once.

An op that its caller waits for from the launch on is timed by the engine. One that is launched while its caller goes on
to compute is not: it may lie there for long, and nobody loses any time by that. What counts is when its handle is
waited for. From both the master tells who has the others wait (`protocol.diagnosis`).
"""

from __future__ import annotations

import threading
import time


class OverlappedWaits:
    """The waits of one session, by ops. Thread-safe. Whatever a signal cuts off ends with its op."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun_ns: dict[int, int] = {}
        """When each op that is waited for now was first waited for, the oldest first."""
        self._since_ns = 0
        """Since when something has been waited for."""
        self._total_ns = 0
        """The time before that."""

    def begin(self, op: int) -> None:
        """Note that a caller waits for an op that is not over."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if not self._begun_ns:
                self._since_ns = now_ns
            self._begun_ns.setdefault(op, now_ns)

    def end(self, op: int) -> None:
        """Note that nobody waits for an op any more. It need not have been waited for."""
        if op not in self._begun_ns:
            return
        with self._lock:
            if self._begun_ns.pop(op, None) is not None and not self._begun_ns:
                self._total_ns += time.monotonic_ns() - self._since_ns

    def added_to(self, stats: dict[str, int]) -> dict[str, int]:
        """Return the counters of the engine, in which these waits count like ops that were waited for from the launch
        on."""
        with self._lock:
            now_ns = time.monotonic_ns()
            begun_ns = next(iter(self._begun_ns.values()), now_ns)
            total_ns = self._total_ns + (now_ns - self._since_ns if self._begun_ns else 0)
        in_ops_us = stats["in_ops_us"] + total_ns // 1000
        op_wait_us = max(stats["op_wait_us"], (now_ns - begun_ns) // 1000)
        return {**stats, "in_ops_us": in_ops_us, "op_wait_us": op_wait_us}
