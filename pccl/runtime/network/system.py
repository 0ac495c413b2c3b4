"""The operating system's services that sessions and masters use. Simulations replace them."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

import trio

from pccl.runtime.network import addresses, datagrams, shared_memory
from pccl.runtime.network.datagrams import Datagrams
from pccl.runtime.network.dialing import dial_tcp
from pccl.runtime.network.heartbeat import HeartbeatThread
from pccl.runtime.network.shared_memory import SharedMemory
from pccl.runtime.threads.tasks import HelperThread


class System:
    def listen(self, host: str, port: int) -> socket.socket:
        return addresses.listen(host, port)

    async def dial(self, host: str, port: int) -> socket.socket:
        return await dial_tcp(host, port)

    def stream(self, sock: socket.socket) -> trio.socket.SocketType:
        """Return a connection for trio tasks that takes ownership of the socket."""
        return trio.socket.from_stdlib_socket(sock)

    def share_memory(self, sock: trio.socket.SocketType) -> SharedMemory | None:
        """Return memory to offer to the other end of a connection, or None if that is on another host."""
        if not _is_within_host(sock):
            return None
        with suppress(OSError):
            return shared_memory.create()
        return None

    def open_memory(self, sock: trio.socket.SocketType, offer: bytes) -> SharedMemory:
        """Return the memory that the other end offers. Raises OSError."""
        if not _is_within_host(sock):
            raise OSError(errno.EINVAL, "the offer of another host")
        return shared_memory.open_offered(offer)

    def offer_datagrams(self, sock: trio.socket.SocketType, secret: bytes) -> Datagrams | None:
        """Return a socket for datagrams to the other end of a connection, or None if there can be none."""
        with suppress(OSError):
            return datagrams.offer(sock, secret)
        return None

    def open_datagrams(self, sock: trio.socket.SocketType, secret: bytes, port: int) -> Datagrams:
        """Return a socket for the datagrams that the other end offers. Raises OSError."""
        return datagrams.open_offered(sock, secret, port)

    def heartbeats(self, timeout_s: float) -> HeartbeatThread:
        return HeartbeatThread(timeout_s)

    def helper(self, name: str) -> HelperThread:
        return HelperThread(name)


def _is_within_host(sock: trio.socket.SocketType) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False


SYSTEM = System()
