"""A network in memory: hosts that listen and dial, and connections whose bytes travel through it.

A connection is two pairs of sockets of the system's. Each side has one end of its pair, the network the other two, and
a task for each direction that takes bytes from the one and gives them to the other later. So

1. what a direction loses is never lost inside a stream: bytes that do not get through stay where they were sent, and
   the sender's system counts them as not acknowledged;
2. a reset takes what is on its way with it, at whatever byte the schedule says;
3. a process that dies closes its sockets, which the other side hears if the path still carries; a machine that dies
   says nothing.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from tests.simulation.session.sockets import Address, SimListener, SimSocket

SYSTEM_TIMEOUT_S = 900.0
"""The time until the system gives up what no peer acknowledges, unless it was told another."""
CHUNK_BYTES = 64 * 1024
FIRST_PORT = 40000


@dataclass
class Weather:
    """How the network is, from one host to another and in general."""

    latency_s: float = 0.001
    jitter_s: float = 0.001
    bytes_per_s: float = 50e6
    part_share: float = 0.0
    """Share of the calls that move only a part of what they could."""
    reset_share: float = 0.0
    """Share of the connections that are reset somewhere in their first bytes."""
    reset_within: int = 2000
    refusal_share: float = 0.0
    """Share of the dials that are refused although a peer listens."""


@dataclass(eq=False)
class ConnectionEnd:
    """One end of a connection, as its socket sees it."""

    local: Address
    remote: Address
    network: Network
    error: int = 0
    user_timeout_s: float = SYSTEM_TIMEOUT_S

    def amount(self, wanted: int) -> int:
        chance, share = self.network.random, self.network.weather.part_share
        if wanted > 1 and share and chance.random() < share:
            return chance.randint(1, min(wanted, 16)) if chance.random() < 0.5 else chance.randint(1, wanted)
        return wanted


@dataclass(eq=False)
class Connection:
    """A connection on its way through the network."""

    number: int
    ends: tuple[ConnectionEnd, ConnectionEnd]
    """Those of the dialer and of the acceptor."""
    near: tuple[socket.socket, socket.socket]
    """The network's ends of the pairs."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    reset_after: list[int] = field(default_factory=lambda: [-1, -1])
    """Number of bytes until each direction resets the connection; negative: never."""
    carried: list[int] = field(default_factory=lambda: [0, 0])

    def hosts(self) -> tuple[str, str]:
        return self.ends[0].local[0], self.ends[1].local[0]

    def break_off(self, error: int = errno.ECONNRESET) -> None:
        """Reset the connection on both sides."""
        for end in self.ends:
            end.error = end.error or error
        self.scope.cancel()


