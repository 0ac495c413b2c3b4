"""Stand-ins for what pccl takes from `threading`, `_thread`, `queue`, `select` and `time`, under a scheduler.

They behave as the originals do, except that a waiting thread gives the turn away, and that time is virtual. Threads
that are not managed find the locks free: no other thread runs while they do.
"""

from __future__ import annotations

import _thread
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

from tests.interleaving.scheduler import Scheduler


class Namespace(SimpleNamespace):
    """A module with some names replaced."""

    def __init__(self, original: Any, **names: Any) -> None:
        super().__init__(**names)
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


class Lock:
    """A `threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        if scheduler.me is not None:
            scheduler.step("a lock is taken")
            if self._is_held and blocking:
                deadline = None if timeout < 0 else scheduler.now + timeout
                scheduler.wait(lambda: not self._is_held, "a lock", deadline)
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False
        self._scheduler.step("a lock is released")

    def locked(self) -> bool:
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class RLock:
    """A `threading.RLock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: object | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self._scheduler
        me = scheduler.me
        if me is not None and self._owner is not me:
            scheduler.step("a lock is taken")
            if self._owner is not None and blocking:
                deadline = None if timeout < 0 else scheduler.now + timeout
                scheduler.wait(lambda: self._owner is None, "a lock", deadline)
            if self._owner is not None:
                return False
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._owner = None
            self._scheduler.step("a lock is released")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Thread:
    """A `threading.Thread`, which the scheduler manages."""

    def __init__(
        self,
        scheduler: Scheduler,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        *,
        daemon: bool | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._target = target
        self._args = args
        self.name = name
        self.daemon = daemon
        self._managed: Any = None

    def start(self) -> None:
        target = self._target
        assert target is not None
        self._managed = self._scheduler.spawn(self.name, lambda: target(*self._args))
        self._managed.facade = self
        self._scheduler.step("a thread is started")

    def is_alive(self) -> bool:
        return self._managed is not None and not self._managed.is_over

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else self._scheduler.now + timeout
        if self._scheduler.me is not None:
            self._scheduler.wait(lambda: not self.is_alive(), f"the end of {self.name}", deadline)


class SimpleQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._scheduler.step("something is put into a queue")

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        scheduler = self._scheduler
        if block and scheduler.me is not None:
            deadline = None if timeout is None else scheduler.now + timeout
            scheduler.wait(lambda: bool(self._items), "a queue", deadline)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Poll:
    """A `select.poll` object."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._poll = select.poll()

    def register(self, fd: int, events: int) -> None:
        self._poll.register(fd, events)

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        scheduler = self._scheduler
        if scheduler.me is not None:
            deadline = None if timeout_ms is None else scheduler.now + timeout_ms / 1000
            scheduler.wait(lambda: bool(self._poll.poll(0)), "a poll", deadline)
        return self._poll.poll(0)


def replacements(scheduler: Scheduler) -> dict[object, Namespace]:
    """Return the stand-in of each module that pccl's modules import."""

    def current_thread() -> object:
        me = scheduler.me
        return threading.current_thread() if me is None else me.facade or me

    def make_thread(*args: Any, **named: Any) -> Thread:
        return Thread(scheduler, *args, **named)

    def start_new_thread(function: Callable[..., object], args: tuple[Any, ...]) -> None:
        make_thread(target=function, args=args, name=getattr(function, "__qualname__", "thread")).start()

    def sleep(seconds: float) -> None:
        scheduler.wait(lambda: False, "a sleep", scheduler.now + seconds)

    def make_lock() -> Lock:
        return Lock(scheduler)

    return {
        threading: Namespace(
            threading,
            Lock=make_lock,
            RLock=lambda: RLock(scheduler),
            Thread=make_thread,
            current_thread=current_thread,
        ),
        _thread: Namespace(_thread, allocate_lock=make_lock, start_new_thread=start_new_thread),
        queue: Namespace(queue, SimpleQueue=lambda: SimpleQueue(scheduler)),
        select: Namespace(select, poll=lambda: Poll(scheduler)),
        time: Namespace(time, monotonic=lambda: scheduler.now, sleep=sleep),
    }
