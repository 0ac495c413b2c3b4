"""Fills in a `pccl_op_request` of the C library from the caller's spec and the machine's launch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pccl.protocol.link_metrics import UNKNOWN
from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.extension import ffi, lib
from pccl.types import Collective, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp

EXCHANGES = (Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)
"""Collectives that exchange parts. If all peers are linked, the parts are sent directly."""


class OpRequest:
    """A `pccl_op_request` that is filled in for each op. For use by one thread at a time."""

    def __init__(self, group: int, segment_bytes: int = 0) -> None:
        """If `segment_bytes` is 0, each op's size determines it."""
        self._segment_bytes = segment_bytes
        self._rank_links: Any = ffi.NULL
        self._counts: tuple[Any, Any] = ffi.NULL, ffi.NULL
        self._named_parts: tuple[Any, Any] = ffi.NULL, ffi.NULL
        self._spread_count = 0
        self._launch: SubmitOp | None = None
        self._kind: tuple[Any, ...] = ()
        """The arguments, except the memory, of the op for which the request was last filled in."""
        self.count = 0
        """Number of elements of the op."""
        self.native = ffi.new("pccl_op_request *")
        self.native.key.group = group

    def refill(self, launch: SubmitOp, spec: OpSpec, buffers: Buffers, op: int, tag: int) -> bool:
        """Set the op number and the tag of the request. Return False if only the memory differs from that of the last
        op, which takes a tenth of the time."""
        kind = (
            spec.collective,
            buffers.count,
            spec.dtype,
            spec.reduce_op,
            spec.root,
            spec.quantization,
            spec.algorithm,
            spec.segment_bytes,
            spec.step,
            spec.shape,
            spec.bytes_of,
            spec.is_overlapped,
        )
        is_plain = buffers.parts is None and buffers.send_parts is None and buffers.recv_parts is None
        if is_plain and launch is self._launch and kind == self._kind:
            native = self.native
            native.send = ffi.cast("void *", buffers.send)
            native.recv = ffi.cast("void *", buffers.recv)
            native.op, native.key.tag = op, tag
            return False
        self.fill(launch, spec, buffers)
        self.native.op, self.native.key.tag = op, tag
        if is_plain:
            self._launch, self._kind = launch, kind
        return True

    def fill(self, launch: SubmitOp, spec: OpSpec, buffers: Buffers | None = None) -> None:
        """Fill in the request; `buffers` replace those of `spec`. Raises ValueError if a link that the algorithm needs
        is missing, and ValueError or RootLostError like `Placement.place` and `Root.rank_in`."""
        request = self.native
        rank, world_size, links = launch.rank, launch.world_size, launch.links
        self._launch, self._kind = None, ()
        if buffers is None:
            given = spec.buffers
            buffers = given if isinstance(given, Buffers) else given.place(rank, world_size)
        request.op = launch.op
        request.key.epoch = launch.epoch
        request.key.tag = launch.tag
        request.key.sequence = launch.sequence
        shape = request.shape
        shape.collective = spec.collective
        shape.root = spec.root.rank_in(launch.ring) if spec.root is not None else 0
        shape.count = self.count = buffers.count
        # Count one chunk per rank, because a broadcast's only chunk is its whole array.
        is_whole = spec.collective in (Collective.BROADCAST, Collective.SEND)
        self._spread_count = buffers.count * (world_size if is_whole else 1)
        if spec.collective is Collective.ALL_TO_ALL:  # no rank knows the sizes of all parts, so none is assumed
            self._spread_count = 0
        shape.dtype = spec.dtype
        shape.reduce_op = spec.reduce_op
        quantization = spec.quantization
        if quantization is None or quantization.algorithm is QuantizationAlgorithm.NONE:
            shape.quantization = shape.quantized_dtype = shape.quantization_block = 0
            request.rounding = request.rounding_seed = 0
        else:
            shape.quantization = quantization.algorithm
            shape.quantized_dtype = code_type(quantization)
            shape.quantization_block = quantization.block_size
            request.rounding = lib.PCCL_ROUND_STOCHASTIC if quantization.stochastic else lib.PCCL_ROUND_NEAREST
            request.rounding_seed = quantization.seed
        old, new = 0, 0
        if spec.residuals is not None:
            old, new = spec.residuals.place((self, launch.epoch, launch.ring, buffers.count), buffers.count)
            request.feedback_decay = spec.residuals.decay
        request.residual, request.residual_next = ffi.cast("float *", old), ffi.cast("float *", new)
        shape.step = 0 if spec.step is None else spec.step + 1
        shape.dimensions = number_of(spec.shape, spec.bytes_of)
        shape.segment_bytes = max(
            spec.dtype.itemsize,
            spec.segment_bytes
            or self._segment_bytes
            or lib.pccl_segment_bytes_default(self._spread_count, spec.dtype, world_size, launch.is_local),
        )
        shape.world_size = world_size
        algorithm: int | None = spec.algorithm
        if spec.collective in EXCHANGES:
            algorithm = ReduceAlgorithm.DIRECT if launch.is_meshed else ReduceAlgorithm.RING
        elif algorithm is None:
            algorithm = ReduceAlgorithm.RING
            if launch.is_meshed:
                algorithm = self._algorithm(launch, spec.dtype)
        elif algorithm is ReduceAlgorithm.DIRECT and not launch.is_meshed:
            raise ValueError("algorithm DIRECT needs a link between every two peers of the group; some are missing")
        shape.algorithm = algorithm
        request.rank = rank
        request.link_prev = links[rank - 1]
        request.link_next = links[(rank + 1) % world_size]
        self._rank_links = ffi.new("uint64_t[]", links) if launch.is_meshed else ffi.NULL
        request.rank_links = self._rank_links
        request.awaits_completion = launch.is_mutual
        request.is_overlapped = spec.is_overlapped
        self._counts = ffi.NULL, ffi.NULL
        if buffers.parts is not None:
            self._counts = ffi.new("uint64_t[]", buffers.parts[0]), ffi.new("uint64_t[]", buffers.parts[1])
        request.send_counts, request.recv_counts = self._counts
        self._named_parts = ffi.NULL, ffi.NULL
        if not (buffers.send_parts is None and buffers.recv_parts is None):
            self._named_parts = _addresses(buffers.send_parts), _addresses(buffers.recv_parts)
        request.send_parts, request.recv_parts = self._named_parts
        request.send = ffi.cast("void *", buffers.send)
        request.recv = ffi.cast("void *", buffers.recv)

    def _algorithm(self, launch: SubmitOp, dtype: DataType) -> int:
        """Return the ReduceAlgorithm that suits the op. All peers choose the same one."""
        shape = self.native.shape
        if launch.direct_limit != UNKNOWN and not shape.quantization:
            is_direct = self._spread_count * dtype.itemsize <= launch.direct_limit
            return ReduceAlgorithm.DIRECT if is_direct else ReduceAlgorithm.RING
        found: int = lib.pccl_algorithm_default(self._spread_count, dtype, shape.quantization, launch.world_size)
        return found

    def slices(self, engines: int) -> int:
        """Return the number of slices to use with this number of engines per peer."""
        shape = self.native.shape
        found: int = lib.pccl_slices_default(
            self._spread_count, shape.dtype, shape.segment_bytes, shape.world_size, engines
        )
        return found


