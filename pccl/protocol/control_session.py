"""The session of a control connection, which survives the reset of the connection.

A session lasts from the opening (Hello or Resume) to the end of the peer's part in the run. Its name is a random secret
key in the opening. After a reset the peer dials the same master and sends `Reattach` with the key; both sides exchange
the number of received messages, and resend the rest.

    1  Both ends count the messages of each direction after the opening, without handshakes and `Ack`.
    2  A sender keeps every frame until it is acknowledged. A message is received when the machine gets it.
    3  A receiver acknowledges every ACK_EVERY messages.
    4  The master stops reading the old connection before it reports its count, so no message is received twice.

A master without the session answers `Rejected`, and the peer has lost its master. With a token, the new connection is
authenticated like any other.
"""

from __future__ import annotations

from collections import deque

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError

KEY_BYTES = 16
ACK_EVERY = 16
KEPT_BYTES_MAX = 64 * 2**20
"""Bytes that one end keeps for the other. An end that lets more gather has stopped reading, or is away for too long."""


class ControlSession:
    def __init__(self, key: bytes) -> None:
        self.key = key
        self.received = 0
        self.kept_bytes = 0
        self._kept: deque[bytes] = deque()
        self._acknowledged = 0
        self._told = 0

    def keep(self, frame: bytes) -> None:
        """Note the next message that is sent, whether there is a connection or not."""
        self._kept.append(frame)
        self.kept_bytes += len(frame)

    def acknowledge(self, received: int) -> None:
        """Drop the frames that the other side has received. ProtocolError."""
        count = received - self._acknowledged
        if not 0 <= count <= len(self._kept):
            sent = self._acknowledged + len(self._kept)
            raise ProtocolError(
                f"{received} messages are acknowledged after {self._acknowledged}, and {sent} were sent"
            )
        for _ in range(count):
            self.kept_bytes -= len(self._kept.popleft())
        self._acknowledged = received

    def receive(self) -> m.Ack | None:
        """Count a message that was received. Return the Ack that is due by now, if one is."""
        self.received += 1
        if self.received < self._told + ACK_EVERY:
            return None
        self._told = self.received
        return m.Ack(self.received)

    def reattach(self, received: int) -> list[bytes]:
        """Return the frames to send first over a new connection, whose other end has received `received` messages.
        ProtocolError."""
        self.acknowledge(received)
        self._told = self.received
        return list(self._kept)

    @property
    def is_flooded(self) -> bool:
        return self.kept_bytes > KEPT_BYTES_MAX
