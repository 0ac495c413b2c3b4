"""The deadlines of works that nobody may be waiting for: those whose futures are waited for, as by DDP, or are polled.

A thread sleeps until the first deadline among the works that are under way, and has those given up whose time has
passed. Calls of a group usually have one timeout, so that a new work's deadline is the last one, and the thread need
not be woken for it. It is started by the first work, and ends with the group.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

AGAIN_S = 1.0
"""Seconds between two attempts to give up a work whose time has passed."""
SLEEP_S_MAX = 3600.0


class Expiring(Protocol):
    """A work, as its deadline is watched."""

    deadline_s: float
    """When its time has passed, by the monotonic clock."""


Work = TypeVar("Work", bound=Expiring)


class Deadlines(Generic[Work]):
    """Watches the works of one process group. Thread-safe."""

    def __init__(
        self, name: str, under_way: Callable[[], Sequence[Work]], expire: Callable[[Sequence[Work]], None]
    ) -> None:
        """`under_way()` returns the works to be watched. `expire(works)` has some given up, in the order of their
        deadlines, and does not wait."""
        self._name = name
        self._under_way = under_way
        self._expire = expire
        self._changed = threading.Condition(threading.Lock())
        self._wake_at = math.inf
        """When the thread looks at the works, by the monotonic clock."""
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def watch(self, work: Work) -> None:
        """Have a work that is under way given up when its time has passed, unless it is over then."""
        with self._changed:
            if work.deadline_s >= self._wake_at or self._is_stopped:
                return
            self._wake_at = work.deadline_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def stop(self) -> None:
        """Watch nothing any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_stopped and (left_s := self._wake_at - time.monotonic()) > 0:
                    self._changed.wait(min(left_s, SLEEP_S_MAX))
                if self._is_stopped:
                    return
                works, now = self._under_way(), time.monotonic()
                due = [work for work in works if work.deadline_s <= now]
                next_s = min((work.deadline_s for work in works if work.deadline_s > now), default=math.inf)
                self._wake_at = min(next_s, now + AGAIN_S) if due else next_s
            if due:
                self._expire(sorted(due, key=lambda work: work.deadline_s))
