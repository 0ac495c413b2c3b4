"""Weighted averages of gradients, settled without a network: the form that peers launch, and the peers in each."""

from __future__ import annotations

import math

import pytest

from pccl.training.ddp.gradients import EXPONENT_SLACK, factor_of, form_of, settle_buckets
from pccl.training.group.relaunch import Outcome


class Scripted:
    """A bucket whose averages are of the peers that are said."""

    def __init__(self, values: dict[int, float], worlds: list[int]) -> None:
        self.values, self.worlds = values, worlds
        self.weights: dict[int, float] = {}
        self.exponent: int | None = None
        self.mean = math.nan

    def land(self) -> Outcome:
        peers = tuple(range(self.worlds.pop(0)))
        factors = [1.0 if self.exponent is None else factor_of(self.weights[peer], self.exponent) for peer in peers]
        self.mean = sum(f * self.values[peer] for f, peer in zip(factors, peers, strict=True))
        if self.exponent is None:
            self.mean /= len(peers)
        elif len(peers) == 1:
            self.mean = self.values[0]
        return Outcome(len(peers), 0, 1, 1, peers)

    def divide(self, total: float) -> None:
        self.mean /= total

    def keep_none(self) -> None:
        self.mean = 0.0


WEIGHTS = {0: 3.0, 1: 5.0, 2: 100.0}
VALUES = {0: 1.0, 1: 2.0, 2: 7.0}


@pytest.mark.parametrize("used", [None, 7, 9])
@pytest.mark.parametrize(
    ("worlds", "told", "left"),
    [([3], 3, 3), ([3, 2], 2, 2), ([2], 3, 2), ([3, 1], 2, 1), ([3, 3, 1], 2, 1)],
    ids=["no loss", "lost after the sum", "lost after the weights", "both, one after the other", "late"],
)
def test_loss_between_sums_and_weights(worlds: list[int], told: int, left: int, used: int | None) -> None:
    weights = {peer: WEIGHTS[peer] for peer in range(told)}
    bucket = Scripted(VALUES, [*worlds] if form_of(weights, used) == used else [3, *worlds])
    bucket.weights, bucket.exponent = WEIGHTS, used

    def launch(number: int, exponent: int | None) -> None:
        assert number == 0
        bucket.exponent = exponent

    (averaged,), form = settle_buckets([bucket], [bucket.land()], weights, used, launch)
    assert not bucket.worlds
    assert averaged.world_size == left
    expected = sum(WEIGHTS[peer] * VALUES[peer] for peer in range(left)) / sum(WEIGHTS[peer] for peer in range(left))
    assert bucket.mean == pytest.approx(expected, rel=1e-15)
    assert form is not None
    assert max(weights.values()) / 2.0**form < 1


@pytest.mark.parametrize(
    ("weights", "used", "form"),
    [
        ([3.0, 100.0], None, 7),
        ([3.0, 100.0], 7, 7),
        ([3.0, 100.0], 6, 7),
        ([3.0, 100.0], 7 + EXPONENT_SLACK, 7 + EXPONENT_SLACK),
        ([3.0, 100.0], 8 + EXPONENT_SLACK, 7),
        ([128.0], 7, 8),
        ([0.0, 0.0], None, 0),
        ([0.0, 0.0], 5, 5),
        ([math.nan, math.nan], 5, None),
    ],
)
def test_buckets_relaunch_for_new_exponent(weights: list[float], used: int | None, form: int | None) -> None:
    assert form_of(dict(enumerate(weights)), used) == form
    if form is not None:
        assert all(factor_of(weight, form) < 1 for weight in weights)
