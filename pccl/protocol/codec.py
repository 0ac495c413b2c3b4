"""Framing and validation of messages: a 4-byte big-endian length, then that many bytes of msgpack.

Any client may connect, so input is validated in two stages: msgpack decodes under explicit limits, then msgspec
converts the result into one of the expected message types. `ProtocolError` names the problem.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, TypeVar

import msgpack
import msgspec

from pccl.protocol import messages as m
from pccl.protocol.messages import Message

LENGTH_BYTES = 4
MESSAGE_BYTES_MAX = 16 * 2**20
"""Largest message after the first one of a connection."""
OPENING_BYTES_MAX = 16 * 2**10
"""Largest first message of a connection, from an unauthenticated sender."""

M = TypeVar("M")


class ProtocolError(Exception):
    """The other side violated the protocol."""


def encode(message: Message) -> bytes:
    body: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    if len(body) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds {MESSAGE_BYTES_MAX}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameCache:
    """Encodes a message once for any number of receivers. The cache keeps all messages, so each batch of messages needs
    its own."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Message, bytes]] = {}

    def frame(self, message: Message) -> bytes:
        found = self._frames.get(id(message))
        if found is None:
            found = self._frames[id(message)] = message, encode(message)
        return found[1]


def frame_length(head: bytes, limit_bytes: int) -> int:
    length = int.from_bytes(head, "big")
    if length > limit_bytes:
        raise ProtocolError(
            f"the other side announces a message of {length} bytes, but at most {limit_bytes} are allowed; it is not a "
            f"pccl peer, or runs another version"
        )
    if length == 0:
        raise ProtocolError("an empty message")
    return length


def decode_body(body: bytes | bytearray | memoryview, expected: Any) -> Any:
    try:
        plain = msgpack.unpackb(body, raw=False, strict_map_key=True, max_ext_len=0)
    except Exception as error:  # msgpack raises half a dozen unrelated types
        raise ProtocolError(f"not msgpack: {error or type(error).__name__}") from None
    try:
        return msgspec.convert((plain,), _holder(expected)).message
    except (msgspec.ValidationError, RecursionError) as error:
        what = str(error).replace("`$[0]", "`$").removesuffix(" - at `$`")
        raise ProtocolError(f"not an expected message: {harmless(what)}") from None


@cache
def _holder(expected: Any) -> Any:
    return msgspec.defstruct("Holder", [("message", expected)], array_like=True)


def harmless(text: str, characters_max: int = 500) -> str:
    """Return an untrusted text, shortened and escaped to fit into one log line."""
    if len(text) > characters_max:
        text = f"{text[:characters_max]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class Decoder(Generic[M]):
    """Reassembles messages of one union type from arbitrary fragments. The first message may have a lower size limit.
    Do not use the decoder after an error."""

    def __init__(self, expected: Any, opening_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._expected = expected
        self._limit_bytes = opening_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        self._buffer += data
        while (body := self.next_body()) is not None:
            self.trust()
            yield decode_body(body, self._expected)

    def feed_raw(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data

    def next_body(self) -> bytes | None:
        """Remove the next message and return its undecoded body, or None if it is incomplete."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + frame_length(bytes(self._buffer[:LENGTH_BYTES]), self._limit_bytes)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body

    def trust(self) -> None:
        self._limit_bytes = MESSAGE_BYTES_MAX

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)


KEY_BYTES = 16
ACK_EVERY = 16
KEPT_BYTES_MAX = 64 * 2**20
"""Maximum number of bytes that one end keeps for the other, which may have stopped reading or lost its connection."""


class ControlSession:
    """The session of a control connection, which survives a reset of the connection.

    A random secret key in the opening (Hello or Resume) identifies it. After a reset the peer dials the same master and
    sends `Reattach` with the key. Each side sends its count of received messages, and the other resends the rest.

        1  Both ends count the messages in each direction after the opening, except handshakes and `Ack`.
        2  A sender keeps every frame until it is acknowledged. A message is acknowledged after the machine handles it.
        3  The master stops reading the old connection before it reports its count, so no message is received twice.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.received = 0
        self.kept_bytes = 0
        self._kept: deque[bytes] = deque()
        self._acknowledged = 0
        self._acknowledged_here = 0

    def keep(self, frame: bytes) -> None:
        self._kept.append(frame)
        self.kept_bytes += len(frame)

    def acknowledge(self, received: int) -> None:
        """Drop the frames that the other side has received. Raises ProtocolError if the count is impossible."""
        count = received - self._acknowledged
        if not 0 <= count <= len(self._kept):
            sent = self._acknowledged + len(self._kept)
            raise ProtocolError(
                f"{received} messages are acknowledged after {self._acknowledged}, but {sent} were sent"
            )
        for _ in range(count):
            self.kept_bytes -= len(self._kept.popleft())
        self._acknowledged = received

    def receive(self) -> m.Ack | None:
        """Count a received message. Return an Ack if one is due."""
        self.received += 1
        if self.received < self._acknowledged_here + ACK_EVERY:
            return None
        self._acknowledged_here = self.received
        return m.Ack(self.received)

    def reattach(self, received: int) -> list[bytes]:
        """Return the frames to resend on a new connection to an end that has received `received` messages.
        Raises ProtocolError."""
        self.acknowledge(received)
        self._acknowledged_here = self.received
        return list(self._kept)

    @property
    def is_flooded(self) -> bool:
        return self.kept_bytes > KEPT_BYTES_MAX
