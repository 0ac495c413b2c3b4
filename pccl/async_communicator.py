"""The communicator for programs of trio and asyncio; `pccl.communicator` has the blocking one.

A session lives in a trio run: the program's own, or, for an asyncio program, that of the portal's thread, as the
sessions of blocking communicators. `connect` chooses. Group calls run as coroutines there; in asyncio the caller waits
for a task in the portal. Ops are launched in the caller's thread, and their ends wake its event loop.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import trio

from _pccl_torch import outside_graphs
from pccl import _collectives
from pccl._arrays import Array, Movable
from pccl._collectives import CallOf, ReduceOpDescriptor
from pccl._options import CommunicatorOptions, holder_of
from pccl._session_holder import SessionErrors, close_forgotten
from pccl._timeouts import DEFAULT, Timeout, checked_s
from pccl.communicator import ENFORCE_POPULAR, CommunicatorBase
from pccl.errors import PCCLError
from pccl.handle import (
    CANCEL_GRACE_S,
    INTERRUPT_GRACE_S,
    Retry,
    cancel,
    collective_info,
    gave_up,
    reduce_info,
    require_outcome,
)
from pccl.protocol.messages import Kind
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.threads import portal, waking
from pccl.shared_state import SharedState
from pccl.types import (
    CollectiveInfo,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
)

T = TypeVar("T")
P = ParamSpec("P")


@outside_graphs
class AsyncCommunicator(CommunicatorBase):
    """A peer of a run, for programs of trio or asyncio. Its arguments, methods and errors are those of `Communicator`.

    Methods that block there are coroutines here, and handles can be awaited. In trio all methods must be called from
    the trio run that connected it. In asyncio its background tasks run in a thread of pccl's own, and any event
    loop may call.

    A call that is cancelled withdraws what it began: the communicator can still be used, and the arrays are as they
    were. If its op was committed first, the call returns its result in trio; in asyncio it raises `CancelledError`, and
    the arrays hold the result (`step` keeps a repeated call from meeting the others' next one).
    """

    def __init__(
        self,
        address: str | None = None,
        peer_group: int = 0,
        connections: int = 0,
        *,
        timeout: float | None = None,
        name: str | None = None,
        token: str | None = None,
        encrypt: bool | None = None,
        options: CommunicatorOptions | None = None,
        **old_names: Any,
    ) -> None:
        holder = holder_of(address, peer_group, connections, timeout, name, token, encrypt, options, old_names)
        super().__init__(holder, is_blocking=False)
        self._home: trio.lowlevel.TrioToken | None = None
        """The session's trio run; None: that of the portal."""
        self._is_settled = False
        """Whether it has a home."""
        self._finalizer: weakref.finalize[Any, Any] | None = None

    # Life.

    async def connect(self, n_attempts: int | None = None, *, timeout: Timeout = DEFAULT) -> None:
        """Do as `Communicator.connect`."""
        await self._call("connect", lambda: self._inner.connect(n_attempts, timeout))

    async def close(self, *, timeout: float | None = None, reason: str = "") -> None:
        """Do as `Communicator.close`. A cancellation does not end it."""
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

    # Group calls: they return when all accepted peers have made them.

    async def admit_peers(
        self,
        state: SharedState | None = None,
        strategy: SharedStateSyncStrategy = ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> bool:
        """Do as `Communicator.admit_peers`."""
        return await self._call("admit_peers", lambda: self._inner.admit_peers(state, strategy, timeout))

    async def are_peers_pending(self, *, timeout: Timeout = DEFAULT) -> bool:
        """Do as `Communicator.are_peers_pending`."""
        name = "are_peers_pending"
        pending = await self._call(name, lambda: self._inner.group_call(name, Kind.ARE_PEERS_PENDING, timeout))
        return pending > 0

    async def update_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Do as `Communicator.update_topology`."""
        name = "update_topology"
        await self._call(name, lambda: self._inner.group_call(name, Kind.UPDATE_TOPOLOGY, timeout))

    async def wait_for_peers(self, count: int, *, timeout: Timeout = DEFAULT) -> int:
        """Do as `Communicator.wait_for_peers`."""
        return await self._call("wait_for_peers", lambda: self._inner.wait_for_peers(count, timeout))

    async def optimize_topology(self, *, timeout: Timeout = DEFAULT) -> None:
        """Do as `Communicator.optimize_topology`."""
        name = "optimize_topology"
        await self._call(name, lambda: self._inner.group_call(name, Kind.OPTIMIZE_TOPOLOGY, timeout))

    async def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = ENFORCE_POPULAR,
        *,
        timeout: Timeout = DEFAULT,
    ) -> SharedStateSyncInfo:
        """Do as `Communicator.sync_shared_state`."""
        name = "sync_shared_state"
        return await self._call(name, lambda: self._inner.sync_shared_state(shared_state, strategy, timeout))

    # Collectives.

    async def all_reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        quantization: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
    ) -> ReduceInfo:
        """Do as `Communicator.all_reduce`."""
        quantization = quantization if quantization is not None else quantization_options
        spec = _collectives.all_reduce(
            send, recv, op, tag, quantization, algorithm, step, operand_descriptor, "all_reduce"
        )
        return reduce_info(await self._run(spec, timeout, "all_reduce"), "all_reduce")

    async def all_gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.all_gather`."""
        return await self._collective(_collectives.all_gather, timeout, send, recv, tag, algorithm, step)

    async def reduce_scatter(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.reduce_scatter`."""
        return await self._collective(_collectives.reduce_scatter, timeout, send, recv, op, tag, algorithm, step)

    async def broadcast(
        self,
        array: Movable,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.broadcast`."""
        return await self._collective(_collectives.broadcast, timeout, array, root, tag, algorithm, step)

    async def reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.reduce`."""
        return await self._collective(_collectives.reduce, timeout, send, recv, op, root, tag, algorithm, step)

    async def all_to_all(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.all_to_all`."""
        return await self._collective(_collectives.all_to_all, timeout, send, recv, send_counts, recv_counts, tag, step)

    async def gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.gather`."""
        return await self._collective(_collectives.gather, timeout, send, recv, root, tag, step)

    async def scatter(
        self,
        send: Movable | None,
        recv: Movable,
        *,
        root: int,
        tag: int = 0,
        step: int | None = None,
        timeout: Timeout = DEFAULT,
    ) -> CollectiveInfo:
        """Do as `Communicator.scatter`."""
        return await self._collective(_collectives.scatter, timeout, send, recv, root, tag, step)

    async def send(
        self, array: Movable, *, dst: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfo:
        """Do as `Communicator.send`."""
        return await self._collective(_collectives.send, timeout, array, dst, tag, step)

    async def recv(
        self, array: Movable, *, src: int, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT
    ) -> CollectiveInfo:
        """Do as `Communicator.recv`."""
        return await self._collective(_collectives.recv, timeout, array, src, tag, step)

    async def barrier(self, *, tag: int = 0, step: int | None = None, timeout: Timeout = DEFAULT) -> CollectiveInfo:
        """Do as `Communicator.barrier`."""
        return await self._collective(_collectives.barrier, timeout, tag, step)

    async def all_reduce_multiple_with_retry(
        self, descriptors: Sequence[ReduceOpDescriptor], *, max_in_flight: int = 4, timeout: Timeout = DEFAULT
    ) -> ReduceInfo:
        """Do as `Communicator.all_reduce_multiple_with_retry`."""
        retry = Retry(self._inner, descriptors, max_in_flight, timeout)
        self._is_at_home("all_reduce_multiple_with_retry")
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
        except BaseException:
            cancel(retry.session, retry.in_flight)
            for op in retry.in_flight:
                await op.async_reclaim()
            await _wait_all(retry.in_flight, INTERRUPT_GRACE_S)
            raise

    # Waiting.

    def _is_at_home(self, func_name: str) -> bool:
        """Return whether the session lives in the caller's trio run, and not in the portal's.

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
    async def _call(self, func_name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the session's trio run."""
        with SessionErrors(func_name):
            if self._is_at_home(func_name):
                return await call()
            if self._finalizer is None:
                self._finalizer = weakref.finalize(self, close_forgotten, self._inner)
                self._finalizer.atexit = False
            portal.on_exit(self._inner)
            return await portal.current().call_from_asyncio(call)

    async def _collective(
        self, make: CallOf[P], timeout: Timeout, *arguments: P.args, **keywords: P.kwargs
    ) -> CollectiveInfo:
        name = make.__name__
        made = make(self._inner.view(name), name, *arguments, **keywords)
        return collective_info(await self._run(made.spec, timeout, name), made, name)

    @trio.lowlevel.enable_ki_protection
    async def _run(self, spec: OpSpec, timeout: Timeout, func_name: str) -> PendingOp:
        """Launch an op and wait for its end. Abort it on all peers if the time passes or the caller is cancelled."""
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
            await op.async_reclaim()
            await op.async_wait(INTERRUPT_GRACE_S, is_shielded=True)
            if not isinstance(error, trio.Cancelled) or op.is_given_up or op.has_failed:
                raise
        require_outcome(session, [op], func_name)
        return op


async def _wait_all(ops: Sequence[PendingOp], limit_s: float) -> None:
    """Wait until all ops are over or the time has passed, also where the caller is cancelled."""
    end_s = waking.clock_s() + limit_s
    for op in ops:
        await op.async_wait(max(0.0, end_s - waking.clock_s()), is_shielded=True)
