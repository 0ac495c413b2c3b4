"""An event that happens once, and waits for it that a signal may interrupt anywhere.

threading.Event will not do. Its `wait` holds a lock while it runs Python code, and where a signal handler raises there
(Ctrl-C does), the lock stays held for ever: `set` then blocks whoever calls it, here the trio thread and with it every
communicator of the process. This one shares no lock: each waiter has its own, which is released when it happens.

One who waits for any of several latches leaves the same lock with all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
                lock = self._waiters.pop()
                with suppress(RuntimeError):  # another latch has released it
                    lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """False if the time passed first."""
        return wait_any((self,), timeout_s)


def wait_any(latches: Sequence[Latch], timeout_s: float | None = None) -> bool:
    """Waits until one of them is set; False if the time passed first."""
    lock = threading.Lock()
    lock.acquire()
    for latch in latches:
        latch._waiters.append(lock)
    # From here on either `set` finds the lock, or we find that it was called.
    if not any(latch._is_set for latch in latches):
        if timeout_s is None:
            lock.acquire()
        else:
            lock.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
    for latch in latches:
        with suppress(ValueError):
            latch._waiters.remove(lock)
    return any(latch._is_set for latch in latches)
