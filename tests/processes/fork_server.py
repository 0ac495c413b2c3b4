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
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES_MAX = 1 << 17
_LOCK = threading.RLock()


class Forked(subprocess.Popen[str]):
    """A process that a server forks; text streams. Without `stdin` and so on, it has those of this process."""

    def __init__(self, server: ForkServer, arguments: Sequence[str] = (), **streams: Any) -> None:
        """`arguments` are its `sys.argv[1:]`; it has this process's environment and working directory."""
        self._server = server
        super().__init__([server.module, *arguments], text=True, **streams)

    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        pipes = more[9:15]  # for each of its standard files, the ends to read and to write
        mine = [own if own != -1 else number for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = self._server.fork(args[1:], mine)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)


class ForkServer:
    """This process's server for one module. It ends with this process."""

    def __init__(self, module: str) -> None:
        """Workers run `module.main`, and exit with what it returns."""
        self.module = module
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The first test to start it may have set a log level, which all later workers would inherit.
        ours = ("PCCL_LOG", "PYTHONUNBUFFERED")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.processes.fork_server", str(theirs.fileno()), module],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # A process that is to be forked must have no threads, and numpy's would be some.
                env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OPENBLAS_NUM_THREADS": "1"},
            )
        atexit.register(self._close)

    def fork(self, arguments: Sequence[str], files: Sequence[int]) -> int:
        """Return the process ID of a worker with these standard files, for `Forked`."""
        message = json.dumps([list(arguments), dict(os.environ), os.getcwd()]).encode()
        with _LOCK:
            _take_in_orphans(True)
            try:
                socket.send_fds(self._sock, [message], files)
                answer = self._sock.recv(MESSAGE_BYTES_MAX)
            finally:
                _take_in_orphans(False)
        assert answer, f"the fork server ended with {self._process.wait()}"
        return int(answer)

    def _close(self) -> None:
        self._sock.close()
        self._process.wait()


@functools.cache
def fork_server(module: str) -> ForkServer:
    return ForkServer(module)


def start(module: str, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """Start a process that runs `module.main` with these `sys.argv[1:]`: forked, where that is possible."""
    if sys.platform.startswith("linux"):
        return Forked(fork_server(module), arguments, **streams)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], text=True, env=environment, **streams)


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
            sys.argv[1:], environment, folder = json.loads(message)
            os.chdir(folder)
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
        sys.exit(worker_main())
