"""The collectives besides all_reduce: what their callers give, as what the engine needs.

Those that only move elements take any dtype whose elements are plain memory; what cannot be reduced travels as bytes.
How large a result is depends on the world, which is known when the op starts: a `Placement` then finds out whether the
caller's array fits, or makes one. One that does not fit fails the op on all peers, which would wait for this one in
vain otherwise.

A rank names a peer in the view that its caller has seen. Until the op starts that view may be gone, so a root is bound
to its peer when the call is made (`Root`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from pccl.errors import PCCLError
from pccl.operands import Operand, empty_like, resolve, resolve_bytes
from pccl.protocol.pairs import PAIR_TAG_MAX
from pccl.protocol.peer import View
from pccl.reduce import AsyncHandle, check_algorithm, check_tag
from pccl.runtime.engine import Buffers, OpSpec, Pair, Placement, Root
from pccl.runtime.peer_session import PendingOp
from pccl.types import Collective, CollectiveInfo, DataType, Membership, ReduceAlgorithm, ReduceOp, Result


class CollectiveCall(NamedTuple):
    """An op to launch, and where its result is then."""

    spec: OpSpec
    array: Callable[[], Any]

    def info(self, op: PendingOp, func_name: str) -> CollectiveInfo:
        """What the op did once it is over, or why it failed (PCCLError)."""
        result = op.result
        assert result is not None
        if result.code is not Result.SUCCESS:
            raise PCCLError(result.code, func_name, result.reason)
        return CollectiveInfo(Membership(op.rank, op.ring), result.tx_bytes, result.rx_bytes, self.array())


class AsyncCollectiveHandle(AsyncHandle[CollectiveInfo]):
    """A collective in flight. Its arrays belong to pccl until it has ended. Thread-safe."""

    def __init__(self, op: PendingOp, call: CollectiveCall) -> None:
        super().__init__(op, call.info)


CallOf = Callable[[View, str], CollectiveCall]
"""Makes the call for the view that its caller sees; `func_name` is for errors. PCCLError INVALID_ARGUMENT."""


def all_gather(send: Any, recv: Any, tag: int, algorithm: ReduceAlgorithm | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = _resolve(send, "send", func_name)
        target = None if recv is None else _target(recv, "recv", func_name, source)
        placement = _Gathered(source, target, recv)
        spec = _spec(Collective.ALL_GATHER, source.dtype, placement, tag, algorithm, func_name)
        return CollectiveCall(spec, lambda: placement.array)

    return call


class _Gathered:
    def __init__(self, send: Operand, recv: Operand | None, array: Any) -> None:
        self.array = array
        self._send = send
        self._recv = recv

    def place(self, rank: int, world_size: int) -> Buffers:
        send, recv = self._send, self._recv
        if recv is None:
            self.array = empty_like(send.owner, (world_size, *send.shape))
            recv = _resolve(self.array, "recv", "")
        if recv.count != world_size * send.count:
            what = "bytes" if send.dtype is DataType.UINT8 else "elements"
            raise ValueError(
                f"recv has {recv.count} {what}, but {world_size} peers give {send.count} each, "
                f"{world_size * send.count} in all; leave recv out to have one made that fits"
            )
        is_own_part = recv.address + rank * send.size_bytes == send.address
        if not is_own_part and _overlap(send, recv):
            raise ValueError(f"send lies within recv, but not where rank {rank} has its part of it")
        return Buffers(send.address, recv.address, recv.count, (send.owner, recv.owner))


def reduce_scatter(send: Any, recv: Any, op: ReduceOp, tag: int, algorithm: ReduceAlgorithm | None) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        source = _resolve(send, "send", func_name, resolve)
        target = None if recv is None else _target(recv, "recv", func_name, source)
        if not isinstance(op, ReduceOp):
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"op must be a ReduceOp, not {op!r}")
        placement = _Scattered(source, target, recv)
        spec = _spec(Collective.REDUCE_SCATTER, source.dtype, placement, tag, algorithm, func_name, reduce_op=op)
        return CollectiveCall(spec, lambda: placement.array)

    return call


class _Scattered:
    def __init__(self, send: Operand, recv: Operand | None, array: Any) -> None:
        self.array = array
        self._send = send
        self._recv = recv

    def place(self, rank: int, world_size: int) -> Buffers:
        send, recv = self._send, self._recv
        count = send.count // world_size + (rank < send.count % world_size)
        if recv is None:
            self.array = empty_like(send.owner, (count,))
            recv = _resolve(self.array, "recv", "")
        if recv.count != count:
            raise ValueError(
                f"recv has {recv.count} elements, but rank {rank} of {world_size} gets {count} of {send.count}; leave "
                f"recv out to have one made that fits"
            )
        if _overlap(send, recv):
            raise ValueError("recv overlaps send, which has to stay as it is")
        return Buffers(send.address, recv.address, send.count, (send.owner, recv.owner))


def broadcast(array: Any, root: int, tag: int, algorithm: ReduceAlgorithm | None) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        if isinstance(root, bool) or not isinstance(root, int):
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"root must be a rank, not {root!r}")
        operand = _resolve(array, "array", func_name)
        placement = _Broadcast(operand)
        named = Root(root, view.ring[root] if 0 <= root < view.world_size else 0)
        if not operand.is_writable and named.peer != view.peer:
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, "array is read-only")
        spec = _spec(Collective.BROADCAST, operand.dtype, placement, tag, algorithm, func_name, named)
        return CollectiveCall(spec, lambda: array)

    return call


class _Broadcast:
    def __init__(self, operand: Operand) -> None:
        self._operand = operand

    def place(self, rank: int, world_size: int) -> Buffers:
        operand = self._operand
        return Buffers(operand.address, operand.address, operand.count, operand.owner)


def send(array: Any, to: int, tag: int) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand = _resolve(array, "array", func_name)
        buffers = Buffers(operand.address, 0, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, to, "to", True, tag, func_name), lambda: array)

    return call


def recv(array: Any, from_: int, tag: int) -> CallOf:
    def call(view: View, func_name: str) -> CollectiveCall:
        operand = _resolve(array, "array", func_name)
        if not operand.is_writable:
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, "array is read-only")
        buffers = Buffers(0, operand.address, operand.count, operand.owner)
        return CollectiveCall(_pair_spec(operand, buffers, view, from_, "from_", False, tag, func_name), lambda: array)

    return call


def _pair_spec(
    operand: Operand,
    buffers: Buffers,
    view: View,
    rank: int,
    role: str,
    is_sender: bool,
    tag: int,
    func_name: str,
) -> OpSpec:
    def fail(message: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, message)

    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < view.world_size:
        raise fail(f"{role} {rank!r} is no rank of a group of {view.world_size} peers")
    if view.ring[rank] == view.peer:
        raise fail(f"{role} {rank} is this peer itself")
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= PAIR_TAG_MAX:
        raise fail(f"tag {tag!r} is not an integer in [0, 2**35)")
    spec = _spec(Collective.SEND, operand.dtype, buffers, tag, None, func_name)
    return replace(spec, pair=Pair(view.ring[rank], is_sender))


def barrier(tag: int) -> CallOf:
    def call(_: View, func_name: str) -> CollectiveCall:
        spec = _spec(Collective.BARRIER, DataType.UINT8, Buffers(0, 0, 0, None), tag, None, func_name)
        return CollectiveCall(spec, lambda: None)

    return call


def _spec(
    collective: Collective,
    dtype: DataType,
    buffers: Buffers | Placement,
    tag: int,
    algorithm: ReduceAlgorithm | None,
    func_name: str,
    root: Root | None = None,
    reduce_op: ReduceOp = ReduceOp.SUM,
) -> OpSpec:
    check_tag(tag, func_name)
    check_algorithm(algorithm, func_name)
    return OpSpec(tag, dtype, reduce_op, None, buffers, algorithm, collective, root)


def _target(array: Any, role: str, func_name: str, source: Operand) -> Operand:
    """A writable operand of the same kind as `source`."""
    operand = _resolve(array, role, func_name)
    if not operand.is_writable:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role} is read-only")
    if operand.dtype is not source.dtype:
        what = f"send is {source.dtype.name} but {role} is {operand.dtype.name}; they must be of one dtype"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
    return operand


def _resolve(array: Any, role: str, func_name: str, by: Callable[[Any, str, str], Operand] = resolve_bytes) -> Operand:
    operand = by(array, role, func_name)
    if operand.device is not None:
        what = f"{role} is on {operand.device_name}; only all_reduce takes such arrays, pass {role}.cpu()"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
    return operand


def _overlap(a: Operand, b: Operand) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes and min(a.count, b.count) > 0
