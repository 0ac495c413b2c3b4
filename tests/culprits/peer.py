"""A peer that computes and reduces, step after step, for ever:

python -m tests.culprits.peer MASTER NAME COUNT STEP_MS

What it computes takes STEP_MS, give or take a fifth. A line on stdin is a factor for that from then on.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np

from pccl import Attribute, Communicator, PCCLError, ReduceOp, Result

LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
NOISE = 0.2
STEPS_BETWEEN_JOINS = 5


class Pace:
    """The factor by which this peer is slower than it was."""

    def __init__(self) -> None:
        self.factor = 1.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.factor = float(line)


def main() -> None:
    master, name, count, step_ms = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    pace = Pace()
    chance = random.Random(name)
    gradient = np.ones(count, np.float32)
    while True:
        try:
            with Communicator(master, name=name, timeout=None) as peer:
                step = 0
                while True:
                    alone = peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2
                    if alone or (step % STEPS_BETWEEN_JOINS == 0 and peer.are_peers_pending()):
                        peer.update_topology()
                    if alone:
                        time.sleep(0.02)
                        continue
                    time.sleep(step_ms / 1e3 * pace.factor * (1 + NOISE * (2 * chance.random() - 1)))
                    try:
                        peer.all_reduce(gradient, op=ReduceOp.AVG)
                        step += 1
                    except PCCLError as error:
                        if error.result in LEFT_OUT:
                            raise
        except PCCLError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
