"""The background threads of a process group: `Progress` for callbacks, `Deadlines` for timeouts."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pccl.runtime.threads import portal

logger = logging.getLogger("pccl.torch")

IDLE_S = 2.0
"""The number of seconds without a call after which a progress thread ends."""
AGAIN_S = 1.0
"""The number of seconds between two attempts to abort a work after its deadline."""
SLEEP_S_MAX = 3600.0

Call = Callable[[], None]


class Progress:
    """Threads that run calls (copies and callbacks of futures) in the order passed to `later`. Thread-safe.

    A callback may wait for another call of the group, so another thread starts whenever waiting calls outnumber free
    threads. At exit, the program waits for calls in progress, because a thread that returns from C++ after the
    interpreter has been finalized aborts the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._waiting = 0
        """The number of calls that no thread has taken."""
        self._free = 0
        """The number of threads that wait for a call or will do so soon; never less than `_waiting`."""
        self._is_stopped = False
        self._threads: set[threading.Thread] = set()
        portal.on_exit_drain(self)

    def later(self, call: Call) -> None:
        """Run `call` soon in a progress thread."""
        with self._lock:
            self._waiting += 1
            if self._waiting > self._free:
                self._free += 1
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
        self._calls.put(call)

    def stop(self) -> None:
        """End each thread once it is idle, without waiting for it."""
        with self._lock:
            self._is_stopped = True
            free = self._free
        for _ in range(free):
            self._calls.put(None)

    def drain(self, timeout_s: float) -> None:
        """Wait until all calls are done and the threads have ended. Log the number left after the timeout."""
        self.stop()
        ends_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        left = sum(thread.is_alive() for thread in threads)
        if left:
            text = "%s: the program is exiting while %d callbacks of futures are still running or queued"
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
        logger.exception("a call in a process group's progress thread failed")


class Deadlines:
    """Aborts works after their deadlines, even if no thread waits for them, as in DDP. Thread-safe."""

    def __init__(
        self, name: str, watched: Callable[[], Sequence[Any]], expire: Callable[[Sequence[Any]], None]
    ) -> None:
        """Works have a `deadline_s`. `expire(works)` aborts the given works in order of deadline, without blocking."""
        self._name = name
        self._watched = watched
        self._expire = expire
        self._changed = threading.Condition(threading.Lock())
        self._wake_at = math.inf
        """The monotonic time of the thread's next check of the works."""
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def watch(self, work: Any) -> None:
        """Enforce the deadline of a work."""
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
        """End the thread."""
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
                works, now = self._watched(), time.monotonic()
                due = [work for work in works if work.deadline_s <= now]
                next_s = min((work.deadline_s for work in works if work.deadline_s > now), default=math.inf)
                self._wake_at = min(next_s, now + AGAIN_S) if due else next_s
            if due:
                self._expire(sorted(due, key=lambda work: work.deadline_s))
