"""Traces: asks all peers for their flight recorders, for whoever wants to see them on one timeline.

Theory of operation. The peers are asked over their control connections, which also carry what keeps the run together;
so a trace must never be in the way of that.

1. Parts are pulled. The master asks a peer for one part at a time, of PART_BYTES_MAX, and for the next one when it is
   there: whatever else the connection has to carry waits for one part at most.
2. PEERS_AT_ONCE peers are asked at a time, and what they say goes straight on to who has asked. If that one does not
   read, no further part is asked for.
3. A peer that does not answer a request in time is left out, and named with the reason.

Clocks. Each request and its answer are an exchange of timestamps as in NTP: the master's when it asks (t1) and when it
has the answer (t4), the peer's in between (t2, t3). The peer's clock is ahead of the master's by ((t2 - t1) + (t3 -
t4)) / 2, if both ways took as long; it is off by half of the round trip at most. So the exchange with the shortest
round trip counts. Besides the parts there are CLOCK_PROBES exchanges that carry nothing else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from pccl.protocol import messages as m
from pccl.protocol.recording import PACKED_BYTES_MAX

PEERS_AT_ONCE = 32
"""Number of peers that are asked at a time: a thousand, 100 ms away, take a minute."""
TRACES_MAX = 2
"""Number of traces at a time."""
CLOCK_PROBES = 12
PROBE_PAUSE_S = 0.005
ANSWER_S = 5.0
"""Time in which a peer has to answer a request."""
PEER_S = 30.0
"""Time that one peer's recording may take in all."""
BACKLOG_BYTES_MAX = 2**20
"""What may wait to be read by who has asked."""


@dataclass(frozen=True)
class Traceable:
    """A peer to be asked."""

    peer: int
    name: str
    connection: int
    """The number of its control connection."""
    absence: str
    """Why it cannot be asked; empty: it can."""


class Reader(Protocol):
    """The connection to who has asked, as it is needed here."""

    def send(self, messages: list[m.Message]) -> None: ...

    def until_sent(self, bytes_left: int) -> Awaitable[None]: ...


@dataclass
class ClockOffset:
    """The offset of a peer's clock, by the exchange with the shortest round trip."""

    offset_ns: int = 0
    round_trip_ns: int | None = None

    def add(self, asked_ns: int, received_ns: int, sent_ns: int, answered_ns: int) -> None:
        """Take in an exchange: t1, t2, t3, t4."""
        round_trip_ns = (answered_ns - asked_ns) - (sent_ns - received_ns)
        if round_trip_ns >= 0 and (self.round_trip_ns is None or round_trip_ns < self.round_trip_ns):
            self.round_trip_ns = round_trip_ns
            self.offset_ns = ((received_ns - asked_ns) + (sent_ns - answered_ns)) // 2

    @property
    def uncertainty_ns(self) -> int:
        return (self.round_trip_ns or 0) // 2 + 1


class NoRecording(Exception):  # noqa: N818 - named after what happened
    """A peer's recording cannot be had; the text says why."""


@dataclass
class _Question:
    """A request that a peer has still to answer."""

    part: int
    answered: trio.Event = field(default_factory=trio.Event)
    answer: m.RecordingPart | None = None
    answered_ns: int = 0


class Tracing:
    """The traces that a master makes. Only for the trio thread."""

    def __init__(self, send: Callable[[int, m.Message], None]) -> None:
        """`send` sends to the client of a number, if it is there still."""
        self._send = send
        self._numbers = itertools.count(1)
        self._questions: dict[tuple[int, int], _Question] = {}
        """By connection and trace."""
        self._running = 0

    @property
    def is_busy(self) -> bool:
        return self._running >= TRACES_MAX

    def heard(self, connection: int, message: m.RecordingPart) -> None:
        """Take in what a peer says. Answers that nobody waits for are dropped."""
        question = self._questions.get((connection, message.trace))
        if question is not None and question.part == message.part and question.answer is None:
            question.answer = message
            question.answered_ns = time.monotonic_ns()
            question.answered.set()

    async def trace(self, peers: Sequence[Traceable], request: m.TraceRequest, reader: Reader) -> None:
        """Send all that the peers have recorded to who has asked."""
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
