"""The inner optimizer of the demo: AdamW, in place on flat vectors, and the schedule of its learning rate.

Its moments stay on their peer and are never reduced; a newcomer starts with empty ones and warms up. The outer
optimizer, whose momentum belongs to the shared state, is `pccl.training`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

import numpy as np

from pccl.demo.model import Floats

WARM_UP_STEPS = 20


@dataclass(frozen=True)
class AdamWOptions:
    """The inner optimizer's constants."""

    learning_rate: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-8
    weight_decay: float = 0.01


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) and a short linear warm-up of its own."""

    def __init__(self, like: Floats, options: AdamWOptions = AdamWOptions()) -> None:
        self.options = options
        self._steps = 0
        self._mean = np.zeros_like(like)
        self._square = np.zeros_like(like)
        self._scratch = np.zeros_like(like)

    def step(self, parameters: Floats, gradient: Floats, scale: float = 1.0) -> None:
        """Make one step on `parameters`, in place. `scale` is the schedule's factor on the learning rate.

        `gradient` is used as scratch: its contents are lost.
        """
        o = self.options
        self._steps += 1
        rate = o.learning_rate * scale * min(1.0, self._steps / WARM_UP_STEPS)
        unbias1 = 1 - o.beta1**self._steps
        unbias2 = 1 - o.beta2**self._steps
        mean, square, scratch = self._mean, self._square, self._scratch

        np.multiply(gradient, 1 - o.beta1, out=scratch)
        mean *= o.beta1
        mean += scratch
        np.multiply(gradient, gradient, out=gradient)
        gradient *= 1 - o.beta2
        square *= o.beta2
        square += gradient

        # rate * (mean / unbias1) / (sqrt(square / unbias2) + epsilon), with the scalars gathered
        np.sqrt(square, out=scratch)
        scratch += o.epsilon * unbias2**0.5
        np.divide(mean, scratch, out=scratch)
        scratch *= rate * unbias2**0.5 / unbias1
        parameters *= 1 - rate * o.weight_decay
        parameters -= scratch


def cosine_scale(done: float, floor: float = 0.05) -> float:
    """Return the factor on the inner learning rate after the fraction `done` (0 to 1) of the run: 1 down to `floor`."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(max(done, 0.0), 1.0)))
