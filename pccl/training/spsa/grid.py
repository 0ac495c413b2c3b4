"""Parameters on a grid, where moving along random signs is exact, and so can be undone.

Theory of operation. Float addition rounds: `w + a - a` is not `w`. Peers that evaluate different perturbations of the
same weights would each come back with another residue, and drift apart. Here nothing is ever rounded on the way, by
choice of the numbers: every element of a tensor is a whole multiple of the tensor's *quantum*, a power of two, and no
element, perturbed or not, exceeds 2**24 quanta. float32 has 24 bits, so all such numbers are representable, and sums of
them are exact. Hence

- a perturbation is taken away again to the last bit, without a copy of the weights;
- the order in which contributions are added is of no consequence, nor is fused multiplication or vectorization: all
  CPUs get the same bits;
- perturbing, coming back, and updating along many directions can be one pass over memory (`pccl.signs`).

*The price* is that small elements have no more digits after the point than large ones of the same tensor: the quantum
is at first 2**-21 of the largest one, about. An update's amount is a single number for a direction and a tensor. It
is rounded to quanta at random, up or down in proportion, so that its mean is right even far below one quantum; the
random number is of the same generator, and thus the same on all peers.

*When elements grow*, the grid is made coarser: the quantum doubles, and the elements are rounded to it, to nearest and
even. It happens only where the next update could otherwise exceed the limit; `_ensure_room` says when, a function of
elements and amounts alone. So all peers do the same at the same step, also one that has just received its elements from
others. Beside the elements the exponents of the quanta are all there is to share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pccl._floating_point import default_environment
from pccl.signs import SUM_MAX, sign_words
from pccl.training.spsa.elements import Elements, HostElements, Tensor

UNITS_MAX = SUM_MAX
"""No element is ever larger, in quanta: 2**24."""
HEADROOM = 8
"""The factor by which the largest element of a tensor may grow before its grid is made coarser."""
EPSILONS_MIN = 16
"""The least that counts as the largest element, in perturbations: for a tensor that is zero at first."""
EXPONENT_MIN = -126
ROUNDING_TENSOR = 2**32 - 1
"""The tensor number from which random numbers for rounding are taken; no tensor has it."""


class Grid:
    """Tensors, flat and contiguous, that live on their grids from now on. Not thread-safe.

    They are at *home*, or displaced by signed perturbations for an evaluation; whoever reads or sends them must have
    brought them home before.
    """

    @default_environment()
    def __init__(self, tensors: Sequence[Tensor | Elements], epsilon: float, seed: int) -> None:
        """Chooses the quanta and rounds the elements to them. `epsilon` is the perturbation's size, which is rounded to
        quanta as well, the same for all peers.

        ValueError: an element is not finite, or too large for the perturbation to matter.
        """
        self._tensors = [HostElements(each) if isinstance(each, np.ndarray) else each for each in tensors]
        self._epsilon = epsilon
        self._seed = seed
        self.exponents: NDArray[np.int32] = np.zeros(len(self._tensors), np.int32)
        """The exponents of the quanta, base 2. Together with the elements this is what peers share."""
        self._bounds = [0] * len(self._tensors)
        """No element at home is larger than this, in quanta; may be more than the largest."""
        self._away: dict[int, int] = {}
        """The displacement of the tensors: perturbations by direction, each +1 or -1 of them."""
        self._away_step = 0
        self._is_torn = False
        for t in range(len(self._tensors)):
            self._settle(t)

    @default_environment()
    def adopt(self) -> None:
        """Take up elements and exponents that have been overwritten with another peer's."""
        self._is_torn = False
        self._away = {}
        self._bounds = [self._largest(t) for t in range(len(self._tensors))]

    @property
    def is_home(self) -> bool:
        return not self._away and not self._is_torn

    def require_home(self) -> None:
        """RuntimeError after an interrupted pass."""
        if self._is_torn:
            raise RuntimeError("a former call was interrupted while it moved the parameters: load or reconnect")
        assert not self._away

    @default_environment()
    def displace(self, step: int, factors: Mapping[int, int]) -> None:
        """Goes to where, beside home, so many perturbations are added in each direction of a step; {} is home."""
        assert not self._away or step == self._away_step
        moves = {d: factors.get(d, 0) - self._away.get(d, 0) for d in {**self._away, **factors}}
        self._pass(step, [{d: factor * reach for d, factor in moves.items()} for reach in self._reaches()])
        self._away = {d: factor for d, factor in factors.items() if factor}
        self._away_step = step

    def come_home(self) -> None:
        """Move the tensors home from wherever they are. If a pass was interrupted nobody knows where: then nothing else
        can be done with the grid before `adopt`."""
        if self._away and not self._is_torn:
            self.displace(self._away_step, {})

    @default_environment()
    def update(self, step: int, coefficients: Mapping[int, float]) -> None:
        """Home moves by so much along each direction of the step, and the tensors come home, in one pass.

        OverflowError: elements have grown so large that a perturbation is below a quantum. Training has diverged.
        """
        assert not self._away or step == self._away_step
        amounts = [self._amounts(t, step, coefficients) for t in range(len(self._tensors))]
        tight = [t for t, each in enumerate(amounts) if not self._has_room(t, each)]
        if tight:
            self.displace(step, {})
        for t in tight:
            amounts[t] = self._ensure_room(t, step, coefficients)
        for t, each in enumerate(amounts):
            self._bounds[t] += _total(each)
        moves = []
        for each, reach in zip(amounts, self._reaches(), strict=True):
            back = {d: -factor * reach for d, factor in self._away.items()}
            moves.append({d: each.get(d, 0) + back.get(d, 0) for d in {**each, **back}})
        self._pass(step, moves)
        self._away = {}

    def _pass(self, step: int, moves: Sequence[Mapping[int, int]]) -> None:
        """Adds, to each tensor, so many quanta along each direction."""
        if self._is_torn:
            raise RuntimeError("a former call was interrupted while it moved the parameters: load or reconnect")
        self._is_torn = True
        for t, (tensor, each) in enumerate(zip(self._tensors, moves, strict=True)):
            numbers = {"seed": self._seed, "tensor": t, "step": step}
            directions = [d for d, amount in each.items() if amount]
            if directions:
                amounts = [each[d] for d in directions]
                tensor.add_signs(self._quantum(t), **numbers, directions=directions, amounts=amounts)
        self._is_torn = False

    def _quantum(self, t: int) -> float:
        return math.ldexp(1.0, int(self.exponents[t]))

    def _reach(self, t: int) -> int:
        """The perturbation in quanta."""
        return round(math.ldexp(self._epsilon, -int(self.exponents[t])))

    def _reaches(self) -> list[int]:
        return [self._reach(t) for t in range(len(self._tensors))]

    def _amounts(self, t: int, step: int, coefficients: Mapping[int, float]) -> dict[int, int]:
        """The coefficients in quanta, each rounded up or down at random."""
        amounts = {}
        for direction, coefficient in coefficients.items():
            words = sign_words(seed=self._seed, tensor=ROUNDING_TENSOR, step=step, direction=direction, block=t)
            quanta = math.ldexp(coefficient, -int(self.exponents[t]))
            amounts[direction] = math.floor(quanta + math.ldexp(words[0], -32))
        return amounts

    def _has_room(self, t: int, amounts: Mapping[int, int]) -> bool:
        """Whether this update, and a perturbation before and after it, is sure to be exact."""
        return self._bounds[t] + _total(amounts) + self._reach(t) <= UNITS_MAX

    def _ensure_room(self, t: int, step: int, coefficients: Mapping[int, float]) -> dict[int, int]:
        """Looks how large the elements are, and makes the grid coarser as often as it takes. Returns the amounts."""
        self._bounds[t] = self._largest(t)
        while not self._has_room(t, amounts := self._amounts(t, step, coefficients)):
            self.exponents[t] += 1
            if self._reach(t) < 1:
                raise OverflowError(
                    f"tensor {t} has grown so large that perturbations of {self._epsilon:g} vanish: training diverges"
                )
            self._tensors[t].round_to(self._quantum(t))
            self._bounds[t] = round(self._bounds[t] / 2)
        return amounts

    def _settle(self, t: int) -> None:
        largest = self._tensors[t].largest()
        if not math.isfinite(largest):
            raise ValueError(f"tensor {t} has elements that are not finite")
        mantissa, exponent = math.frexp(HEADROOM * max(largest, EPSILONS_MIN * self._epsilon))
        within = exponent - (mantissa == 0.5)  # the least power of two that is no less
        self.exponents[t] = max(within - UNITS_MAX.bit_length() + 1, EXPONENT_MIN)
        if self._reach(t) < 1:
            raise ValueError(f"tensor {t} has elements up to {largest:g}: perturbations of {self._epsilon:g} vanish")
        self._tensors[t].round_to(self._quantum(t))
        self._bounds[t] = self._largest(t)

    def _largest(self, t: int) -> int:
        return int(math.ldexp(self._tensors[t].largest(), -int(self.exponents[t])))


def _total(amounts: Mapping[int, int]) -> int:
    return sum(map(abs, amounts.values()))
