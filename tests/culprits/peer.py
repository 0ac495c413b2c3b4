"""A peer that computes and reduces in a loop:

python tests/culprits/peer.py MASTER NAME STEP_MS HABIT

Computation takes STEP_MS, plus or minus a fifth. A line on stdin is a factor for that from then on. Habits of healthy
programs: "steady"; "uneven": steps of very different lengths; "saves": p0 pauses for 3 s out of 10; "overlaps": the
handle of an op is waited for after the next computation.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp

NOISE = 0.2
UNEVEN = (0.3, 1.0, 3.0)
SAVES_EVERY_S, SAVES_S = 10.0, 3.0


def main() -> None:
    master, name, step_ms, habit = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
    factor = 1.0

    def listen() -> None:
        nonlocal factor
        for line in sys.stdin:
            factor = float(line)

    threading.Thread(target=listen, daemon=True).start()
    chance = random.Random(name)
    gradient = np.ones(10_000, np.float32)
    saved_at = time.monotonic()

    def compute() -> None:
        nonlocal saved_at
        usual_s = step_ms / 1e3 * (chance.choice(UNEVEN) if habit == "uneven" else 1.0)
        time.sleep(usual_s * factor * (1 + NOISE * (2 * chance.random() - 1)))
        if habit == "saves" and name == "p0" and time.monotonic() >= saved_at + SAVES_EVERY_S:
            time.sleep(SAVES_S)
            saved_at = time.monotonic()

    while True:
        try:
            with Communicator(master, name=name, timeout=None) as peer:
                peer.wait_for_peers(3)
                while True:
                    if habit == "overlaps":
                        handle = peer.all_reduce_async(gradient, op=ReduceOp.AVG)
                        compute()
                        handle.result()
                    else:
                        compute()
                        peer.all_reduce(gradient, op=ReduceOp.AVG)
        except PCCLError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
