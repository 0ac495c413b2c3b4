"""The cost of a host whose packets of more than 1000 bytes vanish without notice, as with a wrong MTU.

python -m tests.wan.black_hole [--peer-timeout 5] [--seconds 100] [--bytes-max 1000]

Three peers on hosts of their own take steps: a usual loop, which admits a peer that waits, brings them up to date, and
reduces 400 kB. A fourth peer connects again after each eviction. On its host large packets vanish, in both
directions: from the beginning, or once it has taken part for a while, or for the first seconds only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp, Result, SharedState
from tests.processes.harness import Worker
from tests.wan.lab import Host, Lab, Link

HEALTHY = 3
COUNT = 100_000
BYTES_MAX = 1000
STEPS_BEFORE = 5
"""The length of a run until the hole opens in its middle."""
LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
PAUSE_S = 0.01
"""Between two attempts of the sick peer, and for company."""


def take_steps(master: str, name: str) -> None:
    """Run a peer forever. Every event is a line of JSON with the time of the common clock."""

    def say(event: str, **what: Any) -> None:
        os.write(1, (json.dumps({"event": event, "at_s": time.monotonic(), **what}) + "\n").encode())

    gradient, weights = np.empty(COUNT, np.float32), np.zeros(COUNT, np.float32)
    state = SharedState.from_numpy({"weights": weights})
    while True:
        peer = Communicator(master, name=name, timeout=None)
        try:
            peer.connect()
            say("joined")
            while True:
                try:
                    peer.admit_peers(state)
                    if peer.world_size < 2:
                        time.sleep(PAUSE_S)
                        continue
                    gradient[:] = 1
                    info = peer.all_reduce(gradient, op=ReduceOp.AVG)
                except PCCLError as error:
                    if error.result in LEFT_OUT:
                        raise
                    say("failed", text=str(error))
                    continue
                weights += gradient
                state.revision += 1
                say("step", world=info.world_size)
        except PCCLError as error:
            say("left", text=str(error))
        finally:
            peer.close()
        time.sleep(PAUSE_S)


class Peer:
    """The process on a host."""

    def __init__(self, host: Host, master: str, name: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.heard = threading.Condition()
        command = [sys.executable, "-P", "-m", "tests.wan.black_hole", "--peer", master, "--name", name]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = host.popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self.heard:
                self.events.append(json.loads(line))
                self.heard.notify_all()

    def named(self, event: str) -> list[dict[str, Any]]:
        return [each for each in list(self.events) if each["event"] == event]

    def until(self, condition: Callable[[Peer], object], limit_s: float) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: condition(self), limit_s), str(self.events[-3:])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass
class Found:
    steps: int
    """The number of steps of the healthy peers, in the time watched."""
    seconds: float
    longest_s: float
    """Between two of them."""
    evicted_healthy: list[str] = field(default_factory=list)
    """The errors of healthy peers that were evicted."""
    evicted_sick: list[str] = field(default_factory=list)
    left_after_s: float | None = None
    """The time when the sick one was first sent away, since the beginning or since the hole."""
    joins_of_sick: int = 0
    """The number of times that the sick one was let in since then."""

    def __str__(self) -> str:
        out = "never sent away" if self.left_after_s is None else f"sent away first after {self.left_after_s:.1f} s"
        return (
            f"{self.steps} steps in {self.seconds:.0f} s, {self.longest_s:.2f} s between two at most; healthy peers "
            f"sent away: {len(self.evicted_healthy)}; the sick one: let in {self.joins_of_sick} times, {out}, "
            f"{len(self.evicted_sick)} times in all"
        )


def watch(when: str, peer_timeout_s: float, seconds: float, bytes_max: int = BYTES_MAX, sick: int = HEALTHY) -> Found:
    """`when` the hole is there: "always", "later" or "at first" (until the sick one was sent away once, and then
    mended). `sick`: which of the four it is; the last joins last."""
    with Lab(HEALTHY + 2, Link(delay_ms=1)) as lab, ExitStack() as stack:
        worker = Worker(lab.hosts[0].namespace.command([]))
        stack.callback(worker.discard)
        address = lab.hosts[0].address
        port = worker.do("listen", peer_timeout=peer_timeout_s, address=f"{address}:0").rpartition(":")[2]
        peers: list[Peer] = []
        if when != "later":
            _limit(lab, sick, bytes_max)
        for number in range(HEALTHY + 1):
            peer = Peer(lab.hosts[number + 1], f"{address}:{port}", f"peer-{number + 1}")
            stack.callback(peer.kill)
            peers.append(peer)
            if number != sick or when == "later":
                peer.until(lambda peer: peer.named("joined"), 60)
        healthy, ill = [peer for peer in peers if peer is not peers[sick]], peers[sick]
        for peer in healthy:
            peer.until(lambda peer: _steps(peer, HEALTHY + (when == "later")) >= STEPS_BEFORE, 60)
        start_s = time.monotonic()
        if when == "later":
            _limit(lab, sick, bytes_max)
        if when == "at first":
            ill.until(lambda peer: peer.named("left"), 60)
            _limit(lab, sick, 0)
        time.sleep(seconds)
        end_s = time.monotonic()

        def since(peer: Peer, event: str) -> list[dict[str, Any]]:
            return [each for each in peer.named(event) if start_s <= each["at_s"] <= end_s]

        at = [start_s, *(each["at_s"] for each in since(healthy[0], "step")), end_s]
        left = since(ill, "left")
        return Found(
            len(at) - 2,
            end_s - start_s,
            max(b - a for a, b in itertools.pairwise(at)),
            [each["text"] for peer in healthy for each in since(peer, "left")],
            [each["text"] for each in left],
            left[0]["at_s"] - start_s if left else None,
            len(since(ill, "joined")),
        )


def _steps(peer: Peer, world: int) -> int:
    return sum(each["world"] == world for each in peer.named("step"))


def _limit(lab: Lab, sick: int, bytes_max: int) -> None:
    host = lab.hosts[sick + 1]
    for other in lab.hosts:
        if other is not host:
            lab.limit(host, other, bytes_max)
            lab.limit(other, host, bytes_max)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-timeout", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--bytes-max", type=int, default=BYTES_MAX)
    parser.add_argument("--when", nargs="+", default=["always", "later", "at first"])
    parser.add_argument("--sick", type=int, default=HEALTHY)
    parser.add_argument("--peer", metavar="MASTER", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        take_steps(arguments.peer, arguments.name)
    for when in arguments.when:
        found = watch(when, arguments.peer_timeout, arguments.seconds, arguments.bytes_max, arguments.sick)
        print(f"{when}: {found}", flush=True)
        for text in found.evicted_healthy + found.evicted_sick[:3]:
            print(f"    {text}")


if __name__ == "__main__":
    main()
