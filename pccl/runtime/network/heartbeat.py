"""Heartbeats over separate connections, sent by a thread that does not run Python.

`HeartbeatThread` wraps the C thread (`native/src/heartbeat.c`), which sends and expects heartbeats on its connections
and reports silent or closed ones. `keep_heartbeats` is the peer's side: it dials the master, hands the connection to
the thread that the process's peers share, and redials when it closes. `threads.progress` defines what heartbeats prove.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import trio

from pccl.runtime.extension import ffi, lib, text
from pccl.runtime.network.wire import ConnectionLost
from pccl.runtime.threads import portal
from pccl.runtime.threads.progress import Progress
from pccl.runtime.threads.tasks import start_task

logger = logging.getLogger("pccl.peer")

EVENTS_MAX = 64
QUIET_MAX = 2**14
FIRST_HEARTBEAT_S = 10.0
"""Time limit for the first heartbeat."""
PAUSES_PER_TIMEOUT = 20
HEARTBEAT_INTERVAL_S_MAX = 1.0
HEARTBEATS_PER_TIMEOUT = 5


@dataclass(frozen=True, slots=True)
class Silent:
    """The connection was silent for `silent_s`, so this side has closed it."""

    connection: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """The other side or the system closed the connection after it had been silent for `silent_s`."""

    connection: int
    silent_s: float
    reason: str


class HeartbeatThread:
    """The heartbeat thread. For use in the trio thread only; only `events` waits."""

    def __init__(self, timeout_s: float) -> None:
        error = ffi.new("char[256]")
        self._handle = lib.pccl_heartbeat_create(max(1, round(timeout_s * 1000)), error, len(error))
        if self._handle == ffi.NULL:
            raise OSError(f"cannot start the heartbeat thread: {text(error)}")
        self._events = ffi.new("pccl_heartbeat_event[]", EVENTS_MAX)
        self._quiet: Any = None
        self._timeout_s = timeout_s
        self._pulse: Progress | None = None

    async def keep_progress(self) -> None:
        """Make heartbeats depend on the progress of this trio run until cancelled."""
        pulse = self._pulse = Progress(self._timeout_s)
        still_ms = round(pulse.still_s * 1000) if portal.is_in() else 0
        lib.pccl_heartbeat_vouch(self._handle, pulse.progress, round(pulse.hold_s * 1000), still_ms)
        await pulse.keep()

    def add(self, connection: int, fd: int) -> None:
        """Take ownership of a connected socket. Close it and raise OSError if the system refuses it."""
        if self._handle == ffi.NULL:
            os.close(fd)
            raise OSError("the heartbeat thread has ended")
        status = lib.pccl_heartbeat_add(self._handle, connection, fd)
        if status != lib.PCCL_OK:
            raise OSError(f"the system refuses a heartbeat connection (status {status})")

    def remove(self, connection: int) -> None:
        if self._handle != ffi.NULL:
            lib.pccl_heartbeat_remove(self._handle, connection)

    def quiet(self, seconds: float) -> list[int]:
        """Return up to QUIET_MAX connections that have been silent for `seconds`."""
        if self._quiet is None:
            self._quiet = ffi.new("uint64_t[]", QUIET_MAX)
        count = lib.pccl_heartbeat_quiet(self._handle, round(seconds * 1000), self._quiet, QUIET_MAX)
        return list(self._quiet[0:count])

    async def events(self) -> list[Silent | Closed]:
        """Wait for the next events and return them. Each connection produces one event, at its end."""
        await trio.lowlevel.wait_readable(lib.pccl_heartbeat_event_fd(self._handle))
        count = lib.pccl_heartbeat_poll_events(self._handle, self._events, EVENTS_MAX)
        found: list[Silent | Closed] = []
        for event in self._events[0:count]:
            silent_s = event.silent_ms / 1000
            if event.kind == lib.PCCL_HEARTBEAT_SILENT:
                found.append(Silent(event.connection, silent_s))
            else:
                reason = os.strerror(event.system_error) if event.system_error else "closed by the other side"
                found.append(Closed(event.connection, silent_s, reason))
        return found

    def close(self) -> None:
        """Stop the thread. No task may still be in `events`."""
        handle, self._handle = self._handle, ffi.NULL
        if handle != ffi.NULL:
            lib.pccl_heartbeat_destroy(handle)

    def forget_after_fork(self) -> None:
        if self._handle != ffi.NULL:
            lib.pccl_heartbeat_forget_after_fork(self._handle)
            self._handle = ffi.NULL


class SharedHeartbeats:
    """A heartbeat thread for all sessions of one trio run with the same timeout. The last of them closes it."""

    def __init__(self, thread: HeartbeatThread) -> None:
        self._thread = thread
        self._users = 0
        self._numbers = count(1)
        self._ends: dict[int, trio.MemorySendChannel[Silent | Closed]] = {}
        self._scope = trio.CancelScope()

    @classmethod
    @contextmanager
    def of_run(cls, create: Callable[[float], HeartbeatThread], timeout_s: float) -> Iterator[SharedHeartbeats]:
        """Yield the heartbeats of this trio run, whose thread `create` starts. Raises OSError."""
        known = _shared.get(None)
        if known is None:
            _shared.set(known := {})
        if (create, timeout_s) not in known:
            known[create, timeout_s] = cls(create(timeout_s))
            trio.lowlevel.spawn_system_task(known[create, timeout_s]._run)
        shared = known[create, timeout_s]
        shared._users += 1
        try:
            yield shared
        finally:
            shared._users -= 1
            if not shared._users:
                del known[create, timeout_s]
                shared._scope.cancel()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    start_task(nursery, self._thread.keep_progress)
                    while True:
                        for event in await self._thread.events():
                            if event.connection in self._ends:
                                self._ends[event.connection].send_nowait(event)
        except Exception:
            logger.exception("the heartbeat thread cannot be read")
            for end in self._ends.values():
                end.close()
        finally:
            self._thread.close()

    def forget_after_fork(self) -> None:
        self._thread.forget_after_fork()

    async def keep(self, sock: Any) -> Silent | Closed:
        """Exchange heartbeats over a connected socket until its end. Raises OSError if the system refuses it."""
        number = next(self._numbers)
        self._ends[number], end = trio.open_memory_channel[Silent | Closed](1)
        try:
            self._thread.add(number, sock.detach())
            return await end.receive()
        finally:
            del self._ends[number]
            self._thread.remove(number)


_shared: trio.lowlevel.RunVar[Any] = trio.lowlevel.RunVar("pccl_heartbeats")


async def keep_heartbeats(shared: SharedHeartbeats, connect: Callable[[], Awaitable[Any]], timeout_s: float) -> str:
    """Exchange heartbeats until the other side has been silent for `timeout_s`, and return the reason. `connect`
    returns a connection or raises ConnectionLost."""
    deadline = trio.current_time() + max(timeout_s, FIRST_HEARTBEAT_S)
    while True:
        failure = "no answer"
        sock: Any = None
        with trio.move_on_at(deadline):
            while sock is None:
                try:
                    sock = await connect()
                except (ConnectionLost, OSError) as error:
                    failure = str(error)
                    logger.debug("no heartbeat connection: %s", failure)
                    await trio.sleep(timeout_s / PAUSES_PER_TIMEOUT)
        if sock is None:
            return f"could not be reached with heartbeats: {failure}"
        event = await shared.keep(sock)
        if isinstance(event, Silent):
            return f"was silent for {event.silent_s:.1f} s"
        logger.info("the heartbeat connection was lost: %s", event.reason)
        deadline = trio.current_time() + timeout_s
