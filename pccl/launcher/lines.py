"""Mixes the output of many processes on one terminal: it is cut into lines, and only whole lines are written."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import IO

READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 20


class LineSplitter:
    """Cuts a byte stream into lines, and returns them without their ends.

    A line ends at `\\n`, `\\r\\n` or `\\r`: a progress bar that only ever returns the carriage is seen while it moves.
    An unfinished line longer than `line_bytes_max` is returned in parts.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take further bytes, and return the lines that are complete."""
        text = self._rest + data
        # The second half of a \r\n may still be on its way.
        held = b"\r" if text.endswith(b"\r") else b""
        lines = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = lines.pop()
        while len(rest) > self._line_bytes_max:
            lines.append(rest[: self._line_bytes_max])
            rest = rest[self._line_bytes_max :]
        self._rest = rest + held
        return lines

    def finish(self) -> list[bytes]:
        """Return the unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return [rest.removesuffix(b"\r")] if rest else []


class LinePrinter:
    """Writes prefixed lines to one descriptor. Printers that share a lock never interleave, even on one terminal.

    Once the reader of the descriptor is gone `on_closed` is called and later lines are dropped, so that the sources
    never block on a pipe that nobody empties.
    """

    def __init__(self, descriptor: int, lock: threading.Lock, on_closed: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._lock = lock
        self._on_closed = on_closed
        self._closed = False

    def write(self, prefix: bytes, lines: list[bytes]) -> None:
        data = memoryview(b"".join(prefix + line + b"\n" for line in lines))
        with self._lock:
            while data and not self._closed:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except OSError:
                    self._closed = True
                    self._on_closed()


def pump(source: IO[bytes], printer: LinePrinter, prefix: bytes) -> None:
    """Copy an unbuffered `source` to the printer until its end."""
    splitter = LineSplitter()
    with source:
        while data := source.read(READ_BYTES):
            printer.write(prefix, splitter.feed(data))
        printer.write(prefix, splitter.finish())
