"""A benchmark's plan and its cases, checked before anything starts, and the quantizations on the command line.

    min-max  min-max:int8  zero-point-scale:uint4:block=128  cast:bfloat16  min-max:stochastic:seed=7

The algorithm comes first, followed in any order and at most once by the code type (`uint4` and `int4` are 4-bit codes
in the 8-bit types), `block=N` elements that share a scale, `stochastic` rounding, and its `seed=N`.
"""

from __future__ import annotations

import importlib.util
import re

import msgspec
import numpy as np

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm
from pccl.tools.report import ToolError

PCCL, RAW_RING, GLOO = "pccl", "raw_ring", "gloo"
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ALL_TO_ALL, GATHER, SCATTER, REDUCE = "all_to_all", "gather", "scatter", "reduce"
BROADCAST, SEND, BARRIER = "broadcast", "send", "barrier"
COLLECTIVES = (
    *(ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, REDUCE),
    *(BROADCAST, SEND, BARRIER),
)
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
GLOO_DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")
ALGORITHMS = {"auto": None, "ring": ReduceAlgorithm.RING, "direct": ReduceAlgorithm.DIRECT}

UNQUANTIZED = "none"
QUANTIZATIONS = {
    "min-max": QuantizationAlgorithm.MIN_MAX,
    "zero-point-scale": QuantizationAlgorithm.ZERO_POINT_SCALE,
    "cast": QuantizationAlgorithm.CAST,
    "lloyd-max": QuantizationAlgorithm.LLOYD_MAX,
    "sign": QuantizationAlgorithm.SIGN,
}
CODES = {
    "uint8": (DataType.UINT8, 8),
    "int8": (DataType.INT8, 8),
    "uint16": (DataType.UINT16, 16),
    "int16": (DataType.INT16, 16),
    "uint4": (DataType.UINT8, 4),
    "int4": (DataType.INT8, 4),
    "bfloat16": (DataType.BFLOAT16, 16),
    "float16": (DataType.FLOAT16, 16),
}
# The error of rounding once, relative to the block's range (codes) or the value (casts); doubled if stochastic.
_CODE_ERRORS = {1: 2.1, 2: 2.6, 4: 1 / 29, 8: 1 / 505, 16: 1 / 125_000}
_CAST_ERRORS = {DataType.BFLOAT16: 2**-8, DataType.FLOAT16: 2**-11}


class Plan(msgspec.Struct, frozen=True):
    """A benchmark's options. All combinations of its lists are measured."""

    peers: list[int]
    connections: list[int]
    sizes_bytes: list[int]
    tensors: list[int]
    quantizations: list[str]
    algorithms: list[str]
    dtype: str
    in_place: bool
    rulers: list[str]
    """RAW_RING, GLOO, both or neither."""
    memory: bool
    iterations: int
    warmup: int
    encrypt: bool = False
    collectives: list[str] = msgspec.field(default_factory=lambda: [ALL_REDUCE])
    pause_s: float = 0.0

    @property
    def rows(self) -> int:
        return len(self.peers) * len(self.connections) * len(cases(self))


class Case(msgspec.Struct, frozen=True):
    """One collective over `bytes`, split into `tensors` concurrent tensors, for a number of iterations."""

    bytes: int
    tensors: int
    dtype: str
    quantization: str
    algorithm: str
    in_place: bool
    memory: bool
    warmup: int
    iterations: int
    collective: str = ALL_REDUCE
    pause_s: float = 0.0
    """Seconds before each turn."""


