"""One schedule's world: communicators that ship, over played engines, a played network, and a real master's machine.

What runs unmodified: the communicator, its handles, the portal and trio, `PeerSession` with all its parts but the two
that talk to the network (`Control`, `Inbound`), the data plane down to the calls into the C library, and the machines
of peers and master. All peers live in this process and share the portal's thread, as they may.

The stand-ins are put in place for the time of a schedule (`World.installed`), in the modules that use them.
"""

from __future__ import annotations

import logging
import random
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import trio
import trio._core._entry_queue
import trio._core._run

from pccl import Communicator
from pccl import _session_holder as session_holder
from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.run_state import Close, Effect, MasterOptions, Send
from pccl.protocol.peer import effects as ps
from pccl.runtime.data_plane import engine as engine_module
from pccl.runtime.data_plane import op_records
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.network import links
from pccl.runtime.network.addresses import Address, MasterAddresses
from pccl.runtime.session import links as session_links
from pccl.runtime.session import session as peer_session
from pccl.runtime.session.driver import SessionOptions, Shared
from pccl.runtime.session.session import PeerSession
from pccl.runtime.threads import portal
from tests.interleaving.native import Native
from tests.interleaving.primitives import Lock, Namespace, replacements
from tests.interleaving.scheduler import Scheduler

ADDRESS = "127.0.0.1:48148"
NEVER_S = 1e6

IoManager: Any = trio._core._run.TheIOManager  # type: ignore[attr-defined]


class Clock(trio.abc.Clock):
    """The schedule's virtual time, for trio."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return self._scheduler.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self._scheduler.now


class Connection:
    """A control connection, as a session has it. What is sent arrives, in order."""

    remote_address = ("127.0.0.1", 48148)

    def __init__(self, hub: Hub, number: int) -> None:
        self.number = number
        self.inbox: list[m.FromMaster] = []
        self.has_news = trio.Event()
        self.is_closed = False
        self._hub = hub

    def send(self, messages: list[m.Message]) -> None:
        if not self.is_closed:
            self._hub.hear(self, messages)

    def heartbeat(self, hello: m.HeartbeatHello) -> None:
        """Send a first heartbeat, over a connection of its own. No peer is silent from then on."""
        self._hub.connect().send([hello])

    async def receive(self) -> list[m.FromMaster]:
        """Return what has come; empty once the connection is closed."""
        while not self.inbox and not self.is_closed:
            self.has_news = trio.Event()
            await self.has_news.wait()
        found, self.inbox = self.inbox, []
        return found

    def shutdown(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.has_news.set()
            self._hub.hear(self, [])

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()

    async def part(self) -> None:
        await trio.lowlevel.checkpoint()

    def forget_after_fork(self) -> None:
        pass


class Hub:
    """The master, in a task of the portal's trio run."""

    def __init__(self, options: MasterOptions) -> None:
        self._machine = Failover("run", options, secret=b"secret")
        self._machine.begin(0.0, 0.0)
        self._connections: dict[int, Connection] = {}
        self._heard: list[tuple[Connection, list[m.Message]]] = []
        self._has_news: trio.Event | None = None

    def connect(self) -> Connection:
        if self._has_news is None:
            self._has_news = trio.Event()
            trio.lowlevel.spawn_system_task(self._run)
        number = len(self._connections) + 1
        connection = self._connections[number] = Connection(self, number)
        self._carry_out(self._machine.connected(number, f"10.0.0.{number}", trio.current_time()))
        return connection

    def hear(self, connection: Connection, messages: list[m.Message]) -> None:
        self._heard.append((connection, messages))
        if self._has_news is not None:
            self._has_news.set()

    async def _run(self) -> None:
        while True:
            self._has_news = trio.Event()
            with trio.CancelScope(deadline=self._deadline()):
                if not self._heard:
                    await self._has_news.wait()
            heard, self._heard = self._heard, []
            for connection, messages in heard:
                for message in messages:
                    said: Any = message
                    self._carry_out(self._machine.received(connection.number, said, trio.current_time()))
                if not messages:
                    effects = self._machine.disconnected(connection.number, "it has closed", trio.current_time())
                    self._carry_out(effects)
            if self._deadline() <= trio.current_time():
                self._carry_out(self._machine.tick(trio.current_time()))

    def _deadline(self) -> float:
        deadline = self._machine.deadline()
        return float("inf") if deadline is None else deadline

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                connection = self._connections[effect.connection]
                connection.inbox.append(effect.message)
                connection.has_news.set()
            elif isinstance(effect, Close):
                self._connections[effect.connection].close()


