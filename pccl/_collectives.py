"""Checks the arguments of collectives and turns them into ops for the engine.

`all_reduce` returns the op itself; the other functions return a `CollectiveCall`. A result's size depends on the number
of participants, which is known only when the op starts. A `Placement` then checks the caller's array or makes one. If
an array does not fit, the op fails on all peers. Elements that cannot be reduced are sent as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec

import numpy as np

from pccl._arrays import (
    NewArray,
    Operand,
    changes_of,
    empty_like,
    receiving,
    require_alike,
    require_writable,
    resolve,
    resolve_bytes,
)
from pccl.devices.device import Device
from pccl.devices.staging import StagedArrays, Staging
from pccl.errors import PCCLError, integer_argument, invalid
from pccl.protocol.completion import PAIR_TAG_MAX
from pccl.protocol.peer.view import View
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, Placement, Root
from pccl.types import (
    Collective,
    DataType,
    ErrorFeedback,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOperandDescriptor,
)

TAG_MAX = 2**63 - 1
STEP_MAX = 2**63 - 1

Counts = Sequence[int]


class CollectiveCall(NamedTuple):
    """An op to launch, and a function that returns the array holding its result."""

    spec: OpSpec
    array: Callable[[], Any]


P = ParamSpec("P")
CallOf = Callable[Concatenate[View, str, P], CollectiveCall]
"""A collective's function. It takes the caller's view, the method name for errors, and the method's arguments."""


def _checked(
    op: Any, tag: int, tag_max: int, algorithm: Any, step: int | None, func_name: str
) -> tuple[int, int | None]:
    if not isinstance(op, ReduceOp):
        raise invalid(func_name, f"op must be a ReduceOp, not {op!r}")
    if algorithm is not None and not isinstance(algorithm, ReduceAlgorithm):
        raise invalid(func_name, f"algorithm must be a ReduceAlgorithm or None, not {algorithm!r}")
    if step is not None:
        step = integer_argument("step", step, func_name, 0, STEP_MAX)
    if type(tag) is not int or not 0 <= tag <= tag_max:
        tag = integer_argument("tag", tag, func_name, 0, tag_max)
    return tag, step


def all_reduce(
    send: Any,
    recv: Any,
    op: ReduceOp,
    tag: int,
    quantization: QuantizationOptions | None,
    algorithm: ReduceAlgorithm | None,
    step: int | None,
    operand_descriptor: ReduceOperandDescriptor | None,
    func_name: str,
    count: int | None = None,
    feedback: ErrorFeedback | None = None,
) -> OpSpec:
    """Return the op for an all_reduce of the first `count` elements, or of all if None."""

    def fail(message: str) -> PCCLError:
        return invalid(func_name, message)

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
    if target is not source:
        require_alike(source, target, func_name)
    if count is None:
        if source.count != target.count:
            raise fail(f"send has {source.count} elements but recv has {target.count}; the numbers must be equal")
        count = source.count
    else:
        count = integer_argument("count", count, func_name)
        if not 0 <= count <= min(source.count, target.count):
            raise fail(f"count {count} does not fit send ({source.count} elements) and recv ({target.count})")
    shape = source.shape if count == source.count else (count,)  # a part of an array is treated as flat
    distance = abs(source.address - target.address)
    if distance and distance < count * source.dtype.itemsize:
        raise fail("send and recv overlap but are not the same; pass one array for both, or separate ones")
    tag, step = _checked(op, tag, TAG_MAX, algorithm, step, func_name)
    if operand_descriptor is not None:
        if not isinstance(operand_descriptor, ReduceOperandDescriptor):
            raise fail(f"operand_descriptor must be a ReduceOperandDescriptor or None, not {operand_descriptor!r}")
        if operand_descriptor.datatype is not source.dtype:
            what = getattr(operand_descriptor.datatype, "name", repr(operand_descriptor.datatype))
            raise fail(f"operand_descriptor has datatype {what}, but the arrays are {source.dtype.name}")
    if quantization is not None:
        if not isinstance(quantization, QuantizationOptions):
            raise fail(f"quantization must be QuantizationOptions or None, not {quantization!r}")
        try:
            quantization.check_tensor(source.dtype)
        except ValueError as error:
            raise fail(str(error)) from None
        if quantization.algorithm is QuantizationAlgorithm.NONE:
            quantization = None
    if feedback is not None:
        if not isinstance(feedback, ErrorFeedback):
            raise fail(f"feedback must be an ErrorFeedback or None, not {feedback!r}")
        if quantization is None or source.dtype is not DataType.FLOAT or op not in (ReduceOp.SUM, ReduceOp.AVG):
            what = f"{source.dtype.name} {op.name} {'without' if quantization is None else 'with'} quantization"
            raise fail(f"feedback is for a quantized SUM or AVG of FLOAT tensors, not for {what}")
    if source.device is not None:
        size_bytes = count * source.dtype.itemsize
        arrays = StagedArrays(source.owner, lambda: target.owner, count, size_bytes, size_bytes, is_in_place=True)
        new_source = partial(Staging, source.device, lambda: arrays)
        nowhere = Buffers(0, 0, count, None)
        return OpSpec(
            tag,
            source.dtype,
            op,
            quantization,
            nowhere,
            algorithm,
            new_source=new_source,
            step=step,
            shape=shape,
            feedback=feedback,
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
        written=None if type(target.owner) is np.ndarray else changes_of(target.owner),
        feedback=feedback,
    )


