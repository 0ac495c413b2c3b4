"""The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

What a peer's parameters moved by during its inner steps, `outer - local`, is its *pseudo-gradient*. The mean over all
peers is applied to the outer parameters as if it were a gradient, by SGD with Nesterov momentum.

Every operation is one NumPy ufunc over whole vectors: element-wise, correctly rounded, nothing fused, in the default
floating-point environment. So equal inputs give equal bytes on every peer, whatever its CPU and its program.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pccl._floating_point import default_environment
from pccl.training.tensors.replica import Vector


@dataclass(frozen=True, slots=True)
class OuterNesterov:
    """SGD with Nesterov momentum, the outer optimizer. The defaults are the paper's (arXiv:2311.08105). ValueError:
    `learning_rate` is not above 0, or `momentum` not in [0, 1)."""

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate {self.learning_rate}: must be above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum {self.momentum}: must be at least 0 and below 1")

    @default_environment()
    def step(self, parameters: Vector, momentum: Vector, gradient: Vector) -> None:
        """Compute `m = mu * m + g`, then `p -= lr * (g + mu * m)`, in place, over vectors of one dtype and length.

        `gradient` is used as scratch: its contents are lost."""
        momentum *= self.momentum
        momentum += gradient
        gradient += self.momentum * momentum
        gradient *= self.learning_rate
        parameters -= gradient

    @default_environment()
    def look_ahead(self, parameters: Vector, momentum: Vector, gradient: Vector, out: Vector) -> None:
        """Compute where the parameters go by the momentum of the past alone, and by `gradient` as it is: `out = p - lr
        * mu**2 * m - g`. (With the factor of `step`, `lr * (1 + mu) * g`, it would be where that goes.)"""
        np.multiply(momentum, self.learning_rate * self.momentum**2, out=out)
        out += gradient
        np.subtract(parameters, out, out=out)
