"""The queues of launches, cancels and releases, and what the machine and the engine exchange about ops."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from pccl.protocol.peer import effects as ps
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import OpDone, OpFastCompleted
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, RootLostError
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import SessionError
from pccl.runtime.session.ops import Ops
from pccl.runtime.session.recorder import FlightRecorder
from pccl.runtime.session.reports import WorkCounters
from pccl.types import DataType, ReduceOp, Result

NOBODY = cast(Any, None)
OP = 7
SPEC = OpSpec(3, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 0, None))
START = ps.SubmitOp(OP, 1, 0, 0, 2, 3, (5, 6, 0), True, True, ring=(11, 12, 13))


class Played:
    """The other parts of a session, an engine and a machine, which log calls. Made in a trio run."""

    peer = 13

    def __init__(self) -> None:
        self.log: list[str] = []
        self.dropped: list[PendingOp] = []
        self.abandoned: list[BaseException] = []
        self.after_hearing = nullcontext(self)
        self.is_closed = False
        self.reported: list[Any] = []
        self.refuses: Exception | None = None
        self.verdicts: list[tuple[int, Verdict]] = []
        self.refused: list[tuple[int, Result]] = []
        self.completed_ops: list[int] = []
        self.abandon = self.abandoned.append
        self.whom = NOBODY
        self.failure = None
        self.is_broken = False
        self.contain = nullcontext()
        played: Any = self
        recorder = FlightRecorder(NOBODY, NOBODY, {}, NOBODY)
        self.ops = Ops(played, played, played, played, WorkCounters(), recorder, {})
        self.ops.driver = played
        self.op = self.ops.table[OP] = PendingOp(OP, SPEC, self.ops)

    def at_end(self, ending: object) -> None: ...

    def run(self, op: PendingOp, waits: bool) -> bool:
        return False

    def hear(self) -> None:
        self.log.append("hear")

    def launch(self, op: int, tag: int, now_s: float, pair: object) -> None:
        self.log.append(f"launch {op}")

    def cancel(self, op: int, code: Result, reason: str) -> None:
        self.log.append(f"cancel {op}")

    def has(self, op: PendingOp) -> bool:
        return False

    def drop(self, op: PendingOp) -> None:
        self.dropped.append(op)

    def forget_uses(self, name: object) -> None:
        self.log.append(f"forget {name}")

    def carry_out(self, effect: object) -> None:
        self.ops.handlers[type(effect)](cast(Any, self), effect)

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


def test_interrupted_launch_frees_tag() -> None:
    async def run() -> None:
        played = Played()
        interrupted = played.ops.new(SPEC)
        played.ops._claim_tag(interrupted)  # and there the signal came
        another = played.ops.new(SPEC)
        with pytest.raises(SessionError, match="an op with tag 3 is already in flight") as caught:
            played.ops.launch(another)
        assert caught.value.result is Result.INVALID_USAGE
        played.ops.cancel(interrupted, Result.TIMEOUT, "Ctrl-C")
        await trio.testing.wait_all_tasks_blocked()
        assert played.dropped == [interrupted]
        third = played.ops.new(SPEC)
        played.ops.launch(third)
        await trio.testing.wait_all_tasks_blocked()
        assert played.log == ["hear", "hear", f"forget {third.name}", f"launch {third.op}"]

    trio.run(run)


def test_launches_follow_events_and_cancels_follow_launches() -> None:
    """So each finds its predecessor counted, by the machine alone, and an op that is cancelled is there."""

    async def run() -> None:
        played = Played()
        op = played.ops.new(SPEC)
        played.ops.launch(op)
        played.ops.cancel(op, Result.TIMEOUT, "its caller waits no longer")
        await trio.testing.wait_all_tasks_blocked()
        assert played.log == ["hear", f"forget {op.name}", f"launch {op.op}", f"cancel {op.op}"]

    trio.run(run)


def test_session_that_cannot_be_woken_ends() -> None:
    """Those who wait for it would wait for ever."""

    async def run() -> None:
        played = Played()
        error = OSError(errno.EBADF, "bad file descriptor")

        def refuse(*_: object, **__: object) -> None:
            raise error

        played.ops._token = cast(Any, SimpleNamespace(run_sync_soon=refuse))
        op = played.ops.new(SPEC)
        played.ops.launch(op)
        assert played.abandoned == [error]
        played.ops.cancel(op, Result.TIMEOUT, "Ctrl-C")
        assert played.abandoned == [error, error]

    trio.run(run)


async def made() -> Played:
    return Played()


def test_submitted_op_has_rank() -> None:
    """It decides how much of the result is this peer's."""
    played = trio.run(made)
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
def test_refused_submission_has_code(error: Exception, code: Result) -> None:
    played = trio.run(made)
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
def test_verdict_reaches_engine(effect: object, verdict: Verdict) -> None:
    played = trio.run(made)
    played.carry_out(effect)
    assert played.verdicts == [(OP, verdict)]
    assert played.op.is_committed is (verdict is not Verdict.ABORT)


@pytest.mark.parametrize("is_closed", [False, True])
def test_last_commits_of_fast_path_count(is_closed: bool) -> None:
    played = trio.run(made)
    played.is_closed = is_closed
    played.reported = [OpDone(OP, 0, 0), OpFastCompleted(8, 1, 0, 0), OpFastCompleted(9, 2, 0, 0)]
    played.ops.hear_last()
    assert played.completed_ops == ([] if is_closed else [8, 9])
