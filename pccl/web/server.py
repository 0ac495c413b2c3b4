"""Serves `routes` over HTTP/1.1 with h11, one request per connection, in the thread of the master's control plane.

At most CONNECTIONS_MAX connections are open; one more replaces the oldest. A request's head is at most HEAD_BYTES_MAX,
its body is not read, and its connection is closed after CONNECTION_S.
"""

from __future__ import annotations

import logging
import socket

import h11
import trio

from pccl.runtime.network import addresses
from pccl.runtime.network.accepting import Unauthenticated
from pccl.web.routes import TEXT, Answer, Routes, is_no_browser

logger = logging.getLogger("pccl.web")

CONNECTIONS_MAX = 32
HEAD_BYTES_MAX = 8192
CONNECTION_S = 10.0
RECEIVE_BYTES = 8192
HEADERS = [("Connection", "close"), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]


class WebServer:
    """The HTTP server for a run's status page. `serve` runs until it is cancelled."""

    def __init__(self, listener: socket.socket, routes: Routes) -> None:
        self._listener = listener
        self._routes = routes
        self._readers = Unauthenticated(CONNECTIONS_MAX, CONNECTIONS_MAX)

    async def serve(self) -> None:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        try:
            async with listener:
                await trio.serve_listeners(self._serve_one, [listener])
        except Exception:
            logger.exception("the status page has failed; the master continues")

    def forget_after_fork(self) -> None:
        self._listener.close()

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        reader: int | None = None
        try:
            with trio.move_on_after(CONNECTION_S) as scope:
                reader = self._readers.enter(addresses.plain_host(stream.socket.getpeername()), scope.cancel)
                await self._answer(stream)
        except (OSError, trio.BrokenResourceError, h11.LocalProtocolError) as error:
            logger.debug("a connection to the status page was lost: %s", error)
        except Exception:
            logger.exception("a request to the status page has failed; this is a bug in pccl")
        finally:
            if reader is not None:
                self._readers.leave(reader)
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        try:
            data = await stream.receive_some(RECEIVE_BYTES)
            if is_no_browser(data):
                answer, is_head = self._routes.answer_to_peers(), False
            else:
                connection.receive_data(data)
                while (event := connection.next_event()) is h11.NEED_DATA:
                    connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
                if not isinstance(event, h11.Request):
                    return
                host = next((value.decode("latin-1") for name, value in event.headers if name == b"host"), None)
                answer = self._routes.answer(event.method.decode("ascii"), event.target.decode("ascii"), host)
                is_head = event.method == b"HEAD"
        except h11.RemoteProtocolError as error:
            answer = Answer(error.error_status_hint, TEXT, f"{error}\n".encode())
            is_head = False
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            *HEADERS,
            *answer.headers,
        ]
        head = connection.send(h11.Response(status_code=answer.status, headers=headers))
        assert head is not None
        await stream.send_all(head if is_head else head + answer.body)
        await stream.send_eof()
        # Closing with unread data resets the connection.
        while await stream.receive_some(RECEIVE_BYTES):
            pass
