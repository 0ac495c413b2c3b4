"""Tasks of pccl's own within a user's trio program.

Where trio runs in the main thread, Ctrl-C is raised in whatever is running then, unless that is protected. In a task of
pccl it would end the session, and trio with it, for neither expects it there. So all of them are protected, and so are
the calls that users make, where these are not waiting: trio then has the main task raise KeyboardInterrupt where it
next waits, or waits already. That is the program's own code, or a call of pccl that undoes what it began.
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


# A thread for what would hold up the trio thread, made while threads can be made.

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
        """Start the thread. OSError if the system denies it."""
        self._tasks: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError as error:
            raise OSError(str(error)) from None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    async def run(self, function: Callable[[], T], *, is_left: bool) -> T:
        """Run a function in the thread and return or raise what it does. When cancelled, go on without waiting if the
        function may be left running (`is_left`), else wait for its end."""
        task = _Task(function)
        self._tasks.put(task)  # type: ignore[arg-type]
        with trio.CancelScope(shield=not is_left):
            await task.done.wait()
        if task.error is not None:
            raise task.error
        return task.value[0]

    def close(self) -> None:
        """End the thread, after what it was given."""
        self._tasks.put(None)


TEXT_CHARACTERS_MAX = 200


def described(error: BaseException) -> str:
    """Return what was raised and where, in a line; for a group, the first of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{where}{text}"[:TEXT_CHARACTERS_MAX].replace("\n", " ")


def report(what: str, error: BaseException) -> str:
    """Return the text that tells the user that a bug of pccl has ended `what`."""
    return f"a bug of pccl has ended {what}: {described(error)}; please report it, with the log, which has more"
