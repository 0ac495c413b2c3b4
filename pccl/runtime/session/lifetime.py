"""The life of a session: which tasks run in it, what ends it, and how its faults are contained.

A session shares its thread with other sessions and masters, which outlive its faults: everything of it that others
call, be it a task, a callback of trio's or a method, is contained (`contain`). An exception that nobody expects ends
this session alone: its machine is asked nothing any more, the master is told that this peer leaves, the engine is
closed, which restores the buffers, and callers get INTERNAL_ERROR; but those get their results whose ops the engine was
told to commit before.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress

import trio

from pccl.runtime.data_plane.events import EngineFailedError
from pccl.runtime.session.options import SessionError
from pccl.runtime.threads import faults
from pccl.runtime.threads.tasks import start_task
from pccl.types import Result

NO_BUG = EngineFailedError, MemoryError
"""Exceptions that end a session without being a bug."""

CLOSED_NURSERY = "Nursery is closed to new arrivals"
"""The words of trio for a task that comes too late."""


def loop_has_ended(error: BaseException) -> str:
    """Return the text for an event loop whose descriptors somebody else has closed."""
    return f"the event loop has ended: {error}; something in this process closes descriptors that are not its own"


class Containment:
    """A context for all that others call: an exception that nobody expects ends the session. May be entered again
    within itself."""

    def __init__(self, end: Callable[[Exception], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._end(error)
        return True


class Lifetime:
    """The life of a session: its tasks, and why it is over once it is."""

    def __init__(self, logger: logging.LoggerAdapter[logging.Logger], last_words: Callable[[str], None]) -> None:
        """`last_words` tells the master why this peer leaves, if it can still be told."""
        self.failure: SessionError | None = None
        """The reason why the session is over."""
        self.is_broken = False
        """Whether the session has a fault, so that its machine is not to be believed."""
        self.ended = trio.Event()
        """Set when the session has a failure."""
        self.over = trio.Event()
        """Set when nothing of this session runs any more."""
        self.contain = Containment(self.break_off)
        self.nursery: trio.Nursery | None = None
        """Holds the tasks, while the session runs."""
        self._logger = logger
        self._last_words = last_words
        self._endings: list[Callable[[SessionError], None]] = []

    def at_end(self, ending: Callable[[SessionError], None]) -> None:
        """Have `ending` called when the session fails, and perhaps again later."""
        self._endings.append(ending)

    def require_alive(self) -> None:
        """Raise a SessionError with the reason if the session is over."""
        if self.failure is not None:
            raise SessionError(self.failure.result, self.failure.message)

    def spawn(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task that ends with the session. Nothing starts once the session's tasks have ended."""
        if self.nursery is None or self.ended.is_set():
            return
        try:
            start_task(self.nursery, self.contained, function, *args)
        except RuntimeError as error:
            # Where a trio run ends, the nursery is closed before the session knows: another thread may ask meanwhile.
            if str(error) != CLOSED_NURSERY:
                raise

    async def contained(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        with self.contain:
            await function(*args)

    def fail(self, code: Result, reason: str) -> None:
        """End the session: all calls and queued launches fail. May be called again; the first reason stays. If one of
        the endings raises, as those of trio's do in another thread, the others are called all the same."""
        if self.failure is None:
            self.failure = SessionError(code, reason)
        with ExitStack() as last:
            last.callback(self.ended.set)
            for ending in reversed(self._endings):
                last.callback(ending, self.failure)

    def break_off(self, error: Exception) -> None:
        """End the session for a fault of pccl or of this machine. May be called again: one fault brings forth
        others."""
        if self.is_broken or self.over.is_set():
            return
        self.is_broken = True
        text = str(error) if isinstance(error, NO_BUG) else faults.report("this communicator", error)
        if isinstance(error, MemoryError):
            text = f"this process is out of memory: {text}" if text else "this process is out of memory"
        elif isinstance(error, OSError) and error.errno == errno.EBADF:
            text = loop_has_ended(error)
        with suppress(Exception):
            self._logger.error("%s", text, exc_info=error)
        with suppress(Exception):
            self._last_words(text)
        self.fail(Result.INTERNAL_ERROR, text)
