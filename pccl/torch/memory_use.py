"""Tracks the memory that a group's calls read and write, so that a call waits for earlier calls that conflict with it.

torch users expect calls on one tensor to run in order: two consecutive all_reduces sum it twice, even without a wait
between them. This cannot deadlock because all ranks make a group's calls in the same order. Hundreds of calls may be
in flight, so spans are kept sorted.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from pccl.torch.tensors import Tensor

Span = tuple[int, int]
"""A half-open byte range (start, end)."""


class Use(NamedTuple):
    """The memory that a call uses."""

    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()

    def spans(self) -> Iterator[tuple[Span, bool]]:
        """Yield each span and whether it is written."""
        yield from ((span, False) for span in self.reads)
        yield from ((span, True) for span in self.writes)


UNUSED = Use()
"""The memory use of a call that cannot conflict with others."""


def use_of(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Use:
    """Return the memory use of dense tensors, including gaps between their elements."""
    return Use(_spans(reads), _spans(writes))


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    return [_span(tensor) for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]


def _span(tensor: Tensor) -> Span:
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


Owner = TypeVar("Owner", bound=Hashable)
Entry = tuple[int, int, int, bool]
"""The start and end of a span, its unique number, and whether it is written."""


class Uses(Generic[Owner]):
    """The memory that a group's open calls use. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._owners: dict[int, Owner] = {}
        self._entries_of: dict[Owner, list[Entry]] = {}
        self._numbers = itertools.count()
        self._longest = 0

    def add(self, owner: Owner, use: Use) -> None:
        for (start, end), is_written in use.spans():
            entry = (start, end, next(self._numbers), is_written)
            insort(self._entries, entry)
            self._owners[entry[2]] = owner
            self._entries_of.setdefault(owner, []).append(entry)
            self._longest = max(self._longest, end - start)

    def remove(self, owner: Owner) -> None:
        for entry in self._entries_of.pop(owner, ()):
            del self._entries[bisect_left(self._entries, entry)]
            del self._owners[entry[2]]
        if not self._entries:
            self._longest = 0

    def disturbed_by(self, use: Use) -> list[Owner]:
        """Return the calls that conflict with a use of memory."""
        found: dict[Owner, None] = {}
        for (start, end), is_written in use.spans():
            for index in range(bisect_left(self._entries, (start - self._longest,)), len(self._entries)):
                first, behind, number, writes = self._entries[index]
                if first >= end:
                    break
                if behind > start and (is_written or writes):
                    found[self._owners[number]] = None
        return list(found)
