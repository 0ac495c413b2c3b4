"""Handles for ops in flight, the calls that launch ops, and cancellation.

If a wait ends early, the op stays in flight and keeps its arrays. Cancelling the op returns them to the caller: the
engine restores what it has overwritten without waiting for the network, and the master aborts the op on all peers
unless they have committed it. If neither abort nor commit is confirmed within `CANCEL_GRACE_S`, the outcome is unknown.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, SupportsIndex, TypeVar

import trio

from _pccl_torch import outside_graphs
from pccl import _collectives, _timeouts
from pccl._arrays import Array, Movable
from pccl._collectives import CallOf, CollectiveCall, ReduceOpDescriptor
from pccl._session_holder import SessionErrors, SessionHolder
from pccl._timeouts import Timeout
from pccl.errors import PCCLError, integer_argument, invalid, op_error
from pccl.protocol.completion import tag_named
from pccl.protocol.peer.effects import OpResult
from pccl.protocol.peer.view import alone_in
from pccl.runtime.data_plane.op_spec import OpSpec, Source
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import SessionError
from pccl.runtime.session.session import PeerSession
from pccl.types import (
    CollectiveInfo,
    ErrorFeedback,
    Membership,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
)

CANCEL_GRACE_S = 5.0
"""After a timeout, all peers have this long to confirm that the op is aborted; otherwise its outcome is unknown."""
INTERRUPT_GRACE_S = 0.5
"""The same for an op whose caller was interrupted. If the op is over by then, its tag is free again."""
TAGS_NAMED_MAX = 8

Info = TypeVar("Info")
T = TypeVar("T")
InfoOf = Callable[[PendingOp, str], T]
"""Returns the result of an op that is over, or raises its error on behalf of the named call."""
P = ParamSpec("P")

logger = logging.getLogger(__name__)


# Results.


def delivered(op: PendingOp, func_name: str) -> OpResult:
    """Return the `OpResult` of an op that has succeeded, once its result is in the caller's array.

    Raises:
        PCCLError: the reason, if the op failed; OUTCOME_UNKNOWN if the other peers committed the op after this peer had
            given it up; INTERNAL_ERROR if the result could not be copied to its device, so this peer has left the run.
    """
    result = op.result
    assert result is not None
    if result.code is not Result.SUCCESS:
        raise op_error(result.code, func_name, result.reason)
    if op.is_given_up:
        text = f"the other peers committed the op with tag {op.tag} after it was given up here"
        raise PCCLError(Result.OUTCOME_UNKNOWN, func_name, f"{text}; the arrays are unchanged")
    if op.source is not None:
        _deliver(op, op.source, func_name)
    return result


def _deliver(op: PendingOp, source: Source, func_name: str) -> None:
    """Copy a result to the device, retrying once. A KeyboardInterrupt propagates; the next wait copies again."""
    for is_last in (False, True):
        try:
            source.deliver()
            return
        except Exception as error:  # whatever the device's library raises
            if is_last:
                what = f"{type(error).__name__}: {error}"
                text = f"all peers have the result, but it could not be copied to the device here: {what}"
                op.leave_run(text)
                raise PCCLError(Result.INTERNAL_ERROR, func_name, f"{text}; this peer has left the run") from error


def reduce_info(op: PendingOp, func_name: str) -> ReduceInfo:
    """Return the result of an all_reduce that is over. Raise the errors of `delivered`."""
    result = delivered(op, func_name)
    array = None if op.new_array is None else op.new_array()
    return ReduceInfo(result.world_size, result.tx_bytes, result.rx_bytes, Membership(op.rank, op.ring), array)


def collective_info(call: CollectiveCall, op: PendingOp, func_name: str) -> CollectiveInfo:
    """Return the result of another collective that is over. Raise the errors of `delivered`."""
    result = delivered(op, func_name)
    return CollectiveInfo(Membership(op.rank, op.ring), result.tx_bytes, result.rx_bytes, call.array())


# Giving up.


def deadline(timeout_s: float | None) -> float:
    """Return when a timeout expires, on the monotonic clock; infinity without a timeout."""
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def gave_up(session: PeerSession, timeout_s: float | None, op: PendingOp, whom: str = "") -> str:
    """Return the reason that all peers receive if this one gives up an op after waiting for `whom`."""
    who = session.named(session.view.peer) if session.view is not None else "a peer"
    if timeout_s is None:
        return f"aborted on all peers: {who} gave up the op with {tag_named(op.tag)}"
    text = f"the op with {tag_named(op.tag)} waited for {whom or session.whom(op)}"
    return f"aborted on all peers: {who} gave up after {timeout_s:g} s: {text}"


def cancel(session: PeerSession, ops: Sequence[PendingOp], timeout_s: float | None = None) -> None:
    """Start aborting, on all peers, those `ops` that are not over."""
    for op in ops:
        if not op.is_over:
            session.ops.cancel(op, Result.TIMEOUT, gave_up(session, timeout_s, op))


def wait_all(ops: Sequence[PendingOp], limit_s: float) -> None:
    """Wait until all ops are over or the time has passed."""
    end_s = deadline(limit_s)
    for op in ops:
        op.wait(max(0.0, end_s - time.monotonic()))


def interrupted(session: PeerSession, ops: Sequence[PendingOp]) -> None:
    """Abort the interrupted caller's ops on all peers and return its arrays."""
    cancel(session, ops)
    try:
        for op in ops:
            op.reclaim()
        wait_all(ops, INTERRUPT_GRACE_S)
    finally:
        for op in ops:
            if op.result is not None:
                op.finish(op.result)  # the interrupt may have cut this short


