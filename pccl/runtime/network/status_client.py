"""Asks a master how its run stands, without taking part in it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import trio

from pccl.protocol import messages as m
from pccl.protocol.status import RunStatus
from pccl.runtime.network.conversation import NoAnswer, Refused, converse, waiting_for
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.wire import ControlConnection

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
