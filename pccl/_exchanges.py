"""The collectives in which peers have parts for each other: all_to_all, gather and scatter.

They are checked and turned into ops as those of `pccl._collectives`. What a peer gives and gets follows from its rank,
from the root, and for an all_to_all from the caller's counts, which are numbers of rows: of entries of the first
dimension. The engine has elements instead. It tells the other peers how many this one gives them, and they compare that
with what they take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pccl._collectives import CallOf, CollectiveCall, Placed, overlap, rooted, spec_of, staged, target_of
from pccl._operands import Operand, receiving, require_alike, resolve_bytes
from pccl.devices.staging import Cargo
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.peer import View
from pccl.runtime.data_plane.op_spec import Buffers
from pccl.types import Collective, DataType, Result

Counts = Sequence[int]


def all_to_all(
    send: Any, recv: Any, send_counts: Counts | None, recv_counts: Counts | None, tag: int, step: int | None
) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = resolve_bytes(send, "send", func_name)
        target = target_of(recv, func_name, source)
        if not source.shape:
            text = "send has no dimension to be divided among the peers; give it a first one, of world_size parts"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, text)
        counts = _checked(send_counts, recv_counts, source.shape[0], func_name)
        placement = _Exchanged(source, target, recv, counts)
        shape = source.shape[1:]
        spec = spec_of(Collective.ALL_TO_ALL, source, placement, tag, None, step, func_name, shape=shape, target=target)
        return CollectiveCall(staged(spec, source.device, placement.cargo), placement.result)

    return call


def _checked(
    send_counts: Counts | None, recv_counts: Counts | None, rows: int, func_name: str
) -> tuple[list[int], list[int]] | None:
    """Return the counts as lists of numbers; None if there are none."""

    def fail(text: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, text)

    if send_counts is None and recv_counts is None:
        return None
    if send_counts is None or recv_counts is None:
        missing = "send_counts" if send_counts is None else "recv_counts"
        raise fail(f"{missing} is missing: give both, or neither if all parts are of one size")
    found = []
    for role, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        try:
            numbers = [integer_argument(f"{role}[{i}]", count, func_name) for i, count in enumerate(counts)]
        except TypeError:
            raise fail(f"{role} must be a sequence with a number for each rank, not {counts!r}") from None
        if any(number < 0 for number in numbers):
            raise fail(f"{role} has a negative number: {numbers}")
        found.append(numbers)
    if sum(found[0]) != rows:
        raise fail(f"send_counts add up to {sum(found[0])}, but send has {rows} rows")
    return found[0], found[1]


def _item_bytes(array: Any) -> int:
    """Return the size of an element of a NumPy array or a torch tensor."""
    size: int = array.itemsize
    return size


class _Exchanged(Placed):
    def __init__(self, send: Operand, recv: Operand | None, array: Any, counts: tuple[list[int], list[int]] | None):
        super().__init__(send, recv, array)
        self._counts = counts
        self._row = math.prod(send.shape[1:]) * (_item_bytes(send.owner) if send.bytes_of else 1)
        """Elements of a row."""
        self._parts: tuple[list[int], list[int]] | None = None
        """The counts in elements; None: all parts are alike."""

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        rows = self._rows(rank, world_size)
        self._count = rows * self._row
        recv = self._destination((rows, *send.shape[1:]))
        count = max(send.count, self._count)
        if recv is None:
            return Buffers(0, 0, count, None, self._parts)
        if recv.count != self._count:
            what = "bytes" if send.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"recv has {recv.count} {what}, but the peers give this one {self._count}; leave recv out to have one "
                f"made that fits"
            )
        if overlap(send, recv):
            raise ValueError("recv overlaps send, which has to stay as it is")
        return Buffers(send.address, recv.address, count, (send.owner, recv.owner), self._parts)

    def _rows(self, rank: int, world_size: int) -> int:
        """Check the counts. Return how many rows this peer gets."""
        if self._counts is None:
            rows = self._send.shape[0]
            if rows % world_size:
                raise ValueError(
                    f"send has {rows} rows, which cannot be divided evenly among {world_size} peers; give send_counts "
                    f"and recv_counts"
                )
            return rows
        gives, gets = self._counts
        for role, counts in (("send_counts", gives), ("recv_counts", gets)):
            if len(counts) != world_size:
                raise ValueError(f"{role} has {len(counts)} numbers, but there are {world_size} peers")
        if gives[rank] != gets[rank]:
            raise ValueError(
                f"rank {rank} gives itself {gives[rank]} rows, but takes {gets[rank]} from itself: send_counts and "
                f"recv_counts differ at its own rank"
            )
        self._parts = [rows * self._row for rows in gives], [rows * self._row for rows in gets]
        return sum(gets)

    def cargo(self) -> Cargo:
        size_bytes = self._count * self._send.dtype.itemsize
        count = max(self._send.count, self._count)
        send = self._send
        return Cargo(send.owner, self._delivery, count, send.size_bytes, size_bytes, parts=self._parts)


def gather(send: Any, recv: Any, root: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = rooted(root, view, func_name)
        is_root = named.peer == view.peer
        source = resolve_bytes(send, "send", func_name)
        target = target_of(recv, func_name, source) if is_root else None
        placement = _GatheredAtRoot(source, target, recv, is_root)
        spec = spec_of(Collective.GATHER, source, placement, tag, None, step, func_name, named, target=target)
        return CollectiveCall(staged(spec, source.device, placement.cargo), placement.result)

    return call


class _GatheredAtRoot(Placed):
    def __init__(self, send: Operand, recv: Operand | None, array: Any, is_root: bool) -> None:
        super().__init__(send, recv, array if is_root else None)
        self._is_root = is_root

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        self._count = world_size * send.count
        if not self._is_root:
            return Buffers(send.address, 0, self._count, send.owner)
        recv = self._destination((world_size, *send.shape))
        if recv is None:
            return Buffers(0, 0, self._count, None)
        self._require_rows(recv, rank, world_size)
        return Buffers(send.address, recv.address, recv.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        recv_bytes = self._count * self._send.dtype.itemsize if self._is_root else None
        return Cargo(self._send.owner, self._delivery, self._count, self._send.size_bytes, recv_bytes)


def scatter(send: Any, recv: Any, root: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = rooted(root, view, func_name)
        target, result = receiving(resolve_bytes(recv, "recv", func_name), recv, "recv", func_name)
        source = None
        if named.peer == view.peer:
            if send is None:
                raise PCCLError(Result.INVALID_ARGUMENT, func_name, "send is None, but this peer is the root")
            source = resolve_bytes(send, "send", func_name)
            require_alike(source, target, func_name)
        placement = _ScatteredFromRoot(source, target)
        spec = spec_of(Collective.SCATTER, target, placement, tag, None, step, func_name, named, target=target)
        return CollectiveCall(staged(spec, target.device, placement.cargo), result)

    return call


class _ScatteredFromRoot:
    def __init__(self, send: Operand | None, recv: Operand) -> None:
        self._send = send
        self._recv = recv
        self._count = 0

    def place(self, rank: int, world_size: int) -> Buffers:
        send, recv = self._send, self._recv
        self._count = world_size * recv.count
        if send is None:
            return Buffers(0, recv.address, self._count, recv.owner)
        if send.count != self._count:
            what = "bytes" if recv.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"send has {send.count} {what}, but {world_size} peers get {recv.count} each, {self._count} in all"
            )
        is_own_part = send.address + rank * recv.size_bytes == recv.address
        if not is_own_part and overlap(send, recv):
            raise ValueError(f"recv lies within send, but not where rank {rank} has its part of it")
        return Buffers(send.address, recv.address, self._count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        send, recv = self._send, self._recv
        owner, send_bytes = (send.owner, send.size_bytes) if send is not None else (None, None)
        return Cargo(owner, lambda: recv.owner, self._count, send_bytes, recv.size_bytes)
