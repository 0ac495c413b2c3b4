"""Messages over sockets.

A `ControlConnection` is long-lived. Sends never wait (data that the socket does not accept goes to a backlog), and
receives return batches. It may carry a session (`protocol.codec.ControlSession`) that the next connection continues.
`send_message` and `receive_message` transfer exactly one message.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable
from contextlib import suppress
from math import inf
from typing import Any, Generic, Protocol, TypeVar

import trio

from pccl.protocol.codec import (
    LENGTH_BYTES,
    OPENING_BYTES_MAX,
    ControlSession,
    Decoder,
    ProtocolError,
    decode_body,
    encode,
    frame_length,
)
from pccl.protocol.messages import Ack, Message
from pccl.runtime.network.dialing import Dial, dial_tcp
from pccl.runtime.network.tls import NO_TLS_AT_MASTER, TlsEnd, TlsError, answers_tls, begins_tls

RECEIVE_BYTES = 64 * 1024
STUCK_TIMEOUTS = 2.0
"""The time without an acknowledgement, in peer timeouts, after which a connection breaks. Short timeouts are extended
to the time that keepalive probes take."""
KEEPALIVE_PROBES = 3
"""Number of unanswered keepalive probes after which a connection breaks if TCP_USER_TIMEOUT is unavailable."""
KEEPALIVE_S_MAX = 32767
BACKLOG_BYTES_MAX = 64 * 2**20

SEEN_BYTES_MAX = 512
"""Number of bytes kept from the start of a connection, so that an error can show a foreign service's answer."""
SHOWN_MAX = 40
PAGE_HEADER = "Pccl-Master-Port"
"""The HTTP header in the status page's answer to a peer that dials it by mistake."""

NO_ANSWER_MEANS = "a firewall drops it, the host is down, or the address is wrong"

M = TypeVar("M")


class NoMasterError(ProtocolError):
    """The server at a master's address is not a pccl master; the text shows the bytes that it sent."""


class ConnectionLost(Exception):  # noqa: N818 - as trio's names
    """The connection is lost; the text is the reason. `is_refused` if the port is closed, `is_of_tls` if TLS failed."""

    def __init__(self, text: str, is_refused: bool = False, is_of_tls: bool = False) -> None:
        super().__init__(text)
        self.is_refused = is_refused
        self.is_of_tls = is_of_tls


class ByteStream(Protocol):
    """The socket methods that are used here."""

    def send(self, data: bytes | memoryview, /) -> Awaitable[int]: ...
    def recv_into(self, buffer: bytearray | memoryview, /) -> Awaitable[int]: ...


