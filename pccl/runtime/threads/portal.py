"""The trio thread of this process, and the calls of other threads into it (like anyio's BlockingPortal).

All blocking communicators and master nodes of a process share one daemon thread, which the first of them starts. A call
runs there as a task while its caller waits on a `Latch`, which signal handlers can interrupt. Rules:

1. On Ctrl-C the task is cancelled and gets a moment to undo its work; KeyboardInterrupt then propagates to the caller.
2. A job must not end the thread, because all communicators share it. An exception in a job is raised in its caller; an
   exception in a posted function is a bug and is logged.
3. A fork copies the memory but not the thread. So the child starts without a portal, and objects that belonged to the
   parent's portal release their resources (`forget_after_fork`).
4. At interpreter exit the registered closers run, with a time limit. If servers run, everything else is closed first;
   then the exit waits for the servers (`outlast`) and closes them.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, TypeVar

import trio

from pccl.runtime.extension import lib
from pccl.runtime.threads import tasks, waking
from pccl.runtime.threads.waking import Latch, Waker

logger = logging.getLogger("pccl")

INTERRUPT_GRACE_S = 0.5
EXIT_GRACE_S = 3.0

T = TypeVar("T")


class Forkable(Protocol):
    def forget_after_fork(self) -> None: ...


class PortalTimeoutError(Exception):
    """A call has not ended in time. It has been cancelled but may still be running."""


class PortalClosedError(Exception):
    """The interpreter is exiting."""


class PortalBrokenError(Exception):
    """The portal's thread has ended or cannot be woken; the text is the reason."""


def _broken(error: BaseException) -> PortalBrokenError:
    what = "something in this process closes descriptors that are not its own"
    return PortalBrokenError(f"the event loop has ended: {type(error).__name__}: {error}; {what}")