def cases(plan: Plan) -> list[Case]:
    """Return the cases for each number of peers and connections. Raise ToolError if a case cannot be measured."""
    dtype = np.dtype(plan.dtype)
    for size_bytes in plan.sizes_bytes:
        if size_bytes % dtype.itemsize or size_bytes // dtype.itemsize < max(plan.tensors):
            raise ToolError(f"{size_bytes} bytes cannot be cut into {max(plan.tensors)} tensors of {plan.dtype}")
    for text in plan.quantizations:
        try:
            options = parse_quantization(text)
            if options is not None:
                options.check_tensor(DataType.from_numpy_dtype(dtype))
        except ValueError as error:
            raise ToolError(f"--quantize {text}: {error}") from None
    if plan.collectives != [ALL_REDUCE]:
        if plan.tensors != [1] or plan.quantizations != [UNQUANTIZED]:
            raise ToolError("--tensors and --quantize apply only to all_reduce: measure it by itself")
        smallest = min(plan.sizes_bytes) // dtype.itemsize
        if smallest < max(plan.peers):
            raise ToolError(f"{smallest} elements cannot be divided among {max(plan.peers)} peers")
    if GLOO in plan.rulers:
        if importlib.util.find_spec("torch") is None:
            raise ToolError("--against gloo needs torch: pip install '.[torch]' in a clone of pccl")
        if plan.dtype not in GLOO_DTYPES:
            raise ToolError(f"--against gloo: Gloo does not reduce {plan.dtype}, only {', '.join(GLOO_DTYPES)}")
    common = (plan.in_place, plan.memory, plan.warmup, plan.iterations)
    return [
        Case(size_bytes, tensors, plan.dtype, quantization, algorithm, *common, collective, plan.pause_s)
        for collective in plan.collectives
        for size_bytes in plan.sizes_bytes
        for tensors in plan.tensors
        for quantization in plan.quantizations
        for algorithm in plan.algorithms
        if collective != BARRIER or (size_bytes, algorithm) == (plan.sizes_bytes[0], plan.algorithms[0])
    ]


def parse_quantization(text: str) -> QuantizationOptions | None:
    """Return the options for a quantization, or None for `none`. Raise ValueError if it is invalid."""
    if text == UNQUANTIZED:
        return None
    name, *words = text.split(":")
    if name == UNQUANTIZED:
        raise ValueError(f"{text!r}: {UNQUANTIZED!r} takes no options")
    if name not in QUANTIZATIONS:
        raise ValueError(f"{text!r} does not begin with one of {', '.join([UNQUANTIZED, *QUANTIZATIONS])}")
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if word in CODES:
            key, value = "type", word
        elif word != "stochastic" and not (key in ("block", "seed") and value.isdecimal()):
            raise ValueError(
                f"{text!r}: {word!r} is neither one of {', '.join(CODES)} nor block=N, stochastic or seed=N"
            )
        if key in found:
            raise ValueError(f"{text!r}: {key} is given twice")
        found[key] = value
    if name == "cast" and "type" not in found:
        raise ValueError(f"{text!r}: the type is missing, as in cast:bfloat16")
    datatype, bits = CODES[found["type"]] if "type" in found else (DataType.UINT8, 0)
    try:
        return QuantizationOptions(
            datatype,
            QUANTIZATIONS[name],
            block_size=int(found.get("block", 0)),
            bits=bits,
            stochastic="stochastic" in found,
            seed=int(found.get("seed", 0)),
        )
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def error_max(options: QuantizationOptions, world_size: int, largest: float, epsilon: float) -> float:
    """Return an error bound for a quantized sum whose elements range from 0 to `largest`, in a type with this epsilon.

    The direct algorithm quantizes twice at the full range, the ring W times at growing ranges.
    """
    if options.algorithm is QuantizationAlgorithm.CAST:
        part = _CAST_ERRORS[options.quantized_datatype]
    else:
        part = _CODE_ERRORS[options.bits]
    once = part * (2 if options.stochastic else 1) + epsilon
    return largest * once * max(2.0, (world_size + 1) / 2)


_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BINARY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a size such as `64MiB`, `1.5 GiB` or `4096`. Raise ValueError if it is invalid."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 4KiB or 64MiB")
    value = float(match[1]) * _UNITS[match[2].upper()]
    if value != int(value) or value < 1:
        raise ValueError(f"{text!r} is not a whole number of bytes above zero")
    return int(value)


def format_bytes(count: int) -> str:
    for unit, factor in _BINARY:
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} B"


def format_bytes_about(count: int) -> str:
    """Return a size with two or three digits."""
    for unit, factor in _BINARY:
        if count >= factor:
            return f"{count / factor:.{1 if count < 10 * factor else 0}f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def format_megabytes_per_second(bytes_per_second: float) -> str:
    """Return a rate as a number without its unit."""
    rate = bytes_per_second / 1e6
    return f"{rate:.0f}" if rate >= 99.95 else f"{rate:.1f}" if rate >= 9.95 else f"{rate:.2f}"