def require_outcome(
    session: PeerSession, ops: Sequence[PendingOp], func_name: str, cause: PCCLError | None = None
) -> None:
    """Raise OUTCOME_UNKNOWN if other peers may have committed one of `ops` that this peer gave up.

    `cause` is the error that made the caller give up, if any.
    """
    unknown = [op for op in ops if not op.is_over or (op.is_given_up and not op.has_failed)]
    if not unknown:
        return
    tags = sorted({op.tag for op in unknown})
    view = session.view
    others = sorted({peer for op in unknown for peer in op.ring if view is None or peer != view.peer})
    what = f"the op with tag {tags[0]} was" if len(tags) == 1 else f"the ops with tags {tags[:10]} were"
    why = "not all of them have answered" if session.hears_master else "the master is lost, and no other was found"
    text = (
        f"{what} given up here, but peers {others} may have committed without this peer: {why}. The arrays are "
        f"unchanged. Without step=, another reduce here may match the other peers' next step: first bring all peers "
        f"to one state (sync_shared_state), or leave the run"
    )
    raise PCCLError(Result.OUTCOME_UNKNOWN, func_name, text if cause is None else f"{text}. The cause: {cause}")


# Handles.


@outside_graphs
class Handle(Generic[Info]):
    """An op in flight. Its arrays belong to pccl until it is over or cancelled. Thread-safe.

    In a trio or asyncio coroutine, `await handle` returns or raises as `result` does. A wait that is cancelled or
    interrupted leaves the op in flight. For arrays on a device, the wait enqueues the copy of the result on the waiting
    thread's current stream. If the op fails and the program never looks at the failure, a WARNING is logged when the
    handle is garbage-collected or, if the op is still in flight then, when it fails.
    """

    def __init__(self, op: PendingOp, session: PeerSession, info_of: InfoOf[Info]) -> None:
        self._was_asked = False
        self._op = op
        self._session = session
        self._info_of = info_of

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        op: PendingOp | None = getattr(self, "_op", None)
        if op is None or self._was_asked:
            return
        op.when_over(partial(_log_unseen, op, type(self).__name__))
        if op.source is not None and not op.has_failed:
            text = f"the op with tag {op.tag} was never waited for, so its result has not been copied to the device"
            warn(text, ResourceWarning, source=self)

    def ignore_failure(self) -> None:
        """Do not log a WARNING if the op fails and the program never looks at the failure."""
        self._was_asked = True

    def __repr__(self) -> str:
        result = self._op.result
        end = "in flight"
        if result is not None:
            failure = f"failed, {result.code.name}: {result.reason}"
            end = f"done by {result.world_size} peers" if result.code is Result.SUCCESS else failure
        return f"<{type(self).__name__} with tag {self._op.tag}: {end}>"

    @property
    def tag(self) -> int:
        """The tag of the op."""
        return self._op.tag

    def done(self) -> bool:
        """Return whether the op is over. If it is, a wait returns at once."""
        return self._op.is_over

    def result(self, timeout: float | None = None) -> Info:
        """Wait for the op and return its info. It may be called repeatedly.

        Args:
            timeout: The maximum number of seconds to wait; None waits indefinitely.

        Raises:
            PCCLError: the op's error if it failed; TIMEOUT if the time passed first. After a TIMEOUT, the op is still
                in flight, and its arrays belong to pccl: wait again or call `cancel`.
        """
        name = f"{type(self).__name__}.result"
        limit_s = _timeouts.checked_s(timeout, name)
        if not self._op.wait(limit_s):
            text = f"the op with tag {self.tag} has not ended in {limit_s:g} s and is still in flight"
            raise PCCLError(Result.TIMEOUT, name, f"{text}; it waits for {self._op.whom()}")
        return self._info(name)

    def cancel(self) -> bool:
        """Abort the op on all peers. Return once its arrays belong to the caller again, with their old contents.

        Returns:
            True if the op was aborted; False if it was committed first, in which case the arrays hold the result.

        Raises:
            PCCLError: OUTCOME_UNKNOWN if neither the master nor the other peers confirm within 5 s, as they may have
                committed the op; INVALID_USAGE in the trio run of an `AsyncCommunicator`, which it would block.
        """
        if self._session.ops.is_own_thread():
            text = "it would block the trio run that the op needs; await handle.async_cancel() instead"
            raise PCCLError(Result.INVALID_USAGE, f"{type(self).__name__}.cancel", text)
        cancel(self._session, [self._op])
        try:
            self._op.wait(CANCEL_GRACE_S)
        finally:
            self._op.reclaim()
        return self._was_aborted()

    @trio.lowlevel.enable_ki_protection
    async def async_cancel(self) -> bool:
        """Abort the op like `cancel`, from a trio or asyncio coroutine."""
        cancel(self._session, [self._op])
        try:
            await self._op.async_wait(CANCEL_GRACE_S)
        finally:
            await self._op.async_reclaim()
        return self._was_aborted()

    def _was_aborted(self) -> bool:
        self._was_asked = True
        require_outcome(self._session, [self._op], f"{type(self).__name__}.cancel")
        return self._op.has_failed

    def __await__(self) -> Generator[Any, Any, Info]:
        return self._awaited().__await__()

    @trio.lowlevel.enable_ki_protection
    async def _awaited(self) -> Info:
        await self._op.async_wait()
        return self._info(type(self).__name__)

    def _info(self, func_name: str) -> Info:
        self._was_asked = True
        return self._info_of(self._op, func_name)