class Control:
    """The part of a session that follows its master: see `pccl.runtime.session.control`."""

    def __init__(self, shared: Shared, *_: object) -> None:
        lifetime = shared.lifetime
        self.attached = trio.Event()
        self.attached.set()
        self.answered = trio.Event()
        self.senders: trio.Nursery | None = None
        self.is_cut_off = False
        self.handlers = {ps.SeekMaster: lambda _, effect: lifetime.spawn(self._give_up, effect.reason)}
        self._master: Any = shared.master
        self._options = shared.options
        self._driver = shared.driver
        lifetime.at_end(lambda _: self.answered.set())

    def account(self) -> str:
        return ""

    async def until_master_speaks(self) -> None:
        await trio.sleep_forever()

    def welcomed(self, timeout_s: float) -> None:
        facts = self._driver.facts
        self._master.connection.heartbeat(m.HeartbeatHello(m.PROTOCOL_VERSION, facts.run, facts.peer))

    async def follow_masters(self) -> None:
        driver, options, connection = self._driver, self._options, self._master.connection
        hello = m.Hello(
            m.PROTOCOL_VERSION,
            __version__,
            options.group,
            [],
            1000 + connection.number,
            options.connections,
            options.name,
            masters=1,
            may_found=True,
            session=b"",
            master_timeout_s=options.master_timeout_s,
        )
        connection.send([hello])
        while not driver.facts.is_over:
            messages = await connection.receive()
            self.answered.set()
            with driver.taking_over as machine:
                for message in messages:
                    machine.received(message)
                if not messages:
                    machine.master_lost("the master has closed the connection")

    async def _give_up(self, reason: str) -> None:
        with self._driver.taking_over as machine:
            machine.give_up(reason)


class Inbound:
    """The part of a session that takes connections: none come this way."""

    def __init__(self, *parts: object) -> None:
        pass

    async def accept(self) -> None:
        await trio.sleep_forever()


class Sock:
    def detach(self) -> int:
        return -1

    def close(self) -> None:
        pass


class Port:
    number = 1
    listener = Sock()

    def release(self) -> None:
        pass


