"""An op as its caller has it: from the launch to the result."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from pccl.protocol.peer import OpResult
from pccl.runtime.engine import OpSpec
from pccl.runtime.latch import Latch, wait_any
from pccl.types import Result


class PendingOp:
    """An op from its launch to its result. `wait` may be called from any thread, `async_wait` from trio."""

    def __init__(self, op: int, spec: OpSpec) -> None:
        self.op = op
        self.spec: OpSpec | None = spec
        self.feed = spec.feed
        """Delivers the result where it succeeds."""
        self.tag = spec.tag
        self.name = spec.tag, spec.pair
        """Of those in flight no two are called the same."""
        self.result: OpResult | None = None
        self.epoch: int | None = None
        """In which it runs; None before."""
        self.ring: tuple[int, ...] = ()
        """Who takes part, once it has started."""
        self.rank = 0
        self._over = Latch()
        self._trio_events: list[trio.Event] = []

    def wait(self, timeout_s: float | None) -> bool:
        """False if the time passed first. A signal handler that raises (Ctrl-C) ends the wait."""
        return self._over.wait(timeout_s)

    async def async_wait(self) -> None:
        """In the session's trio run."""
        await self.async_wait_any([self])

    @staticmethod
    def wait_any(ops: Sequence[PendingOp], timeout_s: float | None) -> bool:
        """Waits until one of them is over, as `wait` does for one."""
        return wait_any([op._over for op in ops], timeout_s)

    @staticmethod
    async def async_wait_any(ops: Sequence[PendingOp]) -> None:
        """Waits until one of them is over, as `async_wait` does for one."""
        if any(op.is_over for op in ops):
            return
        event = trio.Event()
        for op in ops:
            op._trio_events.append(event)
        try:
            await event.wait()
        finally:
            for op in ops:
                op._trio_events.remove(event)

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def finish(self, result: OpResult) -> None:
        """May be called again."""
        if self.is_over:
            return
        self.result = result
        self.spec = None  # lets go of the buffers
        if result.code is not Result.SUCCESS:
            self.feed = None
        self._over.set()
        for event in self._trio_events:
            event.set()

    def forget_after_fork(self, result: OpResult) -> None:
        """Ends it in a forked child, where there is no trio run to wake."""
        self.result = self.result or result
        self._over.set()
