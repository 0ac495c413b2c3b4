"""`python -m tests.wan LAB -- steps --size SIZE`: all-reduces as outer steps make them, after pauses and back to back.

A pause is what makes TCP start slowly again. Host 0 prints the first op, the medians of the warm ones (the second of
all, and those that follow another) and of the cold ones (after a pause), and how many connections its links have.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np

from pccl import Communicator
from pccl.tools.bench.plan import parse_bytes

WARM_OPS = 3
"""Number of ops between two pauses."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="steps")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--size", default="32MiB")
    parser.add_argument("--connections", type=int, default=0, help="of each link (default: the library's choice)")
    parser.add_argument("--rounds", type=int, default=3, help="number of pauses (default: 3)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="(default: 5)")
    options = parser.parse_args()
    with Communicator(p2p_connection_pool_size=options.connections) as comm:
        comm.wait_for_peers(options.hosts)
        values = np.zeros(parse_bytes(options.size) // 4, np.float32)
        first_s = _reduce(comm, values)
        warm_s, cold_s = [_reduce(comm, values)], []
        for _ in range(options.rounds):
            time.sleep(options.pause_s)
            cold_s.append(_reduce(comm, values))
            warm_s += [_reduce(comm, values) for _ in range(WARM_OPS)]
        if os.environ["PCCL_HOST"] == "0":
            print(
                f"{options.size}: first {first_s:.2f} s, second {warm_s[0]:.2f} s, then warm"
                f" {statistics.median(warm_s[1:]):.2f} s, cold {statistics.median(cold_s):.2f} s;"
                f" {comm.stats['connections']} connections"
            )


def _reduce(comm: Communicator, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    comm.all_reduce(np.zeros(1, np.float32))  # all begin together
    began_at = time.perf_counter()
    comm.all_reduce(values)
    return time.perf_counter() - began_at


if __name__ == "__main__":
    main()