def _addresses(parts: Sequence[int] | None) -> Any:
    return ffi.NULL if parts is None else ffi.new("void *[]", [ffi.cast("void *", part) for part in parts])


# Peers compare the shapes of their ops. Dimensions are encoded as a number; errors show a `pccl_op_shape` as text.
#
# Dimensions, and the dtype of an array that is sent as bytes, are encoded as a number of 64 bits:
#
#     0              neither dimensions nor dtype
#     bit 63 clear   starting at the lowest bits, for each dimension from the last to the first: its width in six bits,
#                    then its value in that many bits; finally a 1
#     bit 63 set     63 bits of a BLAKE2b hash of the dimensions, if there are any, and the dtype

WIDTH_BITS = 6
DIGEST_FLAG = 1 << 63
REMEMBERED_MAX = 4096

_number_of: dict[tuple[tuple[int, ...] | None, str], int] = {}
"""A cache, so that repeated small ops do not recompute their numbers."""
_digested: dict[int, tuple[tuple[int, ...] | None, str]] = {}
"""Dimensions and dtypes by their digest."""

SHORT_CODES: dict[tuple[int, DataType], int] = {
    (4, DataType.UINT8): lib.PCCL_CODE_UINT4,
    (4, DataType.INT8): lib.PCCL_CODE_INT4,
    (2, DataType.UINT8): lib.PCCL_CODE_UINT2,
    (1, DataType.UINT8): lib.PCCL_CODE_UINT1,
}
ROOT_ROLES = {
    Collective.BROADCAST: "from",
    Collective.GATHER: "to",
    Collective.SCATTER: "from",
    Collective.REDUCE: "to",
}


