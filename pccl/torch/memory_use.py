"""The memory that the calls of a group read and write: a call waits for earlier ones that conflict with it.

Users of torch expect calls on one tensor to run in order: two all_reduces in a row sum it twice, even without a wait
between them. All ranks make the calls of a group in one order, so this cannot deadlock. Hundreds of calls may be in
flight, so spans are kept sorted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from pccl.torch.tensors import Tensor

Span = tuple[int, int]
"""Half-open byte range: start, end."""


class Use(NamedTuple):
    """The memory that a call uses."""

    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()

    def spans(self) -> Iterator[tuple[Span, bool]]:
        """Yield each span, and whether it is written."""
        yield from ((span, False) for span in self.reads)
        yield from ((span, True) for span in self.writes)


UNUSED = Use()
"""Memory of a call that cannot conflict with others."""


def use_of(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Use:
    """Return the memory of dense tensors, including their gaps."""
    return Use(_spans(reads), _spans(writes))


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    return [_span(tensor) for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]


def _span(tensor: Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


Owner = TypeVar("Owner")


class Uses(Generic[Owner]):
    """The memory that the open calls of a group use. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, int, bool, Owner]] = []
        """Start and end of a span, its unique number, whether it is written, and by which call."""
        self._numbers = itertools.count()
        self._longest = 0

    def add(self, owner: Owner, use: Use) -> None:
        for (start, end), is_written in use.spans():
            insort(self._entries, (start, end, next(self._numbers), is_written, owner))
            self._longest = max(self._longest, end - start)

    def remove(self, owner: Owner) -> None:
        self._entries = [entry for entry in self._entries if entry[4] != owner]
        self._longest = self._longest if self._entries else 0

    def disturbed_by(self, use: Use) -> list[Owner]:
        """Return the calls that conflict with a use of memory."""
        found: dict[Owner, None] = {}
        for (start, end), is_written in use.spans():
            for index in range(bisect_left(self._entries, (start - self._longest,)), len(self._entries)):
                first, behind, _, writes, owner = self._entries[index]
                if first >= end:
                    break
                if behind > start and (is_written or writes):
                    found[owner] = None
        return list(found)
