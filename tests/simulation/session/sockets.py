"""Sockets of the simulated network: real ones of the system, whose other ends the network holds.

pccl polls descriptors, asks how many bytes lie in them and gives them away, so each socket is one end of a pair of the
system's. What the system would say of a TCP connection, such as addresses and resets, the network says instead.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from typing import Any, Protocol

import trio

Address = tuple[str, int]
SEGMENT_BYTES = 700
"""Size of a packet, so that a connection between peers opens with padding of about twice that."""


class End(Protocol):
    """One end of a connection, as its socket sees it."""

    local: Address
    remote: Address
    error: int
    """The error that has ended the connection; 0: none has."""
    user_timeout_s: float
    """The time until the system gives up what no peer acknowledges."""

    def amount(self, wanted: int) -> int:
        """Return how many bytes a call moves at most, of those that it would move."""


class SimSocket(socket.socket):
    """A connected socket of the simulation, which does not block."""

    def __init__(self, fd: int, end: End) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        self.setblocking(False)
        self.end = end

    def _check(self) -> None:
        if self.end.error:
            raise OSError(self.end.error, os.strerror(self.end.error))

    def getpeername(self) -> Any:
        self._check()
        return self.end.remote

    def getsockname(self) -> Any:
        return self.end.local

    def setsockopt(self, *args: Any) -> None:
        level, option, value = args
        if level == socket.IPPROTO_TCP and option == socket.TCP_USER_TIMEOUT:
            self.end.user_timeout_s = value / 1000

    def send(self, data: Any, flags: int = 0) -> int:
        self._check()
        return super().send(memoryview(data)[: self.end.amount(len(data))], flags | socket.MSG_NOSIGNAL)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._check()
        return super().recv(self.end.amount(size), flags)


class SimStream:
    """A connection as trio tasks use it: what pccl needs of a socket of trio's."""

    def __init__(self, sock: SimSocket) -> None:
        self.end = sock.end
        self._sock = trio.socket.from_stdlib_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, sock.detach()))

    def _check(self) -> None:
        if self.end.error:
            raise OSError(self.end.error, os.strerror(self.end.error))

    def fileno(self) -> int:
        return self._sock.fileno()

    def detach(self) -> int:
        return self._sock.detach()

    def close(self) -> None:
        self._sock.close()

    def setsockopt(self, *_: Any) -> None:
        pass

    def getsockopt(self, level: int, option: int) -> int:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        return SEGMENT_BYTES

    async def send(self, data: Any) -> int:
        self._check()
        sent = await self._sock.send(memoryview(data)[: self.end.amount(len(data))], socket.MSG_NOSIGNAL)
        self._check()
        return sent

    async def recv(self, size: int, flags: int = 0) -> bytes:
        self._check()
        data = await self._sock.recv(self.end.amount(size), flags)
        self._check()
        return data

    async def recv_into(self, buffer: Any) -> int:
        self._check()
        view = memoryview(buffer)
        count = await self._sock.recv_into(view[: self.end.amount(len(view))] if view else view)
        self._check()
        return count


class SimListener(socket.socket):
    """A listening socket: readable while there are connections to accept."""

    def __init__(self, address: Address) -> None:
        reader, self._writer = socket.socketpair()
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM, 0, reader.detach())
        self.setblocking(False)
        self.address = address
        self.is_open = True
        self._waiting: deque[tuple[SimSocket, Address]] = deque()

    def getsockname(self) -> Any:
        return self.address

    def arrive(self, sock: SimSocket, address: Address) -> None:
        self._waiting.append((sock, address))
        self._writer.send(b"\0")

    def accept(self) -> Any:
        if not self._waiting:
            raise BlockingIOError(errno.EAGAIN, "without a waiting thread")
        super().recv(1)
        return self._waiting.popleft()

    def close(self) -> None:
        """Close it, with the connections that no peer has accepted."""
        self.is_open = False
        while self._waiting:
            self._waiting.popleft()[0].close()
        self._writer.close()
        super().close()
