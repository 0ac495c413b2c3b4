"""Asks a master how its run stands, without taking part in it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import ProtocolError, harmless
from pccl.protocol.status import RunStatus
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, dial_control

LEADING = "leading"


class NoStatus(Exception):  # noqa: N818 - named after what happened
    """No status could be had; the text names the address and says why."""


async def ask(host: str, port: int, token: str, ssl_context: ssl.SSLContext | None, dial: Dial = dial_tcp) -> RunStatus:
    """Return the status of the run whose master is at this address. NoStatus."""
    where = addresses.join(host, port)
    try:
        connection: ControlConnection[m.ToWatcher] = await dial_control(host, port, m.ToWatcher, dial)
    except ConnectionLost as error:
        raise NoStatus(
            f"cannot reach a master at {where}: {error}; is `pccl master` running there, and is the port open?"
        ) from None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_sender)
            answer = await _converse(connection, token, ssl_context, host)
            nursery.cancel_scope.cancel()
    finally:
        connection.close()
    if isinstance(answer, str):
        raise NoStatus(f"the master at {where}: {harmless(answer)}")
    return answer


async def ask_all(
    masters: Sequence[tuple[str, int]], token: str, ssl_context: ssl.SSLContext | None, timeout_s: float
) -> RunStatus:
    """Return the status that the leading master gives, else that of any which answers in time. NoStatus,
    trio.TooSlowError."""
    found: list[RunStatus] = []
    failures: list[str] = []

    async def ask_one(host: str, port: int) -> None:
        try:
            status = await ask(host, port, token, ssl_context)
        except NoStatus as error:
            failures.append(str(error))
            return
        found.append(status)
        if status.role == LEADING:
            scope.cancel()

    with trio.move_on_after(timeout_s) as scope:
        async with trio.open_nursery() as nursery:
            for host, port in masters:
                nursery.start_soon(ask_one, host, port)
    if found:
        return max(found, key=lambda status: status.role == LEADING)
    if len(failures) < len(masters):
        raise trio.TooSlowError
    raise NoStatus("; ".join(failures))


async def _converse(
    connection: ControlConnection[m.ToWatcher], token: str, ssl_context: ssl.SSLContext | None, host: str
) -> RunStatus | str:
    """Return the status, or why there is none."""
    try:
        if ssl_context is not None:
            await connection.start_tls(TlsEnd(ssl_context, host))
        request = m.StatusRequest(m.PROTOCOL_VERSION)
        answer: m.ToWatcher = await handshake.dial(connection, token, None, request, m.ToWatcher)
        if isinstance(answer, m.Accepted):
            connection.trust()
            answer = (await connection.receive())[0]
    except ConnectionLost as error:
        return f"the connection was lost: {error}"
    except TlsError as error:
        return f"no TLS with it: {error}"
    except AuthError as error:
        return f"not accepted: {error}"
    except ProtocolError as error:
        return f"it does not speak as a pccl master does: {error}"
    if isinstance(answer, m.Status):
        return answer.run
    return answer.reason if isinstance(answer, m.Goodbye) else "it says twice that it accepts us"
