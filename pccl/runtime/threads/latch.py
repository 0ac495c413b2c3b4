"""An event that happens once, and that may be waited for where a signal handler raises.

`threading.Event` will not do. Its `wait` holds a lock while it runs Python code, and where a signal handler raises
there (Ctrl-C does), the lock stays held for ever: `set` then blocks whoever calls it, here the trio thread and with it
every communicator of the process. This one shares no lock: each waiter has its own, which is released when it happens.

A thread that waits for any of several latches leaves the same lock with all of them.

A signal that arrives right before the wait for a lock begins does not end that wait: Python has noted it, and calls the
handler when the main thread runs Python code again. So nobody waits for longer than LOOK_UP_S at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

LOOK_UP_S = 0.5


class Latch:
    """An event that happens once. Thread-safe; usable after a fork, too."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake all who wait, now and later. Never waits itself. May be called again."""
        self._is_set = True
        while self._waiters:
            with suppress(IndexError, RuntimeError):  # the waiter has left, or another latch has released it
                self._waiters.pop().release()

    def wake(self) -> None:
        self.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set. Return False if the time passed first."""
        return self._is_set or wait_any((self,), timeout_s)


def wait_any(latches: Sequence[Latch], timeout_s: float | None = None) -> bool:
    """Wait until one of the latches is set. Return False if the time passed first."""
    lock = threading.Lock()
    lock.acquire()
    for latch in latches:
        latch._waiters.append(lock)
    # From here on either `set` finds the lock, or we find that it was called.
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not any(latch._is_set for latch in latches):
        rest_s = end_s - time.monotonic()
        if rest_s <= 0 or lock.acquire(timeout=min(rest_s, LOOK_UP_S)):
            break
    for latch in latches:
        if lock in latch._waiters:
            with suppress(ValueError):  # `set` was faster
                latch._waiters.remove(lock)
    return any(latch._is_set for latch in latches)
