"""Openings of the fast path over engine threads that are made up: which ops go through, how uses are counted, and
what is known meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane.engine import COMPLETED, HANDED_OVER
from pccl.runtime.data_plane.events import OpFastCompleted, OpHandedOver
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import DataType, ReduceOp

CLOSED = -1
TAG, USES = 3, 5
START = SubmitOp(0, 1, 0, 0, 0, 2, (0, 1), True, True, (1, 2))


class Request:
    """An op in the engine's terms, which suits the fast path."""

    count = 8

    def refill(self, *_: object) -> bool:
        return True

    def slices(self, threads: int) -> int:
        return 1


class Thread:
    """An engine thread's way; `ends` plays what becomes of an op."""

    def __init__(self) -> None:
        self.is_open = False
        self.uses: list[int] = []
        self.ends: Callable[[], int] = lambda: COMPLETED

    def open(self) -> int:
        self.is_open = True
        return 1

    def close(self) -> None:
        self.is_open = False

    def run(self, opening: int, request: Request, uses: Any, wait_ms: int) -> tuple[int, int, int]:
        self.uses.append(uses[0])
        uses[0] += 1
        return self.ends(), 10, 20


class Played:
    """A fast path that is open, and the machine and the engine beside it."""

    def __init__(self, threads: int = 1) -> None:
        self.threads = [Thread() for _ in range(threads)]
        self.path = FastPath(cast(Any, self), cast(Any, self))
        self.path.attach()
        self.path.open(START)

    def new_fast_paths(self) -> list[Thread]:
        return self.threads

    def new_request(self) -> Request:
        return Request()

    def uses_of(self, tag: int) -> int:
        return USES if tag == TAG else 0


def new_op(number: int, tag: int = TAG, source: Any = None) -> PendingOp:
    spec = OpSpec(tag, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 8, None), source=source)
    return PendingOp(number, spec, cast(Any, SimpleNamespace(free_tag=lambda _: None)))


def test_uses_are_counted_on_from_where_the_machine_is() -> None:
    played = Played()
    ops = [new_op(number) for number in range(2)]
    assert all(played.path.run(op) for op in ops)
    assert played.threads[0].uses == [USES, USES + 1]
    assert all(op.is_over for op in ops)
    assert not played.path.run(new_op(3, TAG + 1)), "the first use of a tag is the machine's"


def test_arrays_on_devices_are_the_sessions() -> None:
    played = Played()
    assert not played.path.run(new_op(1, source=object()))
    assert played.threads[0].uses == []


@pytest.mark.parametrize("becomes", ["completed", "handed over"])
def test_an_op_is_known_until_the_session_has_heard_of_it(becomes: str) -> None:
    played = Played()
    op = new_op(1)
    seen: list[tuple[bool, list[PendingOp]]] = []

    def end() -> int:
        seen.append((played.path.has(op), played.path.running))
        return COMPLETED if becomes == "completed" else HANDED_OVER

    played.threads[0].ends = end
    assert played.path.run(op)
    assert seen == [(True, [op])]
    assert played.path.has(op)
    if becomes == "completed":
        assert played.path.completed(OpFastCompleted(1, USES, 10, 20)) is op
    else:
        assert played.path.handed_over(OpHandedOver(1, USES)) is op
    assert not played.path.has(op)


def test_an_op_that_came_too_late_is_launched_by_the_session() -> None:
    played = Played()
    op = new_op(1)
    played.threads[0].ends = lambda: CLOSED
    assert not played.path.run(op)
    assert not played.path.has(op)
    assert op.epoch is None


def test_closing_closes_the_ways_into_all_threads() -> None:
    played = Played(threads=3)
    assert all(thread.is_open for thread in played.threads)
    assert played.path.close()
    assert not any(thread.is_open for thread in played.threads)
    assert not played.path.close()
    assert not played.path.run(new_op(1))
