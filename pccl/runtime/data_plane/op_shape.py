"""Shapes of ops, which peers compare: an array's dimensions as a number, and a `pccl_op_shape` as text for errors.

Dimensions, and the dtype of an array that travels as bytes, have a number of 64 bits. Different dimensions have
different numbers. Most numbers can be decoded, so that a peer can report another peer's dimensions; dimensions that are
many or huge, and those with a dtype, have a digest instead:

    0              neither dimensions nor dtype
    bit 63 clear   from the lowest bits on, for each dimension from the last to the first: its width in six bits, then
                   its value in as many bits as the width; then a 1
    bit 63 set     63 bits of a BLAKE2b of the dimensions, if there are any, and the dtype

A shape from another peer may hold any numbers.
"""

from __future__ import annotations

import hashlib
from typing import Any

from pccl.runtime.extension import lib
from pccl.types import Collective, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp

WIDTH_BITS = 6
DIGEST_FLAG = 1 << 63
REMEMBERED_MAX = 4096

_number_of: dict[tuple[tuple[int, ...] | None, str], int] = {}
"""A cache, so that a small op does not compute its number again."""
_digested: dict[int, tuple[tuple[int, ...] | None, str]] = {}
"""Dimensions and dtypes by their digests."""

FOUR_BITS = {DataType.UINT8: lib.PCCL_CODE_UINT4, DataType.INT8: lib.PCCL_CODE_INT4}
ROOT_ROLES = {
    Collective.BROADCAST: "from",
    Collective.GATHER: "to",
    Collective.SCATTER: "from",
    Collective.REDUCE: "to",
}


def number_of(dimensions: tuple[int, ...] | None, dtype: str = "") -> int:
    """Return the number of dimensions, of a dtype or of both; 0 for neither. Thread-safe."""
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
    """Return the dimensions that have this number. Thread-safe.

    None for 0, for a number that cannot be decoded, and for a digest that this process has not computed.
    """
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
    """Return the engine's number for the type of a quantized element on the wire."""
    datatype = quantization.quantized_datatype
    return FOUR_BITS[datatype] if quantization.bits == 4 else datatype


def size_bytes(shape: Any) -> int:
    """Return the size of the shape's elements; 0 for an unknown dtype."""
    found: int = shape.count * lib.pccl_dtype_bytes(shape.dtype)
    return found


def describe(shape: Any, with_dimensions: bool, *, is_mine: bool = False) -> str:
    """Return a `pccl_op_shape` as text. `is_mine`: this peer's expectation of the other peer's op."""
    text = _name(ReduceOp, shape.reduce_op)
    if shape.collective in (Collective.REDUCE_SCATTER, Collective.REDUCE):
        text = f"{_name(Collective, shape.collective).lower()} {text}"
    elif shape.collective != Collective.ALL_REDUCE:
        text = _name(Collective, shape.collective).lower()
    is_exchange = shape.collective == Collective.ALL_TO_ALL
    if is_exchange:
        verbs = ("takes", "gives") if is_mine else ("gives", "takes")
        text += f" that {verbs[0]} {shape.count} x {_name(DataType, shape.dtype)} and {verbs[1]} {shape.root}"
    else:
        text += f" of {shape.count} x {_name(DataType, shape.dtype)}"
    if with_dimensions:
        described = _describe_dimensions(shape.dimensions)
        text += described.replace(" of shape", ", rows of shape") if is_exchange else described
    if shape.collective in ROOT_ROLES:
        text += f" {ROOT_ROLES[shape.collective]} rank {shape.root}"
    if shape.quantization:
        four_bits = {code: f"4-bit {datatype.name}" for datatype, code in FOUR_BITS.items()}
        code = four_bits.get(shape.quantized_dtype) or _name(DataType, shape.quantized_dtype)
        text += f", {_name(QuantizationAlgorithm, shape.quantization)} to {code}"
        if shape.quantization_block:
            text += f" in blocks of {shape.quantization_block}"
    algorithm = _name(ReduceAlgorithm, shape.algorithm)
    text += f" ({algorithm}, world {shape.world_size}, segments of {shape.segment_bytes} bytes"
    if shape.last_slice:
        text += f", slice {shape.slice} of {shape.last_slice + 1}"
    return text + ")"


def _name(kind: Any, value: int) -> str:
    try:
        return str(kind(value).name)
    except ValueError:
        return f"unknown {value}"
