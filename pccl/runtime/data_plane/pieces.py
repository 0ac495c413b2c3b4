"""The division of an op into pieces, and the marker by which whole ops are told from ops in pieces; see `staged_ops`.

A marker is an op without elements under the name (epoch, tag, use) that the whole op would have. Its segment size is
odd, which no other op's is, and says how large the pieces are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.types import Collective, DataType, ReduceAlgorithm, ReduceOp


def _piece_bytes() -> int:
    text = os.environ.get("PCCL_PIECE_BYTES", "").strip()
    try:
        found = int(text) if text else 16 << 20
    except ValueError:
        found = -1
    if found < 0:
        # No default will do: it may not be that of the other peers.
        raise ValueError(f"PCCL_PIECE_BYTES={text}: not a number of bytes, as all peers should have alike")
    return found


PIECE_BYTES = _piece_bytes()
"""Size of the pieces of an op, which all peers should have alike. 0: no op is divided."""

FIRST_PIECE_OP = 1 << 62
"""Numbers of pieces and markers, in the engine's eyes, begin here; those of ops never come so far."""
PIECE_SHIFT = 40
"""Bits of the key's sequence that count the uses of a tag in a view. Above them is 0 for the op itself or its marker,
or the number of the piece from 1."""


def piece_elements(item_bytes: int) -> int:
    """Return the number of elements of a piece; 0: all of them."""
    return max(PIECE_BYTES, item_bytes) // item_bytes if PIECE_BYTES else 0


class InMemory:
    """A source of pieces of arrays that are in memory."""

    def __init__(self, spec: OpSpec) -> None:
        assert isinstance(spec.buffers, Buffers)
        self._whole = spec.buffers
        self._item_bytes = spec.dtype.itemsize
        self._length = piece_elements(self._item_bytes)
        self.piece_count = -(-self._whole.count // self._length)

    def undivide(self) -> None:
        raise AssertionError("what is in memory is divided only where others have pieces")

    def begin(self, ready: Callable[[int, Buffers], None], failed: Callable[[BaseException], None]) -> None:
        for number in range(self.piece_count):
            ready(number, self.piece(self._whole, number))

    def piece(self, whole: Buffers, number: int) -> Buffers:
        """Return the buffers of a piece within buffers of the whole op."""
        start = number * self._length
        at = start * self._item_bytes
        count = min(self._length, whole.count - start)
        return Buffers(whole.send + at, whole.recv + at, count, whole.keep)

    def abandon(self) -> None:
        """Do nothing: all pieces were there at once."""

    def release(self, released: Callable[[], None]) -> None:
        released()

    def deliver(self) -> None:
        """Do nothing: the engine has written the results where the caller wants them."""


def marker_of(spec: OpSpec) -> OpSpec:
    """Return the marker of an op that is divided."""
    nothing = Buffers(0, 0, 0, None)
    mark = announced_bytes() + 1
    kind = DataType.UINT8, ReduceOp.SUM, None
    return OpSpec(spec.tag, *kind, nothing, ReduceAlgorithm.RING, segment_bytes=mark, step=spec.step)


def announced_bytes() -> int:
    """Return the size of pieces as this peer's markers announce it: in 32 bits, of which the lowest is the mark."""
    return PIECE_BYTES & 0xFFFFFFFE


def piece_bytes_of(shape: Any) -> int:
    """Return the size of pieces that a shape announces, a `pccl_op_shape` that may come from another peer; 0 if it is
    not that of a marker."""
    is_marker = shape.count == 0 and shape.collective == Collective.ALL_REDUCE and shape.dtype == DataType.UINT8
    mark: int = shape.segment_bytes
    return mark - 1 if is_marker and mark % 2 else 0
