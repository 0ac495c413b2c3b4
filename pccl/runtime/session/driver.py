"""Turns, which give access to a session's protocol machine, and the session's options, tasks and end.

A turn is a context that prepares the machine, yields it, and executes its effects in order at the end:

    with driver.taking_over as machine:
        machine.received(message)

1. Before the machine gets input that affects ops (a message, a call, a loss), the fast path is closed, and the machine
   gets the results of the ops on it (`taking_over`). So it decides as if it had launched each of them.
2. Launches, cancels and the clock leave the fast path open, but the engine's events are handled first (`hearing`), so
   that a launch comes after the previous op with its tag.
3. Effects are executed at the end of the outermost turn and never wait. Longer work (making a link, transferring state)
   runs in a task that reports its result in another turn. A handler may answer the machine immediately; the effects of
   the answer are executed after the current batch.
4. When a turn ends, the fast path is reopened if small ops need no decision from the machine.
5. If a turn raises, no effects are executed, and the exception ends the session.

A session shares its thread with other sessions and masters. All its tasks, callbacks and methods are contained
(`Lifetime.contain`): an unexpected exception ends only this session. The engine is closed, which restores the buffers,
and callers get INTERNAL_ERROR, except for ops that the engine was already told to commit.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from pccl.protocol import messages as m
from pccl.protocol.messages import MASTER_TIMEOUT_S
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.data_plane.events import EngineFailedError
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.network import addresses
from pccl.runtime.network.addresses import Address
from pccl.runtime.network.system import SYSTEM, System
from pccl.runtime.network.wire import ControlConnection
from pccl.runtime.session.reports import WorkCounters
from pccl.runtime.threads.tasks import report
from pccl.types import Result

Handler = Callable[[Peer, Any], None]
Handlers = Mapping[type, Handler]
"""Functions that execute effects, by effect type. Each gets the machine, so that it can answer immediately."""


class Turn:
    """A context that yields the machine."""

    __slots__ = ("_begin", "_machine", "_pump")

    def __init__(self, machine: Peer, begin: Callable[[], None] | None, pump: Callable[[], None]) -> None:
        self._machine = machine
        self._begin = begin
        self._pump = pump

    def __enter__(self) -> Peer:
        if self._begin is not None:
            self._begin()
        return self._machine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if kind is None:
            self._pump()


class Driver:
    """The owner of the machine. Only for the trio thread."""

    def __init__(
        self,
        machine: Peer,
        fast_path: FastPath,
        lifetime: Lifetime,
        hear: Callable[[Peer], None],
        send: Callable[[list[m.Message]], None],
    ) -> None:
        """`hear` passes the engine's events to the machine. `send` sends messages to the master and never waits."""
        self.facts = machine
        """The machine, whose properties may be read at any time."""
        self.drained = trio.Event()
        """Set when the session has ended and the engine has returned all buffers."""
        self.hear = partial(hear, machine)
        self.taking_over = Turn(machine, self._take_over, self._pump)
        self.hearing = Turn(machine, self.hear, self._pump)
        self.after_hearing = Turn(machine, None, self._pump)
        """A turn for callers that have read the engine's events themselves or can no longer read them."""
        self._machine = machine
        self._fast_path = fast_path
        self._lifetime = lifetime
        self._send = send
        self._handlers: dict[type, tuple[Handler, ...]] = {}
        self._timer_changed = trio.Event()
        self._timer_deadline = float("inf")
        self._is_pumping = False

    def carry_out(self, handlers: Mapping[type, tuple[Handler, ...]]) -> None:
        """Register handlers for effects."""
        assert not self._handlers.keys() & handlers.keys()
        self._handlers.update(handlers)

    def _take_over(self) -> None:
        if self._fast_path.close():
            self.hear()

    def _pump(self) -> None:
        if self._is_pumping or self._lifetime.is_broken:
            return
        machine, fast_path, handlers = self._machine, self._fast_path, self._handlers
        self._is_pumping = True
        try:
            outgoing: list[m.Message] = []
            while True:
                while effects := machine.drain():
                    for effect in effects:
                        if isinstance(effect, ps.ToMaster):
                            outgoing.append(effect.message)
                        else:
                            for handler in handlers[type(effect)]:
                                handler(machine, effect)
                start = machine.plain_start()
                if start is fast_path.open_with or start == fast_path.open_with:
                    break
                if fast_path.close():
                    self.hear()  # this may change the start
                else:
                    assert start is not None
                    fast_path.open(start)
                    break
            if outgoing:
                self._send(outgoing)
        finally:
            self._is_pumping = False
        if (machine.deadline() or float("inf")) < self._timer_deadline:
            self._timer_changed.set()
        if machine.is_over and not machine.open_ops:
            self.drained.set()

    async def watch_clock(self) -> None:
        """Call the machine's `tick` at its deadlines."""
        while True:
            self._timer_changed = trio.Event()
            self._timer_deadline = self._machine.deadline() or float("inf")
            with trio.CancelScope(deadline=self._timer_deadline):
                await self._timer_changed.wait()
            if trio.current_time() >= self._timer_deadline:
                with self.hearing as machine:
                    machine.tick(trio.current_time())


