"""The machines of a simulated run: processes of peers and masters, started and killed."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeVar, cast

import trio

from pccl import AsyncCommunicator
from pccl.protocol.failover.bootstrap import Start
from pccl.protocol.master.run_state import MasterOptions
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.master.server import MasterServer
from pccl.runtime.network.heartbeat import HeartbeatThread
from pccl.runtime.network.system import System
from pccl.runtime.threads.tasks import HelperThread
from tests.simulation.session.determinism import process_nursery
from tests.simulation.session.engine import SimEngine
from tests.simulation.session.heartbeats import SimHeartbeats, Spawn
from tests.simulation.session.network import Network
from tests.simulation.session.sockets import Address, SimSocket, SimStream

MASTER_PORT = 48148
PEER_TIMEOUT_S = 2.0


class Process:
    """A process on a machine of the network."""

    def __init__(self, host: str, network: Network, seed: int) -> None:
        self.host = host
        self.is_alive = True
        self.ended = trio.Event()
        self.random = random.Random(f"{host} {seed}")
        self.system = SimSystem(host, network, self.spawn)
        self.server: MasterServer | None = None
        """The master that runs in it."""
        self._network = network
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()

    def spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        """Start a task that ends with the process. No task starts in one that was killed, whose calls are unwound."""
        assert self._nursery is not None
        if not self._scope.cancel_called:
            self._nursery.start_soon(function)

    async def run(self, main: Callable[[], Awaitable[None]]) -> None:
        """Run the process until `main` and all that it has started have ended, or it is killed."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    process_nursery.set(nursery)
                    process_of_task.set(self)
                    nursery.start_soon(main)
        finally:
            self.is_alive = False
            self.ended.set()

    def kill(self) -> None:
        """End the process as SIGKILL does: its connections are reset, and it sends no more."""
        self.is_alive = False
        for connection in list(self._network.connections.values()):
            if self.host in connection.hosts():
                connection.break_off()
        self._scope.cancel()

    def communicator(
        self, masters: list[Address], timeout_s: float, token: str, connections: int, master_timeout_s: float = 15.0
    ) -> AsyncCommunicator:
        """Return a communicator whose system is this machine."""
        comm = AsyncCommunicator(
            ",".join(f"{host}:{port}" for host, port in masters),
            p2p_connection_pool_size=connections,
            timeout=timeout_s,
            listen=f"{self.host}:0",
            name=self.host,
            token=token,
            master_timeout=master_timeout_s,
        )
        inner = comm._inner
        inner._options = replace(
            inner._options,
            system=self.system,
            new_engine=lambda group, segment_bytes, _: cast(
                Engine, SimEngine(group, segment_bytes, self.random, self.spawn)
            ),
        )
        return comm


process_of_task: ContextVar[Process] = ContextVar("process_of_task")
"""The process that the present task belongs to."""


async def serve_master(
    process: Process, start: Start, standby_of: list[Address], token: str, founders: int = 1
) -> None:
    """Run a master in this process, for as long as it lives."""
    listener = process.system.listen(process.host, MASTER_PORT)
    options = MasterOptions(peer_timeout_s=PEER_TIMEOUT_S, founders=founders)
    process.server = MasterServer(listener, options, token, start=start, standby_of=standby_of, system=process.system)
    await process.server.serve()


T = TypeVar("T")
HELPER_S = 0.002


class SimHelper:
    """A helper thread that takes a moment for each function."""

    async def run(self, function: Callable[[], T], *, is_left: bool) -> T:
        with trio.CancelScope(shield=not is_left):
            await trio.sleep(HELPER_S)
            return function()

    def close(self) -> None:
        pass


class SimSystem(System):
    """The system of one machine of the network."""

    def __init__(self, host: str, network: Network, spawn: Spawn) -> None:
        """`spawn` starts a task that ends with the process."""
        self.host = host
        self._network = network
        self._spawn = spawn

    def listen(self, host: str, port: int) -> Any:
        return self._network.listen(self.host, port)

    async def dial(self, host: str, port: int) -> Any:
        return await self._network.dial(self.host, host, port)

    def stream(self, sock: Any) -> trio.socket.SocketType:
        assert isinstance(sock, SimSocket)
        return cast(trio.socket.SocketType, SimStream(sock))

    def share_memory(self, sock: trio.socket.SocketType) -> None:
        return None

    def offer_datagrams(self, sock: trio.socket.SocketType, secret: bytes) -> None:
        return None

    def heartbeats(self, timeout_s: float) -> HeartbeatThread:
        return cast(HeartbeatThread, SimHeartbeats(timeout_s, self._spawn))

    def helper(self, name: str) -> HelperThread:
        return cast(HelperThread, SimHelper())
