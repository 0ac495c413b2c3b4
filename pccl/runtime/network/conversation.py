"""Conversations with a master from outside of its run: dial, TLS, handshake, one question, and what it answers.

`pccl status`, `pccl trace` and `pccl doctor` ask so, a standby asks the other masters, and a peer that has waited for
long asks its own. All that can go wrong is told in the same words (`failure_of`).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import ProtocolError, harmless
from pccl.protocol.long_wait import how_to_look
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, NoMasterError, dial_control
from pccl.runtime.threads.waits import waiting

logger = logging.getLogger("pccl")

T = TypeVar("T")

FAILURES = ConnectionLost, TlsError, AuthError, ProtocolError
"""What a conversation may end with."""


class NoAnswer(Exception):  # noqa: N818 - named after what happened
    """A master gave no answer, or refused; the text names its address and says why."""


class Refused(Exception):  # noqa: N818 - named after what happened
    """The master has answered that it does not answer; the text is its reason."""


def failure_of(error: Exception) -> str:
    """Return in words how a conversation has failed."""
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
