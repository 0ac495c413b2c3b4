"""The first message on a connection to a master: TLS where it is asked for, then proof of the token.

An unauthenticated connection is held to one small message, and may be dropped when there are too many like it
(`network.unauthenticated`). What follows a proven first message may be large.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import decode_body
from pccl.runtime.network import handshake
from pccl.runtime.network.tls import TlsEnd
from pccl.runtime.network.unauthenticated import Unauthenticated
from pccl.runtime.network.wire import ConnectionLost, ControlConnection

Opening = m.FromPeer | m.StatusRequest | m.TraceRequest | m.CheckRequest | m.Reattach
DIALERS = m.Hello | m.Resume | m.Reattach | m.HeartbeatHello | m.StatusRequest | m.TraceRequest | m.CheckRequest
"""The openings of connections to a master."""


class Authentication:
    """Decides who may speak to a master."""

    def __init__(self, token: str, ssl_context: ssl.SSLContext | None, run: Callable[[], str]) -> None:
        """Let in only those who know the `token`, if there is one, and only over TLS, if there is an `ssl_context`.
        `run` returns the name of the run at present."""
        self.unauthenticated = Unauthenticated()
        self._token = token
        self._ssl_context = ssl_context
        self._run = run

    async def first_message(self, connection: ControlConnection[m.SaidByPeer], host: str) -> Opening:
        """Return the first message on a connection from `host`, once its sender has proved itself. ConnectionLost, also
        if it was dropped; TlsError, AuthError, ProtocolError."""
        with trio.CancelScope() as scope:
            number = self.unauthenticated.enter(host, scope.cancel)
            try:
                is_private = await self._agree_on_tls(connection)
                body = await connection.receive_body()
                opening: Opening = decode_body(body, Opening)
                if isinstance(opening, DIALERS):
                    self._check_tls(opening, is_private)
                    await handshake.accept(connection, self._token, self._run(), "the master", opening, body)
                    connection.trust()
                return opening
            finally:
                self.unauthenticated.leave(number)
        raise ConnectionLost("dropped: too many connections that had not said who they are")

    async def _agree_on_tls(self, connection: ControlConnection[m.SaidByPeer]) -> bool:
        """Speak TLS if the other side begins with it. Return whether it does."""
        if not await connection.speaks_tls():
            return False
        if self._ssl_context is None:
            raise AuthError("it speaks TLS, for which this master has no certificate")
        await connection.start_tls(TlsEnd(self._ssl_context))
        return True

    def _check_tls(self, opening: Opening, is_private: bool) -> None:
        if not isinstance(opening, m.HeartbeatHello) and self._ssl_context is not None and not is_private:
            raise AuthError("the master asks for TLS; give the peer an ssl_context= or PCCL_TLS_CA")
        if isinstance(opening, m.HeartbeatHello) and is_private:
            raise AuthError("heartbeats go without TLS")  # the thread that hears them knows none
