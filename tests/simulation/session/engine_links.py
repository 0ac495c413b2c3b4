"""The links of a simulated engine: frames that get there once each, over any of a link's connections.

A frame has a number on its link, is kept until the other side has acknowledged it, and is sent again over another
connection when the one that carried it is lost; what comes twice is dropped.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import trio

from pccl.runtime.data_plane.events import EngineEvent, LinkCounters, LinkDegraded, LinkDown
from tests.simulation.session.heartbeats import Spawn

LENGTH_BYTES = 4
LOOKS_PER_TIMEOUT = 4


class Random(Protocol):
    def randrange(self, stop: int, /) -> int: ...


class _Connection:
    def __init__(self, fd: int) -> None:
        self.sock = trio.socket.from_stdlib_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd))
        self.scope = trio.CancelScope()
        self.backlog: list[bytes] = []
        self.wake = trio.Event()

    def send(self, frame: bytes) -> None:
        self.backlog.append(frame)
        self.wake.set()


class _Link:
    def __init__(self, number: int) -> None:
        self.number = number
        self.connections: list[_Connection] = []
        self.next = 1
        self.kept: dict[int, bytes] = {}
        self.seen: set[int] = set()
        self.moved_at = 0.0
        self.tx_bytes = self.rx_bytes = 0
        self.is_lost = False


class Links:
    """All links of an engine."""

    def __init__(
        self,
        random: Random,
        spawn: Spawn,
        report: Callable[[EngineEvent], None],
        arrive: Callable[[int, Any], None],
    ) -> None:
        """`arrive` is called with a link and what came on it."""
        self.timeout_s = 0.0
        self._random = random
        self._spawn = spawn
        self._report = report
        self._arrive = arrive
        self._links: dict[int, _Link] = {}
        self._is_closed = False

    def add(self, number: int, fd: int) -> None:
        link = self._links.get(number)
        if link is None:
            link = self._links[number] = _Link(number)
            self._spawn(lambda: self._watch(link))
        connection = _Connection(fd)
        link.connections.append(connection)
        connection.send(GREETING)
        if len(link.connections) == 1:
            link.moved_at = trio.current_time()
            for frame in link.kept.values():
                connection.send(frame)
        self._spawn(lambda: self._serve(link, connection))

    def send(self, number: int, content: Any) -> None:
        link = self._links.get(number)
        if link is None or link.is_lost:
            return  # a flush must follow
        if not link.kept:
            link.moved_at = trio.current_time()
        frame = _encoded((link.next, content))
        link.kept[link.next] = frame
        link.next += 1
        link.tx_bytes += len(frame)
        if link.connections:
            link.connections[self._random.randrange(len(link.connections))].send(frame)

    def count(self, number: int) -> None:
        link = self._links.get(number)
        if link is not None:
            self._report(LinkCounters(number, link.tx_bytes, link.rx_bytes, 0, 0))

    def close(self, number: int) -> None:
        link = self._links.pop(number, None)
        if link is not None:
            link.is_lost = True
            for connection in link.connections:
                connection.scope.cancel()
                connection.sock.close()

    def close_all(self) -> None:
        self._is_closed = True
        for number in list(self._links):
            self.close(number)

    async def _watch(self, link: _Link) -> None:
        """Lose the link when bytes lie on it and none get across."""
        while not link.is_lost:
            await trio.sleep((self.timeout_s or 5.0) / LOOKS_PER_TIMEOUT)
            is_stuck = link.kept and trio.current_time() - link.moved_at > self.timeout_s > 0
            if is_stuck and not link.is_lost:
                self._lose(link, f"no byte has got across for {self.timeout_s:g} s")

    def _lose(self, link: _Link, reason: str) -> None:
        link.is_lost = True
        for connection in link.connections:
            connection.scope.cancel()
        self._report(LinkDown(link.number, reason))

    async def _serve(self, link: _Link, connection: _Connection) -> None:
        reason = "closed by the other side"
        try:
            with connection.scope, connection.sock:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_backlog, connection)
                    try:
                        await self._receive(link, connection)
                    except OSError as error:
                        reason = error.strerror or str(error)
                    nursery.cancel_scope.cancel()
        finally:
            with suppress(ValueError):
                link.connections.remove(connection)
        if link.is_lost or self._is_closed or connection.scope.cancelled_caught:
            return
        if not link.connections:
            self._lose(link, reason)
            return
        self._report(LinkDegraded(link.number, reason))
        for frame in link.kept.values():
            link.connections[0].send(frame)

    async def _send_backlog(self, connection: _Connection) -> None:
        with suppress(OSError):  # readers notice it
            while True:
                data = b"".join(connection.backlog)
                connection.backlog.clear()
                view = memoryview(data)
                while view:
                    view = view[await connection.sock.send(view, socket.MSG_NOSIGNAL) :]
                if not connection.backlog:
                    connection.wake = trio.Event()
                    await connection.wake.wait()

    async def _receive(self, link: _Link, connection: _Connection) -> None:
        buffer = bytearray()
        while data := await connection.sock.recv(65536):
            buffer += data
            while len(buffer) >= LENGTH_BYTES:
                size = int.from_bytes(buffer[:LENGTH_BYTES], "big")
                if len(buffer) < LENGTH_BYTES + size:
                    break
                body = bytes(buffer[LENGTH_BYTES : LENGTH_BYTES + size])
                del buffer[: LENGTH_BYTES + size]
                self._take(link, connection, *msgspec.msgpack.decode(body))

    def _take(self, link: _Link, connection: _Connection, number: int, content: Any) -> None:
        if number <= 0:
            link.kept.pop(-number, None)
            link.moved_at = trio.current_time()
            return
        connection.send(_encoded((-number, None)))
        if number not in link.seen:
            link.seen.add(number)
            link.rx_bytes += LENGTH_BYTES
            self._arrive(link.number, content)


def _encoded(frame: Any) -> bytes:
    body = msgspec.msgpack.encode(frame)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


GREETING = _encoded((0, None))
"""What an engine says first on a connection: the acceptor hears that it is in use."""
