"""The operating system's services that sessions and masters use. Simulations replace them."""

from __future__ import annotations

import socket

import trio

from pccl.runtime.network import addresses
from pccl.runtime.network.dialing import dial_tcp
from pccl.runtime.network.heartbeat import HeartbeatThread
from pccl.runtime.threads.tasks import HelperThread


class System:
    def listen(self, host: str, port: int) -> socket.socket:
        return addresses.listen(host, port)

    async def dial(self, host: str, port: int) -> socket.socket:
        return await dial_tcp(host, port)

    def stream(self, sock: socket.socket) -> trio.socket.SocketType:
        """Return a connection for trio tasks that takes ownership of the socket."""
        return trio.socket.from_stdlib_socket(sock)

    def heartbeats(self, timeout_s: float) -> HeartbeatThread:
        return HeartbeatThread(timeout_s)

    def helper(self, name: str) -> HelperThread:
        return HelperThread(name)


SYSTEM = System()
