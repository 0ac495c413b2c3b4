"""A child process that is spoken with line by line: its lines, and its end, come into a queue.

Theory of operation. A thread per child reads its output into the queue, line by line until it ends, then puts its
return code, which is the last entry of it. Half a line, of a child that was killed while it wrote, is left out.
Children that share a queue have one listener, which sleeps until any of them has something to say. Standard error goes
to a file, whose end is worth showing when a child ends by itself. The child itself writes with `say_line`, since Python
without buffers (PYTHONUNBUFFERED) forgets the rest of a write that a signal has cut short.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

from pccl.launcher.guard import Guard

LAST_WORDS_BYTES = 6000


class Child:
    """One process in a guard's group. `popen` may be signalled and killed, but its pipes belong to this object."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        guard: Guard,
        heard: queue.SimpleQueue[Heard],
        environment: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        """Start the process. Its standard error goes to the file `log`, or to one without a name. OSError."""
        self.name = name
        self.log = log
        self._heard = heard
        self._errors: IO[bytes] = log.open("w+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            process_group=guard.group,
        )
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        output = self.popen.stdout
        assert output is not None
        for line in output:
            if line.endswith(b"\n"):
                self._heard.put((self, line))
        self._heard.put((self, self.popen.wait()))

    def say(self, line: str) -> None:
        """Write a line to its standard input. If it has ended nothing happens: its return code is on the way."""
        stdin = self.popen.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def last_words(self) -> str:
        """Return the end of its standard error. Not to be called after `close`."""
        size_bytes = os.fstat(self._errors.fileno()).st_size
        start = max(0, size_bytes - LAST_WORDS_BYTES)
        # pread: the child writes at the offset that the two share, which must stay at the end.
        return os.pread(self._errors.fileno(), size_bytes - start, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close its pipes. To be called when the process has ended or is sure to end."""
        self._reader.join()
        for file in (self.popen.stdin, self.popen.stdout, self._errors):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):  # of a line that it did not live to read
                    file.close()


def say_line(line: bytes) -> None:
    """Write all of a line, and its end, to standard output. For the child to call."""
    rest = memoryview(line + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


Heard: TypeAlias = tuple[Child, bytes | int]
"""An entry of the queue: a child with one of its lines, line end included, or with its return code, the last entry."""
