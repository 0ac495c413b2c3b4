"""Parameters on a grid, where moving along random signs is exact and can therefore be undone.

Float addition rounds, so `w + a - a` may differ from `w`. Here every element of a tensor is a whole multiple of the
tensor's *quantum*, a power of two, and never exceeds 2**24 quanta, perturbed or not. float32 has 24 bits, so all sums
are exact: a perturbation can be removed without a copy of the weights, and all CPUs compute the same bits.

The price is that small elements have the same absolute precision as large ones of the same tensor. An update's amount,
one number per direction and tensor, is rounded to quanta stochastically, with random numbers that are the same on all
peers. If the next update could exceed the limit, the quantum doubles and elements are rounded to it.

Elements are a NumPy array in memory, or a torch tensor on a device, where torch computes the random signs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl import TensorInfo
from pccl._floating_point import default_environment
from pccl.signs import SUM_MAX, add_signs, sign_words
from pccl.training.state.replica import is_distributed, named_parameters, replica_of

UNITS_MAX = SUM_MAX
HEADROOM = 8
"""How far a tensor's largest element can grow, as a factor, before its grid becomes coarser."""
EPSILONS_MIN = 16
"""The assumed minimum of a tensor's largest element, in perturbations, for tensors that start near zero."""
EXPONENT_MIN = -126
ROUNDING_TENSOR = 2**32 - 1
"""The tensor number for the random numbers used in rounding; no tensor has it."""


class Grid:
    """Flat, contiguous tensors on their grids, at *home* or displaced for an evaluation. Not thread-safe."""

    @default_environment()
    def __init__(self, tensors: Sequence[Tensor | Elements], epsilon: float, seed: int) -> None:
        """Choose the quanta and round elements and `epsilon` to them. Raises ValueError for unsuitable elements."""
        self._tensors = [HostElements(each) if isinstance(each, np.ndarray) else each for each in tensors]
        self._epsilon = epsilon
        self._seed = seed
        self.exponents: NDArray[np.int32] = np.zeros(len(self._tensors), np.int32)
        """The base-2 exponents of the quanta, which peers share together with the elements."""
        self._bounds = [0] * len(self._tensors)
        self._away: dict[int, int] = {}
        """The displacement of the tensors: the number of perturbations along each direction, +1 or -1."""
        self._away_step = 0
        self._is_torn = False
        for t in range(len(self._tensors)):
            self._settle(t)

    @default_environment()
    def adopt(self) -> None:
        """Continue from elements and exponents that were overwritten with another peer's."""
        self._is_torn = False
        self._away = {}
        self._bounds = [self._largest(t) for t in range(len(self._tensors))]

    @property
    def is_home(self) -> bool:
        return not self._away and not self._is_torn

    def require_home(self) -> None:
        """Raise RuntimeError if a pass was interrupted."""
        if self._is_torn:
            raise RuntimeError("an earlier call was interrupted while it moved the parameters: load or reconnect")
        assert not self._away

    @default_environment()
    def displace(self, step: int, factors: Mapping[int, int]) -> None:
        """Move to home plus `factors` perturbations along each direction of a step; {} is home."""
        assert not self._away or step == self._away_step
        moves = {d: factors.get(d, 0) - self._away.get(d, 0) for d in {**self._away, **factors}}
        self._pass(step, [{d: factor * reach for d, factor in moves.items()} for reach in self._reaches()])
        self._away = {d: factor for d, factor in factors.items() if factor}
        self._away_step = step

    def come_home(self) -> None:
        """Move the tensors home. After an interrupted pass, only `adopt` can restore them."""
        if self._away and not self._is_torn:
            self.displace(self._away_step, {})

    @default_environment()
    def update(self, step: int, coefficients: Mapping[int, float]) -> None:
        """Move home by the coefficients along each direction. Raises OverflowError if training has diverged."""
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
        if self._is_torn:
            raise RuntimeError("an earlier call was interrupted while it moved the parameters: load or reconnect")
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
        return round(math.ldexp(self._epsilon, -int(self.exponents[t])))

    def _reaches(self) -> list[int]:
        return [self._reach(t) for t in range(len(self._tensors))]

    def _amounts(self, t: int, step: int, coefficients: Mapping[int, float]) -> dict[int, int]:
        """Return the coefficients in quanta, each rounded up or down at random."""
        amounts = {}
        for direction, coefficient in coefficients.items():
            words = sign_words(seed=self._seed, tensor=ROUNDING_TENSOR, step=step, direction=direction, block=t)
            quanta = math.ldexp(coefficient, -int(self.exponents[t]))
            amounts[direction] = math.floor(quanta + math.ldexp(words[0], -32))
        return amounts

    def _has_room(self, t: int, amounts: Mapping[int, int]) -> bool:
        """Return whether this update and a perturbation before and after it are certain to be exact."""
        return self._bounds[t] + _total(amounts) + self._reach(t) <= UNITS_MAX

    def _ensure_room(self, t: int, step: int, coefficients: Mapping[int, float]) -> dict[int, int]:
        """Measure the elements, make the grid coarser as needed, and return the amounts."""
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
        within = exponent - (mantissa == 0.5)  # the exponent of the smallest power of two that is at least as large
        self.exponents[t] = max(within - UNITS_MAX.bit_length() + 1, EXPONENT_MIN)
        if self._reach(t) < 1:
            raise ValueError(f"tensor {t} has elements up to {largest:g}: perturbations of {self._epsilon:g} vanish")
        self._tensors[t].round_to(self._quantum(t))
        self._bounds[t] = self._largest(t)

    def _largest(self, t: int) -> int:
        return int(math.ldexp(self._tensors[t].largest(), -int(self.exponents[t])))


