"""Parses quantizations of the command line, and bounds the error of their sums.

    min-max  min-max:int8  zero-point-scale:uint4:block=128  cast:bfloat16  min-max:stochastic:seed=7

First the algorithm, then in any order and each at most once: the type of a code (`uint4` and `int4` are 4 bits of the
8-bit types), `block=N` elements that share a scale, `stochastic` rounding, and its `seed=N`. What is left out is the
library's default.
"""

from __future__ import annotations

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions

NONE = "none"
ALGORITHMS = {
    "min-max": QuantizationAlgorithm.MIN_MAX,
    "zero-point-scale": QuantizationAlgorithm.ZERO_POINT_SCALE,
    "cast": QuantizationAlgorithm.CAST,
}
TYPES = {
    "uint8": (DataType.UINT8, 8),
    "int8": (DataType.INT8, 8),
    "uint16": (DataType.UINT16, 16),
    "int16": (DataType.INT16, 16),
    "uint4": (DataType.UINT8, 4),
    "int4": (DataType.INT8, 4),
    "bfloat16": (DataType.BFLOAT16, 16),
    "float16": (DataType.FLOAT16, 16),
}
# The error of one quantization: of the block's range with codes, of the value with a cast. Twice that if stochastic.
_CODE_ERRORS = {4: 1 / 29, 8: 1 / 505, 16: 1 / 125_000}
_CAST_ERRORS = {DataType.BFLOAT16: 2**-8, DataType.FLOAT16: 2**-11}


def parse_quantization(text: str) -> QuantizationOptions | None:
    """Return the options that a word of the command line stands for, None for `none`. ValueError says what is wrong."""
    if text == NONE:
        return None
    name, *words = text.split(":")
    if name == NONE:
        raise ValueError(f"{text!r}: nothing can follow {NONE!r}")
    if name not in ALGORITHMS:
        raise ValueError(f"{text!r} does not begin with one of {', '.join([NONE, *ALGORITHMS])}")
    algorithm = ALGORITHMS[name]
    found: dict[str, int | str] = {}
    for word in words:
        key, has_value, value = word.partition("=")
        if word in TYPES:
            key, known = "type", word
        elif key in ("block", "seed") and value.isdecimal():
            known = value
        elif word == "stochastic" and not has_value:
            known = word
        else:
            raise ValueError(
                f"{text!r}: {word!r} is neither one of {', '.join(TYPES)} nor block=N, stochastic or seed=N"
            )
        if key in found:
            raise ValueError(f"{text!r}: {key} is given twice")
        found[key] = known
    if algorithm is QuantizationAlgorithm.CAST and "type" not in found:
        raise ValueError(f"{text!r}: say to what, as in cast:bfloat16")
    datatype, bits = TYPES[str(found.get("type", "uint8"))]
    try:
        return QuantizationOptions(
            datatype,
            algorithm,
            block_size=int(found.get("block", 0)),
            bits=bits,
            stochastic="stochastic" in found,
            seed=int(found.get("seed", 0)),
        )
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def error_max(options: QuantizationOptions, world_size: int, largest: float, epsilon: float) -> float:
    """Return a bound of the error of a sum of values that are not negative, whichever algorithm is used.

    `largest` is the greatest element of the sum, and `epsilon` the precision of its type. The direct algorithm
    quantizes twice at the full range, the ring W times at growing ranges.
    """
    if options.algorithm is QuantizationAlgorithm.CAST:
        part = _CAST_ERRORS[options.quantized_datatype]
    else:
        part = _CODE_ERRORS[options.bits]
    once = part * (2 if options.stochastic else 1) + epsilon
    return largest * once * max(2.0, (world_size + 1) / 2)
