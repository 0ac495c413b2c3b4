"""Training peers as processes that are killed and joined while they train, held against each other by their digests."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pccl import MasterNode
from tests.processes import fork_server
from tests.support.streams import Lines

MODULE = "tests.training.process"


class PeerProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.lines = Lines(process.stdout)

    def kill_within(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def started(
    kind: str, master: MasterNode, number: int, stop: Path, *more: object, module: str = MODULE
) -> Iterator[PeerProcess]:
    arguments = [kind, master.address, *map(str, (number, stop, *more))]
    process = fork_server.start(module, *arguments, stdout=subprocess.PIPE)
    try:
        yield PeerProcess(process)
    finally:
        process.kill()
        process.wait()
