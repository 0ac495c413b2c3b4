"""The elements of one parameter, flat float32 where they are: what training in place does with them.

In memory they are a NumPy array, on a device a torch tensor. All that changes them is exact, or rounds as IEEE 754
says, so both get the same bits (`pccl.training.spsa.grid` says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pccl import TensorInfo
from pccl.signs import add_signs
from pccl.training.spsa import torch_signs

Tensor = NDArray[np.float32]

CHUNK = 1 << 16
"""Elements that are worked on while they are in the cache."""


class Elements(Protocol):
    size: int

    def largest(self) -> float:
        """The largest magnitude, 0 where there is none; not finite if any element is not."""

    def round_to(self, quantum: float) -> None:
        """Round to whole quanta (a power of two), to nearest and even; -0 becomes 0."""

    def add_signs(
        self, quantum: float, *, seed: int, tensor: int, step: int, directions: Sequence[int], amounts: Sequence[int]
    ) -> None:
        """Add multiples of random signs, as `pccl.signs.add_signs` does."""

    def info(self, name: str) -> TensorInfo:
        """Return the elements as a tensor of a shared state."""

    def numpy(self) -> Tensor:
        """The elements themselves or a copy."""

    def assign(self, values: Tensor) -> None: ...


class HostElements:
    def __init__(self, array: Tensor) -> None:
        self.array = array
        self.size = array.size

    def largest(self) -> float:
        return max(float(self.array.max(initial=0)), -float(self.array.min(initial=0)))

    def round_to(self, quantum: float) -> None:
        factor, per_quantum = np.float32(quantum), np.float32(1 / quantum)
        for begin in range(0, self.size, CHUNK):
            part = self.array[begin : begin + CHUNK]
            part *= per_quantum
            np.rint(part, out=part)
            part *= factor
            part += np.float32(0)

    def add_signs(
        self, quantum: float, *, seed: int, tensor: int, step: int, directions: Sequence[int], amounts: Sequence[int]
    ) -> None:
        add_signs(self.array, quantum, seed=seed, tensor=tensor, step=step, directions=directions, amounts=amounts)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.from_numpy(self.array, name)

    def numpy(self) -> Tensor:
        return self.array

    def assign(self, values: Tensor) -> None:
        self.array[...] = values


class TorchElements:
    """The elements of a flat torch tensor on any device, in the order of this thread's current stream there."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        """ValueError if the device makes other signs than `pccl.signs` says."""
        self._torch = torch
        self._tensor = tensor
        self.size = tensor.numel()
        torch_signs.check(torch, tensor.device)

    def largest(self) -> float:
        if self.size == 0:
            return 0.0
        return max(float(self._tensor.max()), -float(self._tensor.min()))

    def round_to(self, quantum: float) -> None:
        self._tensor.mul_(1 / quantum).round_().mul_(quantum).add_(0.0)

    def add_signs(
        self, quantum: float, *, seed: int, tensor: int, step: int, directions: Sequence[int], amounts: Sequence[int]
    ) -> None:
        numbers = {"seed": seed, "tensor": tensor, "step": step}
        torch_signs.add_signs(self._torch, self._tensor, quantum, **numbers, directions=directions, amounts=amounts)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.from_torch(self._tensor, name)

    def numpy(self) -> Tensor:
        found: Tensor = self._tensor.cpu().numpy()
        return found

    def assign(self, values: Tensor) -> None:
        self._tensor.copy_(self._torch.from_numpy(values))
