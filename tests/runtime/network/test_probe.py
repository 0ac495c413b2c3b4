"""Measurements of a link."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
import trio.testing

from pccl.runtime.network import probe
from pccl.runtime.network.probe import Measured, ProbeError, measure, steady_rate


def arrivals(rates: list[float], step_s: float = 0.05) -> list[tuple[float, int]]:
    """Return arrivals of so many bytes per second in each step."""
    found, total = [], 0.0
    for at, rate in enumerate(rates):
        for part in range(1, 11):
            total += rate * step_s / 10
            found.append(((at + part / 10) * step_s, round(total)))
    return found


def test_slow_start_is_not_the_rate() -> None:
    slow_start = [2.5e7 / 2**doublings for doublings in range(8, 0, -1)]
    assert steady_rate(arrivals(slow_start + [2.5e7] * 8)) == pytest.approx(2.5e7, rel=0.15)


@pytest.mark.parametrize("found", [[], [(1.0, 10)], arrivals([0.0, 0.0])])
def test_too_little_is_no_rate(found: list[tuple[float, int]]) -> None:
    assert steady_rate(found) == 0


@asynccontextmanager
async def acceptor(
    serve: Callable[[trio.socket.SocketType], Awaitable[None]],
) -> AsyncIterator[Callable[[], Awaitable[trio.socket.SocketType]]]:
    """Gives a function that dials it."""
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen()

        async def accept() -> None:
            while True:
                sock, _ = await listener.accept()
                nursery.start_soon(one, sock)

        async def one(sock: trio.socket.SocketType) -> None:
            with sock:
                await serve(sock)

        async def dial() -> trio.socket.SocketType:
            sock = trio.socket.socket()
            await sock.connect(listener.getsockname())
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            yield dial
            nursery.cancel_scope.cancel()


class Wire:
    """One end of a connection in memory, for a clock that jumps: what is sent takes time to leave, and to arrive."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._sends, self._arriving = trio.open_memory_channel[tuple[float, bytes]](10**6)
        self._came = b""
        self.other = self

    async def send(self, data: bytes | memoryview) -> int:
        await trio.sleep(len(data) / self._bytes_per_s)
        self.other._sends.send_nowait((trio.current_time() + self._latency_s, bytes(data)))
        return len(data)

    async def recv_into(self, buffer: bytearray | memoryview) -> int:
        if not self._came:
            arrives_at, self._came = await self._arriving.receive()
            await trio.sleep_until(arrives_at)
        count = min(len(buffer), len(self._came))
        buffer[:count], self._came = self._came[:count], self._came[count:]
        return count

    def setsockopt(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("pulls", [False, True])
def test_measure(pulls: bool) -> None:
    bytes_per_s, latency_s, connections = 1e8, 5e-3, 3

    async def main() -> Measured:
        async with trio.open_nursery() as nursery:

            async def dial() -> trio.socket.SocketType:
                near, far = Wire(bytes_per_s, latency_s), Wire(bytes_per_s, latency_s)
                near.other, far.other = far, near
                nursery.start_soon(probe.serve, far, pulls)
                return cast(trio.socket.SocketType, near)

            found = await measure(dial, connections, pulls)
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert found.bytes_per_s == pytest.approx(connections * bytes_per_s, rel=0.1)
    assert found.round_trip_s == pytest.approx(2 * latency_s, rel=0.1)


@pytest.mark.parametrize("pulls", [False, True])
def test_closed_probe_is_an_error(pulls: bool) -> None:
    async def hang_up(sock: trio.socket.SocketType) -> None:
        await sock.recv(1)

    async def main() -> None:
        async with acceptor(hang_up) as dial:
            with pytest.raises(ProbeError):
                await measure(dial, 2, pulls)

    trio.run(main)


@pytest.mark.parametrize("pulls", [False, True])
def test_silent_probe_times_out(pulls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "DIAL_S_MAX", 0.05)

    async def main() -> None:
        async def say_nothing(_: trio.socket.SocketType) -> None:
            await trio.sleep_forever()

        async with acceptor(say_nothing) as dial:
            with pytest.raises(ProbeError, match="no answer"):
                await measure(dial, 2, pulls)

    trio.run(main)


@pytest.mark.parametrize("pulls", [False, True])
def test_stalled_probe_times_out(pulls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side answers pings and then neither takes nor sends anything."""
    monkeypatch.setattr(probe, "FLOOD_S_MIN", 0.05)

    async def only_pings(sock: trio.socket.SocketType) -> None:
        for _ in range(probe.PINGS):
            await sock.recv(1)
            await sock.send(bytes(probe.COUNT_BYTES))
        await trio.sleep_forever()

    async def main() -> None:
        async with acceptor(only_pings) as dial:
            with pytest.raises(ProbeError, match="got through"):
                await measure(dial, 2, pulls)

    trio.run(main)
