"""Output of the commands."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TextIO

PRINT_S = 1.0


class OutputError(Exception):
    """Standard output cannot be written; the text has the reason."""


def failed(command: str, why: object) -> int:
    """Print why a command has failed, and return its exit code."""
    print(f"{command}: {why}", file=sys.stderr)
    return 1


def show(text: str, end: str = "\n") -> None:
    """Print at once. BrokenPipeError or OutputError."""
    if sys.stdout is None:
        raise OutputError("it is closed")
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from None


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard output by default, and continue after PRINT_S if the pipe is full."""
    out: TextIO | None = sys.stdout if stream is None else stream
    if out is None:
        return
    try:
        fd = out.fileno()
    except OSError:  # in memory
        print(line, file=out)
        return

    def write() -> None:
        with suppress(OSError):
            os.write(fd, f"{line}\n".encode(errors="backslashreplace"))

    # Past the stream's buffer: a thread that waits with its lock aborts the interpreter at its end.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(PRINT_S)
