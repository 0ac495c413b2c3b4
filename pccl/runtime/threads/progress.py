"""Tracks the progress of a trio run. Heartbeats depend on it.

A process's heartbeats are sent by a thread that does not run Python (`network.heartbeat`), so that a busy process does
not count as dead. That alone would hide a trio run that is blocked, for example by a logging handler. So a task in the
run records each *turn*, and heartbeats stop once the run has made no progress for

    HOLD_S          for any reason. It is long because a library may hold the GIL temporarily.
    peer timeout    (at least STILL_S_MIN) if a watching thread could run Python in that time, which shows that the run
                    itself is stuck. This applies only to pccl's own trio thread: in a user's program, the run makes no
                    progress while one of the user's tasks computes.

A peer timeout later, the other side detects that the process is silent. The watching thread writes the stacks of all
threads to stderr once pccl's own run has stood still for TOLD_S.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import trio

from pccl.runtime.extension import ffi, lib
from pccl.runtime.threads import portal

HOLD_S = 60.0
STILL_S_MIN = 2.0
TOLD_S = 20.0
LOOKS_PER_SPAN = 10
TURNS_PER_TIMEOUT = 10
TURN_S_MAX = 1.0


class Progress:
    """The progress of one trio run. The heartbeats of one thread depend on it."""

    def __init__(self, timeout_s: float) -> None:
        self.progress = ffi.new("pccl_progress *")
        self.hold_s = HOLD_S
        self.still_s = max(timeout_s, STILL_S_MIN)
        self._interval_s = min(timeout_s / TURNS_PER_TIMEOUT, TURN_S_MAX)

    async def keep(self) -> None:
        """Record the run's turns periodically until cancelled."""
        with _watched(self.progress, self.still_s / LOOKS_PER_SPAN):
            while True:
                lib.pccl_progress_turn(self.progress)
                await trio.sleep(self._interval_s)


class _Watch:
    """The thread that watches trio runs, while there are runs to watch."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection may end a watch in the thread that holds it
        self._watched: dict[int, tuple[Any, float]] = {}
        self._next = 1
        self._is_running = False
        self._changed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def begin(self, progress: Any, interval_s: float) -> int:
        with self._lock:
            number = self._next
            self._next += 1
            self._watched[number] = progress, interval_s
            if not self._is_running:
                with suppress(RuntimeError):  # if no thread can start, only HOLD_S counts
                    # Starting a threading.Thread would block the run until the new thread has run.
                    _thread.start_new_thread(self._run, ())
                    self._is_running = True
        self._changed.put(None)
        return number

    def end(self, number: int) -> None:
        with self._lock:
            self._watched.pop(number, None)
        self._changed.put(None)

    def _run(self) -> None:
        turns, still_s, is_told = 0, 0.0, False
        while True:
            with self._lock:
                watched = list(self._watched.values())
                if not watched:
                    self._is_running = False
                    return
            for progress, _ in watched:
                lib.pccl_progress_look(progress)
            interval_s = min(each_s for _, each_s in watched)
            before, turns = turns, sum(progress.turns for progress, _ in watched)
            if turns != before:
                still_s, is_told = 0.0, False
            elif still_s > TOLD_S and not is_told:
                is_told = True
                with suppress(OSError):
                    os.write(2, b"pccl: its thread stands still; please report this with the stacks that follow\n")
                    faulthandler.dump_traceback(2)
            try:
                self._changed.get(timeout=interval_s)
            except queue.Empty:
                still_s += min(interval_s, TURN_S_MAX)  # little of the time of a suspended process


_watch = _Watch()


@contextmanager
def _watched(progress: Any, interval_s: float) -> Iterator[None]:
    if not portal.is_in():
        yield
        return
    watch = _watch
    number = watch.begin(progress, interval_s)
    try:
        yield
    finally:
        watch.end(number)


def _after_fork_in_child() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork_in_child)
