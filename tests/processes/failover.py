"""A measurement of how long a run stands still when its master is killed: `python -m tests.processes.failover [KILLS]`.

Three peers reduce without pause. What is measured is the longest time between two commits around each kill -9, with
another master that is started at once at the same address, or with a standby that listens already; for the first also
how much of it is left once the new master listens.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise

import numpy as np

from pccl import Attribute, Communicator, ReduceOp

PEERS = 3
CALM_S = 1.5
PEER_TIMEOUT_S = "5"


def _master(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process, and its address once it listens."""
    command = [sys.executable, "-m", "pccl", "master", "--peer-timeout", PEER_TIMEOUT_S, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


class _Run:
    def __init__(self, address: str) -> None:
        self.commits: list[float] = []
        """The times of the first peer's commits."""
        self.failures: list[str] = []
        self._stop = False
        self._threads = [threading.Thread(target=self._peer, args=(address, index)) for index in range(PEERS)]
        for thread in self._threads:
            thread.start()

    def _peer(self, address: str, index: int) -> None:
        with Communicator(address) as peer:
            while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < PEERS:
                peer.update_topology()
            x = np.ones(1000, np.float32)
            while not self._stop:
                try:
                    peer.all_reduce(x, np.empty_like(x), op=ReduceOp.SUM)
                except Exception as error:
                    self.failures.append(str(error))
                    return
                if index == 0:
                    self.commits.append(time.monotonic())
                    self._stop = self._stop or len(self.commits) > 10**7

    def until_commits_after(self, moment: float) -> float:
        """Returns when the next one came."""
        while not self.commits or self.commits[-1] <= moment:
            if self.failures:
                raise SystemExit(self.failures[0])
            time.sleep(0.001)
        return next(at for at in self.commits if at > moment)

    def end(self) -> None:
        # One that is told to stop first leaves the others waiting: they hear of it.
        self._stop = True
        for thread in self._threads:
            thread.join(20)

    def gap(self, since: float) -> float:
        around = [at for at in self.commits if at > since - 0.5]
        return max(after - before for before, after in pairwise(around))


def restarted(kills: int) -> tuple[list[float], list[float]]:
    master, address = _master("--listen", "127.0.0.1:0")
    run = _Run(address)
    gaps, after_listening = [], []
    try:
        for _ in range(kills):
            run.until_commits_after(time.monotonic() + CALM_S)
            killed_at = time.monotonic()
            master.kill()
            master.wait()
            master, _ = _master("--listen", address)
            listens_at = time.monotonic()
            after_listening.append(run.until_commits_after(listens_at) - listens_at)
            gaps.append(run.gap(killed_at))
    finally:
        run.end()
        master.kill()
    return gaps, after_listening


def followed_by_a_standby(kills: int) -> list[float]:
    gaps = []
    for _ in range(kills):
        primary, first = _master("--listen", "127.0.0.1:0")
        standby, second = _master("--listen", "127.0.0.1:0", "--standby-of", first)
        run = _Run(f"{first},{second}")
        try:
            run.until_commits_after(time.monotonic() + CALM_S)
            killed_at = time.monotonic()
            primary.kill()
            run.until_commits_after(killed_at + 0.2)
            run.until_commits_after(time.monotonic() + 0.1)
            gaps.append(run.gap(killed_at))
        finally:
            run.end()
            primary.kill()
            standby.kill()
    return gaps


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    gaps, after_listening = restarted(kills)
    _show("a restarted master", gaps)
    _show("  after the new master listens", after_listening)
    _show("a standby", followed_by_a_standby(kills))


def _show(what: str, seconds: list[float]) -> None:
    print(f"{what}: median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s, of {len(seconds)}")


if __name__ == "__main__":
    main()
