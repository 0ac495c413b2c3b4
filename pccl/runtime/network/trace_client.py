"""Asks a master for the flight recorders of all peers of its run, without taking part in it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol.recording import PACKED_BYTES_MAX
from pccl.runtime.network.conversation import NoAnswer, Refused, converse, waiting_for
from pccl.runtime.network.wire import ControlConnection


@dataclass
class FetchedTrace:
    """What a master has sent of a trace."""

    peers: list[tuple[m.TracedPeer, bytes]] = field(default_factory=list)
    """Each peer with its packed recording, empty if there is none."""
    end: m.Traced | None = None
    """None: it is not complete."""


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
    """Return the trace that one of the masters gives; after `timeout_s` what has come of it by then. NoAnswer,
    trio.TooSlowError if that is nothing."""
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
    """Take the trace in, to its end. Refused."""
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
