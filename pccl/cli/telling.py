"""Prints lines for whoever started this process, without waiting until somebody reads them."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import TextIO

WAIT_S = 1.0


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard output by default. If nobody takes it within WAIT_S, go on."""
    out: TextIO | None = sys.stdout if stream is None else stream
    if out is None:
        return  # the process was started with it closed

    try:
        fd = out.fileno()
    except OSError:
        print(line, file=out)  # memory, which never lets wait
        return

    def write() -> None:
        with suppress(OSError):  # nobody is there
            os.write(fd, f"{line}\n".encode(errors="backslashreplace"))

    # Past the stream's buffer: a thread that waited with its lock would abort the interpreter when it ends.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(WAIT_S)
