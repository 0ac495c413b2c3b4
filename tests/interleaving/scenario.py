"""A scenario: what the callers of one schedule do, and what each must find."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from pccl import Communicator, ReduceOp
from tests.interleaving.choosers import Switching
from tests.interleaving.scheduler import Torn
from tests.interleaving.world import World, seeded

SUM = ReduceOp.SUM
MARK = -3.5
COUNT = 3

Array = np.ndarray[Any, Any]


class Scenario:
    """The callers of one schedule. `main` runs in its first thread."""

    peers = 2
    engine_threads: tuple[int, ...] = (1, 1, 1, 2)
    early = 0.0
    """The probability that time passes at a hand-over, in half of the schedules."""
    may_keep_tags = False

    def __init__(self, world: World, chooser: Switching, seed: int, is_strict: bool) -> None:
        """`is_strict`: time stands still while anybody can go on, so a slow peer delays no other peer."""
        self.world = world
        self.is_strict = is_strict
        self.scheduler = world.scheduler
        self.rng: random.Random = seeded(seed, "scenario")
        self._chooser = chooser
        self._left = 0
        self._given_back: list[tuple[Array, str]] = []
        """Arrays that their callers have back, and that must not change."""

    def main(self) -> None:
        """Set up, play, and check. The set-up and the end run straight."""
        world = self.world
        self.set_up()
        self.play()
        self.scheduler.wait(lambda: self._left == 0, "the callers")
        self._chooser.settle()
        self.finish()
        world.close()
        for array, whose in self._given_back:
            if not np.all(array == MARK):
                self.wrong(f"an array was written to after its caller had it back: {whose}: {array}")
        world.check()

    def set_up(self) -> None:
        """Have all peers in a run, and begin to preempt."""
        self.world.gather(self.peers)
        self.prepare()
        self._chooser.switch()

    def prepare(self) -> None:
        """Run before anything is preempted."""

    def play(self) -> None:
        """Start the callers."""
        raise NotImplementedError

    def finish(self) -> None:
        """Check what has come of it."""

    # For callers.

    def wrong(self, text: str) -> None:
        self.scheduler.fail(text)
        raise Torn

    def caller(self, name: str, run: Callable[[], object]) -> None:
        """Start a caller."""
        self._left += 1

        def play() -> None:
            run()
            self._left -= 1

        self.world.spawn(name, play)

    def together(self, call: Callable[[Communicator], object]) -> None:
        """Make a call of each peer, at the same time, and wait for all."""
        left = len(self.world.peers)

        def one(peer: Communicator) -> None:
            nonlocal left
            call(peer)
            left -= 1

        for number, peer in enumerate(self.world.peers):
            self.world.spawn(f"together {number}", lambda peer=peer: one(peer))  # type: ignore[misc]
        self.scheduler.wait(lambda: not left, "a call of all peers")

    def pause(self, seconds: float = 0.001) -> None:
        """Sleep, by the virtual clock."""
        self.scheduler.wait(lambda: False, "a pause", self.scheduler.now + seconds)

    def give_back(self, array: Array, whose: str) -> None:
        """Note that this array must not change any more."""
        array[:] = MARK
        self._given_back.append((array, whose))

    def warm_up(self, tags: list[int]) -> None:
        """Use each tag once, so that the fast path is open for it."""
        for tag in tags:
            self.together(lambda peer, tag=tag: peer.all_reduce(np.ones(1, np.float32), op=SUM, tag=tag))  # type: ignore


def contribution(peer: int, tag: int, use: int) -> float:
    """Return what a peer gives to a use of a tag."""
    return 1 + use + 100 * tag + 1000 * peer
