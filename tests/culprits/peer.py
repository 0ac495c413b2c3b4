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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pccl import Attribute, Communicator, PCCLError, ReduceOp, Result

Compute = Callable[[int], None]
LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
NOISE = 0.2
STEPS_BETWEEN_JOINS = 5
HABITS = ("steady", "uneven", "saves", "rests", "sleeps", "broadcasts", "overlaps", "threads")
"""Steps of very different lengths; the first peer saves for a second out of ten, while the others wait; it is away for
seven seconds out of forty; all are, at one step; the first rank broadcasts large vectors, and small ones are reduced
beside; what is reduced is waited for after the next computation; two threads compute and reduce, with a tag each."""
SMALL_COUNT = 100
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


def step(peer: Communicator, gradient: np.ndarray[Any, np.dtype[np.float32]], habit: str, compute: Compute) -> None:
    """Compute and reduce once. `compute` is told which thread computes."""
    if habit == "overlaps":
        handle = peer.all_reduce_async(gradient, op=ReduceOp.AVG)
        compute(0)
        handle.result()
    elif habit == "threads":

        def compute_and_reduce(thread: int, own: np.ndarray[Any, np.dtype[np.float32]]) -> None:
            compute(thread)
            peer.all_reduce(own, op=ReduceOp.AVG, tag=thread)

        with ThreadPoolExecutor(1) as other:
            begun = other.submit(compute_and_reduce, 1, gradient.copy())
            try:
                compute_and_reduce(0, gradient)
            finally:
                error = begun.exception()
        if error is not None:
            raise error
    else:
        compute(0)
        if habit == "broadcasts":
            peer.broadcast(gradient, root=0)
        peer.all_reduce(gradient[:SMALL_COUNT] if habit == "broadcasts" else gradient, op=ReduceOp.AVG)


def main() -> None:
    master, name, count, step_ms = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    habit = sys.argv[5] if len(sys.argv) > 5 else "steady"
    away = Habit(habit, name)
    pace = Pace()
    chances = [random.Random(name), random.Random(f"{name}, beside")]
    gradient = np.ones(count, np.float32)
    done = 0

    def compute(thread: int) -> None:
        chance = chances[thread]
        usual_s = step_ms / 1e3 * (chance.choice(UNEVEN) if habit == "uneven" else 1.0)
        time.sleep(usual_s * pace.factor * (1 + NOISE * (2 * chance.random() - 1)))
        if thread == 0:
            away.pause(done)

    while True:
        try:
            with Communicator(master, name=name, timeout=None) as peer:
                done = 0
                while True:
                    alone = peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2
                    if alone or (done % STEPS_BETWEEN_JOINS == 0 and peer.are_peers_pending()):
                        peer.update_topology()
                    if alone:
                        time.sleep(0.02)
                        continue
                    try:
                        step(peer, gradient, habit, compute)
                        done += 1
                    except PCCLError as error:
                        if error.result in LEFT_OUT:
                            raise
        except PCCLError:
            time.sleep(0.2)


if __name__ == "__main__":
    main()
