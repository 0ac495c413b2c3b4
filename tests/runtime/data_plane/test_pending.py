"""How an op ends for its caller: what it may conclude from having its arrays back, and which result stands."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pccl.protocol.peer.effects import OpResult
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.overlapped_waits import OverlappedWaits
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import DataType, ReduceOp, Result


class Nobody:
    def ask_for_release(self, op: PendingOp) -> None: ...

    def wait_for_release(self, op: PendingOp) -> None: ...

    def leave_for(self, reason: str) -> None: ...

    def free_tag(self, op: PendingOp) -> None: ...


def new_op(source: Any = None) -> PendingOp:
    spec = OpSpec(0, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 0, None), source=source)
    return PendingOp(1, spec, cast(Any, Nobody()))


def test_an_op_whose_end_gives_the_arrays_back_is_over_by_then() -> None:
    """Else one who has given it up would take a result for what it had put there."""
    op = new_op()
    seen = list[tuple[bool, bool]]()

    class Seeing:
        def wake(self) -> None:
            seen.append((op.is_released, op.is_over))

    op._release_wakers.append(Seeing())  # type: ignore[arg-type]
    op.finish(OpResult(1, Result.SUCCESS, "", 2))
    assert seen == [(True, True)]


def test_given_up_op_is_released_by_the_engine() -> None:
    op = new_op()
    op.is_given_up = True
    op.finish(OpResult(1, Result.SUCCESS, "", 2))
    assert op.is_over
    assert not op.is_released
    op.release()
    assert op.is_released


def test_the_first_result_stands() -> None:
    op = new_op()
    calls: list[Result] = []
    for code in (Result.SUCCESS, Result.INTERNAL_ERROR):
        op.when_over(lambda: calls.append(op.result.code if op.result is not None else Result.TIMEOUT))
        op.finish(OpResult(1, code, "", 2))
    assert calls == [Result.SUCCESS] * 2
    assert op.result == OpResult(1, Result.SUCCESS, "", 2)


def test_an_end_that_a_signal_has_cut_off_is_told_by_the_next() -> None:
    op = new_op()
    calls: list[bool] = []
    op.when_over(lambda: calls.append(op.is_over))

    class Interrupted:
        def wake(self) -> None:
            op._release_wakers.clear()
            raise KeyboardInterrupt

    op._release_wakers.append(Interrupted())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        op.finish(OpResult(1, Result.SUCCESS, "", 2))
    assert not calls
    op.finish(OpResult(1, Result.SUCCESS, "", 2))
    assert calls == [True]


def test_a_forked_child_notes_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's locks may be held for ever there."""
    op = new_op()

    class Locked(OverlappedWaits):
        def end(self, op: int, is_over: bool) -> None:
            raise AssertionError("it would wait for ever")

    op.waits = Locked()
    ended = OpResult(1, Result.INTERNAL_ERROR, "", 1)
    monkeypatch.setattr(op._over, "wait", lambda timeout_s: op.forget_after_fork(ended))  # the handler forks within it
    op.wait(None)
    assert op.is_over


@pytest.mark.parametrize("code", [Result.SUCCESS, Result.RANK_CONNECTION_LOST])
def test_a_device_takes_the_result_of_an_op_that_succeeded_alone(code: Result) -> None:
    source = object()
    op = new_op(source)
    op.finish(OpResult(1, code, "", 2))
    assert op.source is (source if code is Result.SUCCESS else None)
