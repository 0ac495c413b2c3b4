"""Count the Python calls inside pccl that one all_reduce makes, in the caller's thread and in the others.

    python -m tests.calls

runs two peers and prints the least of several ops. Profiling slows ops down; only the counts mean anything.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import pccl
from pccl import Communicator, MasterNode

PACKAGE = str(Path(pccl.__file__).parent)
WARM_UP = 30


class Counter:
    """Calls of functions of pccl since `reset`, in this thread and in all others."""

    def __init__(self) -> None:
        self._home = threading.get_ident()
        self.reset()

    def reset(self) -> None:
        self.here = self.elsewhere = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            if threading.get_ident() == self._home:
                self.here += 1
            else:
                self.elsewhere += 1


def cases(comm: Communicator) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the ops to count, each with its number of repetitions."""
    small, large = np.zeros(1024, np.float32), np.zeros(16 << 20, np.float32)
    return {
        "4 KiB, blocking": (lambda: comm.all_reduce(small), 100),
        "4 KiB, handle": (lambda: comm.all_reduce_async(small).wait(), 100),
        "64 MiB, blocking": (lambda: comm.all_reduce(large), 7),
    }


def run(address: str, counter: Counter | None) -> None:
    """Run all cases as one of two peers; print the counts if there is a counter."""
    with Communicator(address) as comm:
        comm.wait_for_peers(2)
        for title, (call, repetitions) in cases(comm).items():
            for _ in range(min(WARM_UP, repetitions)):
                call()
            here, elsewhere = [], []
            for _ in range(repetitions):
                if counter is not None:
                    counter.reset()
                call()
                if counter is not None:
                    here.append(counter.here)
                    elsewhere.append(counter.elsewhere)
            if counter is not None:
                mine, others = min(zip(here, elsewhere, strict=True), key=sum)
                print(f"{title:18} {mine + others:5.0f}  ({mine:.0f} in the caller's thread, {others:.0f} in others)")


def main() -> None:
    if len(sys.argv) > 1:
        with MasterNode("127.0.0.1:0") as master:
            print(master.address, flush=True)
            run(master.address, None)
        return
    counter = Counter()
    threading.setprofile(counter.note)
    sys.setprofile(counter.note)
    command = [sys.executable, "-m", "tests.calls", "other"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None  # the other process has the master, whose calls do not count
        run(other.stdout.readline().strip(), counter)


if __name__ == "__main__":
    main()
