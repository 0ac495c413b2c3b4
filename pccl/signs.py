"""Random signs that are the same on every machine, derived from a seed, step, direction, tensor and element.

Zeroth-order training with shared seeds (`pccl.training.SPSA`) uses them to perturb and update parameters. The generator
is Philox4x32-10 (`native/src/signs.c`). The sign of element i of tensor t in direction d of step s is bit `i % 32` of
word `i % 128 // 32` of the output for the counter (i // 128, t, s, d), with the seed as the key; a 1 bit means minus.

Sums are exact if all values are multiples of one power of two, the quantum, and at most 2**24 quanta in magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.runtime.extension import ffi, lib

SUM_MAX: int = lib.PCCL_SIGNS_SUM_MAX
"""The maximum sum of the amounts' magnitudes in one call: 2**24."""

_U32_MAX = 2**32 - 1


def add_signs(
    values: NDArray[np.float32],
    quantum: float,
    *,
    seed: int,
    tensor: int,
    step: int,
    directions: Sequence[int],
    amounts: Sequence[int],
) -> None:
    """Add signs in place: `values[i] += quantum * sum(amounts[k] * sign(i, directions[k]))`.

    The sums are exact if values and results are at most 2**24 quanta in magnitude. This releases the GIL.

    Args:
        values: A flat, contiguous, writable float32 array.
        quantum: A power of two from 2**-126 to 2**127.
        seed: A 64-bit number.
        tensor: The tensor's number (32 bits).
        step: The step's number (32 bits).
        directions: The directions' numbers (32 bits each).
        amounts: For each direction, the quanta to add for a plus sign. Their magnitudes sum to at most SUM_MAX.

    Raises:
        ValueError: an argument violates these rules.
    """
    if values.dtype != np.float32 or values.ndim != 1 or not values.flags.c_contiguous or not values.flags.writeable:
        raise ValueError("values must be a flat, contiguous, writable array of float32")
    mantissa, exponent = np.frexp(quantum)
    if mantissa != 0.5 or not -125 <= exponent <= 128:
        raise ValueError(f"quantum {quantum!r} must be a power of two from 2**-126 to 2**127")
    if len(directions) != len(amounts):
        raise ValueError(f"{len(directions)} directions, but {len(amounts)} amounts")
    if sum(map(abs, amounts)) > SUM_MAX:
        raise ValueError(f"amounts {list(amounts)} sum to more than {SUM_MAX} in magnitude")
    lib.pccl_kernel_add_signs(
        ffi.cast("float *", values.ctypes.data),
        values.size,
        quantum,
        _signs(seed, tensor, step),
        ffi.new("uint32_t[]", [_u32("direction", direction) for direction in directions]),
        ffi.new("int32_t[]", list(amounts)),
        len(directions),
    )


def sign_words(*, seed: int, tensor: int, step: int, direction: int, block: int) -> tuple[int, int, int, int]:
    """Return four random 32-bit words: the signs of elements `128 * block` to `128 * block + 127`.

    Raises:
        ValueError: `seed` does not fit 64 bits, or another number does not fit 32.
    """
    words = ffi.new("uint32_t[4]")
    lib.pccl_kernel_sign_words(_signs(seed, tensor, step), _u32("direction", direction), _u32("block", block), words)
    return words[0], words[1], words[2], words[3]


def _signs(seed: int, tensor: int, step: int) -> Any:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} must fit 64 bits")
    return ffi.new("pccl_signs *", {"seed": seed, "tensor": _u32("tensor", tensor), "step": _u32("step", step)})


def _u32(what: str, value: int) -> int:
    if not 0 <= value <= _U32_MAX:
        raise ValueError(f"{what} {value} must fit 32 bits")
    return value