class Network:
    def __init__(self, seed: int, note: Callable[[str], None]) -> None:
        self.random = random.Random(seed)
        self.weather = Weather()
        self.slow: dict[tuple[str, str], float] = {}
        """Bytes per second of paths that are slower than the rest."""
        self.nursery: trio.Nursery | None = None
        self.connections: dict[int, Connection] = {}
        self._note = note
        self._listeners: dict[Address, SimListener] = {}
        self._cut: set[tuple[str, str]] = set()
        self._changed = trio.Event()
        self._next_port = FIRST_PORT
        self._next_connection = 1
        self._cut_next: list[tuple[int, int]] = []

    # Paths.

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self._cut

    def cut(self, source: str, target: str) -> None:
        """Block the direction from one host to the other any more, until `mend`."""
        self._cut.add((source, target))

    def mend(self) -> None:
        """Have everything get everywhere again."""
        self._cut.clear()
        self.slow.clear()
        self._changed.set()
        self._changed = trio.Event()

    async def _until_open(self, source: str, target: str) -> None:
        while self.is_cut(source, target):
            await self._changed.wait()

    def _latency_s(self) -> float:
        return self.weather.latency_s + self.random.random() * self.weather.jitter_s

    def cut_next(self, way: int, count: int) -> None:
        """Have the next connection, or the one after those of earlier calls, reset after that many bytes of a
        direction:
        0 is that of the dialer."""
        self._cut_next.append((way, count))

    # Hosts.

    def listen(self, host: str, port: int) -> SimListener:
        if port == 0:
            self._next_port += 1
            port = self._next_port
        known = self._listeners.get((host, port))
        if known is not None and known.is_open:
            raise OSError(errno.EADDRINUSE, f"cannot listen on {host}:{port}: the port is in use")
        listener = self._listeners[host, port] = SimListener((host, port))
        return listener

    async def dial(self, source: str, host: str, port: int) -> SimSocket:
        """Return a connection. OSError if no peer listens there; it waits as long as no packet gets there and back."""
        await self._until_open(source, host)
        await trio.sleep(self._latency_s())
        await self._until_open(source, host)
        await self._until_open(host, source)
        listener = self._listeners.get((host, port))
        refused = self.random.random() < self.weather.refusal_share
        if listener is None or not listener.is_open or refused:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        sock = self._connect((source, self._new_port()), listener)
        try:
            await trio.sleep(self._latency_s())
        except BaseException:
            sock.close()
            raise
        return sock

    def _new_port(self) -> int:
        self._next_port += 1
        return self._next_port

    def _connect(self, dialer: Address, listener: SimListener) -> SimSocket:
        assert self.nursery is not None
        ends = ConnectionEnd(dialer, listener.address, self), ConnectionEnd(listener.address, dialer, self)
        pairs = socket.socketpair(), socket.socketpair()
        near = pairs[0][1], pairs[1][1]
        for each in near:
            each.setblocking(False)
        connection = Connection(self._next_connection, ends, near)
        self._next_connection += 1
        self.connections[connection.number] = connection
        if self.random.random() < self.weather.reset_share:
            way = self.random.randrange(2)
            connection.reset_after[way] = self.random.randrange(self.weather.reset_within)
        if self._cut_next:
            way, count = self._cut_next.pop(0)
            connection.reset_after[way] = count
        self._note(f"connection {connection.number} from {dialer[0]} to {listener.address[0]}:{listener.address[1]}")
        self.nursery.start_soon(self._carry, connection)
        listener.arrive(SimSocket(pairs[1][0].detach(), ends[1]), dialer)
        return SimSocket(pairs[0][0].detach(), ends[0])

    # Connections.

    async def _carry(self, connection: Connection) -> None:
        """Carry a connection's bytes both ways until both sides have ended it, or it is reset."""
        try:
            with connection.scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._direct, connection, 0)
                    nursery.start_soon(self._direct, connection, 1)
        finally:
            del self.connections[connection.number]
            for sock in connection.near:
                sock.close()

    async def _direct(self, connection: Connection, way: int) -> None:
        source, target = connection.near[way], connection.near[1 - way]
        end, other = connection.ends[way], connection.ends[1 - way]
        hosts = end.local[0], other.local[0]
        while True:
            await trio.lowlevel.wait_readable(source)
            if self.is_cut(*hosts) and not await self._get_through(connection, end, hosts):
                return
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            pace = self.slow.get(hosts, self.weather.bytes_per_s)
            await trio.sleep(self._latency_s() + len(data) / pace)
            if self.is_cut(*hosts) and not await self._get_through(connection, end, hosts):
                return
            if not data:
                with suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            limit = connection.reset_after[way]
            is_last = 0 <= limit < connection.carried[way] + len(data)
            if is_last:
                data = data[: max(0, limit - connection.carried[way])]
            connection.carried[way] += len(data)
            if not await self._deliver(target, data):
                connection.break_off()
                return
            if is_last:
                self._note(f"connection {connection.number} is reset after {limit} bytes")
                await trio.sleep(self._latency_s())  # what was sent before may be read
                connection.break_off()
                return

    async def _get_through(self, connection: Connection, end: ConnectionEnd, hosts: tuple[str, str]) -> bool:
        """Wait until the path carries again. Return False if the sender's system gives up before that."""
        with trio.move_on_after(end.user_timeout_s):
            await self._until_open(*hosts)
            return True
        self._note(f"connection {connection.number} from {hosts[0]} to {hosts[1]} timed out")
        end.error = end.error or errno.ETIMEDOUT
        connection.break_off()
        return False

    @staticmethod
    async def _deliver(target: socket.socket, data: bytes) -> bool:
        view = memoryview(data)
        while view:
            try:
                view = view[target.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(target)
            except OSError:
                return False
        return True

    def between(self, a: str, b: str) -> list[Connection]:
        """Return the connections between two hosts."""
        return [each for each in self.connections.values() if set(each.hosts()) == {a, b}]
