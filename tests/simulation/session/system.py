"""A machine of a simulated run, as the sessions and masters on it know their system."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import trio

from pccl.runtime.network.heartbeat import HeartbeatThread
from pccl.runtime.network.system import System
from pccl.runtime.threads.tasks import HelperThread
from tests.simulation.session.heartbeats import SimHeartbeats, Spawn
from tests.simulation.session.network import Network
from tests.simulation.session.sockets import SimSocket, SimStream

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

    def heartbeats(self, timeout_s: float) -> HeartbeatThread:
        return cast(HeartbeatThread, SimHeartbeats(timeout_s, self._spawn))

    def helper(self, name: str) -> HelperThread:
        return cast(HelperThread, SimHelper())
