"""Runs pccl's own tasks within a user's trio program, and functions in helper threads.

If trio runs in the main thread, Ctrl-C raises KeyboardInterrupt in the running task, unless it is protected. In one of
pccl's tasks this would end the session and trio with it, because neither expects it there. So all these tasks are
protected, and so are users' calls except while they wait. trio then raises KeyboardInterrupt in the main task at its
current or next wait. That is the program's own code, or a pccl call that undoes its work.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar, TypeVarTuple

import trio

Args = TypeVarTuple("Args")


@trio.lowlevel.enable_ki_protection
async def _protected(function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    await function(*args)


def start_task(nursery: trio.Nursery, function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    """Start a task in the nursery, protected from KeyboardInterrupt."""
    nursery.start_soon(_protected, function, *args, name=function)


# Threads for functions that would block the trio thread. They are started while threads can still be started.

T = TypeVar("T")


class _Task(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._token = trio.lowlevel.current_trio_token()
        self.done = trio.Event()
        self.value: list[T] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.value.append(self._function())
        except Exception as error:
            self.error = error
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.done.set)


class HelperThread:
    """A thread that runs functions one after the other."""

    def __init__(self, name: str) -> None:
        """Start the thread. Raises OSError if that fails."""
        self._tasks: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError as error:
            raise OSError(str(error)) from None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    async def run(self, function: Callable[[], T], *, is_left: bool) -> T:
        """Run a function in the thread and return its result or raise its exception. A cancelled call leaves the
        function running if `is_left`, and otherwise waits for its end."""
        task = _Task(function)
        self._tasks.put(task)  # type: ignore[arg-type]
        with trio.CancelScope(shield=not is_left):
            await task.done.wait()
        if task.error is not None:
            raise task.error
        return task.value[0]

    def close(self) -> None:
        """End the thread once it has run all functions that it was given."""
        self._tasks.put(None)


TEXT_CHARACTERS_MAX = 200


def described(error: BaseException) -> str:
    """Return one line that describes an exception and where it was raised; for a group, its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{where}{text}"[:TEXT_CHARACTERS_MAX].replace("\n", " ")


def report(what: str, error: BaseException) -> str:
    """Return the error text for a bug in pccl that has ended `what`."""
    return f"a bug of pccl has ended {what}: {described(error)}; please report it with the log, which has details"
