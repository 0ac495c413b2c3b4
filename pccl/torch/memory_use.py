"""What the calls of a group read and write, so that one waits for earlier ones that still need the same memory.

torch's users expect calls on one tensor to have an order: two all_reduces in a row sum it up twice, also if nobody
waits for the first. Calls of different lanes overlap, and where an op writes what another one is sending, neither has a
result. So a call that would do so is not begun before the earlier one is over. All ranks make the calls of a group in
one order, so the earlier one ends without the later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pccl.torch.tensors import Tensor

Span = tuple[int, int]
"""The first byte of a stretch of memory, and the one behind it."""


class Use(NamedTuple):
    """The memory that a call uses."""

    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()

    def is_disturbed_by(self, other: Use) -> bool:
        """Return whether one of the two writes what the other one uses."""
        return _meet(self.writes, other.writes) or _meet(self.writes, other.reads) or _meet(self.reads, other.writes)


def use_of(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Use:
    """Return the memory of dense tensors. That of a tensor with gaps includes them."""
    return Use(_spans(reads), _spans(writes))


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    return [_span(tensor) for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]


def _span(tensor: Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(start < end and first < behind for first, end in some for start, behind in others)
