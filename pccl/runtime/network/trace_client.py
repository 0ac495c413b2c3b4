"""Asks a master for the flight recorders of all peers of its run, without taking part in it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import ProtocolError, harmless
from pccl.protocol.recording import PACKED_BYTES_MAX
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, dial_control


class NoTrace(Exception):  # noqa: N818 - named after what happened
    """No trace could be had; the text names the address and says why."""


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
    """Add the trace of the run whose master is at this address to `fetched`, as it comes. NoTrace."""
    where = addresses.join(host, port)
    try:
        connection: ControlConnection[m.ToTracer] = await dial_control(host, port, m.ToTracer)
    except ConnectionLost as error:
        raise NoTrace(
            f"cannot reach a master at {where}: {error}; is `pccl master` running there, and is the port open?"
        ) from None
    request = m.TraceRequest(m.PROTOCOL_VERSION, seconds, last)
    failure = ""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_sender)
            failure = await _converse(connection, token, ssl_context, host, request, fetched)
            nursery.cancel_scope.cancel()
    finally:
        connection.close()
    if failure:
        raise NoTrace(f"the master at {where}: {harmless(failure)}")


async def fetch_any(
    masters: Sequence[tuple[str, int]],
    token: str,
    ssl_context: ssl.SSLContext | None,
    seconds: float,
    last: int,
    timeout_s: float,
) -> FetchedTrace:
    """Return the trace that one of the masters gives; after `timeout_s` what has come of it by then. NoTrace,
    trio.TooSlowError if that is nothing."""
    traces = [FetchedTrace() for _ in masters]
    failures: list[str] = []

    async def fetch_one(host: str, port: int, fetched: FetchedTrace) -> None:
        try:
            await fetch(host, port, token, ssl_context, seconds, last, fetched)
        except NoTrace as error:
            failures.append(str(error))
        else:
            scope.cancel()

    with trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            for (host, port), fetched in zip(masters, traces, strict=True):
                nursery.start_soon(fetch_one, host, port, fetched)
    best = max(traces, key=lambda fetched: (fetched.end is not None, len(fetched.peers)))
    if best.end is not None or best.peers:
        return best
    if len(failures) < len(masters):
        raise trio.TooSlowError
    raise NoTrace("; ".join(failures))


async def _converse(
    connection: ControlConnection[m.ToTracer],
    token: str,
    ssl_context: ssl.SSLContext | None,
    host: str,
    request: m.TraceRequest,
    fetched: FetchedTrace,
) -> str:
    """Take the trace in. Return why there is none, or no more of it; empty: it is complete."""
    parts: dict[int, bytearray] = {}
    try:
        if ssl_context is not None:
            await connection.start_tls(TlsEnd(ssl_context, host))
        answer: m.ToTracer = await handshake.dial(connection, token, None, request, m.ToTracer)
        if not isinstance(answer, m.Accepted):
            return answer.reason if isinstance(answer, m.Goodbye) else "it does not say whether it accepts us"
        connection.trust()
        while True:
            for message in await connection.receive():
                if isinstance(message, m.Traced):
                    fetched.end = message
                    return ""
                if isinstance(message, m.TracePart):
                    content = parts.setdefault(message.peer, bytearray())
                    content += message.content
                    if len(content) > PACKED_BYTES_MAX + m.PART_BYTES_MAX:
                        return f"the recording of peer {message.peer} is too large"
                elif isinstance(message, m.TracedPeer):
                    content = parts.pop(message.peer, bytearray())
                    fetched.peers.append((message, b"" if message.lack else bytes(content)))
                else:
                    return "it says what has no place in a trace"
    except ConnectionLost as error:
        return f"the connection was lost: {error}"
    except TlsError as error:
        return f"no TLS with it: {error}"
    except AuthError as error:
        return f"not accepted: {error}"
    except ProtocolError as error:
        return f"it does not speak as a pccl master of this version does: {error}"