def _total(amounts: Mapping[int, int]) -> int:
    return sum(map(abs, amounts.values()))


TORCH_CHUNK = 1 << 22
"""The number of elements per pass, a multiple of those that share a counter. A pass needs about 100 MiB of memory."""
BLOCK = 128
MASK = 2**32 - 1

_checked: set[Any] = set()


def check_signs(torch: Any, device: Any) -> None:
    """Raise ValueError if the device computes different signs than the CPU. Checks each device once."""
    if device in _checked:
        return
    numbers: dict[str, Any] = {"seed": 0xFEDCBA9876543210, "tensor": 2**32 - 2, "step": 7}
    numbers |= {"directions": [0, 2**32 - 1], "amounts": [3, -1]}
    expected = np.zeros(3 * BLOCK + 5, np.float32)
    add_signs(expected, 0.5, **numbers)
    found = torch.zeros(expected.size, dtype=torch.float32, device=device)
    add_torch_signs(torch, found, 0.5, **numbers)
    if not np.array_equal(found.cpu().numpy(), expected):
        raise ValueError(f"{device} computes other random signs than the CPU: train this model on the CPU")
    _checked.add(device)


def add_torch_signs(
    torch: Any,
    values: Any,
    quantum: float,
    *,
    seed: int,
    tensor: int,
    step: int,
    directions: Sequence[int],
    amounts: Sequence[int],
) -> None:
    """Add multiples of random signs in place, with the same bits as `pccl.signs.add_signs`."""
    if sum(map(abs, amounts)) > SUM_MAX:
        raise ValueError(f"amounts {list(amounts)} add up to more than {SUM_MAX} in magnitude")
    shifts = torch.arange(32, dtype=torch.int64, device=values.device)
    for begin in range(0, values.numel(), TORCH_CHUNK):
        part = values[begin : begin + TORCH_CHUNK]
        first = begin // BLOCK
        blocks = torch.arange(first, first - (-part.numel() // BLOCK), dtype=torch.int64, device=values.device)
        total = torch.full((blocks.numel(), 4, 32), sum(amounts), dtype=torch.int64, device=values.device)
        for direction, amount in zip(directions, amounts, strict=True):
            words = torch.stack(_philox(blocks, tensor, step, direction, seed), 1)
            minus = torch.bitwise_right_shift(words.unsqueeze(2), shifts).bitwise_and_(1)
            total.sub_(minus, alpha=2 * amount)
        part.add_(total.view(-1)[: part.numel()].to(torch.float32).mul_(quantum))


def _philox(blocks: Any, tensor: int, step: int, direction: int, seed: int) -> list[Any]:
    """Return four words of 32 bits for each block, as `native/src/signs.c` defines them."""
    c0, c1, c2, c3 = blocks, tensor, step, direction
    key0, key1 = seed & MASK, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32) & MASK ^ c1 ^ key0, product1 & MASK
        c2, c3 = (product0 >> 32) & MASK ^ c3 ^ key1, product0 & MASK
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    # Words that do not depend on the block are plain numbers; after ten rounds all words depend on it.
    return [c0, c1, c2, c3]


Tensor = NDArray[np.float32]

CHUNK = 1 << 16


class HostElements:
    """The elements of a flat array in memory."""

    def __init__(self, array: Tensor) -> None:
        self.array = array
        self.size = array.size

    def largest(self) -> float:
        """Return the largest magnitude, which is not finite if any element is not."""
        return max(float(self.array.max(initial=0)), -float(self.array.min(initial=0)))

    def round_to(self, quantum: float) -> None:
        """Round to whole quanta (a power of two), half to even; -0 becomes 0."""
        factor, per_quantum = np.float32(quantum), np.float32(1 / quantum)
        for begin in range(0, self.size, CHUNK):
            part = self.array[begin : begin + CHUNK]
            part *= per_quantum
            np.rint(part, out=part)
            part *= factor
            part += np.float32(0)

    def add_signs(self, quantum: float, **numbers: Any) -> None:
        """Add multiples of random signs: see `pccl.signs.add_signs`."""
        add_signs(self.array, quantum, **numbers)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.from_numpy(self.array, name)

    def numpy(self) -> Tensor:
        return self.array

    def assign(self, values: Tensor) -> None:
        self.array[...] = values


class TorchElements:
    """The elements of a flat torch tensor on any device, accessed in this thread's current stream."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        """Raises ValueError like `check_signs`."""
        self._torch = torch
        self._tensor = tensor
        self.size = tensor.numel()
        check_signs(torch, tensor.device)

    def largest(self) -> float:
        if self.size == 0:
            return 0.0
        return max(float(self._tensor.max()), -float(self._tensor.min()))

    def round_to(self, quantum: float) -> None:
        self._tensor.mul_(1 / quantum).round_().mul_(quantum).add_(0.0)

    def add_signs(self, quantum: float, **numbers: Any) -> None:
        add_torch_signs(self._torch, self._tensor, quantum, **numbers)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.from_torch(self._tensor, name)

    def numpy(self) -> Tensor:
        found: Tensor = self._tensor.cpu().numpy()
        return found

    def assign(self, values: Tensor) -> None:
        self._tensor.copy_(self._torch.from_numpy(values))


Elements: TypeAlias = HostElements | TorchElements


def tensors_of(model: Any) -> tuple[dict[str, Elements], str]:
    """Return the non-empty float32 parameters by name, and the layout. Raises TypeError, ValueError."""
    layout = replica_of(model).layout
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        tensors = {name: _of_torch(torch, name, p) for name, p in named_parameters(model).items() if p.requires_grad}
    else:
        tensors = {name: _of_numpy(name, array) for name, array in model.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.size}, layout


def _of_torch(torch: Any, name: str, parameter: Any) -> Elements:
    if is_distributed(parameter):
        raise ValueError(f"parameter {name!r} is a distributed tensor; only whole ones are trained in place")
    _require_plain(name, parameter.dtype, parameter.dtype is torch.float32, parameter.is_contiguous())
    flat = parameter.detach().view(-1)
    kind = kind_of_place(flat)
    if kind == "cpu":
        return HostElements(flat.numpy())
    if kind != "cuda":
        raise ValueError(f"parameter {name!r} is on {flat.device}; only the CPU and CUDA devices are supported")
    return TorchElements(torch, flat)


def kind_of_place(tensor: Any) -> str:
    return str(tensor.device.type)


def _of_numpy(name: str, array: NDArray[Any]) -> Elements:
    _require_plain(name, array.dtype, array.dtype == np.float32, array.flags.c_contiguous)
    return HostElements(array.reshape(-1))


def _require_plain(name: str, dtype: Any, is_float32: bool, is_contiguous: bool) -> None:
    if not is_float32 or not is_contiguous:
        what = f"{dtype}{'' if is_contiguous else ', not contiguous'}"
        raise ValueError(f"parameter {name!r} is {what}; only contiguous float32 is trained in place")
