"""The memory with which an op goes on without its caller's arrays."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.runtime.data_plane.detached import PrivateCopy, buffer_bytes
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.types import Collective, DataType, ReduceOp

WORLD = 3


@pytest.mark.parametrize(
    ("collective", "count", "expected"),
    [
        (Collective.ALL_REDUCE, 7, [(7, 7)] * WORLD),
        (Collective.REDUCE_SCATTER, 7, [(7, 3), (7, 2), (7, 2)]),
        (Collective.REDUCE_SCATTER, 8, [(8, 3), (8, 3), (8, 2)]),
        (Collective.ALL_GATHER, 6, [(2, 6)] * WORLD),
        (Collective.GATHER, 6, [(2, 6), (2, 0), (2, 0)]),
        (Collective.SCATTER, 6, [(6, 2), (0, 2), (0, 2)]),
        (Collective.REDUCE, 7, [(7, 7), (7, 0), (7, 0)]),
        (Collective.BROADCAST, 7, [(7, 0), (0, 7), (0, 7)]),
    ],
)
def test_each_rank_gives_and_gets_its_part(collective: Collective, count: int, expected: list[tuple[int, int]]) -> None:
    """The root is rank 0."""
    buffers = Buffers(0, 0, count, None)
    spec = OpSpec(0, DataType.FLOAT, ReduceOp.SUM, None, buffers, collective=collective)
    found = [buffer_bytes(spec, buffers, rank, WORLD, rank == 0) for rank in range(WORLD)]
    assert found == [(4 * send, 4 * recv) for send, recv in expected]


def test_a_result_is_delivered_once() -> None:
    """After that the array is its caller's, who may have written to it."""
    array = np.arange(8, dtype=np.uint8)
    at = array.ctypes.data
    copy = PrivateCopy(Buffers(at, at, array.size, array), array.nbytes, array.nbytes)
    copy.fill()
    array[:] = 99
    copy.deliver()
    assert list(array) == list(range(8))
    array[:] = 99
    copy.deliver()
    assert list(array) == [99] * 8