def number_of(dimensions: tuple[int, ...] | None, dtype: str = "") -> int:
    """Return the number that encodes the dimensions, the dtype or both; 0 for neither. Thread-safe."""
    if dimensions is None and not dtype:
        return 0
    known = _number_of.get((dimensions, dtype))
    return _remembered(dimensions, dtype) if known is None else known


def _remembered(dimensions: tuple[int, ...] | None, dtype: str) -> int:
    if len(_number_of) >= REMEMBERED_MAX:
        _number_of.clear()
        _digested.clear()
    number = 1
    for dimension in dimensions or ():
        width = dimension.bit_length()
        number = (number << width | dimension) << WIDTH_BITS | width
    if number >= DIGEST_FLAG or dtype:
        digest = hashlib.blake2b(f"{dimensions!r}{dtype}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") | DIGEST_FLAG
        _digested[number] = dimensions, dtype
    _number_of[dimensions, dtype] = number
    return number


def dimensions_of(number: int) -> tuple[int, ...] | None:
    """Return the dimensions that a number encodes, or None if it is 0 or cannot be decoded. Thread-safe."""
    if number & DIGEST_FLAG:
        return _digested.get(number, (None, ""))[0]
    dimensions = []
    while number > 1:
        width = number & ((1 << WIDTH_BITS) - 1)
        number >>= WIDTH_BITS
        dimensions.append(number & ((1 << width) - 1))
        number >>= width
    return tuple(reversed(dimensions)) if number else None


def _describe_dimensions(number: int) -> str:
    if not number:
        return ""
    dtype = _digested.get(number, ((), ""))[1]
    dimensions = dimensions_of(number)
    if dimensions is None and not dtype:
        return " of another shape or dtype"
    return (f" of shape {dimensions}" if dimensions is not None else "") + (dtype and f" of {dtype}")


def code_type(quantization: QuantizationOptions) -> int:
    """Return the engine's code for the type of a quantized element on the wire."""
    datatype = quantization.quantized_datatype
    return SHORT_CODES.get((quantization.bits, datatype), datatype)


def size_bytes(shape: Any) -> int:
    """Return the total size of the shape's elements; 0 for an unknown dtype."""
    found: int = shape.count * lib.pccl_dtype_bytes(shape.dtype)
    return found


def describe(shape: Any, with_dimensions: bool, *, is_mine: bool = False) -> str:
    """Return a `pccl_op_shape` as text. For an all_to_all, `is_mine` describes what this peer expects of the other."""
    text = _name(ReduceOp, shape.reduce_op)
    if shape.collective in (Collective.REDUCE_SCATTER, Collective.REDUCE):
        text = f"{_name(Collective, shape.collective).lower()} {text}"
    elif shape.collective != Collective.ALL_REDUCE:
        text = _name(Collective, shape.collective).lower()
    is_exchange = shape.collective == Collective.ALL_TO_ALL
    if is_exchange:
        verbs = ("takes", "gives") if is_mine else ("gives", "takes")
        text += f" that {verbs[0]} {shape.count} x {_dtype_name(shape.dtype)} and {verbs[1]} {shape.root}"
    else:
        text += f" of {shape.count} x {_dtype_name(shape.dtype)}"
    if with_dimensions:
        described = _describe_dimensions(shape.dimensions)
        text += described.replace(" of shape", ", rows of shape") if is_exchange else described
    if shape.collective in ROOT_ROLES:
        text += f" {ROOT_ROLES[shape.collective]} rank {shape.root}"
    if shape.quantization:
        short = {code: f"{bits}-bit {datatype.name}" for (bits, datatype), code in SHORT_CODES.items()}
        code = short.get(shape.quantized_dtype) or _name(DataType, shape.quantized_dtype)
        text += f", {_name(QuantizationAlgorithm, shape.quantization)} to {code}"
        if shape.quantization_block:
            text += f" in blocks of {shape.quantization_block}"
    return text


def describe_engine(shape: Any) -> str:
    """Return the parts of a `pccl_op_shape` that follow from options, as text."""
    text = (
        f"{_name(ReduceAlgorithm, shape.algorithm)}, world {shape.world_size}, segments of {shape.segment_bytes} bytes"
    )
    return f" ({text}, slice {shape.slice} of {shape.last_slice + 1})" if shape.last_slice else f" ({text})"


def _dtype_name(dtype: int) -> str:
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(name := _name(DataType, dtype), name.lower())


def _name(kind: Any, value: int) -> str:
    try:
        return str(kind(value).name)
    except ValueError:
        return f"unknown {value}"
