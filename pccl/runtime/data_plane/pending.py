"""An op in flight, from its launch to its result.

The caller's arrays belong to pccl until the op is *released*. That happens when it is over, or earlier, when its caller
gives it up and the engine has restored what it overwrote (native/include/pccl_native.h, pccl_engine_detach). Giving up
returns the arrays immediately, but the op's outcome is still decided by the master and the other peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pccl.protocol.peer.effects import OpResult
from pccl.runtime.data_plane.engine import forget_join
from pccl.runtime.data_plane.op_spec import OpSpec, Pair
from pccl.runtime.data_plane.overlapped_waits import OverlappedWaits
from pccl.runtime.threads import waking
from pccl.runtime.threads.waking import Latch, Waker, wait_any
from pccl.types import Result

OpName = tuple[int, Pair | None]

JOIN_S = 0.1
"""Waits with a shorter timeout do not happen in the engine, where a wait cannot be ended early."""


class Session(Protocol):
    """An op's session. All methods may be called in any thread."""

    def ask_for_release(self, op: PendingOp) -> None: ...

    def wait_for_release(self, op: PendingOp) -> None: ...

    def leave_for(self, reason: str) -> None: ...

    def free_tag(self, op: PendingOp) -> None: ...

    def whom(self, op: PendingOp) -> str: ...


