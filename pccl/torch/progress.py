"""The progress thread of a process group: does what must not be done in pccl's own thread.

That thread serves all communicators of the process, so nothing there may take long or call foreign code. Copies, and
callbacks of futures, are made here. It also gives works up whose time has passed while nobody waits for them. It is
started when it is first needed.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("pccl.torch")

Call = Callable[[], None]


class Progress:
    """A thread that makes calls in the order in which they were handed over. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[float, Call] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def later(self, call: Call) -> None:
        """Have `call` made soon."""
        self.at(0.0, call)

    def at(self, time_s: float, call: Call) -> None:
        """Have `call` made at a time, on the clock of `time.monotonic`."""
        self._calls.put((time_s, call))
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()

    def stop(self) -> None:
        """End the thread once it has made the calls that were handed over, without waiting for it."""
        if self._thread is not None:
            self._calls.put(None)

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        timed: list[tuple[float, int, Call]] = []
        numbers = itertools.count()
        while True:
            try:
                item = self._calls.get(timeout=max(0.0, timed[0][0] - time.monotonic()) if timed else None)
            except queue.Empty:
                _, _, call = heapq.heappop(timed)
                _make(call)
                continue
            if item is None:
                return
            time_s, call = item
            if time_s <= 0.0:
                _make(call)
            else:
                heapq.heappush(timed, (time_s, next(numbers), call))


def _make(call: Call) -> None:
    try:
        call()
    except Exception:
        logger.exception("a call of a process group's progress thread failed")
