"""An op as its caller has it: from the launch to the result.

Its arrays are pccl's until it is *released*: when it is over, or earlier, when it has been detached from them
(`detached`). `reclaim` sees to that and returns after it; whatever a call raises, it comes after a
`reclaim`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pccl.protocol.peer import OpResult
from pccl.runtime.data_plane.detached import PrivateCopy, buffer_bytes
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair
from pccl.runtime.data_plane.overlapped_waits import OverlappedWaits
from pccl.runtime.threads import waking
from pccl.runtime.threads.latch import Latch, wait_any
from pccl.runtime.threads.waking import Waker
from pccl.types import Result

OpName = tuple[int, Pair | None]


class Session(Protocol):
    """The session of an op, as the op needs it. For any thread."""

    def ask_for_release(self, op: PendingOp, goes_on: bool) -> None: ...

    def wait_for_release(self, op: PendingOp) -> None: ...

    def leave_for(self, reason: str) -> None: ...

    def whom(self, op: PendingOp) -> str: ...


class PendingOp:
    """An op from its launch to its result. `wait` may be called from any thread, `async_wait` from trio and asyncio."""

    launched_ns = 0
    """The time of the launch, by the monotonic clock, and the thread that launched it; 0: the engine knows them."""
    caller = 0
    waits: OverlappedWaits | None = None
    """The waits of its session, for an op whose caller waits later; None: the engine times it."""

    def __init__(self, op: int, spec: OpSpec, session: Session) -> None:
        self.op = op
        self._session = session
        self.spec: OpSpec | None = spec
        self.source = spec.source
        """The source of arrays on a device, which delivers the result where the op succeeds."""
        self.new_array = spec.new_array
        """Returns the result, where it is not in an array of the caller's."""
        self.written = spec.written
        """Called when a result is in the caller's arrays."""
        self.copy: PrivateCopy | None = None
        """The memory of an op that was detached and goes on; it has the result where the op succeeds."""
        self.is_detached = False
        """Whether the op does not work on its caller's arrays, or will not when it is released."""
        self.tag = spec.tag
        self.shared_tag = spec.tag
        """The tag by which all participants know an op on the fast path. That of a point-to-point op names the pair."""
        self.name: OpName = spec.tag, spec.pair
        """The op's name, which no other op in flight has."""
        self.result: OpResult | None = None
        self.is_committed = False
        """Whether the engine was told that the op is committed, and so has its result, whatever its machine says of it
        later, or no more."""
        self.epoch: int | None = None
        """The epoch in which the op runs; None before it starts."""
        self.ring: tuple[int, ...] = ()
        """The participants, once the op has started."""
        self.rank = 0
        self.join: Callable[[], None] | None = None
        """Waits, some milliseconds at most, for an op that was started on the fast path; None: there is none."""
        self.before_over: Callable[[], None] | None = None
        """Called before anybody sees that the op is over, perhaps more than once."""
        self._buffers: Buffers | None = None
        self._over = Latch()
        self._released = Latch()
        self._callbacks: list[Callable[[], None]] = []
        self._wakers: list[Waker] = []
        self._release_wakers: list[Waker] = []

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the op is over. Return False if the time passed first. A signal handler that raises (Ctrl-C) ends
        the wait."""
        self.join_started()
        waits = self.waits
        if waits is None or self._over.is_set():
            return self._over.wait(timeout_s)
        waits.begin(self.op, self._over.is_set)  # cut off by a signal, it is no wait, or one that ends with the op
        try:
            return self._over.wait(timeout_s)
        finally:
            waits = self.waits  # None: a handler has forked, and this is the child
            if waits is not None:
                waits.end(self.op, self._over.is_set())

    def join_started(self) -> None:
        """Wait for the op within the engine, if that is possible: it is over then, unless it takes long."""
        join = self.join
        if join is not None and not self._over.is_set():
            join()

    async def async_wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        """Wait until the op is over or the time has passed. For coroutines of trio or asyncio, in any thread."""
        await self.async_wait_any([self], timeout_s, is_shielded=is_shielded)

    @staticmethod
    def wait_any(ops: Sequence[PendingOp], timeout_s: float | None) -> bool:
        """Wait until one of the ops is over, as `wait` does for one."""
        return wait_any([op._over for op in ops], timeout_s)

    @staticmethod
    async def async_wait_any(
        ops: Sequence[PendingOp], timeout_s: float | None = None, *, is_shielded: bool = False
    ) -> None:
        """Wait until one of the ops is over, as `async_wait` does for one."""
        if any(op.is_over for op in ops):
            return
        waker = waking.waker()
        for op in ops:
            op._wakers.append(waker)
        try:
            for op in ops:
                if op.waits is not None:
                    op.waits.begin(op.op, op._over.is_set)
            if not any(op.is_over for op in ops):
                await waker.wait(timeout_s, is_shielded=is_shielded)
        finally:
            for op in ops:
                op._wakers.remove(waker)
                if op.waits is not None:
                    op.waits.end(op.op, op.is_over)

    @property
    def is_over(self) -> bool:
        """Whether there is a result. Set before the op is released, if its end releases it: whoever has the arrays back
        knows whether the op is over."""
        return self.result is not None

    @property
    def is_released(self) -> bool:
        """Whether nobody reads or writes the caller's arrays any more."""
        return self._released.is_set()

    @property
    def has_failed(self) -> bool:
        return self.result is not None and self.result.code is not Result.SUCCESS

    def reclaim(self, goes_on: bool = False) -> None:
        """Return when the arrays are the caller's again; unless the op has been committed by then they are as they
        were. It waits for the engine, never for the network. The op stops, if its caller has had it cancelled, or goes
        on with a copy.

        A signal handler that raises ends even this, so whoever calls it does so again in a `finally`.
        """
        if not self.is_released:
            self._session.ask_for_release(self, goes_on)
            self._session.wait_for_release(self)

    def wait_released(self) -> None:
        self._released.wait()

    async def async_reclaim(self, goes_on: bool = False) -> None:
        """Do as `reclaim`, for coroutines as `async_wait`; cannot be cancelled."""
        if self.is_released:
            return
        waker = waking.waker()
        self._release_wakers.append(waker)
        self._session.ask_for_release(self, goes_on)
        if not self.is_released:
            await waker.wait(is_shielded=True)

    def placed(self, spec: OpSpec, rank: int, world_size: int) -> OpSpec:
        """Return the spec with buffers for these participants, and remember the buffers. ValueError as in
        `Placement.place`."""
        placed = spec.placed(rank, world_size)
        assert isinstance(placed.buffers, Buffers)
        self._buffers = placed.buffers
        return placed

    def place(self, spec: OpSpec, rank: int, world_size: int) -> Buffers:
        """Return the buffers for these participants, and remember them. ValueError as in `Placement.place`."""
        buffers = spec.buffers
        if not isinstance(buffers, Buffers):
            buffers = buffers.place(rank, world_size)
        self._buffers = buffers
        return buffers

    def copied(self, peer: int) -> PrivateCopy:
        """Return memory to go on with, for an op whose buffers are known. MemoryError."""
        spec = self.spec
        assert spec is not None
        buffers = spec.buffers if isinstance(spec.buffers, Buffers) else self._buffers
        assert buffers is not None
        assert buffers.are_whole
        is_root = spec.root is not None and spec.root.peer == peer
        if spec.pair is not None:
            is_root = spec.pair.is_sender
        rank, world_size = self.rank, max(1, len(self.ring))
        return PrivateCopy(buffers, *buffer_bytes(spec, buffers, rank, world_size, is_root))

    def finish(self, result: OpResult) -> None:
        """End the op with its result. May be called again, and does what is left if a signal has ended it."""
        if not self._over.is_set():
            self.result = result
            self.spec = None  # lets go of the buffers
            if result.code is not Result.SUCCESS:
                self.source = None
                self.written = None
            if not self.is_detached:
                self.note_written()
                self.release()
            elif self.is_released:
                self._drop_copy()
            if self.before_over is not None:
                self.before_over()
            self.join = None
            self._over.set()
            if self.waits is not None:
                self.waits.over(self.op)
        self.before_over = None  # it refers to the op as a rule
        self._call_back()
        _wake(self._wakers)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when the op is over, by whoever ends it, or at once if it is over. Any thread.

        Mostly that is the trio thread, so the callback must neither wait nor raise.
        """
        self._callbacks.append(callback)
        if self._over.is_set():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # another thread was faster
            callback()

    def whom(self) -> str:
        """Return in words whom the op waits for. Any thread."""
        return self._session.whom(self)

    def note_written(self) -> None:
        """Say that a result is in the caller's arrays, once."""
        written, self.written = self.written, None
        if written is not None:
            written()

    def leave_run(self, reason: str) -> None:
        """Have the peer leave the run, for it does not have what all others have. Any thread."""
        self._session.leave_for(reason)

    def _drop_copy(self) -> None:
        """Let go of the copy of a failed op, when nobody works on it any more."""
        if self.has_failed:
            self.copy = None

    def release(self) -> None:
        """Give the caller's arrays back. May be called again."""
        if self.copy is not None:
            self._drop_copy()
        self._released.set()
        _wake(self._release_wakers)

    def forget_after_fork(self, result: OpResult) -> None:
        """End the op in a forked child, where there is no trio run to wake, and locks of the engine may be held."""
        self.waits = None
        self.result = self.result or result
        self._released.set()
        self._over.set()


def _wake(wakers: list[Waker]) -> None:
    for waker in tuple(wakers):  # those who wait in other threads leave meanwhile
        waker.wake()
