"""The communicator for trio programs; `pccl.communicator` has the blocking one."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

import trio

from pccl._collectives import CallOf
from pccl._communicator_methods import CommunicatorMethods
from pccl._giving_up import CANCEL_GRACE_S, INTERRUPT_GRACE_S, deadline, gave_up, require_outcome
from pccl._reduce import info_of
from pccl._retry import Retry
from pccl._session_holder import SessionErrors
from pccl._timeouts import Timeout, checked_s
from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import CollectiveInfo, ReduceInfo, Result, SharedStateSyncInfo

T = TypeVar("T")
Awaited = Coroutine[Any, Any, T]


class AsyncCommunicator(
    CommunicatorMethods[
        Awaited[None], Awaited[bool], Awaited[SharedStateSyncInfo], Awaited[ReduceInfo], Awaited[CollectiveInfo]
    ]
):
    """A peer of a run, for trio programs. Its arguments, methods and errors are those of `Communicator`.

    Methods that block there are coroutines here. Properties, `get_attribute` and the methods whose names end in
    `_async` are plain functions in both; the handles that the latter return have `async_wait`.

    All methods must be called from one trio run. Background tasks are trio system tasks: they end with `close`, with
    the `async with` block, or with the run.

    Ctrl-C, where trio raises KeyboardInterrupt, comes to the program's own code or to where the main task waits. A call
    of this class that waits there withdraws what it began; the communicator can still be used. So does one that is
    cancelled, unless its op has been committed by then: that is returned as if in time.
    """

    @trio.lowlevel.enable_ki_protection
    async def close(self, *, reason: str = "") -> None:
        """Leave the run. Ops in flight fail here; the others settle them as after a loss, and are told the `reason`.

        May be called again."""
        await self._inner.close(reason)

    async def __aenter__(self) -> AsyncCommunicator:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The addresses of masters that it was made with."""
        return self._inner.address

    @property
    def is_connected(self) -> bool:
        """Whether it takes part in a run now."""
        return self._inner.is_connected

    @property
    def timeout(self) -> float | None:
        """Seconds that a call has which is given no timeout of its own; None: as long as it takes. It may be set, and
        counts from the next call on.

        Raises:
            PCCLError: INVALID_ARGUMENT if what it is set to is no number.
        """
        return self._inner.default_timeout_s

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._inner.default_timeout_s = checked_s(timeout, "timeout")

    @trio.lowlevel.enable_ki_protection
    async def _call(self, func_name: str, call: Callable[[], Awaited[T]]) -> T:
        with SessionErrors(func_name):
            return await call()

    _call_for_none = _call
    _call_for_bool = _call
    _call_for_sync_info = _call

    async def _reduce(self, spec: OpSpec, timeout: Timeout, func_name: str) -> ReduceInfo:
        return info_of(await self._run(spec, timeout, func_name), func_name)

    async def _collective(self, call: CallOf, timeout: Timeout, func_name: str) -> CollectiveInfo:
        made = call(self._inner.view(func_name), func_name)
        return made.info(await self._run(made.spec, timeout, func_name), func_name)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launch an op and wait for its end, or have it aborted on all peers."""
        session = self._inner.session(func_name)
        timeout_s = self._inner.timeout_s(timeout, func_name)
        pending = session.ops.new(spec)
        try:
            with SessionErrors(func_name):
                session.ops.launch(pending)
            with trio.move_on_after(float("inf") if timeout_s is None else timeout_s):
                await pending.async_wait()
            if not pending.is_over:
                assert timeout_s is not None
                whom = await session.counted_whom(pending)
                session.ops.cancel(pending, Result.TIMEOUT, gave_up(session, timeout_s, pending, whom))
                with trio.move_on_after(CANCEL_GRACE_S):
                    await pending.async_wait()
                await pending.async_reclaim()
        except PCCLError:
            raise
        except BaseException as error:  # cancelled, or trio's KeyboardInterrupt
            session.ops.cancel(pending, Result.TIMEOUT, "its caller was cancelled")
            await pending.async_reclaim()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + INTERRUPT_GRACE_S):
                await pending.async_wait()
            if not isinstance(error, trio.Cancelled) or pending.is_detached or pending.has_failed:
                raise
        require_outcome(session, [pending], func_name)
        return pending

    @trio.lowlevel.enable_ki_protection
    async def _run_retry(self, retry: Retry, timeout: Timeout, func_name: str) -> ReduceInfo:
        limit_s = self._inner.timeout_s(timeout, func_name)
        end_s = deadline(limit_s)
        session = self._inner.session(func_name)
        try:
            while retry.has_more:
                for spec in retry.next_specs():
                    retry.launch(session, spec)
                with trio.move_on_after(max(0.0, end_s - time.monotonic())):
                    await PendingOp.async_wait_any(retry.in_flight)
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
        with trio.CancelScope(shield=True, deadline=trio.current_time() + grace_s):
            for op in retry.in_flight:
                await op.async_wait()
        for op in retry.in_flight:
            await op.async_reclaim()


def _as_coroutine_function(method: Callable[..., Awaited[Any]]) -> Callable[..., Awaited[Any]]:
    """Return a coroutine function that awaits what `method` returns.

    Libraries that retry, wrap or mock calls ask `inspect.iscoroutinefunction`, which is false of the methods that both
    communicators share. It also has wrong arguments told to whoever awaits the call.
    """

    @wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    return call


for _name in (
    *("connect", "are_peers_pending", "update_topology", "optimize_topology", "sync_shared_state"),
    *("all_reduce", "all_reduce_multiple_with_retry"),
    *("all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier"),
):
    setattr(AsyncCommunicator, _name, _as_coroutine_function(getattr(AsyncCommunicator, _name)))
