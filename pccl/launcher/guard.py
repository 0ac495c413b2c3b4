"""A process group that cannot outlive the process that made it, not even by SIGKILL.

Theory of operation. A small guard process is started first, as leader of a process group of its own. Its standard
input is a pipe whose other end only the starter holds; nothing is ever written to it. Whatever the starter wants
guarded is started into the guard's group. When the starter ends, however it ends, the kernel closes its end of the
pipe, the guard reads end-of-file and sends SIGKILL to its whole group, itself included. `close()` is the same path,
taken on purpose.

Why not PR_SET_PDEATHSIG: it is Linux only, spares grandchildren (data loader workers, shells), is forgotten by
some execs, and fires when the *thread* that forked ends, which thread pools turn into random deaths. Why not a list
of pids kept by the guard: a process started a moment before the starter died would be missing from it, and
a number in it may belong to an unrelated process since. Group membership is set by the child before it executes
anything, and is kept by the kernel.

Limit: a process that leaves the group on purpose (setsid, setpgid) is a daemon by its own wish and stays.

This file is executed by its path, without the package, so that the guard costs one bare interpreter.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class Guard:
    """A guard process. Start guarded processes with `subprocess.Popen(..., process_group=guard.group)`."""

    def __init__(self) -> None:
        # -I keeps the guard's start independent of the environment and of the working directory.
        command = [sys.executable, "-I", "-S", os.path.abspath(__file__)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)

    @property
    def group(self) -> int:
        # The leader stays unreaped until close(), so the number cannot come to mean another group.
        return self._process.pid

    def close(self) -> None:
        """Kill every process left in the group. Returns when the guard itself is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    if os.getpgrp() != os.getpid():
        sys.exit("the guard kills its process group and must lead one of its own")
    # Signals for the guarded ones may be sent to the group as a whole.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
