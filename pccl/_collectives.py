"""The collectives: checks a caller's arguments and turns them into an op for the engine.

`all_reduce` returns the op itself. The functions for the other collectives return a `CallOf`, which makes the op from
the view that the caller sees: a rank names a peer in that view, so a root is bound to its peer when the call is made
(`Root`).

Collectives that only move elements take any dtype whose elements are plain memory; elements that cannot be reduced
travel as bytes.

The size of a result depends on the number of participants, which is known when the op starts. A `Placement` then checks
whether the caller's array fits, or makes one. An array that does not fit fails the op on all peers.

Arrays on a device go through this machine's memory (`pccl.devices.staging`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from pccl.devices.staging import Cargo, Staging
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.completion import PAIR_TAG_MAX
from pccl.protocol.peer import View
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, Placement, Root
from pccl.types import (
    Collective,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOperandDescriptor,
    Result,
)

TAG_MAX = 2**63 - 1
STEP_MAX = 2**63 - 1

Counts = Sequence[int]


class CollectiveCall(NamedTuple):
    """An op to launch, and a function that returns the array with its result."""

    spec: OpSpec
    array: Callable[[], Any]


CallOf = Callable[[View, str], CollectiveCall]
"""Makes a call from the view that its caller sees, for the method of that name (INVALID_ARGUMENT)."""


def _checked_tag(tag: int, func_name: str, most: int = TAG_MAX) -> int:
    """Return the tag as an int. INVALID_ARGUMENT unless it is in [0, most]."""
    return integer_argument("tag", tag, func_name, 0, most)


def _checked_step(step: int | None, func_name: str) -> int | None:
    """Return the step as an int, if there is one. INVALID_ARGUMENT unless it is in [0, STEP_MAX]."""
    return None if step is None else integer_argument("step", step, func_name, 0, STEP_MAX)


def _check_algorithm(algorithm: Any, func_name: str) -> None:
    """Raise INVALID_ARGUMENT unless it is a ReduceAlgorithm or None."""
    if algorithm is not None and not isinstance(algorithm, ReduceAlgorithm):
        what = f"algorithm must be a ReduceAlgorithm or None, not {algorithm!r}"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)


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
) -> OpSpec:
    """Return the op of an all_reduce. `count` reduces the first elements of the arrays, None all of them."""

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
    if target is not source:
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
    distance = abs(source.address - target.address)
    if distance and distance < count * source.dtype.itemsize:
        raise fail("send and recv overlap without being the same; pass one array for both, or separate ones")
    if not isinstance(op, ReduceOp):
        raise fail(f"op must be a ReduceOp, not {op!r}")
    if type(tag) is not int or not 0 <= tag <= TAG_MAX:
        tag = _checked_tag(tag, func_name)
    if operand_descriptor is not None and not isinstance(operand_descriptor, ReduceOperandDescriptor):
        raise fail(f"operand_descriptor must be a ReduceOperandDescriptor or None, not {operand_descriptor!r}")
    if operand_descriptor is not None and not isinstance(operand_descriptor.datatype, DataType):
        raise fail(f"operand_descriptor.datatype must be a DataType, not {operand_descriptor.datatype!r}")
    if operand_descriptor is not None and operand_descriptor.datatype is not source.dtype:
        raise fail(f"operand_descriptor says {operand_descriptor.datatype.name} but the arrays are {source.dtype.name}")
    if quantization is not None and not isinstance(quantization, QuantizationOptions):
        raise fail(f"quantization must be QuantizationOptions or None, not {quantization!r}")
    if quantization is not None and quantization.algorithm is QuantizationAlgorithm.NONE:
        quantization = None
    if quantization is not None:
        try:
            quantization.check_tensor(source.dtype)
        except ValueError as error:
            raise fail(str(error)) from None
    if algorithm is not None:
        _check_algorithm(algorithm, func_name)
    if step is not None:
        step = _checked_step(step, func_name)
    if source.device is not None:
        size_bytes = count * source.dtype.itemsize
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
        written=None if type(target.owner) is np.ndarray else changes_of(target.owner),
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


def all_gather(send: Any, recv: Any, tag: int, algorithm: ReduceAlgorithm | None, step: int | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = resolve_bytes(send, "send", func_name)
        target = _target_of(recv, func_name, source)
        placement = _Gathered(source, target, recv)
        spec = _spec_of(Collective.ALL_GATHER, source, placement, tag, algorithm, step, func_name, target=target)
        return CollectiveCall(_staged(spec, source.device, placement.cargo), placement.result)

    return call


class _Placed:
    """A placement with separate arrays for input and result. The latter may be made when the op starts."""

    def __init__(self, send: Operand, recv: Operand | None, array: Any) -> None:
        self.array = array
        self._send = send
        self._recv = recv
        self._shape: tuple[int, ...] = ()
        self._count = 0
        self._new_array: NewArray | None = None

    def result(self) -> Any:
        """Return the array with the result, after the op has succeeded."""
        return self.array if self._new_array is None else self._new_array()

    def _destination(self, shape: tuple[int, ...]) -> Operand | None:
        """Return the memory for a result of this shape, a new array if the caller gave none.

        None for a new array on a device: it is made with the result, in the stream of the waiting thread.
        """
        if self._recv is not None:
            return self._recv
        self._shape = shape
        if self._send.device is not None:
            return None
        self.array = empty_like(self._send, shape)
        if self._send.wrap is not None:
            self._new_array = NewArray(self._send.wrap, self.array)
        return resolve_bytes(self.array, "recv", "")

    def _require_rows(self, recv: Operand, rank: int, world_size: int) -> None:
        """Raise ValueError unless `recv` has room for what all peers send, and `send` is apart from it or this rank's
        row of it."""
        send = self._send
        if recv.count != self._count:
            what = "bytes" if send.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"recv has {recv.count} {what}, but {world_size} peers give {send.count} each, "
                f"{self._count} in all; leave recv out to have one made that fits"
            )
        is_own_part = recv.address + rank * send.size_bytes == send.address
        if not is_own_part and _overlap(send, recv):
            raise ValueError(f"send lies within recv, but not where rank {rank} has its part of it")

    def _delivery(self) -> Any:
        if self.array is None:
            self.array = empty_like(self._send, self._shape)
        return self.array if self._recv is None else self._recv.owner

    def _cargo(self, count: int, size_bytes: int) -> Cargo:
        return Cargo(self._send.owner, self._delivery, count, self._send.size_bytes, size_bytes)


class _Gathered(_Placed):
    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        self._count = world_size * send.count
        recv = self._destination((world_size, *send.shape))
        if recv is None:
            return Buffers(0, 0, self._count, None)
        self._require_rows(recv, rank, world_size)
        return Buffers(send.address, recv.address, recv.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        return self._cargo(self._count, self._count * self._send.dtype.itemsize)


def reduce_scatter(
    send: Any, recv: Any, op: ReduceOp, tag: int, algorithm: ReduceAlgorithm | None, step: int | None
) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = resolve(send, "send", func_name)
        target = _target_of(recv, func_name, source)
        _check_reduce_op(op, func_name)
        placement = _Scattered(source, target, recv)
        spec = _spec_of(
            Collective.REDUCE_SCATTER,
            source,
            placement,
            tag,
            algorithm,
            step,
            func_name,
            reduce_op=op,
            target=target,
        )
        return CollectiveCall(_staged(spec, source.device, placement.cargo), placement.result)

    return call


class _Scattered(_Placed):
    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        self._count = send.count // world_size + (rank < send.count % world_size)
        recv = self._destination((self._count,))
        if recv is None:
            return Buffers(0, 0, send.count, None)
        if recv.count != self._count:
            raise ValueError(
                f"recv has {recv.count} elements, but rank {rank} of {world_size} gets {self._count} of {send.count}; "
                f"leave recv out to have one made that fits"
            )
        if _overlap(send, recv):
            raise ValueError("recv overlaps send, which has to stay as it is")
        return Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        return self._cargo(self._send.count, self._count * self._send.dtype.itemsize)


def reduce(
    send: Any, recv: Any, op: ReduceOp, root: int, tag: int, algorithm: ReduceAlgorithm | None, step: int | None
) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = _rooted(root, view, func_name)
        is_root = named.peer == view.peer
        source = resolve(send, "send", func_name)
        target = _target_of(recv, func_name, source) if is_root else None
        _check_reduce_op(op, func_name)
        if target is not None and target.count != source.count:
            text = f"recv has {target.count} elements, but send {source.count}"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, text)
        if target is not None and target.address != source.address and _overlap(source, target):
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, "recv overlaps send; pass the same array, or another")
        placement = _ReducedAtRoot(source, target, recv, is_root)
        spec = _spec_of(
            Collective.REDUCE, source, placement, tag, algorithm, step, func_name, named, reduce_op=op, target=target
        )
        return CollectiveCall(_staged(spec, source.device, placement.cargo), placement.result)

    return call


class _ReducedAtRoot(_Placed):
    def __init__(self, send: Operand, recv: Operand | None, array: Any, is_root: bool) -> None:
        super().__init__(send, recv, array if is_root else None)
        self._is_root = is_root

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        if not self._is_root:
            return Buffers(send.address, 0, send.count, send.owner)
        recv = self._destination(send.shape)
        if recv is None:
            return Buffers(0, 0, send.count, None)
        return Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        size_bytes = self._send.size_bytes
        return Cargo(
            self._send.owner, self._delivery, self._send.count, size_bytes, size_bytes if self._is_root else None
        )


def _check_reduce_op(op: ReduceOp, func_name: str) -> None:
    if not isinstance(op, ReduceOp):
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"op must be a ReduceOp, not {op!r}")


def broadcast(array: Any, root: int, tag: int, algorithm: ReduceAlgorithm | None, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = _rooted(root, view, func_name)
        operand = resolve_bytes(array, "array", func_name)
        is_root = named.peer == view.peer
        operand, result = (operand, lambda: array) if is_root else receiving(operand, array, "array", func_name)
        buffers = Buffers(operand.address, operand.address, operand.count, operand.owner)
        target = None if is_root else operand
        spec = _spec_of(Collective.BROADCAST, operand, buffers, tag, algorithm, step, func_name, named, target=target)
        return CollectiveCall(_one_way(spec, operand, is_root), result)

    return call


def _rooted(root: int, view: View, func_name: str) -> Root:
    """Return the root: the peer with this rank in the caller's view."""
    rank = integer_argument("root", root, func_name)
    return Root(rank, view.ring[rank] if 0 <= rank < view.world_size else 0)


