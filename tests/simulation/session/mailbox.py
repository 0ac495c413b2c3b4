"""A descriptor that wakes the thread that reads it."""

from __future__ import annotations

import socket
from contextlib import suppress


class Mailbox:
    """`wake` is for any thread, all else for the owner."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable after `wake`, until `empty`."""
        return self._reader.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # so full that it is readable anyway
            self._writer.send(b"\0")

    def empty(self) -> None:
        with suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
