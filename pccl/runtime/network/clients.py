"""Requests to a master from outside its run: status, trace and check. `failure_of` words all failures.

`pccl doctor` uses one connection for its check, in this order: small messages (round trip, clocks), one that fills
packets (MTU), the master's connections to this host, and a flood in each direction.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import ssl
import struct
import termios
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import ProtocolError, decode_body, encode, harmless
from pccl.protocol.recording import PACKED_BYTES_MAX
from pccl.protocol.status import RunStatus
from pccl.protocol.wait_reasons import how_to_look
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.probe import steady_rate
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import (
    ConnectionLost,
    ControlConnection,
    NoMasterError,
    SocketChannel,
    dial_control,
    receive_message,
)
from pccl.runtime.threads.tasks import start_task
from pccl.runtime.threads.waking import waiting

logger = logging.getLogger("pccl")

T = TypeVar("T")

FAILURES = ConnectionLost, TlsError, AuthError, ProtocolError
"""What a conversation may end with."""


class NoAnswer(Exception):  # noqa: N818 - named after what happened
    """A master gave no answer, or refused; the text names its address and says why."""


class Refused(Exception):  # noqa: N818 - named after what happened
    """The master has answered that it does not answer; the text is its reason."""


def failure_of(error: Exception) -> str:
    if isinstance(error, ConnectionLost):
        return f"the connection was lost: {error}"
    if isinstance(error, TlsError):
        return f"no TLS with it: {error}"
    if isinstance(error, AuthError):
        return f"not accepted: {error}"
    if isinstance(error, NoMasterError | Refused):
        return str(error)
    return f"it does not speak as a pccl master of this version does: {error}"


def waiting_for(what: str, masters: Sequence[tuple[str, int]]) -> AbstractContextManager[None]:
    """Return a context for a request that waits for an answer from one of these masters."""
    where = ",".join(addresses.join(*master) for master in masters)

    async def reason() -> tuple[str, str]:
        return f"an answer from {where}", how_to_look(where)

    return waiting(what, reason, logger)


async def converse(
    host: str,
    port: int,
    token: str,
    ssl_context: ssl.SSLContext | None,
    request: m.Opening,
    answers: Any,
    talk: Callable[[ControlConnection[Any]], Awaitable[T]],
    dial: Dial = dial_tcp,
) -> T:
    """Say `request` to the master at this address, and return what `talk` makes of the connection once the request has
    been accepted. `answers` is the union of what may come. NoAnswer; `talk` may raise FAILURES and Refused."""
    where = addresses.join(host, port)
    try:
        connection: ControlConnection[Any] = await dial_control(host, port, answers, dial)
    except ConnectionLost as error:
        raise NoAnswer(
            f"cannot reach a master at {where}: {error}; is `pccl master` running there, and is the port open?"
        ) from None
    said: list[T] = []
    failure = ""

    async def open_it() -> None:
        if ssl_context is not None:
            await connection.start_tls(TlsEnd(ssl_context, host))
        answer = await handshake.dial(connection, token, None, request, answers)
        if not isinstance(answer, m.Accepted):
            raise Refused(getattr(answer, "reason", "it does not say whether it accepts us"))
        connection.trust()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_sender)
            try:
                await open_it()
                said.append(await talk(connection))
            except (*FAILURES, Refused) as error:
                failure = failure_of(error)
            nursery.cancel_scope.cancel()
    finally:
        connection.close()
    if failure:
        raise NoAnswer(f"the master at {where}: {harmless(failure)}")
    return said[0]


LEADING = "leading"


async def ask(host: str, port: int, token: str, ssl_context: ssl.SSLContext | None, dial: Dial = dial_tcp) -> RunStatus:
    """Return the status of the run whose master is at this address. NoAnswer."""
    return await converse(host, port, token, ssl_context, m.StatusRequest(m.PROTOCOL_VERSION), m.ToWatcher, _hear, dial)


async def _hear(connection: ControlConnection[m.ToWatcher]) -> RunStatus:
    (answer, *_) = await connection.receive()
    if isinstance(answer, m.Status):
        return answer.run
    raise Refused(answer.reason if isinstance(answer, m.Goodbye) else "it says twice that it accepts us")


async def ask_all(
    masters: Sequence[tuple[str, int]], token: str, ssl_context: ssl.SSLContext | None, timeout_s: float
) -> RunStatus:
    """Return the status that the leading master gives, else that of any which answers in time. NoAnswer,
    trio.TooSlowError."""
    found: list[RunStatus] = []
    failures: list[str] = []

    async def ask_one(host: str, port: int) -> None:
        try:
            status = await ask(host, port, token, ssl_context)
        except NoAnswer as error:
            failures.append(str(error))
            return
        found.append(status)
        if status.role == LEADING:
            scope.cancel()

    with waiting_for("the request for the status", masters), trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            for host, port in masters:
                nursery.start_soon(ask_one, host, port)
    if found:
        return max(found, key=lambda status: status.role == LEADING)
    if len(failures) < len(masters):
        raise trio.TooSlowError
    raise NoAnswer("; ".join(failures))


@dataclass
class FetchedTrace:
    """What a master has sent of a trace."""

    peers: list[tuple[m.TracedPeer, bytes]] = field(default_factory=list)
    """Each peer with its packed recording, empty if there is none."""
    end: m.Traced | None = None


async def fetch(
    host: str,
    port: int,
    token: str,
    ssl_context: ssl.SSLContext | None,
    seconds: float,
    last: int,
    fetched: FetchedTrace,
) -> None:
    """Add the trace of the run whose master is at this address to `fetched`, as it comes. NoAnswer."""

    async def take(connection: ControlConnection[m.ToTracer]) -> None:
        await _take_in(connection, fetched)

    request = m.TraceRequest(m.PROTOCOL_VERSION, seconds, last)
    await converse(host, port, token, ssl_context, request, m.ToTracer, take)


async def fetch_any(
    masters: Sequence[tuple[str, int]],
    token: str,
    ssl_context: ssl.SSLContext | None,
    seconds: float,
    last: int,
    timeout_s: float,
) -> FetchedTrace:
    """Return the trace of one of the masters; after `timeout_s` the received part. NoAnswer or trio.TooSlowError
    if that is empty."""
    traces = [FetchedTrace() for _ in masters]
    failures: list[str] = []

    async def fetch_one(host: str, port: int, fetched: FetchedTrace) -> None:
        try:
            await fetch(host, port, token, ssl_context, seconds, last, fetched)
        except NoAnswer as error:
            failures.append(str(error))
        else:
            scope.cancel()

    with waiting_for("the request for a trace", masters), trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            for (host, port), fetched in zip(masters, traces, strict=True):
                nursery.start_soon(fetch_one, host, port, fetched)
    best = max(traces, key=lambda fetched: (fetched.end is not None, len(fetched.peers)))
    if best.end is not None or best.peers:
        return best
    if len(failures) < len(masters):
        raise trio.TooSlowError
    raise NoAnswer("; ".join(failures))


async def _take_in(connection: ControlConnection[m.ToTracer], fetched: FetchedTrace) -> None:
    parts: dict[int, bytearray] = {}
    while True:
        for message in await connection.receive():
            if isinstance(message, m.Traced):
                fetched.end = message
                return
            if isinstance(message, m.TracePart):
                content = parts.setdefault(message.peer, bytearray())
                content += message.content
                if len(content) > PACKED_BYTES_MAX + m.PART_BYTES_MAX:
                    raise Refused(f"the recording of peer {message.peer} is too large")
            elif isinstance(message, m.TracedPeer):
                content = parts.pop(message.peer, bytearray())
                fetched.peers.append((message, b"" if message.lack else bytes(content)))
            else:
                raise Refused("it says what has no place in a trace")


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
    seen_host: str = ""
    """This host's address as the master sees it."""
    own_host: str = ""
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
    """Addresses of this host that the master dialed, each with the failure; "": reached."""
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
