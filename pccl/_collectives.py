"""The collectives besides all_reduce: checks a caller's arguments and turns them into an op for the engine.

Collectives that only move elements take any dtype whose elements are plain memory; elements that cannot be reduced
travel as bytes.

The size of a result depends on the world, which is known only when the op starts. A `Placement` then checks whether the
caller's array fits, or makes one. An array that does not fit fails the op on all peers, which would otherwise wait for
this one in vain.

Arrays on a device go through this machine's memory, whole (`pccl.devices.staging`).

A rank names a peer in the view that its caller has seen. By the time the op starts that view may be gone, so a root is
bound to its peer when the call is made (`Root`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pccl._jax_arrays import NewArray
from pccl._operands import (
    Operand,
    changes_of,
    empty_like,
    receiving,
    require_alike,
    require_writable,
    resolve,
    resolve_bytes,
)
from pccl._reduce import TAG_MAX, AsyncHandle, check_algorithm, checked_step, checked_tag, delivered
from pccl.devices.device import Device
from pccl.devices.staging import Cargo, Staging
from pccl.errors import PCCLError, integer_argument
from pccl.protocol.peer import View
from pccl.protocol.point_to_point import PAIR_TAG_MAX
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, Placement, Root
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import Collective, CollectiveInfo, DataType, Membership, ReduceAlgorithm, ReduceOp, Result


class CollectiveCall(NamedTuple):
    """An op to launch, and a function that returns the array with its result."""

    spec: OpSpec
    array: Callable[[], Any]

    def info(self, op: PendingOp, func_name: str) -> CollectiveInfo:
        """Return what the op did. To be called when it is over; errors as `delivered`."""
        result = delivered(op, func_name)
        return CollectiveInfo(Membership(op.rank, op.ring), result.tx_bytes, result.rx_bytes, self.array())


class AsyncCollectiveHandle(AsyncHandle[CollectiveInfo]):
    """A collective in flight. Its arrays belong to pccl until it has ended, or a wait for it has been given up.

    Thread-safe.
    """

    def __init__(self, op: PendingOp, call: CollectiveCall) -> None:
        super().__init__(op, call.info)


CallOf = Callable[[View, str], CollectiveCall]
"""A function that makes a call from the view that its caller sees, for the method of that name (INVALID_ARGUMENT)."""


def all_gather(send: Any, recv: Any, tag: int, algorithm: ReduceAlgorithm | None, step: int | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = resolve_bytes(send, "send", func_name)
        target = target_of(recv, func_name, source)
        placement = _Gathered(source, target, recv)
        spec = spec_of(Collective.ALL_GATHER, source, placement, tag, algorithm, step, func_name, target=target)
        return CollectiveCall(staged(spec, source.device, placement.cargo), placement.result)

    return call


class Placed:
    """A placement with separate arrays to send from and to receive into. The latter may be made when the op starts."""

    def __init__(self, send: Operand, recv: Operand | None, array: Any) -> None:
        self.array = array
        self._send = send
        self._recv = recv
        self._shape: tuple[int, ...] = ()
        self._count = 0
        self._new_array: NewArray | None = None

    def result(self) -> Any:
        """Return the array with the result. To be called when the op has succeeded."""
        return self.array if self._new_array is None else self._new_array()

    def _destination(self, shape: tuple[int, ...]) -> Operand | None:
        """Return the memory for a result of this shape, a new array if the caller has given none.

        None for a new array on a device: it is made when there is a result, in the stream of whoever asks for it.
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
        if not is_own_part and overlap(send, recv):
            raise ValueError(f"send lies within recv, but not where rank {rank} has its part of it")

    def _delivery(self) -> Any:
        if self.array is None:
            self.array = empty_like(self._send, self._shape)
        return self.array if self._recv is None else self._recv.owner

    def _cargo(self, count: int, size_bytes: int) -> Cargo:
        return Cargo(self._send.owner, self._delivery, count, self._send.size_bytes, size_bytes)


class _Gathered(Placed):
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
        target = target_of(recv, func_name, source)
        check_reduce_op(op, func_name)
        placement = _Scattered(source, target, recv)
        spec = spec_of(
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
        return CollectiveCall(staged(spec, source.device, placement.cargo), placement.result)

    return call


class _Scattered(Placed):
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
        if overlap(send, recv):
            raise ValueError("recv overlaps send, which has to stay as it is")
        return Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))

    def cargo(self) -> Cargo:
        return self._cargo(self._send.count, self._count * self._send.dtype.itemsize)


