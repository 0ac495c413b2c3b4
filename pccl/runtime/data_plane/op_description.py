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


def describe(shape: Any, with_dimensions: bool) -> str:
    """Return a sentence about the shape, `with_dimensions` of the caller's array where these matter."""
    text = _name(ReduceOp, shape.reduce_op)
    if shape.collective == Collective.REDUCE_SCATTER:
        text = f"reduce_scatter {text}"
    elif shape.collective != Collective.ALL_REDUCE:
        text = _name(Collective, shape.collective).lower()
    text += f" of {shape.count} x {_name(DataType, shape.dtype)}"
    if with_dimensions:
        text += dimensions.described(shape.dimensions)
    if shape.collective == Collective.BROADCAST:
        text += f" from rank {shape.root}"
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
