"""The elements of one parameter, flat float32: a NumPy array in memory, or a torch tensor on a device.

All changes are exact or round as IEEE 754 does, so both get the same bits (`pccl.training.spsa.grid`). On a device the
random signs of `pccl.signs` are made by torch: Philox4x32-10 in 64-bit integers, whose lower 64 bits of a product are
exact; the sign that shifts bring in is masked out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl import TensorInfo
from pccl.signs import SUM_MAX, add_signs
from pccl.training.state.replica import is_distributed, replica_of

TORCH_CHUNK = 1 << 22
"""Elements in a pass, with some 100 MiB of temporaries; a multiple of those that share a counter."""
BLOCK = 128
MASK = 2**32 - 1

_checked: set[Any] = set()


def check_signs(torch: Any, device: Any) -> None:
    """Raise ValueError if the device computes other signs than the CPU. Checks each device once."""
    if device in _checked:
        return
    numbers: dict[str, Any] = {"seed": 0xFEDCBA9876543210, "tensor": 2**32 - 2, "step": 7}
    numbers |= {"directions": [0, 2**32 - 1], "amounts": [3, -1]}
    expected = np.zeros(3 * BLOCK + 5, np.float32)
    add_signs(expected, 0.5, **numbers)
    found = torch.zeros(expected.size, dtype=torch.float32, device=device)
    add_torch_signs(torch, found, 0.5, **numbers)
    if not np.array_equal(found.cpu().numpy(), expected):
        raise ValueError(f"{device} computes other random signs than the CPU: this model can only be trained there")
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
    """Add multiples of random signs to a flat float32 tensor, the same bits as `pccl.signs.add_signs`. Raises as
    that."""
    if sum(map(abs, amounts)) > SUM_MAX:
        raise ValueError(f"amounts {list(amounts)} sum up to more than {SUM_MAX} in magnitude")
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
    # While they depend on no block, words are numbers; after ten rounds all of them do.
    return [c0, c1, c2, c3]


Tensor = NDArray[np.float32]

CHUNK = 1 << 16
"""Elements that are computed while they are in the cache."""


class HostElements:
    """The elements of a flat array in memory."""

    def __init__(self, array: Tensor) -> None:
        self.array = array
        self.size = array.size

    def largest(self) -> float:
        """Return the largest magnitude; not finite if any element is not."""
        return max(float(self.array.max(initial=0)), -float(self.array.min(initial=0)))

    def round_to(self, quantum: float) -> None:
        """Round to whole quanta (a power of two), to nearest and even; -0 becomes 0."""
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
    """The elements of a flat torch tensor on any device, in the order of this thread's current stream."""

    def __init__(self, torch: Any, tensor: Any) -> None:
        """Raises ValueError as `check_signs`."""
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

    def add_signs(
        self, quantum: float, *, seed: int, tensor: int, step: int, directions: Sequence[int], amounts: Sequence[int]
    ) -> None:
        numbers = {"seed": seed, "tensor": tensor, "step": step}
        add_torch_signs(self._torch, self._tensor, quantum, **numbers, directions=directions, amounts=amounts)

    def info(self, name: str) -> TensorInfo:
        return TensorInfo.from_torch(self._tensor, name)

    def numpy(self) -> Tensor:
        found: Tensor = self._tensor.cpu().numpy()
        return found

    def assign(self, values: Tensor) -> None:
        self._tensor.copy_(self._torch.from_numpy(values))


Elements: TypeAlias = HostElements | TorchElements


def tensors_of(model: Any) -> tuple[dict[str, Elements], str]:
    """Return the float32 parameters by name, without empty ones, and the layout: equal on all peers.

    Of a torch module, those that require gradients; it must keep its tensors. Raises TypeError, ValueError: it cannot
    be trained.
    """
    layout = replica_of(model).layout
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        tensors = {name: _of_torch(torch, name, p) for name, p in model.named_parameters() if p.requires_grad}
    else:
        tensors = {name: _of_numpy(name, array) for name, array in model.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor.size}, layout


def _of_torch(torch: Any, name: str, parameter: Any) -> Elements:
    if is_distributed(parameter):
        raise ValueError(f"parameter {name!r} is a distributed tensor; only whole ones are trained in place")
    if parameter.dtype is not torch.float32 or not parameter.is_contiguous():
        raise ValueError(
            f"parameter {name!r} is {parameter.dtype}{'' if parameter.is_contiguous() else ', not contiguous'}; only "
            f"contiguous torch.float32 is trained in place"
        )
    flat = parameter.detach().view(-1)
    kind = kind_of_place(flat)
    if kind == "cpu":
        return HostElements(flat.numpy())
    if kind != "cuda":
        raise ValueError(f"parameter {name!r} is on {flat.device}; only the CPU and CUDA devices train in place")
    return TorchElements(torch, flat)


def kind_of_place(tensor: Any) -> str:
    return str(tensor.device.type)


def _of_numpy(name: str, array: NDArray[Any]) -> Elements:
    if array.dtype != np.float32 or not array.flags.c_contiguous:
        raise ValueError(
            f"parameter {name!r} is {array.dtype}{'' if array.flags.c_contiguous else ', not contiguous'}; only "
            f"contiguous float32 is trained in place"
        )
    return HostElements(array.reshape(-1))