class ReduceOpDescriptor:
    """One op for `all_reduce_multiple_with_retry`: its arrays and a `ReduceDescriptor`.

    `from_torch` and `from_numpy` both accept arrays of either library. `recv` may be `send`; None reduces in place.
    """

    def __init__(self, send: Any, recv: Any, descriptor: ReduceDescriptor, func_name: str) -> None:
        given: Any = descriptor
        if not isinstance(given, ReduceDescriptor):
            raise invalid(func_name, f"reduce_descriptor must be a ReduceDescriptor, not {given!r}")
        self.send = send
        self.recv = recv
        self.descriptor = descriptor
        self.spec = all_reduce(
            send,
            recv,
            descriptor.op,
            descriptor.tag,
            descriptor.quantization_options,
            descriptor.algorithm,
            descriptor.step,
            descriptor.operand_descriptor,
            func_name,
            descriptor.count,
            descriptor.feedback,
        )
        if self.spec.new_array is not None:
            what = "send is a jax.Array, which cannot be reduced in place; give a NumPy array as recv"
            raise invalid(func_name, what)

    @classmethod
    def from_torch(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe an op on torch tensors. Raise INVALID_ARGUMENT if they do not match the descriptor."""
        return cls(send, recv, reduce_descriptor, "ReduceOpDescriptor.from_torch")

    @classmethod
    def from_numpy(cls, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """Describe an op on NumPy arrays. Raise INVALID_ARGUMENT if they do not match the descriptor."""
        return cls(send, recv, reduce_descriptor, "ReduceOpDescriptor.from_numpy")


# Collectives whose result size depends on the group.


@dataclass(frozen=True, slots=True)
class _Layout:
    """The sizes of an op on one peer, in elements as the engine counts them."""

    count: int
    """Elements in the op."""
    shape: tuple[int, ...]
    """The shape of the result."""
    result: int
    """Elements in the result."""
    own_offset: int | None = None
    """The byte offset in the result where `send` may overlap it; None if it may not."""
    parts: tuple[list[int], list[int]] | None = None


LayoutOf = Callable[[int, int], _Layout]
"""Returns the layout for a rank and a world size. Raises ValueError if the array cannot be divided accordingly."""


class _Placed:
    """A placement with an input and a result array. The result array may be made when the op starts."""

    def __init__(
        self, send: Operand, recv: Operand | None, array: Any, layout_of: LayoutOf, receives: bool = True
    ) -> None:
        self._send = send
        self._recv = recv
        self._array = array if receives else None
        self._layout_of = layout_of
        self._receives = receives
        self._layout = _Layout(0, (), 0)
        self._new_array: NewArray | None = None

    def result(self) -> Any:
        return self._array if self._new_array is None else self._new_array()

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        layout = self._layout = self._layout_of(rank, world_size)
        count, own_offset, parts = layout.count, layout.own_offset, layout.parts
        if not self._receives:
            return Buffers(send.address, 0, count, send.owner)
        recv = self._recv if self._recv is not None else self._new_memory(layout.shape)
        if recv is None:
            return Buffers(0, 0, count, None, parts)
        if recv.count != layout.result:
            what = f"recv has {recv.count} {_unit(send)}, but the result of rank {rank} of {world_size} has"
            raise ValueError(f"{what} {layout.result}; leave recv out to get a new array")
        if _overlap(send, recv) and (own_offset is None or recv.address + own_offset != send.address):
            what = "which must stay unchanged" if own_offset is None else f"outside the part of rank {rank}"
            raise ValueError(f"recv overlaps send, {what}")
        return Buffers(send.address, recv.address, count, (send.owner, recv.owner), parts)

    def _new_memory(self, shape: tuple[int, ...]) -> Operand | None:
        """Make the result array. Return None on a device, where `_delivery` makes it on the waiter's stream."""
        if self._send.device is not None:
            return None
        self._array = empty_like(self._send, shape)
        if self._send.wrap is not None:
            self._new_array = NewArray(self._send.wrap, self._array)
        return resolve_bytes(self._array, "recv", "")

    def _delivery(self) -> Any:
        if self._array is None:
            self._array = empty_like(self._send, self._layout.shape)
        return self._array if self._recv is None else self._recv.owner

    def arrays(self) -> StagedArrays:
        send, layout = self._send, self._layout
        recv_bytes = layout.result * send.dtype.itemsize if self._receives else None
        return StagedArrays(send.owner, self._delivery, layout.count, send.size_bytes, recv_bytes, parts=layout.parts)


def all_gather(
    _: View, func_name: str, send: Any, recv: Any, tag: int, algorithm: Any, step: int | None
) -> CollectiveCall:
    source = resolve_bytes(send, "send", func_name)
    target = _target_of(recv, func_name, source)
    placement = _Placed(source, target, recv, _gathered(source))
    spec = _spec_of(Collective.ALL_GATHER, source, placement, tag, algorithm, step, func_name, target=target)
    return CollectiveCall(_staged(spec, source.device, placement.arrays), placement.result)


def _gathered(send: Operand) -> LayoutOf:
    def layout(rank: int, world_size: int) -> _Layout:
        count = world_size * send.count
        return _Layout(count, (world_size, *send.shape), count, own_offset=rank * send.size_bytes)

    return layout


def gather(view: View, func_name: str, send: Any, recv: Any, root: int, tag: int, step: int | None) -> CollectiveCall:
    named = _rooted(root, view, func_name)
    is_root = named.peer == view.peer
    source = resolve_bytes(send, "send", func_name)
    target = _target_of(recv, func_name, source) if is_root else None
    placement = _Placed(source, target, recv, _gathered(source), is_root)
    spec = _spec_of(Collective.GATHER, source, placement, tag, None, step, func_name, named, target=target)
    return CollectiveCall(_staged(spec, source.device, placement.arrays), placement.result)


def reduce_scatter(
    _: View, func_name: str, send: Any, recv: Any, op: ReduceOp, tag: int, algorithm: Any, step: int | None
) -> CollectiveCall:
    source = resolve(send, "send", func_name)
    target = _target_of(recv, func_name, source)

    def layout(rank: int, world_size: int) -> _Layout:
        part = source.count // world_size + (rank < source.count % world_size)
        return _Layout(source.count, (part,), part)

    placement = _Placed(source, target, recv, layout)
    kind = Collective.REDUCE_SCATTER
    spec = _spec_of(kind, source, placement, tag, algorithm, step, func_name, reduce_op=op, target=target)
    return CollectiveCall(_staged(spec, source.device, placement.arrays), placement.result)


def reduce(
    view: View,
    func_name: str,
    send: Any,
    recv: Any,
    op: ReduceOp,
    root: int,
    tag: int,
    algorithm: Any,
    step: int | None,
) -> CollectiveCall:
    named = _rooted(root, view, func_name)
    is_root = named.peer == view.peer
    source = resolve(send, "send", func_name)
    target = _target_of(recv, func_name, source) if is_root else None
    layout = _Layout(source.count, source.shape, source.count, own_offset=0)
    placement = _Placed(source, target, recv, lambda rank, world_size: layout, is_root)
    kind = Collective.REDUCE
    spec = _spec_of(kind, source, placement, tag, algorithm, step, func_name, named, reduce_op=op, target=target)
    return CollectiveCall(_staged(spec, source.device, placement.arrays), placement.result)


def all_to_all(
    _: View,
    func_name: str,
    send: Any,
    recv: Any,
    send_counts: Counts | None,
    recv_counts: Counts | None,
    tag: int,
    step: int | None,
) -> CollectiveCall:
    source = resolve_bytes(send, "send", func_name)
    target = _target_of(recv, func_name, source)
    if not source.shape:
        text = "send has no dimension to divide among the peers; give it a first dimension of world_size parts"
        raise invalid(func_name, text)
    counts = _checked_counts(send_counts, recv_counts, source.shape[0], func_name)
    placement = _Placed(source, target, recv, _exchanged(source, counts))
    shape, kind = source.shape[1:], Collective.ALL_TO_ALL
    spec = _spec_of(kind, source, placement, tag, None, step, func_name, shape=shape, target=target)
    return CollectiveCall(_staged(spec, source.device, placement.arrays), placement.result)


def _checked_counts(
    send_counts: Counts | None, recv_counts: Counts | None, rows: int, func_name: str
) -> tuple[list[int], list[int]] | None:

    def fail(text: str) -> PCCLError:
        return invalid(func_name, text)

    if send_counts is None and recv_counts is None:
        return None
    found = []
    for role, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if counts is None:
            raise fail(f"{role} is missing: give both, or neither if all parts have the same size")
        try:
            found.append([integer_argument(f"{role}[{i}]", count, func_name, 0) for i, count in enumerate(counts)])
        except TypeError:
            raise fail(f"{role} must be a sequence with one number per rank, not {counts!r}") from None
    if sum(found[0]) != rows:
        raise fail(f"send_counts add up to {sum(found[0])}, but send has {rows} rows")
    return found[0], found[1]


def _exchanged(send: Operand, counts: tuple[list[int], list[int]] | None) -> LayoutOf:
    """Return the layout of an all_to_all with these row counts; None if all parts have the same size."""
    row = math.prod(send.shape[1:]) * (send.owner.itemsize if send.bytes_of else 1)

    def layout(rank: int, world_size: int) -> _Layout:
        rows, parts = send.shape[0], None
        if counts is not None:
            for role, numbers in zip(("send_counts", "recv_counts"), counts, strict=True):
                if len(numbers) != world_size:
                    raise ValueError(f"{role} has {len(numbers)} numbers, but there are {world_size} peers")
            gives, gets = counts
            if gives[rank] != gets[rank]:
                what = f"rank {rank} sends itself {gives[rank]} rows and receives {gets[rank]} from itself"
                raise ValueError(f"{what}: send_counts and recv_counts differ at its own rank")
            rows, parts = sum(gets), ([each * row for each in gives], [each * row for each in gets])
        elif rows % world_size:
            what = f"send has {rows} rows, which cannot be divided evenly among {world_size} peers"
            raise ValueError(f"{what}; give send_counts and recv_counts")
        return _Layout(max(send.count, rows * row), (rows, *send.shape[1:]), rows * row, parts=parts)

    return layout


def scatter(view: View, func_name: str, send: Any, recv: Any, root: int, tag: int, step: int | None) -> CollectiveCall:
    named = _rooted(root, view, func_name)
    target, result = receiving(resolve_bytes(recv, "recv", func_name), recv, "recv", func_name)
    source = None
    if named.peer == view.peer:
        if send is None:
            raise invalid(func_name, "send is None, but this peer is the root")
        source = resolve_bytes(send, "send", func_name)
        require_alike(source, target, func_name)
    placement = _Scattered(source, target)
    spec = _spec_of(Collective.SCATTER, target, placement, tag, None, step, func_name, named, target=target)
    return CollectiveCall(_staged(spec, target.device, placement.arrays), result)


class _Scattered:
    """The placement of a scatter; `send` is None on all peers except the root."""

    def __init__(self, send: Operand | None, recv: Operand) -> None:
        self._send = send
        self._recv = recv
        self._count = 0

    def place(self, rank: int, world_size: int) -> Buffers:
        send, recv = self._send, self._recv
        self._count = world_size * recv.count
        if send is None:
            return Buffers(0, recv.address, self._count, recv.owner)
        if send.count != self._count:
            what = f"send has {send.count} {_unit(recv)}, but {world_size} peers receive {recv.count} each"
            raise ValueError(f"{what}, {self._count} in all")
        if _overlap(send, recv) and send.address + rank * recv.size_bytes != recv.address:
            raise ValueError(f"recv overlaps send, outside the part of rank {rank}")
        return Buffers(send.address, recv.address, self._count, (send.owner, recv.owner))

    def arrays(self) -> StagedArrays:
        send, recv = self._send, self._recv
        owner, send_bytes = (send.owner, send.size_bytes) if send is not None else (None, None)
        return StagedArrays(owner, lambda: recv.owner, self._count, send_bytes, recv.size_bytes)


# One-way collectives: a peer either sends an array or receives it.


def broadcast(
    view: View, func_name: str, array: Any, root: int, tag: int, algorithm: Any, step: int | None
) -> CollectiveCall:
    named = _rooted(root, view, func_name)
    operand = resolve_bytes(array, "array", func_name)
    is_root = named.peer == view.peer
    operand, result = (operand, lambda: array) if is_root else receiving(operand, array, "array", func_name)
    buffers = Buffers(operand.address, operand.address, operand.count, operand.owner)
    target = None if is_root else operand
    spec = _spec_of(Collective.BROADCAST, operand, buffers, tag, algorithm, step, func_name, named, target=target)
    return CollectiveCall(_one_way(spec, operand, is_root), result)


def _rooted(root: int, view: View, func_name: str) -> Root:
    rank = integer_argument("root", root, func_name)
    return Root(rank, view.ring[rank] if 0 <= rank < view.world_size else 0)


def send(view: View, func_name: str, array: Any, dst: int, tag: int, step: int | None) -> CollectiveCall:
    operand = resolve_bytes(array, "array", func_name)
    pair = _pair(view, dst, "dst", True, func_name)
    return CollectiveCall(_pair_spec(operand, pair, tag, step, func_name), lambda: array)


def recv(view: View, func_name: str, array: Any, src: int, tag: int, step: int | None) -> CollectiveCall:
    operand, result = receiving(resolve_bytes(array, "array", func_name), array, "array", func_name)
    pair = _pair(view, src, "src", False, func_name)
    return CollectiveCall(_pair_spec(operand, pair, tag, step, func_name), result)


def _pair(view: View, rank: int, role: str, is_sender: bool, func_name: str) -> Pair:
    rank = integer_argument(role, rank, func_name)
    if not 0 <= rank < view.world_size or view.ring[rank] == view.peer:
        is_rank = 0 <= rank < view.world_size
        what = "this peer itself" if is_rank else f"not a rank in a group of {view.world_size} peers"
        raise invalid(func_name, f"{role} {rank} is {what}")
    return Pair(view.ring[rank], is_sender)


def _pair_spec(operand: Operand, pair: Pair, tag: int, step: int | None, func_name: str) -> OpSpec:
    addresses = (operand.address, 0) if pair.is_sender else (0, operand.address)
    buffers = Buffers(*addresses, operand.count, operand.owner)
    target, kind = None if pair.is_sender else operand, Collective.SEND
    spec = _spec_of(kind, operand, buffers, tag, None, step, func_name, tag_max=PAIR_TAG_MAX, target=target)
    return _one_way(spec._replace(pair=pair), operand, pair.is_sender)


def barrier(_: View, func_name: str, tag: int, step: int | None) -> CollectiveCall:
    spec = _spec_of(Collective.BARRIER, None, Buffers(0, 0, 0, None), tag, None, step, func_name)
    return CollectiveCall(spec, lambda: None)


def _spec_of(
    collective: Collective,
    given: Operand | None,
    buffers: Buffers | Placement,
    tag: int,
    algorithm: Any,
    step: int | None,
    func_name: str,
    root: Root | None = None,
    reduce_op: ReduceOp = ReduceOp.SUM,
    tag_max: int = TAG_MAX,
    shape: tuple[int, ...] | None = None,
    target: Operand | None = None,
) -> OpSpec:
    """Describe an op that writes to `target`. `shape` overrides that of `given`, which all peers must agree on."""
    tag, step = _checked(reduce_op, tag, tag_max, algorithm, step, func_name)
    return OpSpec(
        tag,
        DataType.UINT8 if given is None else given.dtype,
        reduce_op,
        None,
        buffers,
        algorithm,
        collective,
        root,
        step=step,
        shape=given.shape if shape is None and given is not None else shape,
        bytes_of="" if given is None else given.bytes_of,
        written=None if target is None else changes_of(target.owner),
    )


def _target_of(recv: Any, func_name: str, source: Operand) -> Operand | None:
    """Return the memory of `recv`, which must be writable and match `source`, or None without `recv`."""
    if recv is None:
        return None
    operand = resolve_bytes(recv, "recv", func_name)
    require_writable(operand, "recv", func_name)
    require_alike(source, operand, func_name)
    return operand


def _staged(spec: OpSpec, device: Device | None, arrays: Callable[[], StagedArrays]) -> OpSpec:
    """Return the op, staged through host memory if its arrays are on a device."""
    return spec if device is None else spec._replace(new_source=partial(Staging, device, arrays))


def _one_way(spec: OpSpec, operand: Operand, is_sender: bool) -> OpSpec:
    send_bytes, recv_bytes = (operand.size_bytes, None) if is_sender else (None, operand.size_bytes)
    arrays = StagedArrays(operand.owner, lambda: operand.owner, operand.count, send_bytes, recv_bytes)
    return _staged(spec, operand.device, lambda: arrays)


def _overlap(a: Operand, b: Operand) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes and min(a.count, b.count) > 0


def _unit(operand: Operand) -> str:
    return "bytes" if operand.dtype is DataType.UINT8 else "elements"
