"""Output of the `pccl` commands."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TextIO

PRINT_S = 1.0


class OutputError(Exception):
    """Standard output cannot be written to, for the reason in the text."""


def failed(command: str, why: object) -> int:
    """Print why a command failed, and return its exit code."""
    print(f"{command}: {why}", file=sys.stderr)
    return 1


def show(text: str, end: str = "\n") -> None:
    """Print and flush. Raise BrokenPipeError or OutputError on failure."""
    if sys.stdout is None:
        raise OutputError("it is closed")
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or str(error)) from None


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, by default to standard output. If the pipe is full, stop waiting after PRINT_S."""
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

    # Bypass the stream's buffer: a daemon thread that holds its lock at exit would abort the interpreter.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(PRINT_S)
