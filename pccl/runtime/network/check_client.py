"""Checks the way to a master and back, for `pccl doctor`: the asker's side.

One connection carries all, in this order, so that what fails first is told first: small messages (round trip, clocks),
one that fills packets (MTU), the master's own calls to where peers would dial this host, and as much as the way carries
for a moment in each direction.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import ssl
import struct
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError, decode_body, encode
from pccl.runtime.network.conversation import Refused, converse
from pccl.runtime.network.probe import steady_rate
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, SocketChannel, receive_message
from pccl.runtime.threads.tasks import start_task

PINGS = 10
FULL_BYTES = 32 * 2**10
"""Size of a message that fills packets of any MTU but a loopback's."""
FULL_S = 3.0
FLOOD_S = 1.0
FLOOD_BYTES_MAX = 64 << 20
BLOCK_BYTES = m.CHECK_BYTES_MAX
ANSWER_S = 10.0
CALLS_S = 4 * m.CHECK_HOSTS_MAX


@dataclass
class Way:
    """What was found of the way to a master and back."""

    version: str = ""
    """The version of the master's pccl."""
    seen_host: str = ""
    """The address from which the master sees this host."""
    own_host: str = ""
    """The address from which this host sends."""
    round_trips_s: list[float] = field(default_factory=list)
    clock_offset_s: float = 0.0
    """The master's clock less this one's, and how far that may be off."""
    clock_uncertainty_s: float = 0.0
    segment_bytes: int = 0
    """Payload of the largest packets; 0: the system does not say."""
    full_size: str = ""
    """What becomes of packets of full size: they get through "both" ways, or vanish on the way "out" or "back"; "": not
    tried."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Addresses at which the master has dialled this host, each with why it could not be reached; "": it was."""
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


async def check(
    host: str,
    port: int,
    token: str,
    ssl_context: ssl.SSLContext | None,
    listener: socket.socket | None,
    advertised: Sequence[str],
    advertised_port: int | None,
) -> Way:
    """Return what is found of the way to the master at this address. NoAnswer.

    The master is asked to dial this host at `advertised`, or at the address that it sees, and at `advertised_port`, or
    the port of `listener`, where it is answered; with None it is not asked."""
    way = Way()

    async def talk(connection: ControlConnection[m.ToChecker]) -> None:
        seen = await _next(connection)
        if not isinstance(seen, m.Checked):
            raise Refused("it does not say what it sees")
        way.version, way.seen_host = seen.version, seen.host
        way.own_host = str(connection.sock.getsockname()[0]).removeprefix("::ffff:")
        await _ping(connection, way)
        await _fill_packets(connection, way)
        if way.full_size != "both":
            return
        if listener is not None:
            await _be_called(connection, way, listener, advertised, advertised_port)
        way.up_bytes_per_s = await _flood(connection, BLOCK_BYTES, 0)
        way.down_bytes_per_s = await _flood(connection, 0, BLOCK_BYTES)

    await converse(host, port, token, ssl_context, m.CheckRequest(m.PROTOCOL_VERSION), m.ToChecker, talk)
    return way


async def _next(connection: ControlConnection[m.ToChecker], limit_s: float = ANSWER_S) -> m.ToChecker:
    with trio.move_on_after(limit_s):
        answer: m.ToChecker = decode_body(await connection.receive_body(), m.ToChecker)
        return answer
    raise ConnectionLost(f"no answer within {limit_s:g} s")


async def _ping(connection: ControlConnection[m.ToChecker], way: Way) -> None:
    shortest_s = float("inf")
    for _ in range(PINGS):
        begun_s, sent_unix_s = time.monotonic(), time.time()
        connection.send([m.CheckEcho(b"", 0, sent_unix_s)])
        answer = await _next(connection)
        if not isinstance(answer, m.CheckEcho):
            raise ProtocolError("something else than an echo")
        round_trip_s = time.monotonic() - begun_s
        way.round_trips_s.append(round_trip_s)
        if round_trip_s < shortest_s:
            shortest_s = round_trip_s
            way.clock_offset_s = answer.unix_s - (sent_unix_s + round_trip_s / 2)
            way.clock_uncertainty_s = round_trip_s / 2


async def _fill_packets(connection: ControlConnection[m.ToChecker], way: Way) -> None:
    sock = connection.sock
    way.segment_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    connection.send([m.CheckEcho(os.urandom(FULL_BYTES), FULL_BYTES)])
    with trio.move_on_after(FULL_S) as scope:
        await _next(connection)
    way.full_size = "both"
    if scope.cancelled_caught:
        way.full_size = "out" if _unacknowledged_bytes(sock) else "back"


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """Return how many bytes the other side's system has not acknowledged."""
    queued: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, struct.pack("i", 0)))[0]
    return queued


async def _be_called(
    connection: ControlConnection[m.ToChecker],
    way: Way,
    listener: socket.socket,
    advertised: Sequence[str],
    advertised_port: int | None,
) -> None:
    nonce = secrets.token_bytes(16)
    port: int = listener.getsockname()[1] if advertised_port is None else advertised_port
    async with trio.open_nursery() as nursery:
        start_task(nursery, _take_calls, listener, nonce)
        connection.send([m.CheckDial(list(advertised)[: m.CHECK_HOSTS_MAX], port, nonce)])
        answer: m.ToChecker | None = None
        with trio.move_on_after(CALLS_S):
            answer = decode_body(await connection.receive_body(), m.ToChecker)
        nursery.cancel_scope.cancel()
    if not isinstance(answer, m.CheckDialled):
        raise ConnectionLost("the master does not say whether it reaches this host")
    way.calls = answer.calls


async def _take_calls(listener: socket.socket, nonce: bytes) -> None:
    """Answer the master's calls, and nobody else's."""
    while True:
        await trio.lowlevel.wait_readable(listener.fileno())
        try:
            sock = trio.socket.from_stdlib_socket(listener.accept()[0])
        except OSError:
            continue
        with trio.move_on_after(FULL_S):
            try:
                call = await receive_message(sock, m.CheckCall, 2 * FULL_BYTES)
                if call.nonce == nonce:
                    await SocketChannel(sock).send_frame(encode(m.Accepted()))
            except (ConnectionLost, ProtocolError):
                pass
        sock.close()


async def _flood(connection: ControlConnection[m.ToChecker], send_bytes: int, reply_bytes: int) -> float:
    """Return how many bytes a second get through, as far as one connection shows in a moment.

    No more is under way than half of what has come, so that little is left on a slow way when the time is over."""
    block = m.CheckEcho(os.urandom(send_bytes), reply_bytes)
    each, under_way, total = max(send_bytes, reply_bytes), 0, 0
    arrivals: list[tuple[float, int]] = []
    begun_s = trio.current_time()
    while True:
        is_over = trio.current_time() >= begun_s + FLOOD_S or total >= FLOOD_BYTES_MAX
        while not is_over and under_way * each <= max(each, total // 2):
            connection.send([block])
            under_way += 1
        if not under_way:
            break
        await _next(connection)
        under_way -= 1
        total += each
        arrivals.append((trio.current_time(), total))
    return steady_rate(arrivals)
