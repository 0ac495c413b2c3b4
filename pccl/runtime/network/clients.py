"""Requests to a master from outside its run: status, trace and check.

The check of `pccl doctor` uses one connection. It sends small messages (round trip, clocks), then one that fills
packets (MTU), asks the master to connect to this host, and finally floods the path in each direction.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
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
from pccl.runtime.network.links import unacknowledged_bytes
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


class NoAnswer(Exception):  # noqa: N818 - named after what happened
    """A master did not answer or refused the request; the text gives its address and the reason."""


class Refused(Exception):  # noqa: N818 - named after what happened
    """The master has refused the request; the text is the reason."""


def failure_of(error: Exception) -> str:
    if isinstance(error, ConnectionLost):
        return f"the connection was lost: {error}"
    if isinstance(error, TlsError):
        return f"TLS failed: {error}"
    if isinstance(error, AuthError):
        return f"not accepted: {error}"
    if isinstance(error, NoMasterError | Refused):
        return str(error)
    return f"not an answer from a pccl master of this version: {error}"


def waiting_for(what: str, masters: Sequence[tuple[str, int]]) -> AbstractContextManager[None]:
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
    """Send `request` to the master at this address, call `talk` once the master accepts it, and return the result.
    `answers` is the union of the expected messages. Raises NoAnswer."""
    where = addresses.join(host, port)
    try:
        connection: ControlConnection[Any] = await dial_control(host, port, answers, dial)
    except ConnectionLost as error:
        raise NoAnswer(
            f"cannot reach a master at {where}: {error}; is the address right, is `pccl master` running there, and is "
            f"the port open?"
        ) from None
    results: list[T] = []
    failure = ""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_sender)
            try:
                if ssl_context is not None:
                    await connection.start_tls(TlsEnd(ssl_context, host))
                answer = await handshake.dial(connection, token, None, request, answers)
                if not isinstance(answer, m.Accepted):
                    raise Refused(getattr(answer, "reason", "an unexpected answer"))
                connection.trust()
                results.append(await talk(connection))
            except (ConnectionLost, TlsError, AuthError, ProtocolError, Refused) as error:
                failure = failure_of(error)
            nursery.cancel_scope.cancel()
    finally:
        connection.close()
    if failure:
        raise NoAnswer(f"the master at {where}: {harmless(failure)}")
    return results[0]


LEADING = "leading"


async def ask(host: str, port: int, token: str, ssl_context: ssl.SSLContext | None, dial: Dial = dial_tcp) -> RunStatus:

    async def talk(connection: ControlConnection[m.ToWatcher]) -> RunStatus:
        (answer, *_) = await connection.receive()
        if isinstance(answer, m.Status):
            return answer.run
        raise Refused(answer.reason if isinstance(answer, m.Goodbye) else "an unexpected answer")

    return await converse(host, port, token, ssl_context, m.StatusRequest(m.PROTOCOL_VERSION), m.ToWatcher, talk, dial)


async def _ask_each(
    what: str,
    masters: Sequence[tuple[str, int]],
    timeout_s: float,
    ask_one: Callable[[int], Awaitable[bool]],
    has_answer: Callable[[], bool],
) -> None:
    """Call `ask_one` concurrently for the indices of all masters, until one call returns True or the timeout passes.
    Raises NoAnswer or trio.TooSlowError unless `has_answer` is true by then."""
    failures: list[str] = []

    async def one(index: int) -> None:
        try:
            if await ask_one(index):
                scope.cancel()
        except NoAnswer as error:
            failures.append(str(error))

    with waiting_for(what, masters), trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            for index in range(len(masters)):
                nursery.start_soon(one, index)
    if has_answer():
        return
    if len(failures) < len(masters):
        raise trio.TooSlowError
    raise NoAnswer("; ".join(failures))


async def ask_all(
    masters: Sequence[tuple[str, int]], token: str, ssl_context: ssl.SSLContext | None, timeout_s: float
) -> RunStatus:
    """Return the leading master's status, or any other that arrives in time. Raises NoAnswer or trio.TooSlowError."""
    found: list[RunStatus] = []

    async def ask_one(index: int) -> bool:
        found.append(await ask(*masters[index], token, ssl_context))
        return found[-1].role == LEADING

    await _ask_each("the request for the status", masters, timeout_s, ask_one, lambda: bool(found))
    return max(found, key=lambda status: status.role == LEADING)


