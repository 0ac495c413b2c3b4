"""The progress threads of a process group: they do what must not be done in pccl's own thread.

That thread serves all communicators of the process, so nothing there may take long or call foreign code. Copies, and
callbacks of futures, are made here.

A callback may wait for another call of the group, as those of DDP's PowerSGD hook do, whose future is completed here
too. So there is always a thread for the next call: one is started when more calls are waiting than threads. A thread
that has had nothing to do for a while ends.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger("pccl.torch")

IDLE_S = 2.0
"""Seconds without a call after which a thread ends."""

Call = Callable[[], None]


class Progress:
    """Threads that begin calls in the order in which they were handed over. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._waiting = 0
        """The calls that no thread has taken."""
        self._free = 0
        """The threads that take another call, or are about to: never fewer than `_waiting`."""
        self._is_stopped = False

    def later(self, call: Call) -> None:
        """Have `call` made soon."""
        with self._lock:
            self._waiting += 1
            starts = self._waiting > self._free
            if starts:
                self._free += 1
        self._calls.put(call)
        if starts:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Have each thread end as soon as it has nothing to do, without waiting for them."""
        with self._lock:
            self._is_stopped = True
            free = self._free
        for _ in range(free):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                call = None
            if call is not None:
                with self._lock:
                    self._waiting -= 1
                    self._free -= 1
                _make(call)
                with self._lock:
                    self._free += 1
                    if not self._is_stopped:
                        continue
            with self._lock:
                if self._waiting < self._free:
                    self._free -= 1
                    return


def _make(call: Call) -> None:
    try:
        call()
    except Exception:
        logger.exception("a call of a process group's progress thread failed")
