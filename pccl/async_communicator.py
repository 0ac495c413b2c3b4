"""The communicator for programs of trio and asyncio; `pccl.communicator` has the blocking one.

Theory of operation. A session lives in a trio run. In a trio program that is the program's own. An asyncio program has
none, so there it is the one of the portal's thread, in which the sessions of blocking communicators live, too. The
home is chosen when `connect` is called.

*Joint calls* and `connect` run as coroutines in the session's home. In asyncio the caller waits for a task in the
portal, which a cancellation cancels, and is not told before the task has undone what it began.

*Ops* are launched by the caller's own thread, and their ends wake its event loop (`pccl.runtime.threads.waking`).

*Cancellation.* Neither library's may be lost. trio's comes again at the next checkpoint, so a call whose op was
committed as it was cancelled returns its result. asyncio's comes once, so it is always raised; then the arrays of an op
that was committed hold the result.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import trio

from _pccl_torch import outside_graphs
from pccl._collectives import CallOf
from pccl._communicator_methods import RESULTS, CommunicatorMethods
from pccl._giving_up import CANCEL_GRACE_S, INTERRUPT_GRACE_S, deadline, gave_up, require_outcome
from pccl._own_methods import own_methods
from pccl._reduce import info_of
from pccl._retry import Retry
from pccl._session_holder import SessionErrors, close_forgotten
from pccl._timeouts import Timeout, checked_s
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.threads import portal, waking
from pccl.types import CollectiveInfo, ReduceInfo, Result, SharedStateSyncInfo

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


@outside_graphs
@own_methods(RESULTS, are_coroutines=True)
class AsyncCommunicator(
    CommunicatorMethods[
        Awaited[None],
        Awaited[bool],
        Awaited[int],
        Awaited[SharedStateSyncInfo],
        Awaited[ReduceInfo],
        Awaited[CollectiveInfo],
    ]
):
    """A peer of a run, for programs of trio or asyncio. Its arguments, methods and errors are those of `Communicator`.

    Methods that block there are coroutines here. Properties, `get_attribute` and the methods whose names end in
    `_async` are plain functions in both; the handles that the latter return can be awaited.

    In trio all methods must be called from the trio run in which it was connected. Background tasks are trio system
    tasks: they end with `close`, with the `async with` block, or with the run. In asyncio they run in a thread of
    pccl's own, and any event loop may call.

    A call that is cancelled withdraws what it began; the communicator can still be used, and the arrays of an op are as
    they were. If its op has been committed by then, the call returns as if in time in trio; in asyncio, where a
    cancellation would be lost by that, it raises `CancelledError`, and the arrays hold the result: as after a Ctrl-C it
    is `step` that keeps a repeated call from meeting the others' next one. Ctrl-C, where trio raises KeyboardInterrupt,
    comes to the program's own code or to where the main task waits; asyncio cancels the main task.
    """

    def _set_up(self) -> None:
        self._home: trio.lowlevel.TrioToken | None = None
        """The trio run in which the session lives; None: that of the portal."""
        self._is_settled = False
        """Whether it has a home."""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    async def close(self, *, timeout: float | None = None, reason: str = "") -> None:
        """Leave the run. Ops in flight fail here; the others settle them as after a loss, and are told the `reason`.

        It takes a few seconds at most, even if nobody answers, and a cancellation does not end it. It may be called
        again. The communicator's own timeout does not count here.

        Raises:
            PCCLError: TIMEOUT if `timeout` seconds pass before; leaving then goes on by itself.
        """
        limit_s = checked_s(timeout, "close")
        self._before_leaving.clear()
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._inner.begin_close() and not await self._call("close", partial(self._inner.close, reason, limit_s)):
            raise PCCLError(Result.TIMEOUT, "close", f"not finished within {limit_s:g} s; it goes on")

    async def __aenter__(self) -> AsyncCommunicator:
        if not self.is_connected:
            await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for call in list(self._before_leaving.values()):
                    result = call()
                    if inspect.isawaitable(result):
                        await result
        finally:
            await self.close()

    def _is_at_home(self, func_name: str) -> bool:
        """Return whether the session lives in the trio run of the caller, and not in the portal's.

        Raises:
            PCCLError: INVALID_USAGE if it cannot be called from here.
        """
        try:
            run = waking.trio_run()
        except waking.NoEventLoopError as error:
            what = f"{error}; Communicator has the same methods for programs without an event loop"
            raise PCCLError(Result.INVALID_USAGE, func_name, what) from None
        if not self._is_settled or (func_name == "connect" and self._inner.is_at_rest):
            self._home = run
            self._is_settled = True
        if run is not self._home:
            homes = ["asyncio" if each is None else "a trio run" for each in (self._home, run)]
            if homes[0] == homes[1]:
                homes[1] = "another one"
            what = f"it was connected in {homes[0]} and cannot be called from {homes[1]}; make one for each"
            raise PCCLError(Result.INVALID_USAGE, func_name, what)
        return run is not None

    @trio.lowlevel.enable_ki_protection
    async def _call(self, func_name: str, call: Callable[[], Awaited[T]]) -> T:
        with SessionErrors(func_name):
            if self._is_at_home(func_name):
                return await call()
            if self._finalizer is None:
                self._finalizer = weakref.finalize(self, close_forgotten, self._inner)
                self._finalizer.atexit = False
            portal.on_exit(self._inner)
            return await portal.current().call_from_asyncio(call)

    async def _reduce(self, spec: OpSpec, timeout: Timeout, func_name: str) -> ReduceInfo:
        return info_of(await self._run(spec, timeout, func_name), func_name)

    async def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfo:
        made = call(self._inner.view(func_name), func_name)
        return made.info(await self._run(made.spec, timeout, func_name), func_name)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launch an op and wait for its end, or have it aborted on all peers."""
        session = self._inner.session(func_name)
        self._is_at_home(func_name)
        timeout_s = self._inner.timeout_s(timeout, func_name)
        pending = session.ops.new(spec)
        try:
            with SessionErrors(func_name):
                session.ops.launch(pending)
            await pending.async_wait(timeout_s)
            if not pending.is_over:
                assert timeout_s is not None
                whom = await self._call(func_name, partial(session.counted_whom, pending))
                session.ops.cancel(pending, Result.TIMEOUT, gave_up(session, timeout_s, pending, whom))
                await pending.async_wait(CANCEL_GRACE_S)
                await pending.async_reclaim()
        except PCCLError:
            raise
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            session.ops.cancel(pending, Result.TIMEOUT, "its caller was cancelled")
            await pending.async_reclaim()
            await pending.async_wait(INTERRUPT_GRACE_S, is_shielded=True)
            if not isinstance(error, trio.Cancelled) or pending.is_detached or pending.has_failed:
                raise
        require_outcome(session, [pending], func_name)
        return pending

    @trio.lowlevel.enable_ki_protection
    async def _run_retry(self, retry: Retry, timeout: Timeout, func_name: str) -> ReduceInfo:
        limit_s = self._inner.timeout_s(timeout, func_name)
        end_s = deadline(limit_s)
        session = self._inner.session(func_name)
        self._is_at_home(func_name)
        try:
            while retry.has_more:
                for spec in retry.next_specs():
                    retry.launch(session, spec)
                left_s = None if limit_s is None else max(0.0, end_s - time.monotonic())
                await PendingOp.async_wait_any(retry.in_flight, left_s)
                retry.collect(session, limit_s)
        except PCCLError as error:
            retry.abandon(session, limit_s)
            await self._await_verdicts(retry, CANCEL_GRACE_S)
            if not (error.result is Result.TIMEOUT and retry.is_committed_after_all()):
                require_outcome(session, retry.in_flight, func_name, error)
                raise
        except BaseException:
            retry.abandon(session, None)
            for op in retry.in_flight:
                await op.async_reclaim()
            await self._await_verdicts(retry, INTERRUPT_GRACE_S)
            raise
        return retry.info()

    async def _await_verdicts(self, retry: Retry, grace_s: float) -> None:
        end_s = waking.clock_s() + grace_s
        for op in retry.in_flight:
            await op.async_wait(max(0.0, end_s - waking.clock_s()), is_shielded=True)
        for op in retry.in_flight:
            await op.async_reclaim()
