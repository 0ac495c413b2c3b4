"""A fork server: worker processes that need not load their modules first, as they are forked off one that has.

Theory of operation. Half a second of every worker's life goes into imports, and the tests start hundreds. The server
is a process that has imported what a worker needs, has no threads, and has used none of it. For each worker it forks
a child with the given standard files and environment, which goes on as a fresh process would: from the top of the
worker's `main` to an ordinary end of the interpreter. To be waited for by this process the worker must be its child.
So the server forks twice and lets the process in between end, whose orphan falls to this one, which for that moment
takes in orphans (Linux, PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES_MAX = 1 << 17
POLL_S = 0.002


def is_available() -> bool:
    return sys.platform.startswith("linux")


class Forked:
    """The part of subprocess.Popen that tests use; `stdin` and `stdout` are text."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end_s = time.monotonic() + timeout if timeout is not None else float("inf")
        while (returncode := self.poll()) is None:
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(f"worker {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process's server for one module. It ends with this process."""

    def __init__(self, module: str) -> None:
        """Workers run `module.main`."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The first test to start it may have set a log level, which all later workers would inherit.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_LOG")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.processes.fork_server", str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A process that is to be forked must have no threads, and numpy's would be some.
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            )
        atexit.register(self._close)

    def fork(self, stderr: int, arguments: Sequence[str] = ()) -> Forked:
        """A worker with this process's environment; `arguments` are its `sys.argv[1:]`."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        _take_in_orphans(True)
        try:
            message = json.dumps([list(arguments), dict(os.environ)]).encode()
            socket.send_fds(self._sock, [message], [theirs_in, theirs_out, stderr])
            answer = self._sock.recv(MESSAGE_BYTES_MAX)
        finally:
            _take_in_orphans(False)
            os.close(theirs_in)
            os.close(theirs_out)
        assert answer, f"the fork server ended with {self._process.wait()}"
        return Forked(int(answer), os.fdopen(ours_in, "w"), os.fdopen(ours_out))

    def _close(self) -> None:
        self._sock.close()
        self._process.wait()


@functools.cache
def fork_server(module: str) -> ForkServer:
    return ForkServer(module)


def _take_in_orphans(yes: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _serve(sock: socket.socket) -> bool:
    """Forks whatever is asked for; returns True in each worker, and False at the end."""
    while True:
        message, files, _, _ = socket.recv_fds(sock, MESSAGE_BYTES_MAX, 3)
        if not message:
            return False
        number_in, number_out = os.pipe()
        between = os.fork()
        if between == 0:
            worker = os.fork()
            if worker:
                os.write(number_out, str(worker).encode())
                os._exit(0)
            os.close(number_in)
            os.close(number_out)
            sock.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
                os.close(file)
            sys.argv[1:], environment = json.loads(message)
            os.environ.clear()
            os.environ.update(environment)
            return True
        for file in (*files, number_out):
            os.close(file)
        os.waitpid(between, 0)
        sock.send(os.read(number_in, 100))
        os.close(number_in)


if __name__ == "__main__":
    worker_main = __import__(sys.argv[2], fromlist=["main"]).main
    gc.collect()
    gc.freeze()
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        worker_main()