def _log_unseen(op: PendingOp, kind: str, warn: Callable[..., None] = logger.warning) -> None:
    """Log the failure of an op whose handle was dropped, unless this peer itself has left the run."""
    result = op.result
    if result is not None and result.code not in (Result.SUCCESS, Result.NOT_INITIALIZED):
        text = "the op with tag %d failed, and its %s was dropped without result() or await: %s: %s"
        warn(text, op.tag, kind, result.code.name, result.reason)


class _Failure(tuple[bool, Result, None]):
    """The tuple that `wait` returns for a failed op. The failure counts as seen once the tuple is looked into."""

    see: Callable[[], None]

    def __iter__(self) -> Iterator[Any]:
        self.see()
        return super().__iter__()

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.see()
        return super().__getitem__(index)

    def __eq__(self, other: object) -> bool:
        self.see()
        return super().__eq__(other)

    __hash__ = tuple.__hash__


@outside_graphs
class AsyncReduceHandle(Handle[ReduceInfo]):
    """An all_reduce in flight. See `Handle`."""

    def __init__(self, op: PendingOp, session: PeerSession) -> None:
        super().__init__(op, session, reduce_info)

    def wait(self, timeout: float | None = None) -> tuple[bool, Result, ReduceInfo | None]:
        """Block until the op is over or `timeout` seconds have passed. It may be called repeatedly.

        Returns:
            `(is_success, status, info)`: `status` is a `Result`, and `info` is None on failure. If the op is still in
            flight, it returns `(False, TIMEOUT, None)`, and `done()` is False.
        """
        name = "AsyncReduceHandle.wait"
        if not self._op.wait(None if timeout is None else _timeouts.checked_s(timeout, name)):
            return False, Result.TIMEOUT, None
        try:
            return True, Result.SUCCESS, self._info(name)
        except PCCLError as error:
            failure = _Failure((False, error.result, None))
            failure.see = self.ignore_failure
            self._was_asked = not self._op.has_failed
            return failure


