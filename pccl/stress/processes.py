"""The processes of a stress run: how they are started, heard and ended, and their logs.

For each process a thread reads its output into one queue until it ends, then puts its exit code. All processes are in
the group of a `Guard`, so they end with this one however it ends, and a terminal's Ctrl-C reaches this process only.
Standard error goes to a file per process, in a folder that is kept only if something went wrong. What a process must do
is written to its standard input.
"""

from __future__ import annotations

import queue
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pccl.launcher import Child, Guard, Heard, local_environment
from pccl.stress.plan import Plan

LOGS_KEPT = 40
"""Logs of processes that have ended as they should: what led to a failure may be in them."""
# Many peers on few cores: threads of one array operation would only wait for each other.
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "PCCL_LOG_LEVEL": "INFO",
    "PYTHONFAULTHANDLER": "1",  # the master shows its stacks on SIGABRT
}


class Processes:
    """All processes of a run. For the main thread."""

    def __init__(self, plan: Plan) -> None:
        self.logs = Path(tempfile.mkdtemp(prefix="pccl-stress-"))
        self.token = secrets.token_urlsafe() if plan.token or plan.encrypt else ""
        self._guard = Guard()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._running: set[Child] = set()
        self._ended: deque[Child] = deque()
        self._environment = {**local_environment(), **_ENVIRONMENT}
        if self.token:
            self._environment["PCCL_TOKEN"] = self.token
        self._environment.pop("PCCL_STATE", None)
        self._environment["PCCL_ENCRYPT"] = "1" if plan.encrypt else "0"

    def start(self, name: str, command: list[str]) -> Child:
        log = self.logs / f"{name.replace(' ', '-')}.log"
        process = Child(name, command, guard=self._guard, heard=self._heard, environment=self._environment, log=log)
        self._running.add(process)
        return process

    def heard(self, timeout_s: float) -> Iterator[Heard]:
        """Yield what is heard: a line of output, or the exit code at last. Waits for the first at most `timeout_s`, and
        for no further one."""
        while True:
            try:
                heard = self._heard.get(timeout=timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.0
            yield heard

    def put_away(self, process: Child) -> None:
        """Close a process that has ended; its log is kept for a while."""
        process.close()
        self._running.discard(process)
        self._ended.append(process)
        if len(self._ended) > LOGS_KEPT:
            log = self._ended.popleft().log
            assert log is not None
            log.unlink()

    def close(self) -> None:
        """End all processes."""
        self._guard.close()
        for process in self._running:
            process.close()

    def remove_logs(self) -> None:
        shutil.rmtree(self.logs)