class ControlConnection(Generic[M]):
    """A non-blocking socket that carries messages in both directions, over TLS after `start_tls`. The backlog drains
    only while `run_sender` runs."""

    def __init__(self, sock: socket.socket, expected: Any, opening_bytes_max: int, is_dialed: bool = False) -> None:
        """Take ownership of a connected socket, unless OSError is raised. If `is_dialed`, errors describe a foreign
        service that answers."""
        self.remote_address: Any = sock.getpeername()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._decoder: Decoder[M | Ack] = Decoder(expected | Ack, opening_bytes_max)
        self.session: ControlSession | None = None
        """The connection's session after the opening; None again once another connection has continued it."""
        self._backlog = bytearray()
        self._wake = trio.Event()
        self._progress = trio.Event()
        self._sender_ended = trio.Event()
        self._closing = False
        self._has_released_session = False
        self._tls: TlsEnd | None = None
        self._is_dialed = is_dialed
        self._first = b""

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def bound_silence(self, timeout_s: float) -> None:
        """Where the platform allows it, let the system break the connection when data is not acknowledged for a
        multiple of `timeout_s`, and probe the connection while it is idle (keepalive)."""
        idle, interval = (min(max(1, round(timeout_s / part)), KEEPALIVE_S_MAX) for part in (2, 3))
        # Linux breaks a connection at the first probe after that time, regardless of the number of probes sent.
        broken_s = max(STUCK_TIMEOUTS * timeout_s, idle + 2 * interval)
        options = {
            "TCP_USER_TIMEOUT": round(1000 * broken_s),
            "TCP_KEEPIDLE": idle,
            "TCP_KEEPALIVE": idle,  # the macOS name
            "TCP_KEEPINTVL": interval,
            "TCP_KEEPCNT": KEEPALIVE_PROBES,
        }
        for name, value in options.items():
            if hasattr(socket, name):
                with suppress(OSError):
                    self._sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, messages: list[Message]) -> None:
        """Send messages. Never waits and never raises; `receive` detects a broken connection."""
        self.send_frames([encode(message) for message in messages])

    def send_frames(self, frames: list[bytes]) -> None:
        if self.session is not None:
            for frame in frames:
                self.session.keep(frame)
        self._send(b"".join(frames))

    def continue_session(self, session: ControlSession, received: int) -> None:
        """Continue a session in which the other side has received `received` messages. Raises ProtocolError."""
        frames = session.reattach(received)
        self.session = session
        self._send(b"".join(frames))

    def release_session(self) -> None:
        self.session = None
        self._has_released_session = True
        self.shutdown()

    def _send(self, data: bytes) -> None:
        if not self._closing:
            self._send_raw(data if self._tls is None else self._tls.encrypt(data))

    def _send_raw(self, data: bytes) -> None:
        if not self._backlog:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if data:
            self._backlog += data
            self._wake.set()

    @property
    def is_flooded(self) -> bool:
        return len(self._backlog) > BACKLOG_BYTES_MAX or (self.session is not None and self.session.is_flooded)

    async def run_sender(self) -> None:
        """Send the backlog whenever there is one. Return once it is empty after `finish`, or when the connection
        breaks."""
        try:
            while self._backlog or not self._closing:
                if not self._backlog:
                    self._wake = trio.Event()
                    await self._wake.wait()
                    continue
                await trio.lowlevel.wait_writable(self._sock.fileno())
                with suppress(BlockingIOError):
                    del self._backlog[: self._sock.send(self._backlog[:RECEIVE_BYTES])]
                self._note_progress()
        except OSError:
            self._backlog.clear()
        finally:
            self._note_progress()
            self._sender_ended.set()

    def _note_progress(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def until_sent(self, bytes_left: int) -> None:
        while len(self._backlog) > bytes_left and not self._sender_ended.is_set():
            await self._progress.wait()

    def finish(self) -> None:
        if self._tls is not None and not self._closing:
            self._send_raw(self._tls.close_notify())
        self._closing = True
        self._wake.set()

    async def flush(self) -> None:
        self.finish()
        await self._sender_ended.wait()

    async def part(self) -> None:
        """Flush and wait for the other side to close, because closing with unread data would reset the connection."""
        await self.flush()
        with suppress(OSError, ConnectionLost):
            self._sock.shutdown(socket.SHUT_WR)
            while await self._receive_raw():
                pass

    async def receive(self) -> list[M]:
        """Return the next messages, at least one. Raises ConnectionLost or ProtocolError, which end the connection."""
        data = b""
        while True:
            messages = [message for message in self._decoder.feed(data) if not self._is_ack(message)]
            for _ in messages:
                self.note_delivery()
            if messages:
                return messages  # type: ignore[return-value]  # no Ack remains
            data = await self._receive_some()

    def _is_ack(self, message: M | Ack) -> bool:
        if not isinstance(message, Ack):
            return False
        if self.session is None:
            raise ProtocolError("an acknowledgement without a session")
        self.session.acknowledge(message.received)
        return True

    def note_delivery(self) -> None:
        ack = self.session.receive() if self.session is not None else None
        if ack is not None:
            self._send(encode(ack))

    async def _receive_some(self) -> bytes:
        data = b""
        while True:
            if self._tls is not None:
                data = self._decrypt(data)
            if data:
                return data
            data = await self._receive_raw()
            if not data and self._tls is not None and not self._tls.is_over:
                raise ConnectionLost("the connection was cut off in the middle of TLS")
            if not data:
                raise ConnectionLost("the connection was closed by the other side")

    def _decrypt(self, data: bytes) -> bytes:
        assert self._tls is not None
        try:
            plain, outgoing = self._tls.decrypt(data)
        except TlsError as error:
            self._send_raw(self._tls.alert())
            raise ConnectionLost(f"TLS failed: {error}", is_of_tls=True) from None
        self._send_raw(outgoing)
        return plain

    async def _receive_raw(self, flags: int = 0) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._sock.fileno())
            if self._has_released_session:
                raise ConnectionLost("another connection carries its session")
            try:
                data = self._sock.recv(RECEIVE_BYTES, flags)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(error.strerror or str(error)) from None
            if not self._first:
                self._first = data[:SEEN_BYTES_MAX]
            return data

    async def speaks_tls(self) -> bool:
        return begins_tls(await self._receive_raw(socket.MSG_PEEK))

    async def start_tls(self, end: TlsEnd) -> None:
        """Start TLS. Call it before anything is sent or, if accepting, received. Raises TlsError or ConnectionLost."""
        received = b""
        while not end.is_established:
            try:
                outgoing = end.handshake(received)
            except TlsError:
                self._send_raw(end.alert())
                if self._is_dialed and self._first[:1] == b"\0":
                    raise TlsError(NO_TLS_AT_MASTER) from None
                if self._is_dialed and not answers_tls(self._first):
                    self._require_master()
                raise
            self._send_raw(outgoing)
            if not end.is_established:
                received = await self._receive_raw()
                if not received:
                    raise ConnectionLost("the connection was closed by the other side in the TLS handshake")
        self._tls = end

    # Used in the handshake. Until `trust`, the size limit for openings applies to all messages.

    async def send_frame(self, frame: bytes) -> None:
        self._send(frame)

    async def receive_body(self) -> bytes:
        try:
            while (body := self._decoder.next_body()) is None:
                self._decoder.feed_raw(await self._receive_some())
        except (ProtocolError, ConnectionLost):
            if self._is_dialed and self._tls is None:
                self._require_master()
            raise
        return body

    def _require_master(self) -> None:
        """Raise NoMasterError unless the first bytes can begin a pccl message. The length of a message begins with a
        zero byte."""
        first = self._first
        if not first or first[0] == 0:
            return
        got = first[: first.find(b"\n")] if 0 < first.find(b"\n") < SHOWN_MAX else first[:SHOWN_MAX]
        advice = "check host and port"
        if answers_tls(first):
            advice = "if it is a master that uses TLS, give the peer ssl_context= or PCCL_TLS_CA"
        for line in first.decode("latin-1").split("\r\n"):
            name, _, value = line.partition(":")
            if name == PAGE_HEADER:
                advice = f"this is the status page of a pccl master; that master's own port is {value.strip()}"
        raise NoMasterError(f"no pccl master answered (got {got!r}); {advice}") from None

    def trust(self) -> None:
        self._decoder.trust()

    def detach(self) -> int:
        """Return the descriptor for a new owner. Raises ConnectionLost if there is unsent or unread data. No task may
        be in `receive`."""
        if self._backlog or self._decoder.buffered_bytes:
            raise ConnectionLost("unexpected data")
        self._closing = True
        self._wake.set()
        return self._sock.detach()

    def shutdown(self) -> None:
        self._closing = True
        self._backlog.clear()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing = True
        if self._sock.fileno() != -1:
            trio.lowlevel.notify_closing(self._sock.fileno())
            self._sock.close()

    def forget_after_fork(self) -> None:
        self._sock.close()


