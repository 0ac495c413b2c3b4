"""Waits across threads: latches, wakers for coroutines (trio or asyncio), and warnings of long waits in a trio run.

An op may end in its session's trio thread or in the thread that launched it, while its caller waits in another event
loop. The waiter creates a `Waker`, registers its `wake`, checks for the event, and then waits. A wait in asyncio wakes
its loop every LOOK_UP_S, because in a notebook the Ctrl-C handler does not wake the event loop.

A `Latch` replaces `threading.Event`, whose `wait` holds a lock while it runs Python code: a signal handler that raises
there would leave it locked. Each waiter of a latch uses a separate lock. A signal that arrives just before the wait for
that lock does not interrupt it, so the wait checks every LOOK_UP_S.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import trio

from pccl.protocol.wait_reasons import LongWait

if TYPE_CHECKING:
    import asyncio


LOOK_UP_S = 0.5


class NoEventLoopError(RuntimeError):
    """A coroutine that needs trio or asyncio runs under neither."""


class Waker(Protocol):
    """A wait of one coroutine."""

    def wake(self) -> None:
        """End the wait, or a wait that begins later. Thread-safe; may be called again."""

    async def wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        """Wait until woken or until the timeout passes. A cancellation does not end a shielded wait; under asyncio it
        propagates after the wait."""


def clock_s() -> float:
    """Return the time on the clock that the caller's waits use."""
    return trio.current_time() if trio.lowlevel.in_trio_task() else time.monotonic()


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the asyncio loop that runs this code; None in a trio task or if no loop runs."""
    if trio.lowlevel.in_trio_task() or "asyncio" not in sys.modules:
        return None  # trio may run as a guest of asyncio
    return sys.modules["asyncio"]._get_running_loop()  # type: ignore[no-any-return]


def trio_run() -> trio.lowlevel.TrioToken | None:
    """Return the trio run of the current coroutine, or None if it runs in asyncio. Raises NoEventLoopError."""
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()
    if asyncio_loop() is None:
        raise NoEventLoopError("this can only be awaited in trio or asyncio, but neither of them runs here")
    return None


def waker() -> Waker:
    """Return a waker for the current coroutine. Raises NoEventLoopError."""
    run = trio_run()
    if run is not None:
        return _TrioWaker(run)
    loop = asyncio_loop()
    assert loop is not None
    return _AsyncioWaker(loop)


class _TrioWaker:
    def __init__(self, run: trio.lowlevel.TrioToken) -> None:
        self._event = trio.Event()
        self._thread = threading.get_ident()
        self._run = run

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self._event.set()
            return
        with suppress(trio.RunFinishedError):
            self._run.run_sync_soon(self._event.set)

    async def wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        if timeout_s is None and not is_shielded:
            await self._event.wait()
            return
        end_s = float("inf") if timeout_s is None else trio.current_time() + timeout_s
        with trio.CancelScope(shield=is_shielded, deadline=end_s):
            await self._event.wait()


class _AsyncioWaker:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] = loop.create_future()

    def wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        import asyncio

        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        cancellation: asyncio.CancelledError | None = None
        while not self._future.done():
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            try:
                await asyncio.wait([self._future], timeout=LOOK_UP_S if left_s is None else min(left_s, LOOK_UP_S))
            except asyncio.CancelledError as error:
                if not is_shielded:
                    raise
                cancellation = error
        if cancellation is not None:
            raise cancellation


class Latch:
    """An event that happens once. Thread-safe; also usable after a fork."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Wake all current and future waiters. Never waits. May be called again."""
        self._is_set = True
        while self._waiters:
            with suppress(IndexError, RuntimeError):  # the waiter has left, or another latch has released it
                self._waiters.pop().release()

    def wake(self) -> None:
        self.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set. Return False if the timeout passes first."""
        return self._is_set or wait_any((self,), timeout_s)


_IS_SET = attrgetter("_is_set")


def wait_any(latches: Sequence[Latch], timeout_s: float | None = None) -> bool:
    """Wait until one of the latches is set. Return False if the timeout passes first."""
    lock = threading.Lock()
    lock.acquire()
    for latch in latches:
        latch._waiters.append(lock)
    # From here on, either `set` finds the lock or the loop finds that `set` was called.
    end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while not any(map(_IS_SET, latches)):
        rest_s = end_s - time.monotonic()
        if rest_s <= 0 or lock.acquire(timeout=min(rest_s, LOOK_UP_S)):
            break
    for latch in latches:
        if lock in latch._waiters:
            with suppress(ValueError):  # `set` has already removed it
                latch._waiters.remove(lock)
    return any(map(_IS_SET, latches))


# Warnings of long waits in a trio run (`protocol.wait_reasons`).

REASON_S = 3.0
"""Time limit for finding the reason."""

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]
Reason = Callable[[], Awaitable[tuple[str, str]]]
"""A function that returns what a call waits for and where to look for the cause."""


@dataclass(eq=False)
class waiting(AbstractContextManager[None]):  # noqa: N801 - a context, as trio's are named
    """A context for a call that waits. `what` is the call's name or the schedule of its warnings."""

    what: str | LongWait
    reason: Reason
    logger: Logger
    schedule: LongWait = field(init=False)
    _scope: trio.CancelScope = field(init=False, default_factory=trio.CancelScope)

    def __enter__(self) -> None:
        self.schedule = self.what if isinstance(self.what, LongWait) else LongWait(self.what, trio.current_time())
        trio.lowlevel.spawn_system_task(self._warn)

    def __exit__(self, *_: object) -> None:
        self._scope.cancel()
        if self.schedule.is_told:
            self.logger.warning("%s", self.schedule.ending(trio.current_time()))

    async def _warn(self) -> None:
        """Log each warning when it is due, until the wait is over."""
        with self._scope:
            while True:
                await trio.sleep_until(self.schedule.due_at)
                if not self.schedule.is_due(trio.current_time()):
                    continue
                whom, where = "a reason that could not be found in time", "look at the master"
                with suppress(Exception), trio.move_on_after(REASON_S):  # a failed warning must not end the call
                    whom, where = await self.reason()
                self.logger.warning("%s", self.schedule.warning(trio.current_time(), whom, where))
