"""The random signs of `pccl.signs` as torch operations: parameters on a device are moved there, without being copied.

Philox4x32-10 in 64-bit integers: the lower 64 bits of a product of two 32-bit numbers are all of it, whatever int64
takes the uppermost for; shifts bring in the sign, which is masked out. What is added is exact, so it is the same bits
as those of `pccl.signs.add_signs`. A pass works on CHUNK elements at a time, with some 100 MiB of temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pccl import signs

CHUNK = 1 << 22
"""Elements; a multiple of those that share a counter."""
BLOCK = 128
MASK = 2**32 - 1

_checked: set[Any] = set()


def check(torch: Any, device: Any) -> None:
    """ValueError if the device's integers or floats are not as they should be. Looks once at each device."""
    if device in _checked:
        return
    numbers: dict[str, Any] = {"seed": 0xFEDCBA9876543210, "tensor": 2**32 - 2, "step": 7}
    numbers |= {"directions": [0, 2**32 - 1], "amounts": [3, -1]}
    expected = np.zeros(3 * BLOCK + 5, np.float32)
    signs.add_signs(expected, 0.5, **numbers)
    found = torch.zeros(expected.size, dtype=torch.float32, device=device)
    add_signs(torch, found, 0.5, **numbers)
    if not np.array_equal(found.cpu().numpy(), expected):
        raise ValueError(f"{device} computes other random signs than the CPU: this model can only be trained there")
    _checked.add(device)


def add_signs(
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
    """Add multiples of random signs to a flat float32 tensor, the same bits as `pccl.signs.add_signs`. ValueError: as
    there."""
    if sum(map(abs, amounts)) > signs.SUM_MAX:
        raise ValueError(f"amounts {list(amounts)} sum up to more than {signs.SUM_MAX} in magnitude")
    shifts = torch.arange(32, dtype=torch.int64, device=values.device)
    for begin in range(0, values.numel(), CHUNK):
        part = values[begin : begin + CHUNK]
        first = begin // BLOCK
        blocks = torch.arange(first, first - (-part.numel() // BLOCK), dtype=torch.int64, device=values.device)
        total = torch.full((blocks.numel(), 4, 32), sum(amounts), dtype=torch.int64, device=values.device)
        for direction, amount in zip(directions, amounts, strict=True):
            words = torch.stack(_philox(blocks, tensor, step, direction, seed), 1)
            minus = torch.bitwise_right_shift(words.unsqueeze(2), shifts).bitwise_and_(1)
            total.sub_(minus, alpha=2 * amount)
        part.add_(total.view(-1)[: part.numel()].to(torch.float32).mul_(quantum))


def _philox(blocks: Any, tensor: int, step: int, direction: int, seed: int) -> list[Any]:
    """Four words of 32 bits for each block; `native/src/signs.h` writes it down."""
    c0, c1, c2, c3 = blocks, tensor, step, direction
    key0, key1 = seed & MASK, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32) & MASK ^ c1 ^ key0, product1 & MASK
        c2, c3 = (product0 >> 32) & MASK ^ c3 ^ key1, product0 & MASK
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    # While they depend on no block, words are numbers; after ten rounds all of them do.
    return [c0, c1, c2, c3]
