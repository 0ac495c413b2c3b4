"""Helps somebody who checks the way to this master and back (`pccl doctor`): echoes what it sends, and dials it.

What a master does here is bounded, and beside its work: one check at a time, CHECK_S in all and BYTES_MAX. It dials no
address for strangers but their own: without a token anybody may ask, and a master must not be sent to look for open
ports elsewhere.
"""

from __future__ import annotations

import os
import time
from typing import Any

import trio

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError, decode_body, encode
from pccl.runtime.network import addresses
from pccl.runtime.network.system import System
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, SocketChannel, receive_message
from pccl.types import Result

CHECK_S = 30.0
BYTES_MAX = 256 << 20
CALL_S = 3.0
"""Time in which an address must answer."""
UNSENT_BYTES_MAX = 4 << 20
"""Bytes that may wait to be sent to a checker. What it asks for beyond is answered when it has read."""
CALL_BYTES = 16 * 2**10


class Checking:
    """The checks of one master."""

    def __init__(self, has_token: bool, system: System) -> None:
        """With `has_token` checkers have proved that they know the run's, and may have any address dialled."""
        self._has_token = has_token
        self._system = system
        self._is_busy = False

    async def serve(self, connection: ControlConnection[Any], request: m.CheckRequest, host: str, port: int) -> str:
        """Answer a checker from this address until it closes the connection. Return how it ended."""
        refusal = ""
        if request.protocol != m.PROTOCOL_VERSION:
            refusal = f"this master speaks protocol {m.PROTOCOL_VERSION}, the asker {request.protocol}"
        elif self._is_busy:
            refusal = "somebody else checks the way to this master; ask again"
        if refusal:
            connection.send([m.Goodbye(Result.MASTER_CONNECTION_FAILED, refusal)])
            return refusal
        self._is_busy = True
        try:
            connection.send([m.Accepted(), m.Checked(host, port, __version__)])
            with trio.move_on_after(CHECK_S):
                await self._answer(connection, host)
        except (ConnectionLost, ProtocolError) as error:
            return f"has checked the way: {error}"
        finally:
            self._is_busy = False
        return f"has checked the way for {CHECK_S:g} s"

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
            failure = "this master has no token, and dials nobody but the address from which it is asked"
            if host == seen_host or self._has_token:
                failure = await self._call(host, message)
            calls.append((addresses.join(host, message.port), failure))
        return m.CheckDialled(calls)

    async def _call(self, host: str, message: m.CheckDial) -> str:
        """Dial an address as other peers would. Return why it could not be reached, or ""."""
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
                return f"a connection is taken there, and nothing comes back within {CALL_S:g} s"
            return f"no answer to a connection within {CALL_S:g} s"
        except ProtocolError:
            return "something else than this check answers there"
        except (ConnectionLost, OSError) as error:
            return getattr(error, "strerror", None) or str(error)
        return ""
