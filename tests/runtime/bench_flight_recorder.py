"""What the flight recorder costs small ops: the same ops with it and without, in turns.

    python -m tests.runtime.bench_flight_recorder                   # 4 bytes and 4 KiB, 2 peers
    python -m tests.runtime.bench_flight_recorder --bytes 4 --setups 60

Two runs stand at once: in one the peers remember 4096 ops, as users have it, in the other none (PCCL_FLIGHT_RECORDS=0).
They take turns, of some hundred all-reduces each, while the other run rests; which begins a round is drawn. A turn's
time is that of its median op, as rank 0 sees it, and a set-up's ratio the median of its rounds. Two runs that do the
same differ by up to 2 % for as long as they live, by where their memory lies, so there are many set-ups, each of fresh
processes. Shown are the medians of all turns in microseconds, and the mean of the set-ups' ratios with its bootstrap
interval (95 %). In the same way the first run is measured against a twin of its own: what that ratio is off from 1 by
is what this machine cannot tell.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from pccl import Communicator, MasterNode
from tests.support.arguments import positive

OPS = 300
WARM_UP_TURNS = 3


def peer(records: int, address: str, peers: int, rank: int, turns: Connection) -> None:
    """Take the turns that are asked for: each is a number of bytes."""
    with Communicator(address) as comm:
        comm.wait_for_peers(peers)
        turns.send(records)
        while nbytes := turns.recv():
            array = np.zeros(max(1, nbytes // 4), np.float32)
            times = []
            for _ in range(OPS):
                begun = time.perf_counter()
                comm.all_reduce(array)
                times.append(time.perf_counter() - begun)
            turns.send(statistics.median(times) * 1e6)


class Run:
    """Peers of one run, in processes of their own."""

    def __init__(self, records: int, peers: int) -> None:
        self._master = MasterNode("127.0.0.1:0")
        self._master.run()
        os.environ["PCCL_FLIGHT_RECORDS"] = str(records)
        context = multiprocessing.get_context("spawn")
        self._turns = []
        for rank in range(peers):
            ours, theirs = context.Pipe()
            context.Process(target=peer, args=(records, self._master.address, peers, rank, theirs), daemon=True).start()
            self._turns.append(ours)
        for each in self._turns:
            each.recv()

    def turn(self, nbytes: int) -> float:
        """Return the microseconds of the median op."""
        for each in self._turns:
            each.send(nbytes)
        medians: list[float] = [each.recv() for each in self._turns]
        return medians[0]

    def close(self) -> None:
        for each in self._turns:
            each.send(0)
        self._master.interrupt()
        self._master.wait()


def interval(ratios: list[float], chance: random.Random) -> tuple[float, float]:
    """Return the bootstrap interval of the mean."""
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return means[50], means[-51]


def play(peers: int, sizes: list[int], rounds: int, chance: random.Random) -> dict[tuple[int, str], list[float]]:
    """Return the times of all turns of one set-up, by the number of bytes and the run."""
    kinds = [("on", 4096), ("off", 0), ("twin", 4096)]
    chance.shuffle(kinds)
    runs = {name: Run(records, peers) for name, records in kinds}
    turns: dict[tuple[int, str], list[float]] = {(nbytes, name): [] for nbytes in sizes for name in runs}
    for nbytes in sizes:
        for number in range(rounds + WARM_UP_TURNS):
            names = list(runs)
            chance.shuffle(names)
            for name in names:
                took = runs[name].turn(nbytes)
                if number >= WARM_UP_TURNS:
                    turns[nbytes, name].append(took)
    for run in runs.values():
        run.close()
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bytes", type=positive, nargs="*", default=[4, 4096], help="of the arrays (default 4 4096)")
    parser.add_argument("--setups", type=positive, default=20, help="of fresh processes (default 20)")
    parser.add_argument("--rounds", type=positive, default=20, help="in each of them (default 20)")
    parser.add_argument("--peers", type=positive, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    played = [play(options.peers, options.bytes, options.rounds, chance) for _ in range(options.setups)]
    print("bytes  compared       us     us   ratio  95 %")
    for nbytes in options.bytes:
        for other in ("off", "twin"):
            ratios = [
                statistics.median(on / off for on, off in zip(turns[nbytes, "on"], turns[nbytes, other], strict=True))
                for turns in played
            ]
            low, high = interval(ratios, chance)
            on_us, off_us = (
                statistics.median(took for turns in played for took in turns[nbytes, name]) for name in ("on", other)
            )
            mean = statistics.fmean(ratios)
            print(f"{nbytes:5d}  on/{other:8s} {on_us:6.1f} {off_us:6.1f}  {mean:.4f}  {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
