"""TLS without sockets, for control connections whose sends never wait.

The owner of a `TlsEnd` sends the bytes that its methods return. One port serves TLS and plain connections: the first
byte is 22 for TLS and 0 for a pccl message.
"""

from __future__ import annotations

import ssl
from contextlib import suppress

RECORD_TYPE_HANDSHAKE = 22
RECORD_TYPE_ALERT = 21
READ_BYTES = 256 * 1024
NO_TLS_AT_MASTER = (
    "the master does not speak TLS, but this side does: start it with --tls-cert (or ssl_context=), or unset "
    "PCCL_TLS_CA here"
)


class TlsError(Exception):
    """TLS failed; the text is the reason."""


class TlsEnd:
    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        """Create the dialing end, which expects `server_hostname`, or the accepting end if it is None."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self.is_established = False
        self.is_over = False
        """Whether the other side has ended its direction."""

    def handshake(self, received: bytes) -> bytes:
        """Continue the handshake with received bytes and return the bytes to send. After a TlsError, send `alert`."""
        self._incoming.write(received)
        try:
            self._object.do_handshake()
            self.is_established = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explained(error)) from None
        return self._outgoing.read()

    def alert(self) -> bytes:
        return self._outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        rest = memoryview(data)
        with suppress(ssl.SSLError):
            while rest:
                rest = rest[self._object.write(rest) :]
        return self._outgoing.read()

    def decrypt(self, received: bytes) -> tuple[bytes, bytes]:
        """Return the decrypted bytes, and the bytes to send. Raises TlsError as `handshake` does."""
        self._incoming.write(received)
        received_plain = bytearray()
        try:
            while some := self._object.read(READ_BYTES):
                received_plain += some
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_explained(error)) from None
        return bytes(received_plain), self._outgoing.read()

    def close_notify(self) -> bytes:
        with suppress(ssl.SSLError):  # `unwrap` expects the other side's close_notify
            self._object.unwrap()
        return self._outgoing.read()


def begins_tls(first: bytes) -> bool:
    return first[:1] == bytes([RECORD_TYPE_HANDSHAKE])


def answers_tls(first: bytes) -> bool:
    """Return whether an answer with these first bytes is TLS, including alerts."""
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
