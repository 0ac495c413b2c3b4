"""The ops of a step, whose results reveal their participants.

Every running peer has a slot, a number below SLOTS. Element i of an op has a key k(i) in [0, SLOTS); the peer in slot s
contributes 2**p with p = s xor k if p is below the op's number of positions, else 0. In a sum over a set of peers, each
bit then stands for a peer, and SLOTS elements with all keys show every peer, even if the type or the quantization has
room for only one position. Keys differ between ops. This exposes not only results that lack a peer or contain one
twice, but also those with another op's bytes, or with their own bytes in the wrong place.

Sums of powers of two below 2**SLOTS are exact in all types that hold all positions. With one position, every element is
0 or 1; this is used for quantized sums, AVG, MAX, and (shifted) MIN and PROD.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp
from pccl.tools.stress.plan import SLOTS

TAGS = 10
"""The number of concurrent ops in a step."""
RUNS = 1 << 16
"""The number of permutations of the SLOTS keys."""
COUNT_MAX = 2 * RUNS * SLOTS

Array: TypeAlias = NDArray[Any]

_WIDE = ("uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
_NARROW = ("uint8", "int8", "float16")
_QUANTIZED = ("float32", "float32", "float64", "float16")
_KEYS = np.tile(
    np.random.default_rng(1).permuted(np.tile(np.arange(SLOTS, dtype=np.uint8), (RUNS, 1)), axis=1).reshape(-1), 3
)


class WrongResultError(Exception):
    """A result is not the reduction over a set of peers."""


@dataclass(frozen=True)
class Op:
    tag: int
    dtype: str
    count: int
    op: ReduceOp
    positions: int
    first_run: int
    """The permutation that the op's keys begin with."""
    quantization: QuantizationOptions | None
    algorithm: ReduceAlgorithm | None

    def contribution(self, slot: int) -> Array:
        return self._values({slot}, is_result=False)

    def participants(self, result: Array) -> frozenset[int]:
        """Return the slots whose contributions are in `result`, or raise WrongResultError."""
        head = result[:SLOTS].astype(np.float64)
        if self.dtype.startswith("int"):
            head %= 2.0 ** (8 * result.itemsize)
        if self.op is ReduceOp.PROD:
            head = head - 1
        elif self.op is ReduceOp.MIN:
            head = 1 - head
        slots = set()
        for key, value in zip(self._keys[:SLOTS].tolist(), head.tolist(), strict=False):
            if self.positions == 1:
                is_in = value > (0.5 / SLOTS if self.op is ReduceOp.AVG else 0.5)
                slots |= {key} if is_in else set()
            else:
                bits = int(value) if 0 <= value < 1 << 32 else 0
                slots |= {power ^ key for power in range(self.positions) if bits >> power & 1}
        expected = self._values(slots, is_result=True) if slots else np.zeros_like(result)
        tolerance = self._tolerance
        if tolerance:
            with np.errstate(invalid="ignore"):  # infinity minus infinity is NaN, which is not within the tolerance
                is_right = np.abs(result.astype(np.float64) - expected.astype(np.float64)) <= tolerance
        else:
            is_right = result == expected
        if not slots or not is_right.all():
            wrong = np.flatnonzero(~is_right)
            at, last = (int(wrong[0]), int(wrong[-1])) if len(wrong) else (0, 0)
            raise WrongResultError(
                f"{self}: {len(wrong)} of {self.count} elements do not match slots {sorted(slots)}; element "
                f"{at} is {result[at]!s} instead of {expected[at]!s}, the last wrong one is {last}"
            )
        return frozenset(slots)

    @property
    def _tolerance(self) -> float:
        if self.quantization is None:
            return 0.0 if self.op is not ReduceOp.AVG else 1e-3
        return 0.4 if self.quantization.bits == 4 else 0.02 if self.op is ReduceOp.AVG else 0.15

    @property
    def _keys(self) -> NDArray[np.uint8]:
        return _KEYS[self.first_run * SLOTS : self.first_run * SLOTS + self.count]

    def _values(self, slots: Collection[int], is_result: bool) -> Array:
        powers = [[slot ^ key for slot in slots] for key in range(SLOTS)]
        table = np.array([sum(1 << p for p in each if p < self.positions) for each in powers], np.uint64)
        dtype = np.dtype(self.dtype)
        if self.op is ReduceOp.PROD:
            table = table + np.uint64(1)
        elif self.op is ReduceOp.MIN:
            table = np.uint64(1) - table
        values = table.astype(np.float64) / len(slots) if is_result and self.op is ReduceOp.AVG else table
        taken: Array = values.astype(dtype)[self._keys]
        return taken

    def __str__(self) -> str:
        how = f", {self.quantization}" if self.quantization else ""
        where = f", {self.algorithm.name}" if self.algorithm is not None else ""
        return f"tag {self.tag} ({self.op.name} of {self.count} {self.dtype}{how}{where})"


def ops_of_step(seed: int, group: int, revision: int, bytes_max: int) -> list[Op]:
    """Return the TAGS concurrent ops of a step: small ones and sometimes one large op of at most `bytes_max`."""
    random = Random(f"{seed} {group} {revision}")
    large = random.randrange(TAGS) if random.random() < 0.15 else None
    return [_op(random, tag, bytes_max, tag == large) for tag in range(TAGS)]


def _op(random: Random, tag: int, bytes_max: int, is_large: bool) -> Op:
    op = random.choices(
        [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD], weights=[12, 2, 1, 1, 1]
    )[0]
    quantization = _quantization(random) if op in (ReduceOp.SUM, ReduceOp.AVG) and random.random() < 0.35 else None
    if quantization is not None:
        dtype = random.choice(_QUANTIZED)
        if quantization.algorithm is QuantizationAlgorithm.CAST and dtype == "float16":
            dtype = "float32"
    elif op is ReduceOp.AVG:
        dtype = random.choice(("float32", "float64", "float16"))
    else:
        dtype = random.choice(_WIDE * 2 + _NARROW)
    positions = 1 if quantization is not None or op is not ReduceOp.SUM else 8 if dtype in _NARROW else SLOTS
    if is_large:
        size_bytes = random.randint(min(bytes_max, 4 << 20), bytes_max)
    else:
        size_bytes = min(bytes_max, random.choice((1 << 6, 1 << 10, 1 << 12, 1 << 15, 1 << 18, 1 << 20)))
        size_bytes = random.randint(1, size_bytes)
    count = max(1 if positions == SLOTS else 2 * SLOTS, size_bytes // np.dtype(dtype).itemsize)
    if quantization is not None and quantization.bits == 4 and op is ReduceOp.AVG:
        op = ReduceOp.SUM
    algorithm = ReduceAlgorithm.RING if random.random() < 0.15 else None
    return Op(tag, dtype, min(count, COUNT_MAX), op, positions, random.randrange(RUNS), quantization, algorithm)


def _quantization(random: Random) -> QuantizationOptions:
    kind = random.choice(
        (QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE, QuantizationAlgorithm.CAST)
    )
    if kind is QuantizationAlgorithm.CAST:
        return QuantizationOptions(random.choice((DataType.FLOAT16, DataType.BFLOAT16)), kind)
    dtype = random.choice((DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16))
    bits = random.choice((8, 4)) if dtype.itemsize == 1 else 16
    block_size = random.choice((0, 0, 32, 1024))
    is_stochastic = bits != 4 and random.random() < 0.3
    return QuantizationOptions(
        dtype, kind, block_size, bits, stochastic=is_stochastic, seed=random.randrange(1 << 32) if is_stochastic else 0
    )
