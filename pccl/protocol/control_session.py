"""The session of a control connection: what has to survive when the connection is reset.

A peer and a master talk in one session from the opening (Hello or Resume) to the end of the peer's part in the run,
over one connection after the other. A session is named by a secret key of random bytes that the peer makes and says in
the opening. When a connection breaks, the peer dials the same master again and says `Reattach` with the key; both
sides say how many messages they have received, and resend what the other lacks. So the machines on both sides see one
sequence of messages without a gap.

    1  Both ends count the messages of each direction from 0: the answer to the opening and all that follow it from the
       master, all that follow the opening from the peer. What the handshake says, and `Ack`, is not counted.
    2  A sender keeps every frame that it has sent until the receiver has acknowledged it. A message counts as received
       when the machine gets it; a frame that was cut off by a reset is received over the next connection.
    3  A receiver acknowledges every ACK_EVERY messages. An idle session sends nothing and keeps less than that.
    4  A connection says nothing of a session once another one has taken it over: the master stops reading the old one
       before it says what it has received. So no message is received twice.

A master that does not know the key refuses (`Rejected`), and the peer has lost its master; see `failover`. Who may
reattach is who knows the key: with a token, the handshake of the new connection is one of the run, too.

Pure, and on both sides the same.
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
    """One end of a session."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.received = 0
        """Number of messages that have been received."""
        self.kept_bytes = 0
        self._kept: deque[bytes] = deque()
        self._acknowledged = 0
        self._told = 0

    def keep(self, frame: bytes) -> None:
        """Note the next message that is sent, whether there is a connection or not."""
        self._kept.append(frame)
        self.kept_bytes += len(frame)

    def acknowledge(self, received: int) -> None:
        """Note that the other side has received so many messages. Raises ProtocolError if that cannot be."""
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
        """Return the frames to send first over a new connection, whose other end has received so many messages. Raises
        ProtocolError if that cannot be."""
        self.acknowledge(received)
        self._told = self.received
        return list(self._kept)

    @property
    def is_flooded(self) -> bool:
        return self.kept_bytes > KEPT_BYTES_MAX