@outside_graphs
class AsyncCollectiveHandle(Handle[CollectiveInfo]):
    """A collective other than all_reduce in flight. See `Handle`."""

    def __init__(self, op: PendingOp, session: PeerSession, call: CollectiveCall) -> None:
        super().__init__(op, session, partial(collective_info, call))

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the op is over or `timeout` seconds have passed. It may be called repeatedly.

        Returns:
            True if the op is over, so that `result` returns its info or raises its error; False if it is in flight.
        """
        name = "AsyncCollectiveHandle.wait"
        if not self._op.wait(_timeouts.checked_s(timeout, name)):
            return False
        if not self._op.has_failed and not self._op.is_given_up:
            self._was_asked = True
            delivered(self._op, name)
        return True


# Launching.


@outside_graphs
class Launch:
    """Non-blocking collectives: `comm.launch.all_gather(x)` launches an op and returns a handle at once.

    Arguments and errors are those of the communicator's method of the same name. A peer that is alone in its group gets
    TOO_FEW_PEERS from the launch; the handle reports all other failures. Do not use the arrays until the op is over or
    cancelled. pccl keeps them alive until then, and dropping the handle does not stop the op.
    """

    def __init__(self, holder: SessionHolder, is_waited_in_thread: bool) -> None:
        self._holder = holder
        self._is_waited_in_thread = is_waited_in_thread

    @trio.lowlevel.enable_ki_protection
    def _launched(self, spec: OpSpec, func_name: str, handle_of: Callable[[PendingOp, PeerSession], T]) -> T:
        """Launch an op and return its handle. An interrupted launch is withdrawn."""
        session = self._holder.session(func_name)
        view = session.view if session.failure is None else self._holder.view(func_name)
        if view is None or len(view.ring) < 2:
            raise PCCLError(Result.TOO_FEW_PEERS, func_name, alone_in(view.group if view is not None else 0))
        ops = session.ops
        is_overlapped = spec.pair is None
        op = ops.new(spec._replace(is_overlapped=True) if is_overlapped else spec)
        op.waits = session.overlapped_waits if is_overlapped else None
        try:
            handle = handle_of(op, session)
            if self._is_waited_in_thread:  # then a small op takes the fast path
                ops.start(op)
            else:
                ops.launch(op)
        except SessionError as error:  # the launch was refused
            raise PCCLError(error.result, func_name, error.message) from None
        except BaseException:
            interrupted(session, [op])
            raise
        return handle

    def _collective(self, make: CallOf[P], *arguments: P.args, **keywords: P.kwargs) -> AsyncCollectiveHandle:
        name = f"launch.{make.__name__}"
        made = make(self._holder.view(name), name, *arguments, **keywords)
        return self._launched(made.spec, name, lambda op, session: AsyncCollectiveHandle(op, session, made))

    def all_reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        quantization: QuantizationOptions | None = None,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> AsyncReduceHandle:
        name = "all_reduce_async"
        quantization = quantization if quantization is not None else quantization_options
        how = (quantization, algorithm, step, operand_descriptor)
        spec = _collectives.all_reduce(send, recv, op, tag, *how, name, feedback=feedback)
        return self._launched(spec, name, AsyncReduceHandle)

    def all_gather(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.all_gather, send, recv, tag, algorithm, step)

    def reduce_scatter(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.reduce_scatter, send, recv, op, tag, algorithm, step)

    def broadcast(
        self,
        array: Movable,
        *,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.broadcast, array, root, tag, algorithm, step)

    def reduce(
        self,
        send: Array,
        recv: Array | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        root: int,
        tag: int = 0,
        algorithm: ReduceAlgorithm | None = None,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.reduce, send, recv, op, root, tag, algorithm, step)

    def all_to_all(
        self,
        send: Movable,
        recv: Movable | None = None,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        tag: int = 0,
        step: int | None = None,
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.all_to_all, send, recv, send_counts, recv_counts, tag, step)

    def gather(
        self, send: Movable, recv: Movable | None = None, *, root: int, tag: int = 0, step: int | None = None
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.gather, send, recv, root, tag, step)

    def scatter(
        self, send: Movable | None, recv: Movable, *, root: int, tag: int = 0, step: int | None = None
    ) -> AsyncCollectiveHandle:
        return self._collective(_collectives.scatter, send, recv, root, tag, step)

    def send(self, array: Movable, *, dst: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self._collective(_collectives.send, array, dst, tag, step)

    def recv(self, array: Movable, *, src: int, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self._collective(_collectives.recv, array, src, tag, step)

    def barrier(self, *, tag: int = 0, step: int | None = None) -> AsyncCollectiveHandle:
        return self._collective(_collectives.barrier, tag, step)


class Retry:
    """The ops of one `all_reduce_multiple_with_retry`. The communicators wait for them.

    Every peer launches its ops in tag order and retries the same ones, since all peers get the same verdict. When an op
    ends, the waiting op with the lowest tag takes its place. The lowest uncommitted tag is therefore in flight on every
    peer, so the window of `max_in_flight` ops cannot deadlock.
    """

    def __init__(
        self, holder: SessionHolder, descriptors: Sequence[ReduceOpDescriptor], max_in_flight: int, timeout: Timeout
    ) -> None:
        name = self._func_name = "all_reduce_multiple_with_retry"
        given: Any = descriptors
        if not isinstance(given, Sequence) or not all(isinstance(each, ReduceOpDescriptor) for each in given):
            raise invalid(name, f"descriptors must be a list of ReduceOpDescriptor, not {given!r}")
        self._max_in_flight = integer_argument("max_in_flight", max_in_flight, name, 1)
        tags = [descriptor.spec.tag for descriptor in descriptors]
        repeated = sorted({tag for tag in tags if tags.count(tag) > 1}) if len(set(tags)) < len(tags) else []
        if not descriptors or repeated:
            raise invalid(name, f"tags {repeated} occur twice" if repeated else "descriptors must not be empty")
        self._specs = {descriptor.spec.tag: descriptor.spec for descriptor in descriptors}
        self._left = sorted(self._specs, reverse=True)
        self._infos: list[ReduceInfo] = []
        self._failure: PCCLError | None = None
        self._limit_s = holder.timeout_s(timeout, name)
        self._end_s = deadline(self._limit_s)
        self.session = holder.session(name)
        self.in_flight: list[PendingOp] = []

    @property
    def left_s(self) -> float | None:
        """Seconds until the timeout; None without a timeout."""
        return None if self._limit_s is None else max(0.0, self._end_s - time.monotonic())

    def launch(self) -> bool:
        """Launch waiting ops while the window has room. Return whether an op is in flight."""
        while self._left and self._failure is None and len(self.in_flight) < self._max_in_flight:
            op = self.session.ops.new(self._specs[self._left.pop()])
            self.in_flight.append(op)
            try:
                with SessionErrors(self._func_name):
                    self.session.ops.launch(op)
            except PCCLError:
                if op.is_over:
                    self.in_flight.remove(op)
                raise
        return bool(self.in_flight)

    def collect(self) -> None:
        """Collect every op that has ended. Call this when one ends, or at the deadline, when it raises TIMEOUT.

        After a failure, the ops in flight are cancelled on all peers, since a peer whose own call failed may never
        launch them. The failure is raised once the last of them has ended.
        """
        ended = [op for op in self.in_flight if op.is_over]
        if not ended:
            tags = sorted([*(op.tag for op in self.in_flight), *self._left])
            named = f"{', '.join(map(str, tags[:TAGS_NAMED_MAX]))}{' ...' if len(tags) > TAGS_NAMED_MAX else ''}"
            text = f"the ops with tags {named} were not committed within {self._limit_s:g} s"
            whom = self.session.whom(self.in_flight[0])
            raise PCCLError(Result.TIMEOUT, self._func_name, f"{text}; the first waited for {whom}")
        self.in_flight = [op for op in self.in_flight if op not in ended]
        had_failed = self._failure is not None
        for op in ended:
            try:
                self._infos.append(reduce_info(op, self._func_name))
            except PCCLError as error:
                if error.result is Result.RANK_CONNECTION_LOST:
                    self._left = sorted([*self._left, op.tag], reverse=True)
                else:
                    self._failure = self._failure or error
        if self._failure is not None:
            if not had_failed:
                for op in self.in_flight:
                    self.session.ops.cancel(op, self._failure.result, self._failure.message)
            if not self.in_flight:
                raise self._failure

    def cancel(self) -> None:
        """Start aborting the ops in flight on all peers."""
        cancel(self.session, self.in_flight, self._limit_s)

    def outcome(self, error: PCCLError) -> ReduceInfo:
        """If all ops given up because of `error` were committed after all, return the info. Otherwise raise `error` or
        OUTCOME_UNKNOWN."""
        is_open = self._failure is not None or bool(self._left) or error.result is not Result.TIMEOUT
        if is_open or not all(op.is_over and not op.has_failed and not op.is_given_up for op in self.in_flight):
            require_outcome(self.session, self.in_flight, self._func_name, error)
            raise error
        self._infos += [reduce_info(op, self._func_name) for op in self.in_flight]
        return self.info()

    def info(self) -> ReduceInfo:
        """Return the byte counts summed over all ops, and their smallest world size."""
        memberships = {info.membership for info in self._infos}
        return ReduceInfo(
            min(info.local_world_size for info in self._infos),
            sum(info.tx_bytes for info in self._infos),
            sum(info.rx_bytes for info in self._infos),
            memberships.pop() if len(memberships) == 1 else None,
        )
