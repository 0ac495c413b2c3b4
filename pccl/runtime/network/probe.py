"""Measures a link's round trip and the rate of one of its directions.

A probe opens as many separate connections as the link uses. Two PINGs on each measure the round trip. Then one side
floods the connections for FLOOD_ROUND_TRIPS, but at least FLOOD_S_MIN and at most FLOOD_S_MAX. A receiving
acceptor reports its byte count every REPORT_S. The rate excludes the first fifth of the bytes, when TCP windows grow.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from pccl.runtime.network.dialing import RESET_ON_CLOSE
from pccl.runtime.network.links import LinkError
from pccl.runtime.network.wire import ConnectionLost, receive_exactly
from pccl.runtime.threads.tasks import start_task

DIAL_S_MAX = 2.0
FLOOD_S_MIN = 0.05
FLOOD_S_MAX = 1.0
FLOOD_ROUND_TRIPS = 16
SLOW_START_SHARE = 0.2
SERVE_S_MAX = 10.0
"""Time limit for an acceptor."""
PINGS = 2
PING, START = b"\x00", b"\x01"
COUNT_BYTES = 8
REPORT_S = 0.005
BLOCK_BYTES = 1 << 18


class ProbeError(Exception):
    """The link could not be measured; the text is the reason."""


@dataclass(frozen=True)
class Measured:
    bytes_per_s: float
    round_trip_s: float


def steady_rate(arrivals: Sequence[tuple[float, int]]) -> float:
    """Return the bytes per second after slow start, from arrival times and byte counts; 0 if too few bytes arrived."""
    if not arrivals:
        return 0.0
    end_s, total = arrivals[-1]
    begun_s, before = next(each for each in arrivals if each[1] >= SLOW_START_SHARE * total)
    return (total - before) / (end_s - begun_s) if end_s > begun_s else 0.0


Dial = Callable[[], Awaitable[trio.socket.SocketType]]


async def measure(dial: Dial, connections: int, pulls: bool) -> Measured:
    """Measure a link with this number of connections, towards this peer if `pulls`. This takes at most DIAL_S_MAX plus
    FLOOD_S_MAX. Raises ProbeError."""
    socks: list[trio.socket.SocketType] = []
    try:
        round_trip_s = await _connect(dial, connections, socks)
        return Measured(await _flood(socks, round_trip_s, pulls), round_trip_s)
    finally:
        for sock in socks:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            sock.close()


async def _until_one_fails(tasks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    failures: list[Exception] = []

    async def run(task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (LinkError, ConnectionLost, OSError) as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            start_task(nursery, run, task)
    if failures:
        raise ProbeError(str(failures[0]))


async def _connect(dial: Dial, connections: int, socks: list[trio.socket.SocketType]) -> float:
    shortest_s = float("inf")

    async def one() -> None:
        nonlocal shortest_s
        sock = await dial()
        socks.append(sock)
        for _ in range(PINGS):
            start_s = trio.current_time()
            await sock.send(PING)
            await receive_exactly(sock, bytearray(COUNT_BYTES))
            shortest_s = min(shortest_s, trio.current_time() - start_s)

    with trio.move_on_after(DIAL_S_MAX) as scope:
        await _until_one_fails([one] * connections)
    if scope.cancelled_caught:
        raise ProbeError(f"no answer within {DIAL_S_MAX:g} s")
    return shortest_s


async def _flood(socks: Sequence[trio.socket.SocketType], round_trip_s: float, pulls: bool) -> float:
    totals = [0] * len(socks)
    arrivals: list[tuple[float, int]] = []

    def arrived(at: int, total: int) -> None:
        totals[at] = total
        arrivals.append((trio.current_time(), sum(totals)))

    async def count(at: int, sock: trio.socket.SocketType) -> None:
        await sock.send(START)
        buffer = bytearray(BLOCK_BYTES)
        while received := await sock.recv_into(buffer):
            arrived(at, totals[at] + received)
        raise ConnectionLost("closed by the other side")

    async def receive_reports(at: int, sock: trio.socket.SocketType) -> None:
        report = bytearray(COUNT_BYTES)
        while True:
            await receive_exactly(sock, report)
            arrived(at, int.from_bytes(report, "big"))

    tasks: list[Callable[[], Awaitable[None]]] = []
    for at, sock in enumerate(socks):
        tasks += (
            [partial(count, at, sock)]
            if pulls
            else [partial(_send_endlessly, sock), partial(receive_reports, at, sock)]
        )
    flood_s = min(max(FLOOD_ROUND_TRIPS * round_trip_s, FLOOD_S_MIN), FLOOD_S_MAX)
    with trio.move_on_after(flood_s):
        await _until_one_fails(tasks)
    found = steady_rate(arrivals)
    if not found:
        raise ProbeError(f"almost no data got through within {flood_s:.2g} s")
    return found


async def _send_endlessly(sock: trio.socket.SocketType) -> None:
    block = memoryview(os.urandom(BLOCK_BYTES))
    while True:
        await sock.send(block)


async def serve(sock: trio.socket.SocketType, pulls: bool) -> None:
    """Serve the acceptor's side of one probe connection until it is closed, for at most SERVE_S_MAX."""
    with trio.move_on_after(SERVE_S_MAX), suppress(ConnectionLost, OSError):
        for answered in range(PINGS):
            await receive_exactly(sock, bytearray(len(PING)))
            await _report(sock, answered + 1)
        if pulls:
            await receive_exactly(sock, bytearray(len(START)))
            await _send_endlessly(sock)
        buffer = bytearray(BLOCK_BYTES)
        total = 0
        reported_s = float("-inf")
        while received := await sock.recv_into(buffer):
            total += received
            if trio.current_time() >= reported_s + REPORT_S:
                reported_s = trio.current_time()
                await _report(sock, total)


async def _report(sock: trio.socket.SocketType, total: int) -> None:
    await sock.send(total.to_bytes(COUNT_BYTES, "big"))