async def dial_control(
    host: str, port: int, expected: Any, dial: Dial = dial_tcp, limit_s: float = inf
) -> ControlConnection[Any]:
    """Return a connection for messages in the union `expected`. Raises ConnectionLost on failure or after `limit_s`."""
    sock: socket.socket | None = None
    try:
        with trio.fail_after(limit_s):
            sock = await dial(host, port)
        return ControlConnection(sock, expected, OPENING_BYTES_MAX, is_dialed=True)
    except trio.TooSlowError:
        raise ConnectionLost(f"no answer to a connection within {limit_s:.2g} s: {NO_ANSWER_MEANS}") from None
    except OSError as error:
        if sock is not None:
            sock.close()  # the listener has died in the meantime
        is_refused = error.errno == errno.ECONNREFUSED
        raise ConnectionLost(error.strerror or str(error), is_refused) from None


class SocketChannel:
    def __init__(self, sock: ByteStream) -> None:
        self._sock = sock

    async def send_frame(self, frame: bytes) -> None:
        await send_bytes(self._sock, frame)

    async def receive_body(self) -> bytes:
        return bytes(await _receive_body(self._sock, OPENING_BYTES_MAX))


async def send_message(sock: ByteStream, message: Message) -> None:
    await send_bytes(sock, encode(message))


async def send_bytes(sock: ByteStream, data: bytes | memoryview) -> None:
    data = memoryview(data)
    while data:
        data = data[await send_some(sock, data) :]


async def send_some(sock: ByteStream, data: memoryview) -> int:
    try:
        return await sock.send(data)
    except OSError as error:
        raise ConnectionLost(error.strerror or str(error)) from None


async def receive_message(sock: ByteStream, expected: Any, limit_bytes: int = OPENING_BYTES_MAX) -> Any:
    return decode_body(await _receive_body(sock, limit_bytes), expected)


async def _receive_body(sock: ByteStream, limit_bytes: int) -> bytearray | memoryview:
    head = await receive_exactly(sock, bytearray(LENGTH_BYTES))
    return await receive_exactly(sock, bytearray(frame_length(bytes(head), limit_bytes)))


async def receive_exactly(sock: ByteStream, buffer: bytearray | memoryview) -> bytearray | memoryview:
    """Fill `buffer` and return it. Raises ConnectionLost if the other side closes first."""
    view = memoryview(buffer)
    while view:
        view = view[await receive_some(sock, view) :]
    return buffer


async def receive_some(sock: ByteStream, view: memoryview) -> int:
    """Receive at least one byte into `view` and return their number. Raises ConnectionLost if the other side closes."""
    try:
        count = await sock.recv_into(view)
    except OSError as error:
        raise ConnectionLost(error.strerror or str(error)) from None
    if count == 0:
        raise ConnectionLost("the connection was closed by the other side")
    return count
