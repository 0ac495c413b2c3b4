"""The heartbeat thread, as tasks of the simulation: see `pccl.runtime.network.heartbeat.HeartbeatThread`."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio

from pccl.runtime.network.heartbeat import EVENTS_MAX, Closed, Silent

BEATS_PER_TIMEOUT = 4
Spawn = Callable[[Callable[[], Awaitable[None]]], None]


class SimHeartbeats:
    """Sends and expects heartbeats on its connections, and reports those that fall silent or are closed."""

    def __init__(self, timeout_s: float, spawn: Spawn) -> None:
        self._timeout_s = timeout_s
        self._spawn = spawn
        self._scopes: dict[int, trio.CancelScope] = {}
        self._heard_at: dict[int, float] = {}
        self._events: list[Silent | Closed] = []
        self._has_events = trio.Event()

    async def keep_progress(self) -> None:
        await trio.sleep_forever()

    def add(self, connection: int, fd: int) -> None:
        sock = trio.socket.from_stdlib_socket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd))
        scope = self._scopes[connection] = trio.CancelScope()
        self._heard_at[connection] = trio.current_time()

        async def keep() -> None:
            with sock, scope:
                event = await self._keep(connection, sock)
                self._forget(connection)
                self._events.append(event)
                self._has_events.set()

        self._spawn(keep)

    async def _keep(self, connection: int, sock: trio.socket.SocketType) -> Silent | Closed:
        async def beat() -> None:
            while True:
                await sock.send(b"\0")
                await trio.sleep(self._timeout_s / BEATS_PER_TIMEOUT)

        found: Silent | Closed | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_quietly, beat)
            while found is None:
                await trio.lowlevel.checkpoint_if_cancelled()  # the connection may have been removed
                data = b""
                reason = "closed by the other side"
                with trio.move_on_at(self._heard_at[connection] + self._timeout_s) as scope:
                    try:
                        data = await sock.recv(4096)
                    except OSError as error:
                        reason = error.strerror or str(error)
                await trio.lowlevel.checkpoint_if_cancelled()
                silent_s = trio.current_time() - self._heard_at[connection]
                if scope.cancelled_caught:
                    found = Silent(connection, silent_s)
                elif not data:
                    found = Closed(connection, silent_s, reason)
                else:
                    self._heard_at[connection] = trio.current_time()
            nursery.cancel_scope.cancel()
        return found

    def _forget(self, connection: int) -> None:
        self._scopes.pop(connection, None)
        self._heard_at.pop(connection, None)

    def remove(self, connection: int) -> None:
        scope = self._scopes.get(connection)
        if scope is not None:
            scope.cancel()
            self._forget(connection)

    def quiet(self, seconds: float) -> list[int]:
        now = trio.current_time()
        return [connection for connection, at in self._heard_at.items() if now - at >= seconds]

    async def events(self) -> list[Silent | Closed]:
        while not self._events:
            self._has_events = trio.Event()
            await self._has_events.wait()
        found, self._events = self._events[:EVENTS_MAX], self._events[EVENTS_MAX:]
        return found

    def close(self) -> None:
        for connection in list(self._scopes):
            self.remove(connection)


async def _quietly(function: Callable[[], Awaitable[None]]) -> None:
    try:
        await function()
    except OSError:
        return  # readers notice it
