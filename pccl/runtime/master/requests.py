"""Requests from outside the run: status, trace and check.

A status is encoded at most once per REFRESH_S and shared by all readers.

A trace collects the flight recorders of all peers over their control connections. The master queries up to
PEERS_AT_ONCE peers at a time, requests one part at a time from each, and forwards it at the reader's speed. Each
request is also an exchange of timestamps as in NTP; the one with the shortest round trip gives the peer's clock offset.

A check (`pccl doctor`) echoes bytes and dials addresses. Without a token the master dials only the client's own
address, so it cannot be used to scan ports.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError, decode_body, encode
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.machine import snapshot
from pccl.protocol.recording import PACKED_BYTES_MAX
from pccl.protocol.status import RunStatus
from pccl.runtime.network import addresses
from pccl.runtime.network.system import System
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, SocketChannel, receive_message

REFRESH_S = 0.5


class StatusBoard:
    """The run's status, encoded at most once per REFRESH_S."""

    def __init__(self, machine: Failover, now: Callable[[], float]) -> None:
        self._machine = machine
        self._now = now
        self._started_at: float | None = None
        self._address, self._has_token = "", False
        self._made_at = float("-inf")
        self._status: RunStatus | None = None
        self._frame: bytes | None = None
        self._json: bytes | None = None

    def begin(self, address: str = "", has_token: bool = False) -> None:
        self._started_at = self._now()
        self._address, self._has_token = address, has_token

    def status(self) -> RunStatus:
        assert self._started_at is not None
        now = self._now()
        if self._status is None or now >= self._made_at + REFRESH_S:
            machine = self._machine
            recovery = machine.recovery(now)
            other = "recovering" if recovery else "standby" if machine.is_standby else "vacant"
            role = "leading" if machine.is_leading else other
            found = snapshot(machine.master, now, now - self._started_at, __version__)
            held, held_for = machine.holding(now)
            known = {"address": self._address, "has_token": self._has_token}
            self._status = msgspec.structs.replace(
                found, role=role, held=held, held_for=held_for, recovery=recovery, **known
            )
            self._made_at = now
            self._frame = self._json = None
        return self._status

    def frame(self) -> bytes:
        status = self.status()
        if self._frame is None:
            self._frame = encode(m.Status(status))
        return self._frame

    def json(self) -> bytes:
        status = self.status()
        if self._json is None:
            self._json = msgspec.json.encode(status)
        return self._json


PEERS_AT_ONCE = 32
"""Number of peers queried at a time. Querying a thousand peers that are 100 ms away takes a minute."""
TRACES_MAX = 2
"""Maximum number of concurrent traces."""
CLOCK_PROBES = 12
PROBE_PAUSE_S = 0.005
ANSWER_S = 5.0
"""Time limit for a peer's answer."""
PEER_S = 30.0
"""Time limit for one peer's whole recording."""
BACKLOG_BYTES_MAX = 2**20
"""Maximum number of bytes queued for the reader of a trace."""


@dataclass(frozen=True)
class Traceable:
    peer: int
    name: str
    connection: int
    absence: str
    """Why the peer cannot be queried; empty if it can."""


Reader = ControlConnection[Any]


@dataclass
class ClockOffset:
    """The offset of a peer's clock, taken from the exchange with the shortest round trip."""

    offset_ns: int = 0
    round_trip_ns: int | None = None

    def add(self, asked_ns: int, received_ns: int, sent_ns: int, answered_ns: int) -> None:
        round_trip_ns = (answered_ns - asked_ns) - (sent_ns - received_ns)
        if round_trip_ns >= 0 and (self.round_trip_ns is None or round_trip_ns < self.round_trip_ns):
            self.round_trip_ns = round_trip_ns
            self.offset_ns = ((received_ns - asked_ns) + (sent_ns - answered_ns)) // 2

    @property
    def uncertainty_ns(self) -> int:
        return (self.round_trip_ns or 0) // 2 + 1


class NoRecording(Exception):  # noqa: N818 - named after what happened
    """A peer's recording is missing; the text is the reason."""


@dataclass
class _Question:
    part: int
    answered: trio.Event = field(default_factory=trio.Event)
    answer: m.RecordingPart | None = None
    answered_ns: int = 0


