"""Shapes of ops as text, for errors about peers that called different things.

A shape is a `pccl_op_shape` of the C library. Another peer's came over the network: its numbers may be anything.
"""

from __future__ import annotations

from typing import Any

from pccl.runtime.data_plane import dimensions
from pccl.runtime.extension import lib
from pccl.types import Collective, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp

FOUR_BITS = {DataType.UINT8: lib.PCCL_CODE_UINT4, DataType.INT8: lib.PCCL_CODE_INT4}


def code_type(quantization: QuantizationOptions) -> int:
    """Return the engine's number for the type of a quantized element on the wire."""
    datatype = quantization.quantized_datatype
    return FOUR_BITS[datatype] if quantization.bits == 4 else datatype


def size_bytes(shape: Any) -> int:
    """Return the size of the shape's elements; 0 for an unknown dtype."""
    found: int = shape.count * lib.pccl_dtype_bytes(shape.dtype)
    return found


ROOT_ROLES = {
    Collective.BROADCAST: "from",
    Collective.GATHER: "to",
    Collective.SCATTER: "from",
    Collective.REDUCE: "to",
}


def describe(shape: Any, with_dimensions: bool, *, is_mine: bool = False) -> str:
    """Return a sentence about the shape, `with_dimensions` of the caller's array where these matter. `is_mine`: it is
    what this peer expects of the other one."""
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
        described = dimensions.described(shape.dimensions)
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