class _Job:
    """A coroutine in the portal, and the state that its caller waits for."""

    def __init__(self, jobs: set[_Job]) -> None:
        self._jobs = jobs
        """The unfinished jobs of the portal, whose callers may wait. A job is in this set from its start to its end."""
        self.scope: trio.CancelScope | None = None
        self.is_cancelled = False
        self.done = Latch()
        self.waker: Waker | None = None
        """Woken at the job's end, like the waiters of `done`."""
        self.value: Any = None
        self.error: BaseException | None = PortalClosedError("the interpreter is exiting")

    async def run(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        self.scope = trio.CancelScope()
        if self.is_cancelled:
            self.scope.cancel()
        try:
            with self.scope:
                self.value = await function(*args)
                self.error = None
        except trio.Cancelled:
            raise
        except BaseException as error:
            self.error = error
        finally:
            self.end()

    def end(self) -> None:
        """Wake all waiters."""
        self._jobs.discard(self)
        self.done.set()
        if self.waker is not None:
            self.waker.wake()

    def outcome(self) -> Any:
        """Return the result of a job that is over, or raise its exception."""
        error, self.error = self.error, None
        if error is None:
            return self.value
        try:
            raise error
        finally:
            del error  # its traceback holds this frame; a cycle would keep the caller's communicator alive

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()


def _contained(function: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        function(*args)
    except Exception as error:
        with suppress(Exception):
            logger.error("%s", tasks.report(f"a call of {function!r}", error), exc_info=error)


class Portal:
    """The trio thread of a process. `current` returns the process's portal."""

    def __init__(self) -> None:
        self._ready = Latch()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop = trio.Event()
        self._stopped = Latch()
        self._jobs = set[_Job]()
        """Jobs that may have a waiting caller."""
        self._thread = threading.Thread(target=self._run, name="pccl", daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await self._stop.wait()

        lib.pccl_fpenv_set(lib.pccl_fpenv_default())  # instead of the starting thread's
        try:
            trio.run(main)
        except BaseException as error:
            self._break(error)
        finally:
            self._stopped.set()

    def _break(self, error: BaseException) -> None:
        """End everything that belongs to a trio run that has ended by itself, for example because its descriptors were
        closed. Its tasks no longer run, so this function wakes the threads that wait for them."""
        global _portal
        with suppress(Exception):
            logger.error("%s", _broken(error), exc_info=error)
        if _portal is self:
            _portal = None
        for thing in list(_closers):
            if hasattr(thing, "abandon"):
                with suppress(Exception):
                    thing.abandon(error)
        _closers.clear()
        for job in list(self._jobs):
            if not job.done.is_set():
                job.error = _broken(error)
                job.end()

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a plain function in the trio thread soon. Has no effect at exit."""
        assert self._token is not None
        with suppress(OSError, trio.RunFinishedError):
            self._token.run_sync_soon(_contained, function, args)

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> _Job:
        """Start a coroutine in the trio thread without waiting for it."""
        job = _Job(self._jobs)
        self._start(job, function, args)
        return job

    def _start(self, job: _Job, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        assert self._token is not None
        self._jobs.add(job)
        try:
            self._token.run_sync_soon(trio.lowlevel.spawn_system_task, job.run, function, args)
        except OSError as error:
            job.error = _broken(error)
            job.end()
        except trio.RunFinishedError:
            job.end()

    def call(self, function: Callable[..., Awaitable[T]], *args: Any, timeout_s: float | None = None) -> T:
        """Run `await function(*args)` in the trio thread and return its result or raise its exception. After a
        PortalTimeoutError, the call is cancelled but may continue."""
        assert not self.is_this_thread, "a blocking call in the trio thread would wait for itself"
        job = _Job(self._jobs)
        has_decided = False
        try:
            self._start(job, function, args)  # a signal may arrive after the job was queued
            finished = job.done.wait(timeout_s)
            if not finished:
                self.post(job.cancel)
            has_decided = True
        finally:
            if not has_decided:
                self.post(job.cancel)
                job.done.wait(INTERRUPT_GRACE_S)
                self._jobs.discard(job)  # it may never have reached the portal's thread
        if not finished:
            raise PortalTimeoutError
        value: T = job.outcome()
        return value

    async def call_from_asyncio(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Do the same as `call`, for an asyncio coroutine. A cancellation propagates once the task has undone its work
        or ended."""
        job = _Job(self._jobs)
        job.waker = waking.waker()
        self._start(job, function, args)
        try:
            await job.waker.wait()
        except BaseException:
            self.post(job.cancel)
            await job.waker.wait(is_shielded=True)
            raise
        value: T = job.outcome()
        return value

    def stop(self) -> None:
        self.post(self._stop.set)
        self._stopped.wait(EXIT_GRACE_S)


_lock = threading.Lock()
_portal: Portal | None = None
_forkables: weakref.WeakSet[Any] = weakref.WeakSet()
_closers: weakref.WeakSet[Any] = weakref.WeakSet()
_servers: weakref.WeakSet[Any] = weakref.WeakSet()
_callers: weakref.WeakSet[Any] = weakref.WeakSet()


def current() -> Portal:
    """Return the portal of this process, starting it if necessary."""
    global _portal
    if _portal is not None:
        # Without the lock, because a finalizer may call this in the thread that holds it.
        return _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def is_in() -> bool:
    """Return whether this is the portal's thread, which runs only pccl's code."""
    return _portal is not None and _portal.is_this_thread


def on_fork(thing: Forkable) -> None:
    """Call `thing.forget_after_fork()` in every forked child."""
    _forkables.add(thing)


def on_exit(thing: Any) -> None:
    """Run `await thing.close()` in the portal at interpreter exit."""
    _closers.add(thing)


def on_exit_drain(caller: Any) -> None:
    """Call `caller.drain(seconds)` at interpreter exit, before communicators are closed and again afterwards. It waits
    for threads that run foreign callbacks of ops: a thread that returns from C++ after the end of the interpreter would
    abort the process."""
    _callers.add(caller)


def outlasts(server: Server) -> None:
    """Make the program's exit wait until this server is interrupted; then close it as with `on_exit`."""
    _servers.add(server)
    _closers.add(server)
    at_the_end_of_a_child(_outlast)


def _after_fork_in_child() -> None:
    global _portal, _lock
    _lock = threading.Lock()
    _portal = None
    for thing in list(_forkables):
        thing.forget_after_fork()
    _forkables.clear()
    _closers.clear()
    _servers.clear()
    _callers.clear()


def _close(portal: Portal, things: Collection[Any]) -> None:
    async def close_all() -> None:
        with trio.move_on_after(EXIT_GRACE_S):
            async with trio.open_nursery() as nursery:
                for thing in things:
                    nursery.start_soon(thing.close)

    job = portal.start(close_all)
    job.done.wait(EXIT_GRACE_S)


def _outlast() -> None:
    """Wait, at the program's end, for the servers that have not been interrupted."""
    portal = _portal
    servers = [server for server in list(_servers) if not (server.is_interrupted or server.stopped.is_set())]
    if portal is None or not servers or has_failed():
        return
    _close(portal, set(_closers) - set(servers))
    outlast(servers)


def _drain() -> None:
    ends_s = time.monotonic() + EXIT_GRACE_S
    for caller in list(_callers):
        caller.drain(max(0.0, ends_s - time.monotonic()))


def _at_exit() -> None:
    portal = _portal
    _drain()
    if portal is None:
        return
    _outlast()
    _close(portal, set(_closers))
    portal.stop()
    _drain()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)


# Servers that outlast the program: its exit waits until they are interrupted.

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_TIMEOUT_S = 5.0
"""Time limit for an orderly stop."""
SAY_S = 0.5
"""Time to wait while stderr is full."""


class Server(Protocol):
    stopped: Latch
    is_interrupted: bool
    description: str
    fault: str
    """Why the server has stopped by itself; empty if it has not."""

    def interrupt(self) -> None:
        """Begin to stop. Never waits, so signal handlers may call it."""


def has_failed() -> bool:
    """Return whether an exception other than SystemExit is ending the program. In the interactive interpreter, earlier
    exceptions do not count."""
    ending_by = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    return any(error is not None and not isinstance(error, SystemExit) for error in (ending_by, sys.exc_info()[1]))


def outlast(servers: Sequence[Server]) -> None:
    """Wait until all servers have stopped. For the main thread, after the program has ended."""
    ending_by: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ending_by.append(number)
        interrupt()

    def interrupt() -> None:
        for server in servers:
            server.interrupt()

    try:
        with suppress(ValueError):  # not the main thread
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, end)
        names = " and ".join(server.description for server in servers)
        _print(f"the program has ended, but {names} continues until Ctrl-C or SIGTERM")
        for server in servers:
            server.stopped.wait()
    except KeyboardInterrupt:
        ending_by.append(signal.SIGINT)
    except SystemExit:
        pass
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    interrupt()
    for server in servers:
        server.stopped.wait(STOP_TIMEOUT_S)
        if server.fault:
            _print(server.fault)
    if ending_by:
        lib.pccl_end_by_signal(ending_by[0])


def _print(line: str) -> None:
    with suppress(Exception):  # there may be no stderr
        poll = select.poll()
        poll.register(sys.stderr.fileno(), select.POLLOUT)
        if poll.poll(SAY_S * 1000):  # otherwise the write might wait forever, as on a pipe without a reader
            os.write(sys.stderr.fileno(), f"pccl: {line}\n".encode(errors="backslashreplace"))


def at_the_end_of_a_child(callback: Callable[[], object]) -> None:
    """Call `callback` at the end of a multiprocessing process, which may end without the interpreter's exit
    handlers."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        sys.modules["multiprocessing.util"].Finalize(None, callback, exitpriority=0)
