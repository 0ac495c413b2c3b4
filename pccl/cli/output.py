"""Output of the commands: standard output that may fail, lines that may find no reader, and reports as JSON."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    pass

STANDARD_OUTPUT = "-"
TELL_S = 1.0


class UnwrittenError(Exception):
    """Standard output cannot be written. The text says why."""


@contextmanager
def writing() -> Iterator[None]:
    """A context for writes to standard output. BrokenPipeError if its reader is gone, else UnwrittenError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwrittenError(error.strerror or str(error)) from None


def say(text: str, end: str = "\n") -> None:
    """Print a text at once. Raises as `writing` does."""
    if sys.stdout is None:
        raise UnwrittenError("it is closed")
    with writing():
        print(text, end=end, flush=True)


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard output by default, and go on after TELL_S if the pipe is full."""
    out: TextIO | None = sys.stdout if stream is None else stream
    if out is None:
        return  # the process was started with it closed
    try:
        fd = out.fileno()
    except OSError:
        print(line, file=out)  # in memory
        return

    def write() -> None:
        with suppress(OSError):
            os.write(fd, f"{line}\n".encode(errors="backslashreplace"))

    # Past the stream's buffer: a thread that waited with its lock would abort the interpreter when it ends.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(TELL_S)
