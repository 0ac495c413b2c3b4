"""Heartbeats over real connections: dialed, broken and made anew, refused, and missed."""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
import trio.testing

from pccl.runtime.extension import ffi
from pccl.runtime.network import heartbeat as heartbeats_module
from pccl.runtime.network.heartbeat import Closed, HeartbeatThread, SharedHeartbeats, Silent, keep_heartbeats
from pccl.runtime.network.wire import ConnectionLost

TIMEOUT_S = 0.3
LONG_S = 600.0
WAIT_S = 60.0

T = TypeVar("T")


def run(function: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        with trio.fail_after(WAIT_S):
            return await function()

    return trio.run(bounded)


def test_events_name_the_connection_and_the_reason() -> None:
    async def main() -> None:
        mine, closed = socket.socketpair()
        other, silent = socket.socketpair()
        thread = HeartbeatThread(TIMEOUT_S)
        try:
            thread.add(7, mine.detach())
            closed.close()
            (event,) = await thread.events()
            assert isinstance(event, Closed)
            assert event.connection == 7
            assert event.reason in ("closed by the other side", "Connection reset by peer")
            thread.add(8, other.detach())
            (event,) = await thread.events()
            assert isinstance(event, Silent)
            assert event.connection == 8
            assert event.silent_s >= TIMEOUT_S
            silent.close()
        finally:
            thread.close()
            thread.remove(8)

    run(main)


def test_what_is_no_socket_is_refused() -> None:
    thread = HeartbeatThread(LONG_S)
    with pytest.raises(OSError, match="refuses a heartbeat connection"):
        thread.add(1, -1)
    thread.close()


def test_heartbeats_reconnect_until_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures in between are tried again."""
    monkeypatch.setattr(heartbeats_module, "PAUSES_PER_TIMEOUT", 60 * LONG_S)

    async def main() -> None:
        ends: list[socket.socket] = []
        failures = iter([True, False, True, True, False, False])

        async def connect() -> socket.socket:
            await trio.lowlevel.checkpoint()
            if next(failures):
                raise ConnectionLost("refused")
            mine, other = socket.socketpair()
            if len(ends) < 2:
                other.close()
            ends.append(other)
            return mine

        with SharedHeartbeats.of_run(HeartbeatThread, TIMEOUT_S) as shared:
            reason = await keep_heartbeats(shared, connect, LONG_S)
        assert re.fullmatch(r"was silent for \d+\.\d s", reason)
        assert len(ends) == 3
        ends[-1].close()

    run(main)


def test_unreachable_heartbeats_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats_module, "FIRST_HEARTBEAT_S", 0.1)

    async def main() -> None:
        async def connect() -> socket.socket:
            raise ConnectionLost("no route")

        with SharedHeartbeats.of_run(HeartbeatThread, TIMEOUT_S) as shared:
            reason = await keep_heartbeats(shared, connect, TIMEOUT_S)
        assert reason == "could not be reached with heartbeats: no route"

    run(main)


def test_peers_of_a_run_share_a_thread() -> None:
    """Each gets the end of its own connection, and the connections of one that stops are closed."""
    created: list[HeartbeatThread] = []

    def create(timeout_s: float) -> HeartbeatThread:
        created.append(HeartbeatThread(timeout_s))
        return created[-1]

    async def main() -> None:
        ends = [socket.socketpair() for _ in range(3)]
        found: list[object] = [None] * 3
        scopes = [trio.CancelScope() for _ in range(3)]
        has_begun = [trio.Event() for _ in range(3)]
        has_ended = [trio.Event() for _ in range(3)]

        async def one(number: int) -> None:
            with scopes[number], SharedHeartbeats.of_run(create, LONG_S) as shared:
                has_begun[number].set()
                found[number] = await shared.keep(ends[number][0])
                has_ended[number].set()

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(one, number)
            for event in has_begun:
                await event.wait()
            scopes[0].cancel()
            ends[1][1].close()
            await trio.testing.wait_all_tasks_blocked()
            stream = trio.socket.from_stdlib_socket(ends[0][1])
            while await stream.recv(100):  # heartbeats, then the end
                pass
            stream.close()
            await has_ended[1].wait()
            assert isinstance(found[1], Closed)
            assert found[2] is None
            assert len(created) == 1
            scopes[2].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert created[0]._handle == ffi.NULL
        with SharedHeartbeats.of_run(create, LONG_S), SharedHeartbeats.of_run(create, TIMEOUT_S):
            pass
        assert len(created) == 3
        ends[2][1].close()

    run(main)
