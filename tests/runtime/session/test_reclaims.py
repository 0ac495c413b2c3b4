"""An op that goes on with a copy of its caller's arrays has its result there, or none."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from pccl import PCCLError
from pccl._reduce import delivered
from pccl.protocol.peer import OpResult
from pccl.runtime.data_plane.events import OpDetached
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.engine_bridge import EngineBridge
from pccl.runtime.session.flight_recorder import FlightRecorder
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.session.reports import WorkCounters
from pccl.types import DataType, ReduceOp, Result

NOBODY = cast(Any, None)
OP = 1


class Session:
    """Notes why the peer leaves."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def ask_for_release(self, op: PendingOp, goes_on: bool) -> None: ...

    def wait_for_release(self, op: PendingOp) -> None: ...

    def leave_for(self, reason: str) -> None:
        self.left.append(reason)

    def whom(self, op: PendingOp) -> str:
        return "nobody"


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def array() -> Any:
    return np.arange(8, dtype=np.uint8)


@pytest.fixture
def op(session: Session, array: Any) -> PendingOp:
    """An op that is about to be detached from its array."""
    at = array.ctypes.data
    op = PendingOp(OP, OpSpec(0, DataType.UINT8, ReduceOp.SUM, None, Buffers(at, at, array.size, array)), session)
    op.ring = 1, 2
    op.copy, op.is_detached = op.copied(1), True
    return op


def heard(op: PendingOp, event: OpDetached) -> None:
    table = OpTable()
    bridge = EngineBridge(NOBODY, NOBODY, table, WorkCounters(), FlightRecorder(NOBODY, NOBODY, table, NOBODY))
    bridge.detaching[OP] = op
    bridge._reports[OpDetached](NOBODY, event)
    assert op.is_released
    op.finish(OpResult(OP, Result.SUCCESS, "", 2))


def test_a_copy_that_nothing_came_to_is_never_taken_for_a_result(op: PendingOp, session: Session, array: Any) -> None:
    heard(op, OpDetached(OP, is_known=False))
    with pytest.raises(PCCLError, match="all peers have the result") as caught:
        delivered(op, "wait")
    assert caught.value.result is Result.INTERNAL_ERROR
    assert session.left
    np.testing.assert_array_equal(array, np.arange(8))


@pytest.mark.parametrize("is_known", [True, False])
def test_a_copy_that_was_filled_is_what_the_op_goes_on_with(op: PendingOp, array: Any, is_known: bool) -> None:
    """As that of an op which was taken back before it went on in pieces."""
    assert op.copy is not None
    op.copy.fill()
    heard(op, OpDetached(OP, is_known))
    array[:] = 0
    delivered(op, "wait")
    np.testing.assert_array_equal(array, np.arange(8))