class ErrorLog(logging.Handler):
    """What is logged as an error, which is a failure here."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        self.lines.append(text)


class World:
    """The peers of one schedule, and all that they need."""

    def __init__(self, scheduler: Scheduler, engine_threads: int = 1, may_keep_tags: bool = False) -> None:
        """`may_keep_tags`: launches that come after a session's end may leave their tags in its table."""
        self.scheduler = scheduler
        self.native = Native(scheduler)
        self.errors = ErrorLog()
        self.peers: list[Communicator] = []
        self.sessions: list[PeerSession] = []
        self._may_keep_tags = may_keep_tags
        options = MasterOptions(engine_threads=engine_threads, hello_timeout_s=NEVER_S, answer_timeout_s=NEVER_S)
        self._hub = Hub(options)

    # Set-up.

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put the stand-ins in place."""
        scheduler = self.scheduler
        rng = trio._core._run._r  # type: ignore[attr-defined]
        state = rng.getstate()
        rng.seed(scheduler.seed)
        with ExitStack() as undo:
            undo.callback(rng.setstate, state)
            stand_ins = replacements(scheduler)
            for name, module in list(sys.modules.items()):
                if name.startswith("pccl"):
                    for key, value in list(vars(module).items()):
                        if isinstance(value, type(sys)) and value in stand_ins:
                            undo.enter_context(mock.patch.object(module, key, stand_ins[value]))
            for target, key, value in self._patches():
                undo.enter_context(mock.patch.object(target, key, value))
            logger = logging.getLogger("pccl")
            logger.addHandler(self.errors)
            undo.callback(logger.removeHandler, self.errors)
            yield

    def _patches(self) -> list[tuple[Any, str, Any]]:
        return [
            (engine_module, "lib", self.native),
            (op_records, "lib", self.native),
            (session_holder, "open_session", self._open_session),
            (peer_session, "Control", Control),
            (peer_session, "Inbound", Inbound),
            (session_links, "links", Namespace(links, dial_link=self._dial_link)),
            (portal, "_portal", None),
            (portal, "_lock", Lock(self.scheduler)),
            (portal, "_forkables", weakref.WeakSet()),
            (portal, "_closers", weakref.WeakSet()),
            (portal, "_servers", weakref.WeakSet()),
            (trio, "run", self._run_trio),
            (IoManager, "get_events", self._get_events()),
            (trio._core._entry_queue.EntryQueue, "run_sync_soon", self._run_sync_soon()),
        ]

    def _run_trio(self, function: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
        return trio._core._run.run(function, *args, clock=Clock(self.scheduler), **named)

    def _get_events(self) -> Callable[..., Any]:
        original = IoManager.get_events
        scheduler = self.scheduler

        def get_events(manager: Any, timeout: float) -> Any:
            if scheduler.me is None:
                return original(manager, timeout)
            found = original(manager, 0)
            if not found and timeout > 0:

                def has_come() -> bool:
                    nonlocal found
                    found = found or original(manager, 0)
                    return bool(found)

                deadline = scheduler.now + timeout
                scheduler.wait(has_come, "the trio thread sleeps", deadline if timeout < 80_000 else None)
            elif timeout <= 0:
                scheduler.step("the trio thread goes round")
            return found

        return get_events

    def _run_sync_soon(self) -> Callable[..., None]:
        original = trio._core._entry_queue.EntryQueue.run_sync_soon
        scheduler = self.scheduler

        def run_sync_soon(queue: Any, function: Any, *args: Any, idempotent: bool = False) -> None:
            scheduler.step("the trio thread is to be woken")
            original(queue, function, *args, idempotent=idempotent)
            scheduler.step("the trio thread was woken")

        return run_sync_soon

    async def _open_session(
        self, masters: Sequence[Address], options: SessionOptions, dial_s: float = 0.0, seek_s: float = 0.0
    ) -> PeerSession:
        await trio.lowlevel.checkpoint()
        engine = Engine(options.group, options.segment_bytes)
        connection: Any = self._hub.connect()
        port: Any = Port()
        address = masters[0]
        search = MasterAddresses(masters)
        session = PeerSession(connection, port, engine, options, search, address, seek_s)
        self.sessions.append(session)
        return session

    async def _dial_link(
        self,
        member: m.PeerInfo,
        master_host: str,
        hello: Callable[[int], m.LinkHello],
        connections: int,
        token: str,
        take: Callable[[int, Any, None], None],
        *_: object,
    ) -> None:
        for index in range(connections):
            opening = hello(index)
            await trio.lowlevel.checkpoint()
            offered: int | str | None = None
            while offered is None:
                found = [each for each in self.sessions if each._machine.peer == member.peer]
                if not found:
                    raise links.LinkError("no such peer")
                with found[0]._driver.taking_over as machine:
                    offered = machine.link_offered(opening.sender, opening.made_in)
                if offered is None:
                    await trio.sleep(0.01)
            if isinstance(offered, str):
                raise links.LinkError(offered)
            sock: Any = Sock()
            found[0]._outbound.take_connection(offered, index, sock, None)
            take(index, Sock(), None)

    # For scenarios, in managed threads.

    def spawn(self, name: str, run: Callable[[], object]) -> None:
        self.scheduler.spawn(name, run)

    def gather(self, count: int, timeout: float | None = None) -> None:
        """Make this many peers, and admit them to a run. For the first thread, before the others begin."""
        self.peers = [Communicator(ADDRESS, timeout=timeout, name=f"peer {number}") for number in range(count)]
        left = count

        def connect(peer: Communicator) -> None:
            nonlocal left
            peer.connect()
            while peer.membership.world_size < count:
                peer.update_topology()
            left -= 1

        for number, peer in enumerate(self.peers):
            self.spawn(f"connect {number}", lambda peer=peer: connect(peer))  # type: ignore[misc]
        self.scheduler.wait(lambda: not left, "the run's founding")

    def close(self) -> None:
        """Close all peers, and the portal, and check that no task is left."""
        for peer in self.peers:
            peer.close()
        portal._at_exit()

    def check(self) -> None:
        """Fail for what must hold at the end, whatever has happened."""
        problems = [f"logged as an error: {line}" for line in self.errors.lines]
        for session in self.sessions:
            ops, name = session.ops, f"session of peer {session._machine.peer}"
            left = {
                "ops in the table": len(ops.table),
                "tags in use": 0 if self._may_keep_tags else len(ops.holders),
                "ops on the fast path": len(session._fast_path._running),
                "launches": len(ops._launched),
                "ops that are being detached": len(ops.detaching),
                "group calls": len(session._calls),
            }
            problems += [f"{name} is over, and has {count} {what}" for what, count in left.items() if count]
            if not session.over.is_set():
                problems.append(f"{name} is not over")
        problems += [f"{engine.name} still runs" for engine in self.native.wire.engines if not engine.is_over]
        if problems:
            self.scheduler.fail("\n".join(problems))


def seeded(seed: int, purpose: str) -> random.Random:
    """Return a source of chance of its own for each purpose."""
    return random.Random(f"{seed} {purpose}")
