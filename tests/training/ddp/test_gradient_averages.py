"""The averages of a module's gradients on buckets of NumPy arrays, so without torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pccl import Communicator, MasterNode
from pccl.training.ddp.gradients import GradientAverages
from pccl.training.group.relaunch import Compression, Outcome
from tests.support.cluster import Cluster, together

STALE = 1e6
"""The content of an unfilled buffer."""
TAG = 10


class ArrayBucket:
    """A bucket of one parameter."""

    def __init__(self) -> None:
        self.flat = np.full(5, STALE)
        self.average: Any = None
        self._received = np.zeros(5)
        self._has_gradient = False
        self._landed: Outcome | None = None

    @property
    def is_full(self) -> bool:
        return self._has_gradient

    def take(self, i: int) -> None:
        self._has_gradient = True

    def note(self) -> None:
        pass

    def fill(self) -> None:
        if not self._has_gradient:
            self.flat[...] = 0

    def result(self) -> NDArray[np.float64]:
        return self._received

    def weighed(self, factor: float) -> NDArray[np.float64]:
        np.multiply(self.flat, factor, out=self._received)
        return self._received

    def land(self) -> Outcome:
        self._landed = self.average.wait()
        assert self._landed is not None
        return self._landed

    def divide(self, total: float) -> None:
        self._received /= total

    def keep_none(self) -> None:
        self._received[...] = 0

    def give(self) -> None:
        assert self._landed is not None
        assert self._landed.world_size == 2
        self.flat, self._received = self._received, self.flat

    def clear(self) -> None:
        self.average = self._landed = None
        self._has_gradient = False
        self.flat[...] = STALE


class Side:
    """A peer's gradients of two parameters, in buckets of their own."""

    def __init__(self, communicator: Communicator, number: int) -> None:
        self.communicator, self.number = communicator, number
        self.begin_anew()

    def begin_anew(self) -> None:
        self.buckets = [ArrayBucket(), ArrayBucket()]
        self.averages = GradientAverages(self.communicator, self.buckets, TAG, Compression(None))  # type: ignore[arg-type]

    def backward(self, order: tuple[int, ...], revision: int) -> None:
        """Complete gradients in this order: 10 times the peer's number and the bucket's, from 1."""
        for i in order:
            self.buckets[i].flat[...] = 10 * self.number + i + 1
            self.averages.take(i, 0, revision)

    def step(self, order: tuple[int, ...], revision: int, weights: dict[int, float] | None = None) -> list[float]:
        """Return what has become of the gradients."""
        own = None if weights is None else weights[self.number]
        self.backward(order, revision)
        self.averages.launch_rest(own, revision)
        peers = self.communicator.membership.peers
        told = {peer: float("nan") if weights is None else weights[i + 1] for i, peer in enumerate(peers)}
        self.averages.settle(self.averages.land(), told, own, revision)
        self.averages.give()
        found = [float(bucket.flat[0]) for bucket in self.buckets]
        assert all(np.all(bucket.flat == value) for bucket, value in zip(self.buckets, found, strict=True))
        self.averages.clear()
        return found


def sides_of(master: MasterNode) -> list[Side]:
    peers = Cluster(master.address).join(2)
    peers.sort(key=lambda peer: peer.membership.rank)
    return [Side(peer, number) for number, peer in enumerate(peers, 1)]


def each(sides: list[Side], *calls: Callable[[Side], Any]) -> list[Any]:
    return together([partial(call, side) for call, side in zip(calls, sides, strict=True)])


def close(sides: list[Side]) -> None:
    together([side.communicator.close for side in sides])


def test_buckets_complete_in_any_order(master: MasterNode) -> None:
    sides = sides_of(master)
    assert each(sides, lambda side: side.step((0, 1), 0), lambda side: side.step((1, 0), 0)) == [[16, 17]] * 2
    close(sides)


def test_unused_parameter_counts_as_zero(master: MasterNode) -> None:
    sides = sides_of(master)
    assert each(sides, lambda side: side.step((0, 1), 0), lambda side: side.step((0,), 0)) == [[16, 6]] * 2
    assert each(sides, lambda side: side.step((1,), 1), lambda side: side.step((1,), 1)) == [[0, 17]] * 2
    close(sides)


def test_newcomer_after_weighted_steps(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(averages: GradientAverages, number: int, i: int, _: int) -> None:
        averages.buckets[number].take(i)  # without torch's callback at the end of the backward pass

    monkeypatch.setattr(GradientAverages, "take", take)
    sides = sides_of(master)
    weights = {1: 3.0, 2: 1.0}
    assert each(sides, *[lambda side: side.step((0, 1), 0, weights)] * 2) == [[13.5, 14.5]] * 2
    assert each(sides, *[lambda side: side.step((0, 1), 1, weights)] * 2) == [[13.5, 14.5]] * 2
    sides[0].averages.forget_weights()
    sides[1].begin_anew()
    assert each(sides, *[lambda side: side.step((0, 1), 2)] * 2) == [[16, 17]] * 2
    close(sides)
