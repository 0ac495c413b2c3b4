"""The progress threads of a process group: they do what must not be done in pccl's own thread.

That thread serves all communicators of the process, so nothing there may take long or call foreign code. Copies, and
callbacks of futures, are made here.

A callback may wait for another call of the group, as those of DDP's PowerSGD hook do, whose future is completed here
too. So there is always a thread for the next call: one is started when more calls are waiting than threads. A thread
that has had nothing to do for a while ends.

The end of the program waits for calls that are being made. They pass through C++, and what comes back from there into
an interpreter that is gone aborts the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from pccl.runtime.threads import portal

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
        self._threads: set[threading.Thread] = set()
        portal.on_exit_drain(self)

    def later(self, call: Call) -> None:
        """Have `call` made soon."""
        with self._lock:
            self._waiting += 1
            starts = self._waiting > self._free
            if starts:
                self._free += 1
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
        self._calls.put(call)

    def stop(self) -> None:
        """Have each thread end as soon as it has nothing to do, without waiting for them."""
        with self._lock:
            self._is_stopped = True
            free = self._free
        for _ in range(free):
            self._calls.put(None)

    def drain(self, timeout_s: float) -> None:
        """Wait until all calls that were handed over are made, and the threads have ended; log what is left then."""
        self.stop()
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        left = sum(thread.is_alive() for thread in threads)
        if left:
            text = "%s: the program ends while %d callbacks of futures are under way, or what they wait for"
            logger.warning(text, self._name, left)

    def _run(self) -> None:
        try:
            self._make_calls()
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _make_calls(self) -> None:
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