NO_BUG = EngineFailedError, MemoryError
"""Exceptions that end a session but are not caused by a bug."""

CLOSED_NURSERY = "Nursery is closed to new arrivals"
"""trio's error text if a task is started too late."""


def loop_has_ended(error: BaseException) -> str:
    """Return the error text for an event loop whose descriptors were closed by other code."""
    return f"the event loop has ended: {error}; something in this process closes descriptors that are not its own"


class Containment:
    """A context that ends the session if an unexpected exception occurs. Reentrant."""

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
    """The lifetime of a session: its tasks and the reason for its end."""

    def __init__(self, logger: logging.LoggerAdapter[logging.Logger], last_words: Callable[[str], None]) -> None:
        """`last_words` sends the master the reason for leaving, if that is still possible."""
        self.failure: SessionError | None = None
        """The reason for the end of the session."""
        self.is_broken = False
        """Whether the session has a fault, so that its machine's state cannot be trusted."""
        self.ended = trio.Event()
        """Set when the session fails."""
        self.over = trio.Event()
        """Set when all tasks of this session have ended."""
        self.contain = Containment(self.break_off)
        self.nursery: trio.Nursery | None = None
        """Holds the tasks while the session runs."""
        self._logger = logger
        self._last_words = last_words
        self._endings: list[Callable[[SessionError], None]] = []

    def at_end(self, ending: Callable[[SessionError], None]) -> None:
        """Call `ending` when the session fails, and possibly again later."""
        self._endings.append(ending)

    def require_alive(self) -> None:
        """Raise SessionError with the reason if the session is over."""
        if self.failure is not None:
            raise SessionError(self.failure.result, self.failure.message)

    def spawn(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task. If the task raises, the session ends."""
        if self.nursery is None or self.ended.is_set():
            return
        try:
            self.start(self.nursery, function, *args)
        except RuntimeError as error:
            # When a trio run ends, its nursery is closed first, and another thread may call before the session knows.
            if str(error) != CLOSED_NURSERY:
                raise

    def start(self, nursery: trio.Nursery, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Start a task that ends the session if it raises."""
        nursery.start_soon(self._contained, function, *args, name=function)

    @trio.lowlevel.enable_ki_protection
    async def _contained(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        with self.contain:
            await function(*args)

    def fail(self, code: Result, reason: str) -> None:
        """End the session: all calls and queued launches fail. May be called again, but the first reason is kept. All
        endings are called even if one raises, as trio's objects do in another thread."""
        if self.failure is None:
            self.failure = SessionError(code, reason)
        with ExitStack() as last:
            last.callback(self.ended.set)
            for ending in reversed(self._endings):
                last.callback(ending, self.failure)

    def break_off(self, error: Exception) -> None:
        """End the session because of a fault in pccl or in this machine. May be called again, because one fault causes
        others."""
        if self.is_broken or self.over.is_set():
            return
        self.is_broken = True
        text = str(error) if isinstance(error, NO_BUG) else report("this communicator", error)
        if isinstance(error, MemoryError):
            text = f"this process is out of memory: {text}" if text else "this process is out of memory"
        elif isinstance(error, OSError) and error.errno == errno.EBADF:
            text = loop_has_ended(error)
        with suppress(Exception):
            self._logger.error("%s", text, exc_info=error)
        with suppress(Exception):
            self._last_words(text)
        self.fail(Result.INTERNAL_ERROR, text)


class SessionError(Exception):
    """A call failed. The public layer converts this to a PCCLError."""

    def __init__(self, result: Result, message: str, *, of_all_peers: bool = False) -> None:
        super().__init__(message)
        self.result = result
        self.message = message
        self.of_all_peers = of_all_peers


@dataclass(frozen=True)
class SessionOptions:
    group: int
    connections: int
    """Initial number of connections of each link."""
    may_grow: bool = False
    """Whether links get more connections if these help."""
    hosts: tuple[str, ...] = ()
    """Addresses to advertise."""
    port: int | None = None
    """Port to advertise if it differs from the listening port (NAT)."""
    listen_host: str = ""
    listen_port: int = 0
    name: str = ""
    site: str = ""
    """Name of the site, whose peers join and leave together; empty if the peer belongs to none."""
    site_size: int = 0
    """Number of peers in the site; 0 if the peer belongs to none."""
    place: int = -1
    """The ring position that this peer requests if it is one of the run's first peers; -1 if none."""
    run_name: str = ""
    """The user's name for the run; an empty one matches any."""
    token: str = field(default="", repr=False)
    """The run's shared secret; empty if there is none."""
    encrypt: bool = False
    """Whether peers send each other encrypted records. Requires a token."""
    ssl_context: ssl.SSLContext | None = None
    """TLS for the control connection, if any."""
    master_timeout_s: float = MASTER_TIMEOUT_S
    """Time limit for finding a lost master or its successor."""
    segment_bytes: int = 0
    force_poll: bool = False
    is_quiet: bool = False
    """Whether lost masters, the first peer that leaves on purpose, and all later losses are logged at INFO."""
    system: System = SYSTEM
    new_engine: Callable[[int, int, bool], Engine] = Engine
    """Creates the engine from the arguments of `Engine`."""


class MasterConnection:
    """The control connection, which is replaced when it breaks or the session connects to another master."""

    def __init__(self, connection: ControlConnection[m.MasterMessage], address: Address) -> None:
        """`connection` leads to `address`, whose host the master's certificate must name."""
        self.connection = connection
        self.met_at(connection, address)

    def met_at(self, connection: ControlConnection[m.MasterMessage], address: Address) -> None:
        """Record that this connection leads to the session's master, whose address is now `address`."""
        self.connection = connection
        self.address = address
        self.name = address[0]
        self.host = addresses.plain_host(connection.remote_address)
        self.port: int = connection.remote_address[1]

    def send(self, messages: list[m.Message]) -> None:
        """Send messages to the master. Never waits and never raises."""
        self.connection.send(messages)

    async def end(self) -> None:
        """Break the connection, wait until its sender has ended, and close it."""
        self.connection.shutdown()
        await self.connection.flush()
        self.connection.close()

    async def part(self, limit_s: float, *, is_heard: bool) -> None:
        """Send the backlog and, if `is_heard`, wait until the master closes. This takes at most `limit_s`."""
        with trio.move_on_after(limit_s):
            await (self.connection.part() if is_heard else self.connection.flush())


@dataclass
class Shared:
    """Objects shared by the parts of one session."""

    options: SessionOptions
    logger: logging.LoggerAdapter[logging.Logger]
    master: MasterConnection
    listen_port: int
    """The port that accepts connections from peers."""
    engine: Engine
    lifetime: Lifetime
    driver: Driver
    counters: WorkCounters


class Part:
    """A part of a session. For the trio thread only, unless stated otherwise."""

    handlers: Handlers

    def __init__(self, shared: Shared) -> None:
        self._options = shared.options
        self._logger = shared.logger
        self._master = shared.master
        self._listen_port = shared.listen_port
        self._engine = shared.engine
        self._lifetime = shared.lifetime
        self._driver = shared.driver
        self._counters = shared.counters
