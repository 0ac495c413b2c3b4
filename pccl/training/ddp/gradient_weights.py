"""Averages of gradients in which peers count by weights, such as the tokens of their batches.

Theory of operation. The mean of a bucket is `sum(w * x) / sum(w)` over the peers of the average: an all-reduce of each
peer's gradients times `w / 2**e`, divided by the sum of these factors. What a peer's batch counts is known after its
backward pass, and is told to the others with its objections (`pccl.training.group.veto`). *How* buckets are launched,
as plain averages (None) or as weighted sums with the exponent `e`, is the same on all peers before each step. Once all
have heard all weights they *settle* it: where the step needs another way than the one they were launched in, all
buckets are launched again, and go on in that way in the next step.

1. *All peers decide alike*, because they decide on what committed ops have told: the weights by peer, and the peers of
   each average. After an admission all begin with plain averages, which newcomers know of themselves.
2. *The weights are those of the gradients.* Nobody is admitted in between, so who is in an average and not among the
   peers whose weights are known has been lost since; all launch that bucket again, until its peers are among these.
   The gradients stay as they were, the sums arrive in memory of their own.
3. *All divide the same bytes by the same number*, in float64, in the default floating-point environment.
4. *Weights do not overflow.* `2**e` is the power of two above the largest weight, up to 16 times as much, so no product
   is larger than the gradient; where it is not, buckets are launched again.

So a first weighted step, one after an admission, and one without weights after others with them, send all gradients
twice; the others once, after the backward pass instead of during it.

Precision: a product is rounded once to the gradients' dtype, the sum as the engine does, the quotient once. Weight 0
leaves a peer out, whatever its gradients are. If all weights are 0, so is the mean. What is not finite stays so, as in
a plain average, for a GradScaler to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from pccl.training.group.membership import Averaged

EXPONENT_SLACK = 4
"""The most by which an exponent may be larger than a step needs: weights vary, and launching again costs a step's
time."""


class Averageable(Protocol):
    """A bucket (`pccl.training.ddp.gradient_buckets`)."""

    def land(self) -> Averaged: ...
    def divide(self, total: float) -> None: ...
    def keep_none(self) -> None: ...


def factor_of(weight: float, exponent: int) -> float:
    return math.ldexp(weight, -exponent)


def way_of(weights: Mapping[int, float], used: int | None) -> int | None:
    """Return how buckets are to be launched, as an exponent or None for plain averages, where peers gave these weights
    (all NaN: none was given) and buckets were launched with `used`."""
    if any(math.isnan(weight) for weight in weights.values()):
        return None
    largest = max(weights.values())
    if largest == 0:
        return used or 0
    needed = math.frexp(largest)[1]
    return used if used is not None and needed <= used <= needed + EXPONENT_SLACK else needed


def settle(
    buckets: Sequence[Averageable],
    averages: Sequence[Averaged],
    weights: Mapping[int, float],
    used: int | None,
    launch: Callable[[int, int | None], None],
) -> tuple[list[Averaged], int | None]:
    """Makes what the buckets hold the mean that the weights ask for, and returns what became of each, with how to
    launch the next ones. `averages` is what became of them, launched with `used`; `launch(number, exponent)` launches
    one again. All peers call it. PCCLError for anything but losses."""
    way = way_of(weights, used)
    done = list(averages)
    if way != used:
        for number in range(len(buckets)):
            launch(number, way)
        done = [_with_cost(bucket.land(), former) for bucket, former in zip(buckets, done, strict=True)]
    if way is None:
        return done, None
    for number, bucket in enumerate(buckets):
        while not weights.keys() >= {*done[number].peers}:
            launch(number, way)
            done[number] = _with_cost(bucket.land(), done[number], 1)
        total = math.fsum(factor_of(weights[peer], way) for peer in done[number].peers)
        if total == 0:
            bucket.keep_none()
        elif done[number].world_size > 1:
            bucket.divide(total)
    return done, way


def _with_cost(averaged: Averaged, former: Averaged, aborted: int = 0) -> Averaged:
    return replace(
        averaged,
        aborted=averaged.aborted + former.aborted + aborted,
        tx_bytes=averaged.tx_bytes + former.tx_bytes,
        rx_bytes=averaged.rx_bytes + former.rx_bytes,
    )