def send(array: Any, dst: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand = resolve_bytes(array, "array", func_name)
        buffers = Buffers(operand.address, 0, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, dst, "dst", True, tag, step, func_name), lambda: array)

    return call


def recv(array: Any, src: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand, result = receiving(resolve_bytes(array, "array", func_name), array, "array", func_name)
        buffers = Buffers(0, operand.address, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, src, "src", False, tag, step, func_name), result)

    return call


def _pair_spec(
    operand: Operand,
    buffers: Buffers,
    view: View,
    rank: int,
    role: str,
    is_sender: bool,
    tag: int,
    step: int | None,
    func_name: str,
) -> OpSpec:
    def fail(message: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, message)

    rank = integer_argument(role, rank, func_name)
    if not 0 <= rank < view.world_size:
        raise fail(f"{role} {rank} is not a rank of a group of {view.world_size} peers")
    if view.ring[rank] == view.peer:
        raise fail(f"{role} {rank} is this peer itself")
    target = None if is_sender else operand
    spec = _spec_of(Collective.SEND, operand, buffers, tag, None, step, func_name, tag_max=PAIR_TAG_MAX, target=target)
    return _one_way(spec._replace(pair=Pair(view.ring[rank], is_sender)), operand, is_sender)


def barrier(tag: int, step: int | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        spec = _spec_of(Collective.BARRIER, None, Buffers(0, 0, 0, None), tag, None, step, func_name)
        return CollectiveCall(spec, lambda: None)

    return call


def _spec_of(
    collective: Collective,
    given: Operand | None,
    buffers: Buffers | Placement,
    tag: int,
    algorithm: ReduceAlgorithm | None,
    step: int | None,
    func_name: str,
    root: Root | None = None,
    reduce_op: ReduceOp = ReduceOp.SUM,
    tag_max: int = TAG_MAX,
    shape: tuple[int, ...] | None = None,
    target: Operand | None = None,
) -> OpSpec:
    """Describe an op. `shape` replaces the shape of `given` that all peers must agree on. `target` is the caller's
    memory for the result."""
    tag = _checked_tag(tag, func_name, tag_max)
    _check_algorithm(algorithm, func_name)
    step = _checked_step(step, func_name)
    dtype = DataType.UINT8 if given is None else given.dtype
    bytes_of = ""
    if given is not None:
        shape, bytes_of = given.shape if shape is None else shape, given.bytes_of
    written = None if target is None else changes_of(target.owner)
    return OpSpec(
        tag,
        dtype,
        reduce_op,
        None,
        buffers,
        algorithm,
        collective,
        root,
        step=step,
        shape=shape,
        bytes_of=bytes_of,
        written=written,
    )


def _target_of(recv: Any, func_name: str, source: Operand) -> Operand | None:
    """Return the memory of `recv`, which must be writable and of the kind of `source`; None without `recv`."""
    if recv is None:
        return None
    operand = resolve_bytes(recv, "recv", func_name)
    require_writable(operand, "recv", func_name)
    require_alike(source, operand, func_name)
    return operand


def _staged(spec: OpSpec, device: Device | None, cargo: Callable[[], Cargo]) -> OpSpec:
    """Return the op, staged through this machine's memory if its arrays are on a device."""
    return spec if device is None else spec._replace(new_source=partial(Staging, device, cargo))


def _one_way(spec: OpSpec, operand: Operand, is_giver: bool) -> OpSpec:
    """Return the op, staged as by `_staged`, for a collective in which a peer either gives elements or gets them."""
    send_bytes, recv_bytes = (operand.size_bytes, None) if is_giver else (None, operand.size_bytes)
    cargo = Cargo(operand.owner, lambda: operand.owner, operand.count, send_bytes, recv_bytes)
    return _staged(spec, operand.device, lambda: cargo)


def _overlap(a: Operand, b: Operand) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes and min(a.count, b.count) > 0


# Exchanges: what each peer gives and gets follows from its rank, from the root, or from the caller's counts of rows.


def all_to_all(
    send: Any, recv: Any, send_counts: Counts | None, recv_counts: Counts | None, tag: int, step: int | None
) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = resolve_bytes(send, "send", func_name)
        target = _target_of(recv, func_name, source)
        if not source.shape:
            text = "send has no dimension to be divided among the peers; give it a first one, of world_size parts"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, text)
        counts = _checked(send_counts, recv_counts, source.shape[0], func_name)
        placement = _Exchanged(source, target, recv, counts)
        shape = source.shape[1:]
        spec = _spec_of(
            Collective.ALL_TO_ALL, source, placement, tag, None, step, func_name, shape=shape, target=target
        )
        return CollectiveCall(_staged(spec, source.device, placement.cargo), placement.result)

    return call


