"""Wakes a coroutine, of trio or asyncio, from any thread.

An op may end in the trio thread that its session lives in or in the thread that launched it, while its caller waits in
an event loop of its own. Whoever waits makes a `Waker` first, hands out its `wake`, looks whether it has happened
already, and only then waits: nothing is missed.

In a notebook the handler of Ctrl-C does not wake the kernel's event loop: a cell that waits was interrupted only when
something else happened there. So a wait in asyncio wakes its loop every LOOK_UP_S.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import trio

if TYPE_CHECKING:
    import asyncio


LOOK_UP_S = 0.5


class NoEventLoopError(RuntimeError):
    """A coroutine that needs trio or asyncio runs under neither."""


class Waker(Protocol):
    """A wait of one coroutine."""

    def wake(self) -> None:
        """End the wait, now or when it begins. Thread-safe; may be called again."""

    async def wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        """Wait until woken or until the time has passed. A shielded wait is not ended by a cancellation, which under
        asyncio goes on when it is over."""


def clock_s() -> float:
    """Return the time by the clock that the caller's waits go by."""
    return trio.current_time() if trio.lowlevel.in_trio_task() else time.monotonic()


def asyncio_loop() -> asyncio.AbstractEventLoop | None:
    """Return the asyncio loop that runs this code; None in a trio task, or where no loop runs."""
    if trio.lowlevel.in_trio_task() or "asyncio" not in sys.modules:
        return None  # trio may be a guest of asyncio, and has its own tasks
    return sys.modules["asyncio"]._get_running_loop()  # type: ignore[no-any-return]


def trio_run() -> trio.lowlevel.TrioToken | None:
    """Return the trio run of the coroutine that runs; None if it runs in asyncio. NoEventLoopError."""
    if trio.lowlevel.in_trio_task():
        return trio.lowlevel.current_trio_token()
    if asyncio_loop() is None:
        raise NoEventLoopError("this can be awaited in trio and in asyncio, and neither of them runs here")
    return None


def waker() -> Waker:
    """Return a waker for the coroutine that runs. NoEventLoopError."""
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
