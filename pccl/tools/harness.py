"""Child processes that exchange JSON lines with their supervisor and never outlive it.

A `Processes` object owns a guard process and one event queue. A thread per child puts each line of its output into the
queue, then its return code. The supervisor sleeps on the queue, so it needs no locks. A child's standard error goes to
a file; its end explains an unexpected exit.

The guard leads the process group that all children are started in. It reads a pipe whose other end only the supervisor
holds: when the supervisor ends, even by SIGKILL, the guard reads end-of-file and kills its group. PR_SET_PDEATHSIG
would miss grandchildren and is Linux only. A process that leaves the group by setsid or setpgid escapes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

import msgspec

MASTER_READY = b"pccl master listening on "
MASTER_SHOWS = b"pccl master shows the run at "
STDERR_BYTES_SHOWN = 6000
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For several processes on few cores: threads of one array operation would only compete."""

_GUARD = """
import os, signal, sys
if os.getpgrp() != os.getpid():
    sys.exit("the guard kills its process group and must lead one of its own")
for name in ("INT", "TERM", "HUP", "USR1", "USR2", "TSTP"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
while os.read(0, 4096):
    pass
os.killpg(0, signal.SIGKILL)
"""


class Closing:
    """A context manager that calls `close`."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Guard(Closing):
    """A guard process. Start children with `subprocess.Popen(..., process_group=guard.group)`."""

    def __init__(self) -> None:
        # -I -S: independent of the environment and the working directory, and quick to start.
        command = [sys.executable, "-I", "-S", "-c", _GUARD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)

    @property
    def group(self) -> int:
        # The guard is unreaped until close(), so its number cannot be reused.
        return self._process.pid

    def close(self) -> None:
        """Kill every process left in the group. Returns when the guard itself has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Child:
    """One process of a guard's group."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        guard: Guard,
        events: queue.SimpleQueue[Event],
        environment: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        """Start the process. Standard error goes to the file `log`, or to a temporary file."""
        self.name = name
        self.log = log
        self._events = events
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
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.endswith(b"\n"):  # not the rest of a child killed in the middle of a line
                self._events.put((self, line))
        self._events.put((self, self.popen.wait()))

    def send(self, message: Any) -> None:
        """Write a message to standard input. Ignored if the process has ended: its return code is in the queue."""
        stdin = self.popen.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()

    def close_input(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()

    def last_errors(self) -> str:
        """Return the end of standard error. Not after `close`."""
        size_bytes = os.fstat(self._errors.fileno()).st_size
        start = max(0, size_bytes - STDERR_BYTES_SHOWN)
        # pread: the child writes at the file offset that both processes share.
        return os.pread(self._errors.fileno(), size_bytes - start, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipes of a process that has ended or was killed."""
        self._reader.join()
        self.close_input()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self._errors.close()


Event: TypeAlias = tuple[Child, bytes | int]
"""A child with a line of its output, or with its return code, which is its last event."""


class Processes(Closing):
    """Children with one guard and one event queue."""

    def __init__(self, environment: Mapping[str, str], logs: Path | None = None) -> None:
        """`environment` extends that of this process; `logs` is the folder for standard error."""
        self._guard = Guard()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._environment = {**local_environment(), **environment}
        self._logs = logs
        self._children: set[Child] = set()

    def start(self, name: str, module: str, *arguments: str) -> Child:
        """Start `python -m module arguments`."""
        log = self._logs / f"{name.replace(' ', '-')}.log" if self._logs is not None else None
        command = module_command(module, *arguments)
        child = Child(name, command, guard=self._guard, events=self._events, environment=self._environment, log=log)
        self._children.add(child)
        return child

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event, or None if there is none within the timeout."""
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def events(self, timeout_s: float) -> Iterator[Event]:
        """Yield the events that are there, waiting for the first one only."""
        while (event := self.next_event(timeout_s)) is not None:
            timeout_s = 0.0
            yield event

    def reap(self, child: Child) -> None:
        """Close a child that has ended."""
        child.close()
        self._children.discard(child)

    def close(self) -> None:
        """Kill and close all children."""
        self._guard.close()
        for child in self._children:
            child.close()
        self._children.clear()


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m module arguments`, importing the same pccl as this process.

    `-m` puts the working directory first: in a checkout that is a source tree without its extension. -P prevents that,
    unless this process itself has pccl from there.
    """
    imported_from = Path(__file__).resolve().parents[2]
    safe_path = [] if imported_from == Path(os.getcwd()).resolve() else ["-P"]
    return [sys.executable, *safe_path, "-m", module, *arguments]


def local_environment() -> dict[str, str]:
    """Return the environment for peers of a master started by the same process.

    It keeps the token, and drops TLS (such a master has no certificate) and fixed listening addresses.
    """
    return {**os.environ, "PCCL_TLS_CA": "", "PCCL_LISTEN": "", "PCCL_ADVERTISE": ""}


def decoded(line: bytes, kind: Any) -> Any:
    """Return the message of this type (of a struct or a union) in a line, or None for other output."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return None


def send(message: Any) -> None:
    """Write a message to standard output, from a child. With PYTHONUNBUFFERED, print loses part of a write that a
    signal interrupts."""
    rest = memoryview(msgspec.json.encode(message) + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


def received(kind: Any) -> Iterator[Any]:
    """Yield the supervisor's messages of this type until the end of the input.

    Unbuffered: a daemon thread that reads must not hold the lock of `sys.stdin` when the interpreter ends.
    """
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=kind)