def _checked(
    send_counts: Counts | None, recv_counts: Counts | None, rows: int, func_name: str
) -> tuple[list[int], list[int]] | None:
    """Return the counts as lists of numbers; None if there are none."""

    def fail(text: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, text)

    if send_counts is None and recv_counts is None:
        return None
    if send_counts is None or recv_counts is None:
        missing = "send_counts" if send_counts is None else "recv_counts"
        raise fail(f"{missing} is missing: give both, or neither if all parts are of one size")
    found = []
    for role, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        try:
            numbers = [integer_argument(f"{role}[{i}]", count, func_name) for i, count in enumerate(counts)]
        except TypeError:
            raise fail(f"{role} must be a sequence with a number for each rank, not {counts!r}") from None
        if any(number < 0 for number in numbers):
            raise fail(f"{role} has a negative number: {numbers}")
        found.append(numbers)
    if sum(found[0]) != rows:
        raise fail(f"send_counts add up to {sum(found[0])}, but send has {rows} rows")
    return found[0], found[1]


def _item_bytes(array: Any) -> int:
    """Return the size of an element of a NumPy array or a torch tensor."""
    size: int = array.itemsize
    return size


class _Exchanged(_Placed):
    def __init__(self, send: Operand, recv: Operand | None, array: Any, counts: tuple[list[int], list[int]] | None):
        super().__init__(send, recv, array)
        self._counts = counts
        self._row = math.prod(send.shape[1:]) * (_item_bytes(send.owner) if send.bytes_of else 1)
        """Elements of a row."""
        self._parts: tuple[list[int], list[int]] | None = None
        """The counts in elements; None: all parts are alike."""

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        rows = self._rows(rank, world_size)
        self._count = rows * self._row
        recv = self._destination((rows, *send.shape[1:]))
        count = max(send.count, self._count)
        if recv is None:
            return Buffers(0, 0, count, None, self._parts)
        if recv.count != self._count:
            what = "bytes" if send.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"recv has {recv.count} {what}, but the peers give this one {self._count}; leave recv out to have one "
                f"made that fits"
            )
        if _overlap(send, recv):
            raise ValueError("recv overlaps send, which has to stay as it is")
        return Buffers(send.address, recv.address, count, (send.owner, recv.owner), self._parts)

    def _rows(self, rank: int, world_size: int) -> int:
        """Check the counts. Return how many rows this peer gets."""
        if self._counts is None:
            rows = self._send.shape[0]
            if rows % world_size:
                raise ValueError(
                    f"send has {rows} rows, which cannot be divided evenly among {world_size} peers; give send_counts "
                    f"and recv_counts"
                )
            return rows
        gives, gets = self._counts
        for role, counts in (("send_counts", gives), ("recv_counts", gets)):
            if len(counts) != world_size:
                raise ValueError(f"{role} has {len(counts)} numbers, but there are {world_size} peers")
        if gives[rank] != gets[rank]:
            raise ValueError(
                f"rank {rank} gives itself {gives[rank]} rows, but takes {gets[rank]} from itself: send_counts and "
                f"recv_counts differ at its own rank"
            )
        self._parts = [rows * self._row for rows in gives], [rows * self._row for rows in gets]
        return sum(gets)

    def cargo(self) -> Cargo:
        size_bytes = self._count * self._send.dtype.itemsize
        count = max(self._send.count, self._count)
        send = self._send
        return Cargo(send.owner, self._delivery, count, send.size_bytes, size_bytes, parts=self._parts)


