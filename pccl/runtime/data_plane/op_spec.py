"""An op as its caller describes it: the arithmetic, this peer's arrays, and arguments that must match on all peers.

An `OpSpec` is created in the caller's thread, before the participants are known. It describes the arrays by:

    Buffers     addresses that are already known
    Placement   buffers whose sizes depend on the number of peers, computed when the op starts
    Source      arrays that are not in host memory
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from pccl.types import Collective, DataType, ErrorFeedback, QuantizationOptions, ReduceAlgorithm, ReduceOp


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory that an op reads and writes. `keep` is a reference that keeps the memory alive."""

    send: int
    recv: int
    count: int
    keep: Any
    parts: tuple[Sequence[int], Sequence[int]] | None = None
    """For an all_to_all, the numbers of elements that this peer sends to each rank and receives from each rank."""
    send_parts: Sequence[int] | None = None
    """The addresses of the parts for each rank, if they are not contiguous at `send`."""
    recv_parts: Sequence[int] | None = None
    """The addresses for the parts from each rank, if they are not contiguous at `recv`."""

    @property
    def are_whole(self) -> bool:
        """Whether the op sends one contiguous array and receives one."""
        return self.send_parts is None and self.recv_parts is None


class Placement(Protocol):
    """Buffers whose sizes depend on the participants, which are known only when the op starts."""

    def place(self, rank: int, world_size: int) -> Buffers:
        """Return the buffers, with the engine's `count`. Raises ValueError if the caller's arrays do not fit."""


class Source(Protocol):
    """Arrays that the engine cannot read, for one launch of an op."""

    def begin(self, arrived: Callable[[Buffers | BaseException], None]) -> None:
        """Start copying the input to host memory. `arrived` is called in any thread with the buffers or error."""

    def abandon(self) -> None:
        """Skip the copies that have not started yet."""

    def release(self, released: Callable[[], None]) -> None:
        """Call `released` once, in any thread, when the caller's arrays are no longer read."""

    def deliver(self) -> None:
        """Copy a committed op's results to the caller's arrays. Runs in the caller's thread."""


class RootLostError(Exception):
    """The root of an op has left the group."""


class Root(NamedTuple):
    """The root of an op in the group that the caller saw."""

    rank: int
    peer: int
    """0 if the rank did not exist."""

    def rank_in(self, ring: Sequence[int]) -> int:
        """Return the root's rank in `ring`. Raises ValueError if it never existed, RootLostError if it has left."""
        if self.peer == 0:
            raise ValueError(f"rank {self.rank} does not exist in a group of {len(ring)} peers")
        if self.peer not in ring:
            raise RootLostError(f"peer {self.peer}, the root, has left; call again with a rank in the current group")
        return ring.index(self.peer)


class Pair(NamedTuple):
    """The other peer of a point-to-point op, and whether this peer sends."""

    peer: int
    is_sender: bool


class Residuals:
    """The residuals of one launch of an op with error feedback.

    The engine reads the array that was kept and writes a new one, which is kept once the op has succeeded. Thus a
    failed op changes nothing, and no two launches write to one array.
    """

    def __init__(self, feedback: ErrorFeedback) -> None:
        self.decay = feedback.decay
        self._kept = feedback.kept
        self._key: object = None
        self._old: Any = None
        self._new: Any = None

    def claim(self, op: Any) -> bool:
        """Return whether `op` may use the residuals: no other op that uses them is in flight."""
        holder = self._kept.holder()
        if holder is not None and not holder.is_over and not holder.is_given_up:
            return False
        self._kept.holder = weakref.ref(op)
        return True

    def place(self, key: object, count: int) -> tuple[int, int]:
        """Return the addresses of the residual that was kept for `key`, 0 for none, and of the new one."""
        if self._new is None or self._key != key:
            self._key, self._new = key, np.empty(count, np.float32)
            self._old = self._kept.array if self._kept.key == key else None
        return 0 if self._old is None else self._old.ctypes.data, self._new.ctypes.data

    def keep(self) -> None:
        self._kept.key, self._kept.array = self._key, self._new


class OpSpec(NamedTuple):
    """An op as its caller describes it."""

    tag: int
    dtype: DataType
    reduce_op: ReduceOp
    quantization: QuantizationOptions | None
    buffers: Buffers | Placement
    """This peer's buffers. If the op has a source, only their `count` is used."""
    algorithm: ReduceAlgorithm | None = None
    collective: Collective = Collective.ALL_REDUCE
    root: Root | None = None
    """The root, if the collective has one."""
    pair: Pair | None = None
    """The other peer of a send or recv."""
    source: Source | None = None
    """The source for this launch, created by `new_source`."""
    new_source: Callable[[], Source] | None = None
    """Creates a source for each launch, in the launching thread."""
    segment_bytes: int = 0
    """If 0, the op's size determines it."""
    step: int | None = None
    """The caller's step number, if given. It must match on all peers."""
    shape: tuple[int, ...] | None = None
    """Shape of the caller's array, if there is one. It must match on all peers."""
    bytes_of: str = ""
    """Dtype of an array that is sent as bytes. It must match on all peers."""
    new_array: Callable[[], Any] | None = None
    """Returns the result of an all_reduce as a new array, if the caller passed no array for it."""
    written: Callable[[], None] | None = None
    """Called when a result is in the caller's arrays, before the op is reported as over."""
    is_overlapped: bool = False
    """Whether the caller waits later or never (see `overlapped_waits`)."""
    feedback: ErrorFeedback | None = None
    residuals: Residuals | None = None
    """The residuals for this launch, if there is feedback."""

    def launched(self) -> OpSpec:
        """Return the spec for one launch, with a new source and residuals if it needs them."""
        source = self.source if self.new_source is None else self.new_source()
        residuals = None if self.feedback is None else Residuals(self.feedback)
        return self._replace(source=source, new_source=None, residuals=residuals)

    def placed(self, rank: int, world_size: int) -> OpSpec:
        """Return the spec with buffers for this many peers. Raises ValueError as in `Placement.place`."""
        buffers = self.buffers
        return self if isinstance(buffers, Buffers) else self._replace(buffers=buffers.place(rank, world_size))
