"""A peer that computes and reduces, step after step, for ever:

python -m tests.culprits.peer MASTER NAME COUNT STEP_MS [HABIT]

What it computes takes STEP_MS, give or take a fifth. A line on stdin is a factor for that from then on. A habit is what
healthy programs do beside that, see HABITS.
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
HABITS = ("steady", "uneven", "saves", "rests", "sleeps")
"""Steps of very different lengths; the first peer saves for a second out of ten, while the others wait; it is away for
seven seconds out of forty; all are, at one step."""
UNEVEN = (0.3, 1.0, 3.0)
SAVES_EVERY_S, SAVES_S = 10.0, 1.0
RESTS_EVERY_S, RESTS_S = 40.0, 7.0
SLEEPS_EVERY, SLEEPS_S = 150, 7.0
"""Steps, for all must sleep at the same."""


class Pace:
    """The factor by which this peer is slower than it was."""

    def __init__(self) -> None:
        self.factor = 1.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.factor = float(line)


class Habit:
    """What a healthy peer does beside its steps."""

    def __init__(self, name: str, peer: str) -> None:
        self._sleeps = name == "sleeps"
        is_first = peer == "p0"
        self._every_s, self._pause_s = {"saves": (SAVES_EVERY_S, SAVES_S), "rests": (RESTS_EVERY_S, RESTS_S)}.get(
            name if is_first else "", (float("inf"), 0.0)
        )
        self._begun_at = time.monotonic()

    def pause(self, step: int) -> None:
        """Be away before this step, if it is time."""
        if self._sleeps and step % SLEEPS_EVERY == SLEEPS_EVERY - 1:
            time.sleep(SLEEPS_S)
        if time.monotonic() >= self._begun_at + self._every_s:
            time.sleep(self._pause_s)
            self._begun_at = time.monotonic()


def main() -> None:
    master, name, count, step_ms = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    habit = sys.argv[5] if len(sys.argv) > 5 else "steady"
    away = Habit(habit, name)
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
                    usual_s = step_ms / 1e3 * (chance.choice(UNEVEN) if habit == "uneven" else 1.0)
                    time.sleep(usual_s * pace.factor * (1 + NOISE * (2 * chance.random() - 1)))
                    away.pause(step)
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
