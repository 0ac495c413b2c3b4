"""Training peers as processes that are killed and joined while they train, held against each other by their digests."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pccl import MasterNode
from tests.processes.fork_server import Forked, fork_server, is_available
from tests.support.streams import TIMEOUT_S, Lines

MODULE = "tests.training.process"
KILLS = 3


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


@pytest.mark.parametrize(
    "kind", ["sync", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("async", "fragments", "spsa"))]
)
def test_kills_and_joins_leave_everybody_with_the_same_state(master: MasterNode, kind: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    stop = tmp_path / "stop"
    with ExitStack() as stack:
        everybody = [stack.enter_context(started(kind, master, number, stop)) for number in range(3)]
        living = list(everybody)
        newest = everybody[0]
        for number in range(3, 3 + KILLS):
            newest.lines.expect(r"\d+ 3 .*")
            # At a random moment: in the inner steps, with an average on its way, or in the wait for one.
            victim = living.pop(choice.randrange(3))
            victim.kill_within(choice.uniform(0, 0.06))
            newest = stack.enter_context(started(kind, master, number, stop))
            everybody.append(newest)
            living.append(newest)
        newest.lines.expect(r"\d+ 3 .*")
        stop.touch()
        for peer in living:
            assert peer.process.wait(TIMEOUT_S) == 0
        digests: dict[int, set[str]] = {}
        for peer in everybody:
            for line in peer.lines.rest():
                match = re.fullmatch(r"(\d+) \d ([0-9a-f]{64})", line)
                assert match is not None, line
                digests.setdefault(int(match[1]), set()).add(match[2])
    assert {revision: found for revision, found in digests.items() if len(found) > 1} == {}
    assert len({peer.lines.seen[-1] for peer in living}) == 1
