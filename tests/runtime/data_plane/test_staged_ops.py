"""Ops whose input is staged first, over an engine that takes notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane.engine import Engine, StagedOps, Verdict
from pccl.runtime.data_plane.events import EngineEvent, OpDetached, OpDone, OpEnded, OpFrozen, OpRefused
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.types import DataType, ReduceOp

OP = 7
BUFFERS = Buffers(64, 64, 3, None)


class Played:
    def __init__(self) -> None:
        self.staged = StagedOps(cast(Engine, self))
        self.submitted: list[OpSpec] = []
        self.ended: list[Verdict] = []
        self.frozen: list[int] = []
        self.detached: list[int] = []
        self.coming: list[EngineEvent] = []
        self.woken = 0
        self.has_memory = True

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        if spec.tag < 0:
            raise ValueError("tag")

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        if not self.has_memory:
            raise MemoryError("engine submit")
        self.submitted.append(spec)

    def end(self, op: int, verdict: Verdict) -> None:
        self.ended.append(verdict)

    def freeze_op(self, op: int) -> None:
        self.frozen.append(op)

    def detach(self, op: int) -> None:
        self.detached.append(op)

    def events(self) -> list[EngineEvent]:
        coming, self.coming = self.coming, []
        return self.staged.events(coming)

    def wake(self) -> None:
        self.woken += 1


class Source:
    def __init__(self) -> None:
        self.is_abandoned = False
        self.arrived: Callable[[Buffers | BaseException], None]
        self.released: list[Callable[[], None]] = []

    def begin(self, arrived: Callable[[Buffers | BaseException], None]) -> None:
        self.arrived = arrived

    def abandon(self) -> None:
        self.is_abandoned = True

    def release(self, released: Callable[[], None]) -> None:
        self.released.append(released)

    def deliver(self) -> None:
        raise AssertionError("the caller's thread does it")


@pytest.fixture
def engine() -> Played:
    return Played()


@pytest.fixture
def source() -> Source:
    return Source()


def submit(engine: Played, source: Source, tag: int = 5) -> None:
    launch = SubmitOp(OP, 3, tag, 0, 0, 2, (0, 9), True, True, (1, 2))
    spec = OpSpec(tag, DataType.FLOAT, ReduceOp.SUM, None, Buffers(0, 0, 3, None))
    engine.staged.submit(launch, spec, source)


def test_op_starts_when_its_input_has_arrived(engine: Played, source: Source) -> None:
    submit(engine, source)
    assert engine.events() == []
    assert not engine.submitted
    source.arrived(BUFFERS)
    assert engine.woken == 1
    assert engine.events() == []
    assert [spec.buffers for spec in engine.submitted] == [BUFFERS]
    engine.coming = [OpDone(OP, 1, 2)]
    assert engine.events() == [OpDone(OP, 1, 2)]
    engine.staged.end(OP, Verdict.COMMIT)
    engine.coming = [OpEnded(OP, 1, 2)]
    assert engine.events() == [OpEnded(OP, 1, 2)]
    assert not engine.staged.ops


def test_invalid_arguments_are_refused_before_the_copy(engine: Played, source: Source) -> None:
    with pytest.raises(ValueError, match="tag"):
        submit(engine, source, tag=-1)
    assert not hasattr(source, "arrived")


def test_device_error_refuses_the_op(engine: Played, source: Source) -> None:
    submit(engine, source)
    source.arrived(RuntimeError("broken"))
    assert engine.events() == [OpRefused(OP, "RuntimeError: broken")]
    assert not engine.staged.ops


def test_no_memory_refuses_the_op(engine: Played, source: Source) -> None:
    submit(engine, source)
    engine.has_memory = False
    source.arrived(BUFFERS)
    assert engine.events() == [OpRefused(OP, "out of memory: engine submit")]


def test_abort_before_the_input_arrives(engine: Played, source: Source) -> None:
    submit(engine, source)
    engine.staged.end(OP, Verdict.ABORT)
    assert source.is_abandoned
    assert engine.events() == [OpEnded(OP, 0, 0)]
    source.arrived(BUFFERS)
    assert engine.events() == []
    assert not engine.submitted
    assert not engine.ended


def test_freeze_before_the_input_arrives(engine: Played, source: Source) -> None:
    submit(engine, source)
    engine.staged.freeze_op(OP)
    assert engine.events() == [OpFrozen(OP)]
    source.arrived(BUFFERS)
    engine.staged.end(OP, Verdict.ABORT)
    assert engine.events() == [OpEnded(OP, 0, 0)]
    assert not engine.submitted
    assert not engine.frozen


def test_freeze_and_commit_after_the_input_has_arrived(engine: Played, source: Source) -> None:
    submit(engine, source)
    source.arrived(BUFFERS)
    engine.events()
    engine.staged.freeze_op(OP)
    engine.staged.end(OP, Verdict.COMMIT_BY_ALL)
    assert (engine.frozen, engine.ended) == ([OP], [Verdict.COMMIT_BY_ALL])
    assert not engine.staged.ops


def test_detach_waits_for_the_device(engine: Played, source: Source) -> None:
    submit(engine, source)
    engine.staged.detach(OP)
    assert engine.events() == []
    source.released[0]()
    assert engine.events() == [OpDetached(OP)]
    assert not engine.detached


def test_close_stops_copies(engine: Played, source: Source) -> None:
    submit(engine, source)
    engine.staged.close()
    assert source.is_abandoned