def reduce(
    send: Any, recv: Any, op: ReduceOp, root: int, tag: int, algorithm: ReduceAlgorithm | None, step: int | None
) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = rooted(root, view, func_name)
        is_root = named.peer == view.peer
        source = resolve(send, "send", func_name)
        target = target_of(recv, func_name, source) if is_root else None
        check_reduce_op(op, func_name)
        if target is not None and target.count != source.count:
            text = f"recv has {target.count} elements, but send {source.count}"
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, text)
        if target is not None and target.address != source.address and overlap(source, target):
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, "recv overlaps send; pass the same array, or another")
        placement = _ReducedAtRoot(source, target, recv, is_root)
        spec = spec_of(
            Collective.REDUCE, source, placement, tag, algorithm, step, func_name, named, reduce_op=op, target=target
        )
        return CollectiveCall(staged(spec, source.device, placement.cargo), placement.result)

    return call


class _ReducedAtRoot(Placed):
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


def check_reduce_op(op: ReduceOp, func_name: str) -> None:
    if not isinstance(op, ReduceOp):
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"op must be a ReduceOp, not {op!r}")


def broadcast(array: Any, root: int, tag: int, algorithm: ReduceAlgorithm | None, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        named = rooted(root, view, func_name)
        operand = resolve_bytes(array, "array", func_name)
        is_root = named.peer == view.peer
        operand, result = (operand, lambda: array) if is_root else receiving(operand, array, "array", func_name)
        buffers = Buffers(operand.address, operand.address, operand.count, operand.owner)
        target = None if is_root else operand
        spec = spec_of(Collective.BROADCAST, operand, buffers, tag, algorithm, step, func_name, named, target=target)
        return CollectiveCall(_one_way(spec, operand, is_root), result)

    return call


def rooted(root: int, view: View, func_name: str) -> Root:
    """Return the root of a call: the peer that has this rank in the view of its caller."""
    rank = integer_argument("root", root, func_name)
    return Root(rank, view.ring[rank] if 0 <= rank < view.world_size else 0)


def send(array: Any, to: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand = resolve_bytes(array, "array", func_name)
        buffers = Buffers(operand.address, 0, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, to, "to", True, tag, step, func_name), lambda: array)

    return call


def recv(array: Any, from_: int, tag: int, step: int | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand, result = receiving(resolve_bytes(array, "array", func_name), array, "array", func_name)
        buffers = Buffers(0, operand.address, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, from_, "from_", False, tag, step, func_name), result)

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
        raise fail(f"{role} {rank} is no rank of a group of {view.world_size} peers")
    if view.ring[rank] == view.peer:
        raise fail(f"{role} {rank} is this peer itself")
    target = None if is_sender else operand
    spec = spec_of(Collective.SEND, operand, buffers, tag, None, step, func_name, tag_max=PAIR_TAG_MAX, target=target)
    return _one_way(spec._replace(pair=Pair(view.ring[rank], is_sender)), operand, is_sender)


def barrier(tag: int, step: int | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        spec = spec_of(Collective.BARRIER, None, Buffers(0, 0, 0, None), tag, None, step, func_name)
        return CollectiveCall(spec, lambda: None)

    return call


def spec_of(
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
    """Describe an op. `shape` is what all peers must have alike of that of `given`, if it is not all of it. `target` is
    the caller's memory for the result, if there is one here."""
    tag = checked_tag(tag, func_name, tag_max)
    check_algorithm(algorithm, func_name)
    step = checked_step(step, func_name)
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


def target_of(recv: Any, func_name: str, source: Operand) -> Operand | None:
    """Return the memory of `recv`, which must be writable and of the kind of `source`; None if there is no `recv`."""
    if recv is None:
        return None
    operand = resolve_bytes(recv, "recv", func_name)
    require_writable(operand, "recv", func_name)
    require_alike(source, operand, func_name)
    return operand


def staged(spec: OpSpec, device: Device | None, cargo: Callable[[], Cargo]) -> OpSpec:
    """Return the op, staged through this machine's memory if its arrays are on a device."""
    return spec if device is None else spec._replace(new_source=partial(Staging, device, cargo))


def _one_way(spec: OpSpec, operand: Operand, is_giver: bool) -> OpSpec:
    """Return the op, staged as by `staged`, for a collective in which a peer either gives elements or gets them."""
    send_bytes, recv_bytes = (operand.size_bytes, None) if is_giver else (None, operand.size_bytes)
    cargo = Cargo(operand.owner, lambda: operand.owner, operand.count, send_bytes, recv_bytes)
    return staged(spec, operand.device, lambda: cargo)


def overlap(a: Operand, b: Operand) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes and min(a.count, b.count) > 0