async def kick_at_any(
    masters: Sequence[tuple[str, int]], token: str, ssl_context: ssl.SSLContext | None, timeout_s: float, peer: int
) -> None:
    """Remove a peer from the run of one of the masters. Raises NoAnswer or trio.TooSlowError."""
    request, done = m.KickRequest(m.PROTOCOL_VERSION, peer), []

    async def accepted(_: ControlConnection[m.ToWatcher]) -> None:
        done.append(peer)

    async def ask_one(index: int) -> bool:
        await converse(*masters[index], token, ssl_context, request, m.ToWatcher, accepted)
        return True

    await _ask_each("the request to remove a peer", masters, timeout_s, ask_one, lambda: bool(done))


@dataclass
class FetchedTrace:
    """The part of a trace that a master has sent."""

    peers: list[tuple[m.TracedPeer, bytes]] = field(default_factory=list)
    """Each peer with its packed recording, which is empty if there is none."""
    end: m.Traced | None = None


async def fetch_any(
    masters: Sequence[tuple[str, int]],
    token: str,
    ssl_context: ssl.SSLContext | None,
    timeout_s: float,
    seconds: float,
    last: int,
) -> FetchedTrace:
    """Return a trace from one of the masters, or its part that was received within `timeout_s`. Raises NoAnswer or
    trio.TooSlowError if no part was received."""
    traces = [FetchedTrace() for _ in masters]
    request = m.TraceRequest(m.PROTOCOL_VERSION, seconds, last)

    async def fetch_one(index: int) -> bool:
        talk = partial(_receive_trace, traces[index])
        await converse(*masters[index], token, ssl_context, request, m.ToTracer, talk)
        return True

    def best() -> FetchedTrace:
        return max(traces, key=lambda fetched: (fetched.end is not None, len(fetched.peers)))

    def has_some() -> bool:
        return best().end is not None or bool(best().peers)

    await _ask_each("the request for a trace", masters, timeout_s, fetch_one, has_some)
    return best()


async def _receive_trace(fetched: FetchedTrace, connection: ControlConnection[m.ToTracer]) -> None:
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
                raise Refused("an unexpected message in a trace")


PINGS = 10
FULL_BYTES = 32 * 2**10
"""Size of a message that fills packets of any MTU except that of loopback."""
FULL_S = 3.0
FLOOD_S = 1.0
FLOOD_BYTES_MAX = 64 << 20
BLOCK_BYTES = m.CHECK_BYTES_MAX
ANSWER_S = 10.0
CALLS_S = 4 * m.CHECK_HOSTS_MAX


@dataclass
class PathReport:
    """Measurements of the path to a master and back."""

    version: str = ""
    seen_host: str = ""
    """This host's address as the master sees it."""
    own_host: str = ""
    round_trips_s: list[float] = field(default_factory=list)
    clock_offset_s: float = 0.0
    """The master's clock minus this host's; `clock_uncertainty_s` is the maximum error of this difference."""
    clock_uncertainty_s: float = 0.0
    segment_bytes: int = 0
    """Payload of the largest packets; 0 if the system does not report it."""
    full_size: str = ""
    """Is "both" if full-size packets arrive both ways, "out" or "back" if that path loses them, or "" if untested."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Addresses of this host that the master dialed, each with the failure, or "" if it was reached."""
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    sent_segments: int = 0
    """Number of packets sent to the master; 0 if the system does not report it."""
    lost_segments: int = 0
    """Number of these packets that were retransmitted."""
    congestion_control: str = ""
    """Congestion control of a connection to the master."""
    may_choose_bbr: bool = False


async def check(
    host: str,
    port: int,
    token: str,
    ssl_context: ssl.SSLContext | None,
    listener: socket.socket | None,
    advertised: Sequence[str],
    advertised_port: int | None,
) -> PathReport:
    """Measure the path to the master at this address. With a `listener`, the master also dials this host, at the
    `advertised` addresses or the one that it sees, and at `advertised_port` or the listener's port. Raises NoAnswer."""
    path = PathReport()

    async def talk(connection: ControlConnection[m.ToChecker]) -> None:
        seen = await _next(connection)
        if not isinstance(seen, m.Checked):
            raise Refused("an unexpected answer")
        path.version, path.seen_host = seen.version, seen.host
        path.own_host = str(connection.sock.getsockname()[0]).removeprefix("::ffff:")
        await _ping(connection, path)
        await _fill_packets(connection, path)
        if path.full_size != "both":
            return
        if listener is not None:
            await _dial_back(connection, path, listener, advertised, advertised_port)
        path.up_bytes_per_s = await _flood(connection, BLOCK_BYTES, 0)
        path.sent_segments, path.lost_segments = _segments(connection.sock)
        path.down_bytes_per_s = await _flood(connection, 0, BLOCK_BYTES)
        path.congestion_control, path.may_choose_bbr = _congestion_control(connection.sock)

    await converse(host, port, token, ssl_context, m.CheckRequest(m.PROTOCOL_VERSION), m.ToChecker, talk)
    return path