def gather(send: Any, recv: Any, root: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = _rooted(root, view, func_name)
        is_root = named.peer == view.peer
        source = resolve_bytes(send, "send", func_name)
        target = _target_of(recv, func_name, source) if is_root else None
        placement = _GatheredAtRoot(source, target, recv, is_root)
        spec = _spec_of(Collective.GATHER, source, placement, tag, None, step, func_name, named, target=target)
        return CollectiveCall(_staged(spec, source.device, placement.cargo), placement.result)

    return call


class _GatheredAtRoot(_Placed):
    def __init__(self, send: Operand, recv: Operand | None, array: Any, is_root: bool) -> None:
        super().__init__(send, recv, array if is_root else None)
        self._is_root = is_root

    def place(self, rank: int, world_size: int) -> Buffers:
        send = self._send
        self._count = world_size * send.count
        if not self._is_root:
            return Buffers(send.address, 0, self._count, send.owner)
        recv = self._destination((world_size, *send.shape))
        if recv is None:
            return Buffers(0, 0, self._count, None)
        self._require_rows(recv, rank, world_size)
        return Buffers(send.address, recv.address, recv.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        recv_bytes = self._count * self._send.dtype.itemsize if self._is_root else None
        return Cargo(self._send.owner, self._delivery, self._count, self._send.size_bytes, recv_bytes)


def scatter(send: Any, recv: Any, root: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = _rooted(root, view, func_name)
        target, result = receiving(resolve_bytes(recv, "recv", func_name), recv, "recv", func_name)
        source = None
        if named.peer == view.peer:
            if send is None:
                raise PCCLError(Result.INVALID_ARGUMENT, func_name, "send is None, but this peer is the root")
            source = resolve_bytes(send, "send", func_name)
            require_alike(source, target, func_name)
        placement = _ScatteredFromRoot(source, target)
        spec = _spec_of(Collective.SCATTER, target, placement, tag, None, step, func_name, named, target=target)
        return CollectiveCall(_staged(spec, target.device, placement.cargo), result)

    return call


class _ScatteredFromRoot:
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
            what = "bytes" if recv.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"send has {send.count} {what}, but {world_size} peers get {recv.count} each, {self._count} in all"
            )
        is_own_part = send.address + rank * recv.size_bytes == recv.address
        if not is_own_part and _overlap(send, recv):
            raise ValueError(f"recv lies within send, but not where rank {rank} has its part of it")
        return Buffers(send.address, recv.address, self._count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        send, recv = self._send, self._recv
        owner, send_bytes = (send.owner, send.size_bytes) if send is not None else (None, None)
        return Cargo(owner, lambda: recv.owner, self._count, send_bytes, recv.size_bytes)
