"""A thread for what would hold up the trio thread, made while threads can be made.

trio's own are made when they are needed, and from CPython 3.12 on no thread can be made once the program has ended,
though what it serves may go on (`serving`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import trio

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
