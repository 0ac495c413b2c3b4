"""Calls from any thread to the one that owns the mailbox, and a descriptor that wakes it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """Calls that wait for the owner of the mailbox. `post` and `wake` are for any thread, all else is for the owner."""

    def __init__(self) -> None:
        """Open the descriptors. OSError if the system denies them."""
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_awake = False
        """Whether something was written since the last look; without it a look would cost a system call each time."""

    def fileno(self) -> int:
        """Return a descriptor that is readable after `wake`, until `empty`."""
        return self._reader.fileno()

    def post(self, call: Callable[[], None]) -> None:
        """Have the owner call this, soon."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        with suppress(OSError):  # closed; or so full that it is readable anyway
            self._writer.send(b"\0")
        # Last: where it is set, nothing that was written can be missed.
        self._is_awake = True

    def empty(self) -> None:
        """Make all calls that were posted."""
        if self._is_awake:
            self._is_awake = False
            with suppress(OSError):
                while self._reader.recv(4096):
                    pass
        self.run_posted()

    def run_posted(self) -> None:
        """Make all calls that were posted, and leave the descriptor as it is."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