async def _next(connection: ControlConnection[m.ToChecker], limit_s: float = ANSWER_S) -> m.ToChecker:
    with trio.move_on_after(limit_s):
        answer: m.ToChecker = decode_body(await connection.receive_body(), m.ToChecker)
        return answer
    raise ConnectionLost(f"no answer within {limit_s:g} s")


async def _ping(connection: ControlConnection[m.ToChecker], path: PathReport) -> None:
    shortest_s = float("inf")
    for _ in range(PINGS):
        begun_s, sent_unix_s = time.monotonic(), time.time()
        connection.send([m.CheckEcho(b"", 0, sent_unix_s)])
        answer = await _next(connection)
        if not isinstance(answer, m.CheckEcho):
            raise ProtocolError("not an echo")
        round_trip_s = time.monotonic() - begun_s
        path.round_trips_s.append(round_trip_s)
        if round_trip_s < shortest_s:
            shortest_s = round_trip_s
            path.clock_offset_s = answer.unix_s - (sent_unix_s + round_trip_s / 2)
            path.clock_uncertainty_s = round_trip_s / 2


async def _fill_packets(connection: ControlConnection[m.ToChecker], path: PathReport) -> None:
    sock = connection.sock
    path.segment_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    connection.send([m.CheckEcho(os.urandom(FULL_BYTES), FULL_BYTES)])
    with trio.move_on_after(FULL_S) as scope:
        await _next(connection)
    path.full_size = "both"
    if scope.cancelled_caught:
        path.full_size = "out" if unacknowledged_bytes(sock) else "back"


async def _dial_back(
    connection: ControlConnection[m.ToChecker],
    path: PathReport,
    listener: socket.socket,
    advertised: Sequence[str],
    advertised_port: int | None,
) -> None:
    nonce = secrets.token_bytes(16)
    port: int = listener.getsockname()[1] if advertised_port is None else advertised_port
    async with trio.open_nursery() as nursery:
        start_task(nursery, _answer_calls, listener, nonce)
        connection.send([m.CheckDial(list(advertised)[: m.CHECK_HOSTS_MAX], port, nonce)])
        answer: m.ToChecker | None = None
        with trio.move_on_after(CALLS_S):
            answer = decode_body(await connection.receive_body(), m.ToChecker)
        nursery.cancel_scope.cancel()
    if not isinstance(answer, m.CheckDialled):
        raise ConnectionLost("the master did not report whether it can reach this host")
    path.calls = answer.calls


async def _answer_calls(listener: socket.socket, nonce: bytes) -> None:
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


def _segments(sock: socket.socket) -> tuple[int, int]:
    """Return the numbers of sent and of lost data segments from Linux's struct tcp_info, or zeros without it."""
    resent_at, sent_at, duplicates_at, size = 100, 156, 216, 220
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
    except (AttributeError, OSError):
        return 0, 0
    if len(info) < size:
        return 0, 0
    sent, resent, duplicates = (struct.unpack_from("I", info, at)[0] for at in (sent_at, resent_at, duplicates_at))
    return sent, max(0, resent - duplicates)


def _congestion_control(sock: socket.socket) -> tuple[str, bool]:
    """Switch the socket to bbr if possible. Return the previous congestion control and whether that succeeded."""
    name = ""
    with suppress(AttributeError, OSError):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        return name, True
    return name, False


async def _flood(connection: ControlConnection[m.ToChecker], send_bytes: int, reply_bytes: int) -> float:
    """Return the bytes per second of one connection. The number of bytes in flight is at most half the number that have
    arrived, so a slow path drains quickly at the end."""
    block = m.CheckEcho(os.urandom(send_bytes), reply_bytes)
    each, in_flight, total = max(send_bytes, reply_bytes), 0, 0
    arrivals: list[tuple[float, int]] = []
    begun_s = trio.current_time()
    while True:
        is_over = trio.current_time() >= begun_s + FLOOD_S or total >= FLOOD_BYTES_MAX
        while not is_over and in_flight * each <= max(each, total // 2):
            connection.send([block])
            in_flight += 1
        if not in_flight:
            break
        await _next(connection)
        in_flight -= 1
        total += each
        arrivals.append((trio.current_time(), total))
    return steady_rate(arrivals)
