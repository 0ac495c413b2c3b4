"""A network namespace without a name: it lives as long as a process that holds it, and leaves no trace.

Theory of operation. `unshare --net cat` is a process in a new namespace that ends when its standard input does: on
`close()`, and just as surely when this process ends in any other way. That it answers a line says that it is in
place. Others enter by /proc/PID/ns/net: processes through `nsenter`, a thread of this process for as long as
`entered()` lasts. A socket belongs to the namespace it was made in and stays usable afterwards.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

CLONE_NEWNET = 0x40000000


class Namespace:
    def __init__(self, process_group: int | None = None) -> None:
        # Not in the terminal's foreground group: a Ctrl-C is for those that use the namespace, not for what holds it.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=process_group or 0,
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        self.pid = self._holder.pid
        self.path = f"/proc/{self.pid}/ns/net"
        try:
            with suppress(BrokenPipeError):
                self._holder.stdin.write(b"here\n")
                self._holder.stdin.flush()
            if not self._holder.stdout.readline():
                raise OSError(f"no network namespace: {self._holder.stderr.read().decode().strip()}")
            self.run("ip", "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command that runs `arguments` inside, as the same process."""
        return ["nsenter", f"--net={self.path}", "--", *arguments]

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(self.command(arguments), **options)

    def run(self, *arguments: str) -> str:
        """Standard output of a command that must succeed. OSError with what it said."""
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(arguments)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, the calling thread, and threads that it starts, make their sockets in the namespace."""
        with _opened("/proc/thread-self/ns/net") as own, _opened(self.path) as inside:
            _set_namespace(inside)
            try:
                yield
            finally:
                _set_namespace(own)

    def close(self) -> None:
        for stream in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._holder.wait()


@contextmanager
def _opened(path: str) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


def _set_namespace(number: int) -> None:
    """os.setns, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(number, CLONE_NEWNET):
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
