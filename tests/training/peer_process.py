"""Training peers as processes that are killed and joined while they train, held against each other by their digests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pccl import MasterNode
from tests.processes.fork_server import Forked, fork_server, is_available
from tests.support.streams import Lines

MODULE = "tests.training.process"


class PeerProcess:
    def __init__(self, process: subprocess.Popen[str] | Forked) -> None:
        assert process.stdout is not None
        self.process = process
        self.lines = Lines(process.stdout)

    def kill_within(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def started(kind: str, master: MasterNode, number: int, stop: Path) -> Iterator[PeerProcess]:
    arguments = [kind, master.address, str(number), str(stop)]
    process: subprocess.Popen[str] | Forked
    if is_available():
        process = fork_server(MODULE).fork(2, arguments)
    else:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-m", MODULE, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield PeerProcess(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        process.kill()
        process.wait()
