"""What the machine decides about ops, told to an engine that is made up, and what is heard of it last."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pccl.protocol import peer as ps
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import OpDone, OpFastCompleted
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, RootLostError
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.engine_bridge import EngineBridge
from pccl.runtime.session.flight_recorder import FlightRecorder
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.session.reports import WorkCounters
from pccl.types import DataType, ReduceOp, Result

NOBODY = cast(Any, None)
OP = 7
SPEC = OpSpec(0, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 0, None))
START = ps.SubmitOp(OP, 1, 0, 0, 2, 3, (5, 6, 0), True, True, ring=(11, 12, 13))


class Played:
    """An engine, a fast path and a machine, which note what they are told."""

    peer = 13

    def __init__(self) -> None:
        self.is_closed = False
        self.reported: list[Any] = []
        self.refuses: Exception | None = None
        self.verdicts: list[tuple[int, Verdict]] = []
        self.refused: list[tuple[int, Result]] = []
        self.completed_ops: list[int] = []
        self.table = OpTable()
        self.op = PendingOp(OP, SPEC, NOBODY)
        self.table.ops[OP] = self.op
        played: Any = self
        recorder = FlightRecorder(NOBODY, NOBODY, self.table, NOBODY)
        self.bridge = EngineBridge(played, played, self.table, WorkCounters(), recorder)

    def carry_out(self, effect: object) -> None:
        self.bridge.handlers[type(effect)](cast(Any, self), effect)

    def submit(self, start: ps.SubmitOp, spec: OpSpec) -> None:
        if self.refuses is not None:
            raise self.refuses

    def op_refused(self, op: int, code: Result, reason: str) -> None:
        self.refused.append((op, code))

    def end(self, op: int, verdict: Verdict) -> None:
        self.verdicts.append((op, verdict))

    def events(self) -> list[Any]:
        return self.reported

    def completed(self, event: OpFastCompleted) -> None:
        self.completed_ops.append(event.op)


def test_a_submitted_op_knows_its_own_rank() -> None:
    """It decides how much of the result is this peer's."""
    played = Played()
    played.carry_out(START)
    assert (played.op.rank, played.op.ring, played.op.epoch) == (2, (11, 12, 13), 1)
    assert not played.refused


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("too long"), Result.INVALID_ARGUMENT),
        (RootLostError("gone"), Result.RANK_CONNECTION_LOST),
        (MemoryError(), Result.INTERNAL_ERROR),
    ],
)
def test_a_refusal_says_whose_fault_it_is(error: Exception, code: Result) -> None:
    played = Played()
    played.refuses = error
    played.carry_out(START)
    assert played.refused == [(OP, code)]


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [
        (ps.EndOp(OP, True), Verdict.COMMIT),
        (ps.EndOp(OP, False), Verdict.ABORT),
        (ps.ForgetOp(OP), Verdict.COMMIT_BY_ALL),
    ],
)
def test_the_engine_is_told_the_verdict_and_a_commit_is_remembered(effect: object, verdict: Verdict) -> None:
    played = Played()
    played.carry_out(effect)
    assert played.verdicts == [(OP, verdict)]
    assert played.op.is_committed is (verdict is not Verdict.ABORT)


@pytest.mark.parametrize("is_closed", [False, True])
def test_commits_of_the_fast_path_are_heard_as_the_session_ends(is_closed: bool) -> None:
    played = Played()
    played.is_closed = is_closed
    played.reported = [OpDone(OP, 0, 0), OpFastCompleted(8, 1, 0, 0), OpFastCompleted(9, 2, 0, 0)]
    played.bridge.hear_last()
    assert played.completed_ops == ([] if is_closed else [8, 9])
