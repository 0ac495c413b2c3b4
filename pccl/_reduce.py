"""Checks the arguments of an all_reduce, and waits for ops: `AsyncHandle` and what it returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from _pccl_torch import outside_graphs
from pccl import _timeouts
from pccl._jax_arrays import NewArray
from pccl._operands import changes_of, empty_like, require_alike, require_writable, resolve
from pccl.devices.staging import Cargo, Staging
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.peer import OpResult
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Source
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import (
    DataType,
    Membership,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
)

TAG_MAX = 2**63 - 1
STEP_MAX = 2**63 - 1
DELIVERIES_MAX = 10
"""Number of attempts to copy a result to a device, while signal handlers interrupt them."""

Info = TypeVar("Info")


def checked_tag(tag: int, func_name: str, most: int = TAG_MAX) -> int:
    """Return the tag as an int. INVALID_ARGUMENT unless it is in [0, most]."""
    return integer_argument("tag", tag, func_name, 0, most)


def checked_step(step: int | None, func_name: str) -> int | None:
    """Return the step as an int, if there is one. INVALID_ARGUMENT unless it is in [0, STEP_MAX]."""
    return None if step is None else integer_argument("step", step, func_name, 0, STEP_MAX)


def check_algorithm(algorithm: Any, func_name: str) -> None:
    """Raise INVALID_ARGUMENT unless it is a ReduceAlgorithm or None."""
    if algorithm is not None and not isinstance(algorithm, ReduceAlgorithm):
        what = f"algorithm must be a ReduceAlgorithm or None, not {algorithm!r}"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)


def op_spec(
    send: Any,
    recv: Any,
    *,
    op: ReduceOp,
    tag: int,
    operand_descriptor: ReduceOperandDescriptor | None,
    quantization_options: QuantizationOptions | None,
    func_name: str,
    count: int | None = None,
    algorithm: ReduceAlgorithm | None = None,
    step: int | None = None,
) -> OpSpec:
    """Return the op that an all_reduce with these arguments is, for the engine. INVALID_ARGUMENT if one is wrong.

    `count` reduces the first elements of the arrays, None all of them.
    """

    def fail(message: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, message)

    source = resolve(send, "send", func_name)
    new_array = None
    if recv is None and source.wrap is not None:
        recv = empty_like(source, source.shape)
        new_array = NewArray(source.wrap, recv)
    target = source if recv is None or recv is send else resolve(recv, "recv", func_name)
    if recv is not None:
        require_writable(target, "recv", func_name)
    elif not target.is_writable:
        raise fail("send is read-only, so the result cannot replace it")
    require_alike(source, target, func_name)
    if count is None:
        if source.count != target.count:
            raise fail(f"send has {source.count} elements but recv has {target.count}; they must have as many")
        count = source.count
    else:
        count = integer_argument("count", count, func_name)
        if not 0 <= count <= min(source.count, target.count):
            raise fail(f"count {count} does not fit send ({source.count} elements) and recv ({target.count})")
    shape = source.shape if count == source.count else (count,)  # the first elements of an array have none of theirs
    size_bytes = count * source.dtype.itemsize
    if 0 < abs(source.address - target.address) < size_bytes:
        raise fail("send and recv overlap without being the same; pass one array for both, or separate ones")
    if not isinstance(op, ReduceOp):
        raise fail(f"op must be a ReduceOp, not {op!r}")
    tag = checked_tag(tag, func_name)
    if operand_descriptor is not None and not isinstance(operand_descriptor, ReduceOperandDescriptor):
        raise fail(f"operand_descriptor must be a ReduceOperandDescriptor or None, not {operand_descriptor!r}")
    if operand_descriptor is not None and not isinstance(operand_descriptor.datatype, DataType):
        raise fail(f"operand_descriptor.datatype must be a DataType, not {operand_descriptor.datatype!r}")
    if operand_descriptor is not None and operand_descriptor.datatype is not source.dtype:
        raise fail(f"operand_descriptor says {operand_descriptor.datatype.name} but the arrays are {source.dtype.name}")
    quantization = quantization_options
    if quantization is not None and not isinstance(quantization, QuantizationOptions):
        raise fail(f"quantization_options must be QuantizationOptions or None, not {quantization!r}")
    if quantization is not None and quantization.algorithm is QuantizationAlgorithm.NONE:
        quantization = None
    if quantization is not None:
        try:
            quantization.check_tensor(source.dtype)
        except ValueError as error:
            raise fail(str(error)) from None
    check_algorithm(algorithm, func_name)
    step = checked_step(step, func_name)
    if source.device is not None:
        cargo = Cargo(source.owner, lambda: target.owner, count, size_bytes, size_bytes, is_in_place=True)
        new_source = partial(Staging, source.device, lambda: cargo)
        nowhere = Buffers(0, 0, count, None)
        return OpSpec(
            tag, source.dtype, op, quantization, nowhere, algorithm, new_source=new_source, step=step, shape=shape
        )
    keep = (source.owner, target.owner)
    buffers = Buffers(source.address, target.address, count, keep)
    return OpSpec(
        tag,
        source.dtype,
        op,
        quantization,
        buffers,
        algorithm,
        step=step,
        shape=shape,
        new_array=new_array,
        written=changes_of(target.owner),
    )


class ReduceOpDescriptor:
    """One op of `all_reduce_multiple_with_retry`: its arrays and a `ReduceDescriptor`.

    `from_torch` and `from_numpy` make one, and take arrays of either library. `recv` may be `send`; None reduces in
    place.
    """

    def __init__(self, send: Any, recv: Any, descriptor: ReduceDescriptor, func_name: str) -> None:
        given: Any = descriptor
        if not isinstance(given, ReduceDescriptor):
            what = f"reduce_descriptor must be a ReduceDescriptor, not {given!r}"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
        self.send = send
        self.recv = recv
        self.descriptor = descriptor
        self.spec = op_spec(
            send,
            recv,
            op=descriptor.op,
            tag=descriptor.tag,
            operand_descriptor=descriptor.operand_descriptor,
            quantization_options=descriptor.quantization_options,
            func_name=func_name,
            count=descriptor.count,
            algorithm=descriptor.algorithm,
            step=descriptor.step,
        )
        if self.spec.new_array is not None:
            what = "send is a jax.Array, which cannot be reduced in place; give a NumPy array as recv"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe an op on torch tensors. PCCLError INVALID_ARGUMENT if they cannot be reduced so."""
        return cls(send, recv, reduce_descriptor, "ReduceOpDescriptor.from_torch")

    @classmethod
    def from_numpy(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe an op on NumPy arrays. PCCLError INVALID_ARGUMENT if they cannot be reduced so."""
        return cls(send, recv, reduce_descriptor, "ReduceOpDescriptor.from_numpy")


def delivered(op: PendingOp, func_name: str) -> OpResult:
    """Put the result of an op that is over into the caller's array, if it is not there yet. Return how it succeeded.

    Raises:
        PCCLError: the reason, if the op has failed; INTERNAL_ERROR if the other peers have the result but it cannot be
            put into the array here. This peer has left the run then.
    """
    result = op.result
    assert result is not None
    if result.code is not Result.SUCCESS:
        raise PCCLError(result.code, func_name, result.reason)
    if op.is_detached and op.source is None and op.copy is None:
        text = (
            "all peers have the result, but this one had no memory to keep it in after its caller took the arrays back"
        )
        op.leave_run(text)
        raise PCCLError(Result.INTERNAL_ERROR, func_name, f"{text}; this peer has left the run")
    if op.source is not None:
        _deliver(op, op.source, func_name)
    elif op.copy is not None:
        op.copy.deliver()
        op.note_written()
    return result


def _deliver(op: PendingOp, source: Source, func_name: str) -> None:
    """Copy a result to the device, retrying once. A KeyboardInterrupt passes; the next wait copies again."""
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


def info_of(op: PendingOp, func_name: str) -> ReduceInfo:
    """Return what an all_reduce did. To be called when it is over; errors as `delivered`."""
    result = delivered(op, func_name)
    array = None if op.new_array is None else op.new_array()
    return ReduceInfo(result.world_size, result.tx_bytes, result.rx_bytes, Membership(op.rank, op.ring), array)


@outside_graphs
class AsyncHandle(Generic[Info]):
    """An op in flight. Its arrays belong to pccl until it has ended, or a wait for it has been given up. Thread-safe.

    Arrays on a device get the result in `wait`, `async_wait` or `result`. If the handle is dropped before one of them
    is called, they stay as they were, with a ResourceWarning.
    """

    def __init__(self, op: PendingOp, info_of: Callable[[PendingOp, str], Info]) -> None:
        self._was_asked = False
        self._op = op
        self._info_of = info_of

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        op: PendingOp | None = getattr(self, "_op", None)
        if op is None:
            return  # an interrupt came before
        if op.source is not None and not self._was_asked and not op.has_failed:
            text = f"nobody waited for the op with tag {op.tag}: its result has not come to the device"
            warn(text, ResourceWarning, source=self)

    def __repr__(self) -> str:
        result = self._op.result
        end = "in flight"
        if result is not None:
            failure = f"failed, {result.code.name}: {result.reason}"
            end = f"done by {result.world_size} peers" if result.code is Result.SUCCESS else failure
        return f"<{type(self).__name__} with tag {self._op.tag}: {end}>"

    @property
    def tag(self) -> int:
        """The tag that the op was launched with."""
        return self._op.tag

    def done(self) -> bool:
        """Return whether the op is over, so that `wait` would return at once. It does not disturb the op."""
        return self._op.is_over

    def wait(self, timeout: float | None = None) -> tuple[bool, Result, Info | None]:
        """Block until the op has ended. It may be called again.

        Arrays on a device have the result in the order of this thread's current stream.

        When `timeout` passes, or Ctrl-C ends the wait, the arrays are yours again and as they were before the op, which
        goes on with a copy of them. The result is put into them when you call this again. If a Ctrl-C finds that the op
        has just succeeded, the arrays hold the result, and `done` says that it is over. An op that has not begun and
        cannot be copied, since its arrays are on a device or its size depends on who takes part, is taken back instead:
        its status is TIMEOUT.

        Args:
            timeout: Seconds that bound this wait, and not the op; None waits as long as it takes.

        Returns:
            `(is_success, status, info)`: `status` is a `Result`, and `info` is None on failure.

        Raises:
            PCCLError: TIMEOUT.
        """
        try:
            name = f"{type(self).__name__}.wait"
            limit_s = _timeouts.checked_s(timeout, name)
            self._op.wait(limit_s)
        finally:
            try:
                self._op.reclaim(goes_on=True)
            finally:  # where a signal has ended even that
                self._op.reclaim(goes_on=True)
        if not self._op.is_over:
            whom = self._op.whom()
            text = f"the op with tag {self.tag} has not ended in {limit_s:g} s; it goes on with a copy of its arrays"
            text += f", and waits for {whom}"
            raise PCCLError(Result.TIMEOUT, name, text)
        self._was_asked = True
        try:
            info = self._info_of(self._op, name)
        except PCCLError as error:
            return False, error.result, None
        return True, Result.SUCCESS, info

    def result(self, timeout: float | None = None) -> Info:
        """Wait as `wait` does, and return the info. PCCLError with the reason if the op has failed."""
        self.wait(timeout)
        return self._info_of(self._op, f"{type(self).__name__}.result")

    @trio.lowlevel.enable_ki_protection
    async def async_wait(self) -> tuple[bool, Result, Info | None]:
        """Wait as `wait` does, in a coroutine of trio or asyncio.

        If it is cancelled, the arrays are as they were before the op, which goes on with a copy of them. If the op has
        ended by then, that is returned in trio as if in time; in asyncio the cancellation goes on, `done` says that the
        op is over, and the arrays hold the result.
        """
        try:
            await self._op.async_wait()
        except trio.Cancelled:
            await self._op.async_reclaim(goes_on=True)
            if not self._op.is_over or self._op.is_detached:
                raise
        finally:
            await self._op.async_reclaim(goes_on=True)
        return self.wait(0)

    def __await__(self) -> Generator[Any, Any, Info]:
        """Wait as `async_wait` does, and return or raise as `result`."""
        return self._awaited().__await__()

    async def _awaited(self) -> Info:
        await self.async_wait()
        return self._info_of(self._op, type(self).__name__)


class AsyncReduceHandle(AsyncHandle[ReduceInfo]):
    """An all_reduce in flight. Its arrays belong to pccl until it has ended, or a wait for it has been given up.

    Thread-safe.
    """

    def __init__(self, op: PendingOp) -> None:
        super().__init__(op, info_of)