class Tracing:
    """The traces that a master collects. For use in the trio thread only."""

    def __init__(self, send: Callable[[int, m.Message], None]) -> None:
        """`send` sends a message to the client with the given number, if that client exists."""
        self._send = send
        self._numbers = itertools.count(1)
        self._questions: dict[tuple[int, int], _Question] = {}
        self._running = 0

    @property
    def is_busy(self) -> bool:
        return self._running >= TRACES_MAX

    def received(self, connection: int, message: m.RecordingPart) -> None:
        question = self._questions.get((connection, message.trace))
        if question is not None and question.part == message.part and question.answer is None:
            question.answer = message
            question.answered_ns = time.monotonic_ns()
            question.answered.set()

    async def trace(self, peers: Sequence[Traceable], request: m.TraceRequest, reader: Reader) -> None:
        self._running += 1
        limit = trio.CapacityLimiter(PEERS_AT_ONCE)
        try:
            async with trio.open_nursery() as nursery:
                for peer in peers:
                    nursery.start_soon(self._trace_peer, peer, request, reader, limit)
        finally:
            self._running -= 1

    async def _trace_peer(
        self, peer: Traceable, request: m.TraceRequest, reader: Reader, limit: trio.CapacityLimiter
    ) -> None:
        async with limit:
            clock, lack = ClockOffset(), peer.absence
            if not lack:
                try:
                    with trio.fail_after(PEER_S):
                        await self._fetch(peer, request, reader, clock)
                except NoRecording as error:
                    lack = str(error)
                except trio.TooSlowError:
                    lack = f"it took more than {PEER_S:g} s"
            reader.send([m.TracedPeer(peer.peer, peer.name, lack, clock.offset_ns, clock.uncertainty_ns)])

    async def _fetch(self, peer: Traceable, request: m.TraceRequest, reader: Reader, clock: ClockOffset) -> None:
        trace = next(self._numbers)
        part, parts, size_bytes = 0, 1, 0
        while part < parts:
            await reader.until_sent(BACKLOG_BYTES_MAX)
            question = m.RecordingRequest(trace, part, request.seconds, request.last)
            answer = await self._ask(peer.connection, question, clock)
            size_bytes += len(answer.content)
            if answer.parts == 0:
                raise NoRecording(answer.lack or "it has no recording")
            if size_bytes > PACKED_BYTES_MAX:
                raise NoRecording("its recording is too large")
            reader.send([m.TracePart(peer.peer, answer.content)])
            part, parts = part + 1, answer.parts
        for _ in range(CLOCK_PROBES):
            await self._ask(peer.connection, m.RecordingRequest(trace, -1), clock)
            await trio.sleep(PROBE_PAUSE_S)

    async def _ask(self, connection: int, request: m.RecordingRequest, clock: ClockOffset) -> m.RecordingPart:
        question = self._questions[connection, request.trace] = _Question(request.part)
        try:
            asked_ns = time.monotonic_ns()
            self._send(connection, request)
            with trio.move_on_after(ANSWER_S):
                await question.answered.wait()
        finally:
            del self._questions[connection, request.trace]
        if question.answer is None:
            raise NoRecording(f"it did not answer within {ANSWER_S:g} s")
        clock.add(asked_ns, question.answer.received_ns, question.answer.sent_ns, question.answered_ns)
        return question.answer


CHECK_S = 30.0
BYTES_MAX = 256 << 20
CALL_S = 3.0
"""Time limit for each dialed address."""
UNSENT_BYTES_MAX = 4 << 20
"""If more bytes than this are waiting to be sent to a checker, its next request waits."""
CALL_BYTES = 16 * 2**10


class Checking:
    def __init__(self, has_token: bool, system: System) -> None:
        """If `has_token`, checkers are authenticated, so the master dials any address for them."""
        self._has_token = has_token
        self._system = system
        self.is_busy = False

    async def serve(self, connection: ControlConnection[Any], host: str, port: int) -> str:
        """Answer a checker at this address until it closes the connection. Return a description of the outcome."""
        self.is_busy = True
        try:
            connection.send([m.Accepted(), m.Checked(host, port, __version__)])
            with trio.move_on_after(CHECK_S):
                await self._answer(connection, host)
        except (ConnectionLost, ProtocolError) as error:
            return f"has checked the path: {error}"
        finally:
            self.is_busy = False
        return f"has checked the path for {CHECK_S:g} s"

    async def _answer(self, connection: ControlConnection[Any], host: str) -> None:
        left_bytes = BYTES_MAX
        while left_bytes > 0:
            message: m.FromChecker = decode_body(await connection.receive_body(), m.FromChecker)
            if isinstance(message, m.CheckDial):
                connection.send([await self._dialled(message, host)])
                continue
            left_bytes -= len(message.content) + message.reply_bytes
            connection.send([m.CheckEcho(bytes(message.reply_bytes), 0, time.time())])
            await connection.until_sent(UNSENT_BYTES_MAX)

    async def _dialled(self, message: m.CheckDial, seen_host: str) -> m.CheckDialled:
        calls = []
        for host in message.hosts or [seen_host]:
            failure = "this master has no token, so it dials only the address of the client"
            if host == seen_host or self._has_token:
                failure = await self._call(host, message)
            calls.append((addresses.join(host, message.port), failure))
        return m.CheckDialled(calls)

    async def _call(self, host: str, message: m.CheckDial) -> str:
        is_connected = False
        try:
            with trio.fail_after(CALL_S):
                sock = self._system.stream(await self._system.dial(host, message.port))
                is_connected = True
                try:
                    await SocketChannel(sock).send_frame(encode(m.CheckCall(message.nonce, os.urandom(CALL_BYTES))))
                    await receive_message(sock, m.Accepted)
                finally:
                    sock.close()
        except trio.TooSlowError:
            if is_connected:
                return f"the port accepts connections but does not reply within {CALL_S:g} s"
            return f"no answer to a connection within {CALL_S:g} s"
        except ProtocolError:
            return "the port answers with another protocol"
        except (ConnectionLost, OSError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""
