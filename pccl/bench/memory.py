"""Measures how much memory the engine uses beyond the caller's arrays.

An engine that keeps a high-water mark of its own is asked for it. One that does not is watched from a second thread
while ops are in flight. That may miss a peak between two looks, and costs time, so ops that are watched are not timed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import msgspec

LOOK_S = 0.0005


class Memory(msgspec.Struct, frozen=True):
    """The memory of one communicator."""

    scratch_bytes_max: int
    """The most that ops had in use at any time."""
    held_bytes_max: int
    """The most that it had at any time, including memory that is kept idle for later ops."""


class MemoryWatch:
    """Watches a communicator's `stats`, from another thread, for as long as a `with` block lasts.

    The engine's own mark counts from the time when this object is made.
    """

    def __init__(self, stats: Callable[[], dict[str, int]]) -> None:
        self._stats = stats
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)
        self._mark_before = stats().get("scratch_bytes_max", 0)
        self._scratch_bytes_max = 0
        self._held_bytes_max = 0

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if kind is None:
            self._look()

    def result(self) -> Memory:
        """Return the most that was seen."""
        return Memory(self._scratch_bytes_max, max(self._held_bytes_max, self._scratch_bytes_max))

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        stats = self._stats()
        mark = stats.get("scratch_bytes_max", 0)
        # The mark is of the engine's whole life: it tells of what was watched only once it has risen.
        scratch_bytes = mark if mark > self._mark_before else stats["scratch_bytes"]
        self._scratch_bytes_max = max(self._scratch_bytes_max, scratch_bytes)
        self._held_bytes_max = max(self._held_bytes_max, stats["scratch_bytes"] + stats["pool_bytes"])
