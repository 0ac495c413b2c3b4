"""TLS without sockets, for control connections whose sends never wait.

The owner of a `TlsEnd` carries the bytes that `handshake`, `encrypt`, `decrypt` and `farewell` return. Contexts are
Python's own (`ssl.SSLContext`). One port serves TLS and plain connections: TLS begins with the byte 22, a pccl message
with a 0.
"""

from __future__ import annotations

import ssl
from contextlib import suppress

RECORD_TYPE_HANDSHAKE = 22
RECORD_TYPE_ALERT = 21
READ_BYTES = 256 * 1024
NO_TLS_AT_MASTER = (
    "the master does not speak TLS, and this side does: start it with --tls-cert (or ssl_context=), or unset "
    "PCCL_TLS_CA here"
)


class TlsError(Exception):
    """TLS failed; the text says how."""


class TlsEnd:
    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        """Make the dialing end, which expects `server_hostname`, or, without it, the accepting end."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self.is_established = False
        self.is_over = False
        """The other side has said that it has no more to say."""

    def handshake(self, received: bytes) -> bytes:
        """Make a step of the handshake with what has been received; return what is to be sent. After a TlsError, what
        `last_words` returns should be sent."""
        self._incoming.write(received)
        try:
            self._object.do_handshake()
            self.is_established = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explained(error)) from None
        return self._outgoing.read()

    def last_words(self) -> bytes:
        return self._outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send; empty after the end of the conversation."""
        rest = memoryview(data)
        with suppress(ssl.SSLError):
            while rest:
                rest = rest[self._object.write(rest) :]
        return self._outgoing.read()

    def decrypt(self, received: bytes) -> tuple[bytes, bytes]:
        """Return what the other side said, and what TLS itself wants to send. TlsError, as with `handshake`."""
        self._incoming.write(received)
        said = bytearray()
        try:
            while some := self._object.read(READ_BYTES):
                said += some
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explained(error)) from None
        return bytes(said), self._outgoing.read()

    def farewell(self) -> bytes:
        """Return what tells the other side that this is the end and no cut."""
        with suppress(ssl.SSLError):  # it would like to hear the other's farewell
            self._object.unwrap()
        return self._outgoing.read()


def begins_tls(first: bytes) -> bool:
    """Whether a dialer that says these first bytes speaks TLS."""
    return first[:1] == bytes([RECORD_TYPE_HANDSHAKE])


def answers_tls(first: bytes) -> bool:
    """Whether an acceptor that says these first bytes speaks TLS, be it to refuse."""
    return begins_tls(first) or first[:1] == bytes([RECORD_TYPE_ALERT])


def _explained(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was not accepted: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
        return f"it does not speak TLS ({reason})"
    if error.reason and "ALERT" in error.reason:
        return f"it refused our side of TLS: {reason}"
    return reason
