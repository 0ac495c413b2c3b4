"""The communicator for trio and asyncio programs; `pccl.communicator` has the blocking one.

`connect` chooses the trio run for a session: in a trio program, the program's own; in an asyncio program, the portal
thread's, which blocking communicators also use. Group calls run there as coroutines; an asyncio caller waits for a task
in the portal. Ops are launched in the caller's thread and wake its event loop when they end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from _pccl_torch import outside_graphs
from pccl._collectives import ReduceOpDescriptor
from pccl._session_holder import SessionErrors
from pccl._timeouts import DEFAULT, Timeout, checked_s
from pccl.communicator import Communicator, CommunicatorBase
from pccl.errors import PCCLError
from pccl.handle import (
    CANCEL_GRACE_S,
    INTERRUPT_GRACE_S,
    InfoOf,
    Retry,
    cancel,
    gave_up,
    require_outcome,
)
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.threads import portal, waking
from pccl.types import ReduceInfo, Result

T = TypeVar("T")
P = ParamSpec("P")


def _coroutine(
    method: Callable[Concatenate[Communicator, P], T],
) -> Callable[Concatenate[AsyncCommunicator, P], Coroutine[Any, Any, T]]:
    """Return a method of `Communicator` as a coroutine function, for `AsyncCommunicator`.

    These methods only call `_call`, or `_run` through `_collective`, which are coroutines in `AsyncCommunicator`.
    """
    shared: Callable[..., Any] = method

    @wraps(method)
    async def awaited(self: AsyncCommunicator, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        result: T = await shared(self, *arguments, **keywords)
        return result

    return awaited


@outside_graphs
class AsyncCommunicator(CommunicatorBase):
    """A peer in a run, for trio and asyncio programs, with the arguments, methods and errors of `Communicator`.

    Methods that block in `Communicator` are coroutines here, and handles can be awaited. In trio, all methods must be
    called from the trio run that connected the communicator. In asyncio, its background tasks run in a thread that
    belongs to pccl, and any event loop may make calls.

    Cancelling a call withdraws it: the communicator remains usable, and the arrays are unchanged. If the call's op was
    committed first, the call returns its result in trio; in asyncio it raises `CancelledError` and the arrays hold the
    result. Pass `step` so that a repeated call cannot match the other peers' next one.
    """

    _is_blocking = False
    _is_settled = False
    """Whether `_home` has been chosen."""
    _home: trio.lowlevel.TrioToken | None = None
    """The session's trio run, or None for the portal's."""

    # Life.

    connect = _coroutine(Communicator.connect)

    async def close(self, *, timeout: float | None = None, reason: str = "") -> None:
        """Leave the run as `Communicator.close` does, even if the caller is cancelled."""
        limit_s = checked_s(timeout, "close")
        if self._begin_close() and not await self._call("close", partial(self._inner.close, reason, limit_s)):
            raise PCCLError(Result.TIMEOUT, "close", f"not finished within {limit_s:g} s; it continues")

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

    # Group calls, which return once all accepted peers have made them.

    admit_peers = _coroutine(Communicator.admit_peers)
    are_peers_pending = _coroutine(Communicator.are_peers_pending)
    update_topology = _coroutine(Communicator.update_topology)
    wait_for_peers = _coroutine(Communicator.wait_for_peers)
    optimize_topology = _coroutine(Communicator.optimize_topology)
    sync_shared_state = _coroutine(Communicator.sync_shared_state)

    # Collectives.

    all_reduce = _coroutine(Communicator.all_reduce)
    all_gather = _coroutine(Communicator.all_gather)
    reduce_scatter = _coroutine(Communicator.reduce_scatter)
    broadcast = _coroutine(Communicator.broadcast)
    reduce = _coroutine(Communicator.reduce)
    all_to_all = _coroutine(Communicator.all_to_all)
    gather = _coroutine(Communicator.gather)
    scatter = _coroutine(Communicator.scatter)
    send = _coroutine(Communicator.send)
    recv = _coroutine(Communicator.recv)
    barrier = _coroutine(Communicator.barrier)

    async def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, timeout: Timeout = DEFAULT
    ) -> ReduceInfo:
        """Like `Communicator.all_reduce_multiple_with_retry`, as a coroutine."""
        retry = Retry(self._inner, descriptors, max_in_flight, timeout)
        self._is_at_home("all_reduce_multiple_with_retry")
        try:
            try:
                while retry.launch():
                    await PendingOp.async_wait_any(retry.in_flight, retry.left_s)
                    retry.collect()
                return retry.info()
            except PCCLError as error:
                retry.cancel()
                await _wait_all(retry.in_flight, CANCEL_GRACE_S)
                for op in retry.in_flight:
                    await op.async_reclaim()
                return retry.outcome(error)
        except PCCLError:
            raise
        except BaseException:
            cancel(retry.session, retry.in_flight)
            for op in retry.in_flight:
                await op.async_reclaim()
            await _wait_all(retry.in_flight, INTERRUPT_GRACE_S)
            raise

    # Waiting.

    def _is_at_home(self, func_name: str) -> bool:
        """Return True if the session lives in the caller's trio run, False if it lives in the portal's.

        Raises:
            PCCLError: INVALID_USAGE if the communicator cannot be called from here.
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
            what = f"it was connected in {homes[0]} and cannot be called from {homes[1]}; make a communicator for each"
            raise PCCLError(Result.INVALID_USAGE, func_name, what)
        return run is not None

    @trio.lowlevel.enable_ki_protection
    async def _call(self, func_name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the session's trio run."""
        with SessionErrors(func_name):
            if self._is_at_home(func_name):
                return await call()
            self._close_when_dropped()
            return await portal.current().call_from_asyncio(call)

    _collective = Communicator._collective

    @trio.lowlevel.enable_ki_protection
    async def _run(self, spec: OpSpec, timeout: Timeout, func_name: str, info_of: InfoOf[T]) -> T:
        """Run an op like `Communicator._run`, and abort it if the caller is cancelled."""
        session = self._inner.session(func_name)
        self._is_at_home(func_name)
        limit_s = self._inner.timeout_s(timeout, func_name)
        op = session.ops.new(spec)
        try:
            with SessionErrors(func_name):
                session.ops.launch(op)
            await op.async_wait(limit_s)
            if not op.is_over:
                whom = await self._call(func_name, partial(session.counted_whom, op))
                session.ops.cancel(op, Result.TIMEOUT, gave_up(session, limit_s, op, whom))
                await op.async_wait(CANCEL_GRACE_S)
                await op.async_reclaim()
        except BaseException as error:  # cancelled, trio's KeyboardInterrupt, or refused
            cancel(session, [op])
            try:
                await op.async_reclaim()
            finally:  # a second cancellation in asyncio
                await op.async_wait(INTERRUPT_GRACE_S, is_shielded=True)
            if not isinstance(error, trio.Cancelled) or op.is_given_up or op.has_failed:
                raise
        require_outcome(session, [op], func_name)
        return info_of(op, func_name)


async def _wait_all(ops: Sequence[PendingOp], limit_s: float) -> None:
    """Wait until all ops are over or the time has passed, even if the caller is cancelled."""
    end_s = waking.clock_s() + limit_s
    for op in ops:
        await op.async_wait(max(0.0, end_s - waking.clock_s()), is_shielded=True)
