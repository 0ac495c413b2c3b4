"""The ops of a run with real engines: what each op is, what its callers give, and what it must come to.

All peers of an op know it by its key, and so what it is follows from that and the run's seed, without a word between
them. Inputs are small integers, so that sums are exact in every type and order; where they are rounded, all peers must
still have the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pccl.types import Collective, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp

Array = npt.NDArray[np.generic]

DTYPES = {
    DataType.UINT8: np.uint8,
    DataType.INT8: np.int8,
    DataType.UINT16: np.uint16,
    DataType.INT16: np.int16,
    DataType.UINT32: np.uint32,
    DataType.INT32: np.int32,
    DataType.UINT64: np.uint64,
    DataType.INT64: np.int64,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: np.uint16,
    DataType.FLOAT: np.float32,
    DataType.DOUBLE: np.float64,
}
"""The numpy types that hold elements; those of bfloat16 are the upper halves of float32."""
COLLECTIVES = (
    *[Collective.ALL_REDUCE] * 16,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.ALL_TO_ALL,
    Collective.GATHER,
    Collective.SCATTER,
    Collective.REDUCE,
    Collective.BARRIER,
)
IN_PLACE = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST, Collective.SEND)
ROOTED = (Collective.BROADCAST, Collective.GATHER, Collective.SCATTER, Collective.REDUCE)
OF_PARTS = (Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)
"""Collectives where each rank has a part of the larger buffer."""
COUNTS = (0, 1, 2, 5, 16, 33, 64, 120, 260)
SEGMENT_BYTES = (8, 16, 40, 64, 256, 4096)
QUANTIZATIONS = (
    QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX, 16),
    QuantizationOptions(DataType.UINT8, QuantizationAlgorithm.MIN_MAX, 16, 4),
    QuantizationOptions(DataType.INT8, QuantizationAlgorithm.ZERO_POINT_SCALE, 8),
    QuantizationOptions(DataType.INT16, QuantizationAlgorithm.ZERO_POINT_SCALE, 32),
    QuantizationOptions(DataType.FLOAT16, QuantizationAlgorithm.CAST),
    QuantizationOptions(DataType.BFLOAT16, QuantizationAlgorithm.CAST),
    QuantizationOptions(algorithm=QuantizationAlgorithm.LLOYD_MAX, block_size=8),
    QuantizationOptions(algorithm=QuantizationAlgorithm.SIGN, block_size=16),
)
MAGNITUDE = 9
"""The largest input."""


@dataclass(frozen=True)
class Style:
    """What all that take part in an op have alike."""

    collective: Collective
    count: int
    """Elements of the larger of its buffers."""
    dtype: DataType
    reduce_op: ReduceOp
    quantization: QuantizationOptions | None
    algorithm: ReduceAlgorithm | None
    segment_bytes: int
    is_in_place: bool
    root: int
    """The rank whose elements all get, or which gets those of all."""
    lengths: tuple[tuple[int, ...], ...] = ()
    """Elements of each rank for each in an all-to-all; empty: all parts are alike."""

    def parts(self, rank: int) -> tuple[list[int], list[int]] | None:
        """The elements that a rank gives to each, and gets from each, where parts are not alike."""
        if not self.lengths:
            return None
        return list(self.lengths[rank]), [row[rank] for row in self.lengths]

    def sizes(self, rank: int, world_size: int) -> tuple[int, int]:
        """The elements that a rank gives and gets."""
        count = self.count
        parts = self.parts(rank)
        if parts is not None:
            return sum(parts[0]), sum(parts[1])
        if self.collective is Collective.ALL_GATHER:
            return count // world_size, count
        if self.collective is Collective.GATHER:
            return count // world_size, count if rank == self.root else 0
        if self.collective is Collective.SCATTER:
            return count if rank == self.root else 0, count // world_size
        if self.collective is Collective.REDUCE:
            return count, count if rank == self.root else 0
        if self.collective is Collective.REDUCE_SCATTER:
            return count, count // world_size + (rank < count % world_size)
        if self.collective in (Collective.BROADCAST, Collective.SEND):
            return (count, 0) if rank == self.root else (0, count)
        return count, count

    def inputs(self, name: str, op: int, elements: int) -> Array:
        rng = np.random.default_rng(crc32(f"{name} {op}".encode()))
        low, high = 0, MAGNITUDE
        if self.reduce_op is ReduceOp.PROD:
            low, high = 1, 2
        elif self.dtype.is_float or self.dtype.name.startswith("INT"):
            low = -MAGNITUDE
        values = rng.integers(low, high + 1, elements)
        return _as_elements(values.astype(np.float64), self.dtype)

    def result(self, inputs: Sequence[Array], rank: int) -> Array:
        """What a rank gets, of all ranks' inputs. Not for one that is rounded."""
        if self.collective is Collective.ALL_GATHER:
            return np.concatenate(inputs)
        if self.collective in (Collective.BROADCAST, Collective.SEND):
            return inputs[self.root] if rank != self.root else inputs[self.root][:0]
        if self.collective is Collective.BARRIER:
            return inputs[rank]
        if self.collective is Collective.ALL_TO_ALL:
            lengths = self.lengths or [[len(each) // len(inputs)] * len(inputs) for each in inputs]
            cut = [np.split(each, np.cumsum(row)[:-1]) for each, row in zip(inputs, lengths, strict=True)]
            return np.concatenate([each[rank] for each in cut])
        if self.collective is Collective.GATHER:
            return np.concatenate(inputs) if rank == self.root else inputs[rank][:0]
        if self.collective is Collective.SCATTER:
            return np.split(inputs[self.root], len(inputs))[rank]
        if self.collective is Collective.REDUCE and rank != self.root:
            return inputs[rank][:0]
        reduced = self._reduced([_as_numbers(each, self.dtype) for each in inputs])
        if self.collective in (Collective.ALL_REDUCE, Collective.REDUCE):
            return reduced
        sizes = [self.sizes(each, len(inputs))[1] for each in range(len(inputs))]
        first = sum(sizes[:rank])
        return reduced[first : first + sizes[rank]]

    def _reduced(self, numbers: Sequence[npt.NDArray[np.float64]]) -> Array:
        stacked = np.array(numbers)
        if self.reduce_op is ReduceOp.MAX:
            return _as_elements(stacked.max(axis=0), self.dtype)
        if self.reduce_op is ReduceOp.MIN:
            return _as_elements(stacked.min(axis=0), self.dtype)
        if self.reduce_op is ReduceOp.PROD:
            return _as_elements(stacked.prod(axis=0), self.dtype)
        total = _as_elements(stacked.sum(axis=0), self.dtype)
        if self.reduce_op is ReduceOp.SUM:
            return total
        if not self.dtype.is_float:
            return total // total.dtype.type(len(numbers))
        if self.dtype is DataType.DOUBLE:
            return total / np.float64(len(numbers))
        return _as_elements(_as_numbers(total, self.dtype).astype(np.float32) / np.float32(len(numbers)), self.dtype)


def style_of(seed: int, key: tuple[int, int, int, int], is_pair: bool, world_size: int, is_other: bool) -> Style:
    """What the op with this key is. `is_other`: to a peer that calls it with arguments of its own."""
    rng = random.Random(f"{seed} {key}")
    collective = Collective.SEND if is_pair else rng.choice(COLLECTIVES)
    reduces = collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
    count = rng.choice(COUNTS)
    dtype = rng.choice(list(DTYPES))
    quantization = None
    if collective is Collective.ALL_REDUCE and rng.random() < 0.25:
        dtype = DataType.FLOAT
        quantization = rng.choice(QUANTIZATIONS)
        if rng.random() < 0.3 and quantization.bits > 2:
            quantization = replace(quantization, stochastic=True, seed=rng.getrandbits(32))
    ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.AVG]
    if quantization is None:
        ops += [ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PROD]
    reduce_op = rng.choice(ops) if reduces else ReduceOp.SUM
    if reduce_op is ReduceOp.AVG and dtype is DataType.BFLOAT16:
        dtype = DataType.FLOAT
    lengths: tuple[tuple[int, ...], ...] = ()
    if collective in OF_PARTS:
        count -= count % world_size
        if collective is Collective.ALL_TO_ALL and rng.random() < 0.5:
            lengths = tuple(
                tuple(rng.choice((0, 0, 1, 5, 40)) + is_other for _ in range(world_size)) for _ in range(world_size)
            )
    elif collective is Collective.BARRIER:
        count = 0
    if is_other and collective is Collective.BARRIER:
        dtype = DataType.UINT8 if dtype is not DataType.UINT8 else DataType.INT8
    elif is_other:
        count += world_size if collective in OF_PARTS else 1
    return Style(
        collective,
        count,
        dtype,
        reduce_op,
        quantization,
        rng.choice((None, ReduceAlgorithm.RING, ReduceAlgorithm.RING)),
        rng.choice(SEGMENT_BYTES),
        rng.random() < 0.6 and collective in IN_PLACE,
        rng.randrange(world_size) if collective in ROOTED else 0,
        lengths,
    )


def _as_elements(values: npt.NDArray[np.floating], dtype: DataType) -> Array:
    """Whole numbers wrap, as in the engine."""
    if dtype is DataType.BFLOAT16:
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kind = DTYPES[dtype]
    return values.astype(kind) if dtype.is_float else values.astype(np.int64).astype(kind)


def _as_numbers(elements: Array, dtype: DataType) -> npt.NDArray[np.float64]:
    if dtype is DataType.BFLOAT16:
        return (elements.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return elements.astype(np.float64)
