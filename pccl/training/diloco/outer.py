"""Outer optimizers: what each peer applies to the outer parameters, from the average of all pseudo-gradients.

All peers apply the same update to the same state, so it must have the same bits everywhere. Each operation is one NumPy
ufunc over whole vectors in the default floating-point environment: add, subtract, multiply, divide, square root,
minimum and maximum. IEEE 754 requires correct rounding of these in float32 and float64, so SIMD widths and CPUs do not
matter. Sums, norms and powers are not among them.

SGD is `OuterNesterov(learning_rate, momentum=0)`, and averaging of parameters (FedAvg) is `OuterNesterov(1, 0)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from pccl._floating_point import default_environment
from pccl.training.state.replica import Vector


def _require(is_valid: bool, name: str, value: float, what: str) -> None:
    if not is_valid:
        raise ValueError(f"{name} {value}: must be {what}")


class OuterOptimizer(ABC):
    """An outer optimizer. Its `repr` must name all settings, because peers compare it."""

    def state(self, parameters: Vector) -> Vector:
        """Return the initial state, the same on all peers: a vector like the parameters, or several as rows."""
        return np.zeros_like(parameters)

    def at(self, step: int) -> OuterOptimizer:
        """Return the optimizer of outer step `step`, from 0, for a schedule. The result may depend on the step and the
        settings in `repr` alone, and has this optimizer's kind of state. It may be asked for several times."""
        return self

    @abstractmethod
    def step(self, parameters: Vector, state: Vector, gradient: Vector) -> None:
        """Update parameters and state in place. `gradient` is used as scratch."""

    @default_environment()
    def look_ahead(self, parameters: Vector, state: Vector, gradient: Vector, out: Vector) -> None:
        """Set `out` to the parameters moved by the past momentum and by the unscaled `gradient`."""
        np.copyto(out, parameters)
        self.step(out, state.copy(), np.zeros_like(gradient))
        out -= gradient


@dataclass(frozen=True, slots=True)
class OuterNesterov(OuterOptimizer):
    """SGD with Nesterov momentum, the default. The default settings are DiLoCo's (arXiv:2311.08105).

    Raises ValueError if `learning_rate` is not above 0 or `momentum` is not in [0, 1).
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")

    @default_environment()
    def step(self, parameters: Vector, state: Vector, gradient: Vector) -> None:
        """Compute `m = mu * m + g`, then `p -= lr * (g + mu * m)`, in place. `gradient` is used as scratch."""
        momentum = state
        momentum *= self.momentum
        momentum += gradient
        gradient += self.momentum * momentum
        gradient *= self.learning_rate
        parameters -= gradient

    @default_environment()
    def look_ahead(self, parameters: Vector, state: Vector, gradient: Vector, out: Vector) -> None:
        """Compute `out = p - lr * mu**2 * m - g`: apply the past momentum and the unscaled `gradient`."""
        np.multiply(state, self.learning_rate * self.momentum**2, out=out)
        out += gradient
        np.subtract(parameters, out, out=out)


@dataclass(frozen=True, slots=True)
class OuterMomentum(OuterOptimizer):
    """SGD with heavy-ball momentum, as in SlowMo (Wang et al. 2019, arXiv:1910.00643), and clipped as in CO2 (Sun et
    al. 2024, arXiv:2401.16265): each element of the momentum is limited to `clip` in magnitude.

    CO2's staleness penalty divides each gradient. If it is constant, as in the authors' program, it is the same as
    `learning_rate` divided and `clip` multiplied by it. Raises ValueError for settings outside of their ranges.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    clip: float = math.inf

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "at least 0 and below 1")
        _require(self.clip > 0, "clip", self.clip, "above 0")

    @default_environment()
    def step(self, parameters: Vector, state: Vector, gradient: Vector) -> None:
        """Compute `m = clip(mu * m + g)`, then `p -= lr * m`, in place. `gradient` is used as scratch."""
        state *= self.momentum
        state += gradient
        np.clip(state, -self.clip, self.clip, out=state)
        np.multiply(state, self.learning_rate, out=gradient)
        parameters -= gradient


@dataclass(frozen=True, slots=True)
class OuterAdam(OuterOptimizer):
    """FedAdam (Reddi et al. 2020, arXiv:2003.00295): Adam without bias correction, with `tau` for epsilon.

    Its state are two vectors. Raises ValueError for settings outside of their ranges.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("learning_rate", "tau"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")

    def state(self, parameters: Vector) -> Vector:
        """Return zeros, and `tau**2` for the mean square, which the paper asks for as the minimum."""
        state = np.zeros((2, *parameters.shape), parameters.dtype)
        state[1] = self.tau * self.tau
        return state

    @default_environment()
    def step(self, parameters: Vector, state: Vector, gradient: Vector) -> None:
        """Compute `m = b1 * m + (1 - b1) * g`, `v = b2 * v + (1 - b2) * g * g` and `p -= lr * m / (sqrt(v) + tau)`."""
        mean, square = state
        mean *= self.beta1
        mean += (1 - self.beta1) * gradient
        np.multiply(gradient, gradient, out=gradient)
        gradient *= 1 - self.beta2
        square *= self.beta2
        square += gradient
        np.sqrt(square, out=gradient)
        gradient += self.tau
        np.divide(mean, gradient, out=gradient)
        gradient *= self.learning_rate
        parameters -= gradient
