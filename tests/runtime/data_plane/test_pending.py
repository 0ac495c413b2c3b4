"""A caller that has its arrays back may conclude that the op is over."""

from __future__ import annotations

from pccl.protocol.peer import OpResult
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import DataType, ReduceOp, Result


class Nobody:
    def ask_for_release(self, op: PendingOp, goes_on: bool) -> None: ...

    def wait_for_release(self, op: PendingOp) -> None: ...

    def leave_for(self, reason: str) -> None: ...


def test_an_op_whose_end_gives_the_arrays_back_is_over_by_then() -> None:
    """Else one who has given it up would take a result for what it had put there."""
    op = PendingOp(1, OpSpec(0, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 0, None)), Nobody())
    seen = list[tuple[bool, bool]]()

    class Seeing:
        def wake(self) -> None:
            seen.append((op.is_released, op.is_over))

    op._release_wakers.append(Seeing())  # type: ignore[arg-type]
    op.finish(OpResult(1, Result.SUCCESS, "", 2))
    assert seen == [(True, True)]
