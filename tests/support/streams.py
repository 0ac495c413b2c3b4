"""Output of child processes, read with time limits: a test that waits for a line fails instead of hanging."""

from __future__ import annotations

import queue
import re
import threading
from typing import IO

TIMEOUT_S = 180.0
"""Long enough for a busy machine: it only bounds how long a test hangs."""


class Lines:
    """The lines of a stream. A thread reads them as they arrive, so that a wait for a line can be bounded."""

    def __init__(self, stream: IO[str]) -> None:
        self.seen: list[str] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._queue.put(line.removesuffix("\n"))
        self._queue.put(None)

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line that matches `pattern` in full, and return the first one, which may have arrived already."""
        for line in self.seen:
            if match := re.fullmatch(pattern, line):
                return match
        while True:
            try:
                next_line = self._queue.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise AssertionError(f"not within {TIMEOUT_S:g} s: {pattern!r}, after {self.seen}") from None
            assert next_line is not None, f"ended without {pattern!r}, after {self.seen}"
            self.seen.append(next_line)
            if match := re.fullmatch(pattern, next_line):
                return match

    def rest(self) -> list[str]:
        """Wait until the stream has ended, and return all lines."""
        while (line := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.seen.append(line)
        return self.seen
