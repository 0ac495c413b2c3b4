"""What launches are to come before and after, those that are interrupted, and those that find nobody to take them."""

from __future__ import annotations

import errno
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.launches import Launches
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.session.options import SessionError
from pccl.types import DataType, ReduceOp, Result

SPEC = OpSpec(3, DataType.UINT8, ReduceOp.SUM, None, Buffers(0, 0, 0, None))


class Played:
    """All that launches have beside them, with a log of what they are told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.dropped: list[PendingOp] = []
        self.abandoned: list[BaseException] = []
        self.after_hearing = nullcontext(self)
        played: Any = self
        lifetime = SimpleNamespace(failure=None, is_broken=False, contain=nullcontext(), at_end=lambda ending: None)
        self.table = OpTable()
        self.launches = Launches(
            played,
            cast(Any, lifetime),
            played,
            played,
            self.table,
            played,
            self.abandoned.append,
            lambda _: None,
            lambda _: "",
        )

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


def test_a_tag_is_free_when_the_op_was_interrupted_before_it_began() -> None:
    async def run() -> None:
        played = Played()
        interrupted = played.launches.new(SPEC)
        assert played.table.claim(interrupted) is interrupted, "and there the signal came"
        another = played.launches.new(SPEC)
        with pytest.raises(SessionError, match="an op with tag 3 is in flight already") as caught:
            played.launches.launch(another)
        assert caught.value.result is Result.INVALID_USAGE
        played.launches.cancel(interrupted, Result.TIMEOUT, "Ctrl-C")
        await trio.testing.wait_all_tasks_blocked()
        assert played.dropped == [interrupted]
        third = played.launches.new(SPEC)
        played.launches.launch(third)
        await trio.testing.wait_all_tasks_blocked()
        assert played.log == ["hear", "hear", f"forget {third.name}", f"launch {third.op}"]

    trio.run(run)


def test_launches_follow_what_was_heard_and_cancels_follow_them() -> None:
    """So each finds its predecessor counted, by the machine alone, and an op that is cancelled is there."""

    async def run() -> None:
        played = Played()
        op = played.launches.new(SPEC)
        played.launches.launch(op)
        played.launches.cancel(op, Result.TIMEOUT, "its caller waits no longer")
        await trio.testing.wait_all_tasks_blocked()
        assert played.log == ["hear", f"forget {op.name}", f"launch {op.op}", f"cancel {op.op}"]

    trio.run(run)


def test_a_session_that_cannot_be_woken_ends() -> None:
    """Those who wait for it would wait for ever."""

    async def run() -> None:
        played = Played()
        error = OSError(errno.EBADF, "bad file descriptor")

        def refuse(*_: object, **__: object) -> None:
            raise error

        played.launches._token = cast(Any, SimpleNamespace(run_sync_soon=refuse))
        op = played.launches.new(SPEC)
        played.launches.launch(op)
        assert played.abandoned == [error]
        played.launches.cancel(op, Result.TIMEOUT, "Ctrl-C")
        assert played.abandoned == [error, error]

    trio.run(run)
