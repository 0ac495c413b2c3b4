"""Child processes that exchange JSON lines with their supervisor and never outlive it.

A `Processes` object owns a guard process and one event queue. Threads put each line of a child's output into the queue,
then its return code. The supervisor waits on the queue, so it needs no locks. A child's standard error goes to a file,
whose last lines explain an unexpected exit.

The guard leads the process group in which all children are started. It reads a pipe whose other end only the supervisor
holds: when the supervisor ends, even by SIGKILL, the guard reads end-of-file and kills its group. PR_SET_PDEATHSIG
would miss grandchildren and exists only on Linux. A process that leaves the group with setsid or setpgid escapes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeAlias

import msgspec

_MASTER_READY = b"pccl master listening on "
_MASTER_SHOWS = b"pccl master shows the run at "
STDERR_BYTES_SHOWN = 6000
DRAIN_TIMEOUT_S = 1.0
"""The maximum wait for the last output of a process that has ended. A grandchild may keep its pipe open."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""For several processes on few cores, where multithreaded array operations would only compete."""

_GUARD = """
import os, signal, sys
if os.getpgrp() != os.getpid():
    sys.exit("the guard kills its process group, so it must lead its own group")
for name in ("INT", "TERM", "HUP", "USR1", "USR2", "TSTP"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
while os.read(0, 4096):
    pass
os.killpg(0, signal.SIGKILL)
"""


class Guard:
    """A guard process, as a context manager. Start children with `subprocess.Popen(..., process_group=guard.group)`."""

    def __init__(self) -> None:
        # -I -S makes it quick to start and independent of the environment and the working directory.
        command = [sys.executable, "-I", "-S", "-c", _GUARD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)

    @property
    def group(self) -> int:
        # The guard is not reaped before close(), so its process ID cannot be reused.
        return self._process.pid

    def close(self) -> None:
        """Kill every process left in the group. Return once the guard itself has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Child:
    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        guard: Guard,
        events: queue.SimpleQueue[Any],
        environment: Mapping[str, str],
        log: Path | None = None,
        stdout: Copy | None = None,
        stderr: Copy | None = None,
    ) -> None:
        """Start the process. Lines of standard output become events; standard error goes to `log` or a temporary file.

        If `stdout` or `stderr` is given, it reads that stream to its end on a thread instead.
        """
        self.name = name
        self._events = events
        self._errors: IO[bytes] | None = None
        if stderr is None:
            self._errors = log.open("w+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.PIPE,
            env=environment,
            process_group=guard.group,
        )
        self._reports_lines = stdout is None
        self._readers: list[threading.Thread] = []
        for source, copy in ((self.popen.stdout, stdout or self._put_lines), (self.popen.stderr, stderr)):
            if copy is not None:
                self._readers.append(threading.Thread(target=copy, args=(source,), daemon=True))
                self._readers[-1].start()
        self._waiter = threading.Thread(target=self._wait, name=f"waits for {name}", daemon=True)
        self._waiter.start()

    def _put_lines(self, source: IO[bytes]) -> None:
        for line in source:
            if line.endswith(b"\n"):  # drops the partial last line of a killed child
                self._events.put((self, line))

    def _wait(self) -> None:
        returncode = self.popen.wait()
        if self._reports_lines:
            self._readers[0].join()  # the return code is the last event
        self.drain()
        self._events.put((self, returncode))

    def drain(self) -> None:
        """Wait, at most DRAIN_TIMEOUT_S, for the remaining output of a process that has ended."""
        deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
        for reader in self._readers:
            reader.join(max(0.0, deadline_s - time.monotonic()))

    def send(self, message: Any) -> None:
        """Write a message to the child's standard input. Does nothing if the process has ended."""
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
        """Return the end of standard error. Must not be called after `close`."""
        assert self._errors is not None
        size_bytes = os.fstat(self._errors.fileno()).st_size
        start = max(0, size_bytes - STDERR_BYTES_SHOWN)
        # pread, because the child writes at the file offset that both processes share.
        return os.pread(self._errors.fileno(), size_bytes - start, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Close the pipes of a process that has ended or was killed."""
        self._waiter.join()
        self.close_input()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        if self._errors is not None:
            self._errors.close()


Copy: TypeAlias = Callable[[IO[bytes]], None]
Event: TypeAlias = tuple[Child, bytes | int]
"""A child and a line of its output, or its return code, which is its last event."""


class Processes:
    """Children with one guard and one event queue, as a context manager."""

    def __init__(self, environment: Mapping[str, str], logs: Path | None = None) -> None:
        """`environment` extends this process's environment; `logs` is the folder for standard error."""
        self._guard = Guard()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._environment = {**local_environment(), **environment}
        self._logs = logs
        self._children: set[Child] = set()

    def start(self, name: str, module: str, *arguments: str) -> Child:
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
        """Yield the queued events, waiting only for the first one."""
        while (event := self.next_event(timeout_s)) is not None:
            timeout_s = 0.0
            yield event

    def reap(self, child: Child) -> None:
        child.close()
        self._children.discard(child)

    def close(self) -> None:
        self._guard.close()
        for child in self._children:
            child.close()
        self._children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m module arguments`, which imports the same pccl as this process.

    `-m` puts the working directory first on `sys.path`. In a checkout, that would import the source tree, which lacks
    the compiled extension. -P prevents this; it is left out if this process itself imported pccl from there.
    """
    imported_from = Path(__file__).resolve().parents[2]
    safe_path = [] if imported_from == Path(os.getcwd()).resolve() else ["-P"]
    return [sys.executable, *safe_path, "-m", module, *arguments]


def local_environment() -> dict[str, str]:
    """Return the environment for the peers of a master that the same process started.

    It keeps the token but drops TLS settings (such a master has no certificate) and fixed listening addresses.
    """
    return {**os.environ, "PCCL_TLS_CA": "", "PCCL_LISTEN": "", "PCCL_ADVERTISE": ""}


def master_line(line: bytes) -> tuple[str, str]:
    """Return the master's address and the URL of its page from a line of its output, each empty if missing."""
    address, page = (
        line.removeprefix(prefix).decode().strip() if line.startswith(prefix) else ""
        for prefix in (_MASTER_READY, _MASTER_SHOWS)
    )
    return address, page


def decoded(line: bytes, kind: Any) -> Any:
    """Return the message of this type (a struct or a union) in a line, or None for other output."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError:
        return None


def send(message: Any) -> None:
    """Write a message to a child's standard output. With PYTHONUNBUFFERED, print would lose part of a write that a
    signal interrupts."""
    rest = memoryview(msgspec.json.encode(message) + b"\n")
    while rest:
        rest = rest[os.write(1, rest) :]


def received(kind: Any) -> Iterator[Any]:
    """Yield the supervisor's messages of this type until the input ends.

    The input is unbuffered because a reading daemon thread must not hold the lock of `sys.stdin` at interpreter exit.
    """
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=kind)