class PendingOp:
    """An op from its launch to its result. `wait` is for any thread, `async_wait` for trio and asyncio."""

    launched_ns = 0
    """Monotonic launch time; the next field is the launching thread. Both are 0 if the engine records them."""
    caller = 0
    waits: OverlappedWaits | None = None
    """The session's waits, if the op's caller waits later; None if the engine times the op."""

    def __init__(self, op: int, spec: OpSpec, session: Session) -> None:
        self.op = op
        self._session = session
        self.spec: OpSpec | None = spec
        self.source = spec.source
        """The source for arrays on a device; it delivers the result if the op succeeds."""
        self.new_array = spec.new_array
        """Returns the result as a new array, if the caller passed no array for it."""
        self.written = spec.written
        """Called when a result is in the caller's arrays."""
        self.residuals = spec.residuals
        self.is_given_up = False
        """Whether the caller gets its arrays back without the result, at the latest when the op is released."""
        self.tag = spec.tag
        self.shared_tag = spec.tag
        """The tag that all participants use on the fast path. For a point-to-point op it also identifies the pair."""
        self.name: OpName = spec.tag, spec.pair
        """Unique among the ops in flight."""
        self.result: OpResult | None = None
        self.is_committed = False
        """Whether the engine has been told to commit the op and therefore has the result."""
        self.epoch: int | None = None
        """The op's epoch; None before it starts."""
        self.ring: tuple[int, ...] = ()
        """The participants, once the op has started."""
        self.rank = 0
        self.join: Callable[[], tuple[bool, int, int]] | None = None
        """Waits at most a few milliseconds for the end of an op on the fast path. It returns whether the op has
        succeeded, and the numbers of bytes sent and received. None for other ops."""
        self.is_released = False
        """Whether pccl has stopped reading and writing the caller's arrays."""
        self._over = Latch()
        self._callbacks: list[Callable[[], None]] = []
        self._wakers: list[Waker] = []
        self._release_wakers: list[Waker | Latch] = []

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the op is over. Return False if the timeout passes first. A signal handler that raises ends the
        wait."""
        if self.join is not None and (timeout_s is None or timeout_s > JOIN_S):
            self.join_started()
        waits = self.waits
        if waits is None or self._over._is_set:
            return self._over.wait(timeout_s)
        number = waits.new()
        try:
            waits.begin(number)
            return self._over.wait(timeout_s)
        finally:
            if self.waits is not None:  # it is None in a forked child
                waits.end(number)

    def join_started(self) -> None:
        """Wait briefly in the engine for an op on the fast path. A long op may not be over on return."""
        join, waits = self.join, self.waits
        if join is None or self._over._is_set:
            return
        began_ns = time.monotonic_ns()
        is_completed, tx_bytes, rx_bytes = join()
        if waits is not None:
            waits.joined(began_ns)
        if is_completed:
            self.succeed(tx_bytes, rx_bytes)
        else:
            self.join = None

    async def async_wait(self, timeout_s: float | None = None, *, is_shielded: bool = False) -> None:
        """Wait until the op is over or the timeout passes. For trio or asyncio coroutines in any thread."""
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
        waited = [(op.waits, op.waits.new()) for op in ops if op.waits is not None]
        for op in ops:
            op._wakers.append(waker)
        try:
            for waits, number in waited:
                waits.begin(number)
            if not any(op.is_over for op in ops):
                await waker.wait(timeout_s, is_shielded=is_shielded)
        finally:
            for op in ops:
                op._wakers.remove(waker)
            for waits, number in waited:
                waits.end(number)

    @property
    def is_over(self) -> bool:
        """Whether there is a result. If the end of the op releases it, this is set before the release."""
        return self.result is not None

    @property
    def has_failed(self) -> bool:
        return self.result is not None and self.result.code is not Result.SUCCESS

    def reclaim(self) -> None:
        """Wait until the arrays belong to the caller again, either unchanged or, if the op was committed first, with
        the result. This waits for the engine but not for the network."""
        if not self.is_released:
            self._session.ask_for_release(self)
            self._session.wait_for_release(self)

    def wait_released(self) -> None:
        latch = Latch()
        self._release_wakers.append(latch)
        if not self.is_released:
            latch.wait()

    async def async_reclaim(self) -> None:
        """Do the same as `reclaim`, for the coroutines that `async_wait` supports. Cannot be cancelled."""
        if self.is_released:
            return
        waker = waking.waker()
        self._release_wakers.append(waker)
        self._session.ask_for_release(self)
        if not self.is_released:
            await waker.wait(is_shielded=True)

    def succeed(self, tx_bytes: int, rx_bytes: int) -> None:
        """End an op that has completed on the fast path."""
        self.finish(OpResult(self.op, Result.SUCCESS, "", len(self.ring), tx_bytes, rx_bytes))

    def finish(self, result: OpResult) -> None:
        """End the op with its result. May be called again if a signal interrupted the first call."""
        if not self._over._is_set:
            if self.result is None:
                self._session.free_tag(self)  # first, because a waiting thread may launch the next op
            self.result = result
            self.spec = None  # the buffers may be garbage-collected
            if result.code is not Result.SUCCESS:
                self.source = None
                self.written = None
            if not self.is_given_up:
                if self.residuals is not None and result.code is Result.SUCCESS:
                    self.residuals.keep()
                self.residuals = None
                if self.written is not None:
                    self.note_written()
                self.release()
            self.join = None
            self._over.set()
        if self._callbacks:
            self._call_back()
        if self._wakers:
            _wake(self._wakers)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the thread that ends the op, or immediately if the op is over. The callback must
        neither wait nor raise. Thread-safe."""
        self._callbacks.append(callback)
        if self._over.is_set():
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # another thread has taken the last one
            callback()

    def whom(self) -> str:
        """Return a description of the peers that the op waits for. Thread-safe."""
        return self._session.whom(self)

    def note_written(self) -> None:
        """Call `written` once: a result is in the caller's arrays."""
        written, self.written = self.written, None
        if written is not None:
            written()

    def leave_run(self, reason: str) -> None:
        """Leave the run because this peer lacks a result that the others have. Thread-safe."""
        self._session.leave_for(reason)

    def release(self) -> None:
        """Give the caller's arrays back. May be called again."""
        self.is_released = True
        if self._release_wakers:
            _wake(self._release_wakers)

    def forget_after_fork(self, result: OpResult) -> None:
        """End the op in a forked child, where no trio run exists and locks of the engine may be held."""
        self.waits = None
        join, self.join = self.join, None
        if join is not None:
            forget_join(join)
        self.result = self.result or result
        self.is_released = True
        self._over.set()
        _wake([waker for waker in self._release_wakers if isinstance(waker, Latch)])


def _wake(wakers: Sequence[Waker | Latch]) -> None:
    for waker in tuple(wakers):  # a copy, because waiters in other threads may leave
        waker.wake()
