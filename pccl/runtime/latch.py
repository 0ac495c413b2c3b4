"""An event that happens once, and waits for it that a signal may interrupt anywhere.

threading.Event will not do. Its `wait` holds a lock while it runs Python code, and where a signal handler raises there
(Ctrl-C does), the lock stays held for ever: `set` then blocks whoever calls it, here the trio thread and with it every
communicator of the process. This one shares no lock: each waiter has its own, which is released when it happens.
"""

from __future__ import annotations

import threading
from contextlib import suppress


class Latch:
    """Thread-safe; usable after a fork, too."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Never waits. May be called again."""
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._waiters.pop().release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """False if the time passed first."""
        lock = threading.Lock()
        lock.acquire()
        self._waiters.append(lock)
        # From here on either `set` finds the lock, or we find that it was called.
        if self._is_set:
            return True
        if timeout_s is None:
            return lock.acquire()
        if lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)):
            return True
        with suppress(ValueError):
            self._waiters.remove(lock)
        return self._is_set
