"""Compressors that send a part of the elements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pccl.training.compression.compressor import (
    Compressor,
    Floats,
    chunks,
    largest,
    long,
    packed,
    packed_bytes,
    short,
    unpacked,
)


@dataclass
class TopK(Compressor):
    """SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706): the largest magnitudes of each chunk of the vector.

    A chunk has two levels of magnitude, the means of its selected magnitudes above and below their mean. An element is
    its place and two bits for sign and level. Places take 12 bits in the paper, and 2 + log2(1 / density) here: their
    low bits, and the high bits of the sorted places in unary (Elias 1974, Fano 1971). In the paper the residual
    replaces the outer momentum: use it with `OuterNesterov(learning_rate=1, momentum=0)`.
    """

    density: float = 1 / 16
    chunk: int = 4096
    decay: float = 0.95

    def __post_init__(self) -> None:
        if not (0 < self.density <= 1 and 8 <= self.chunk <= 1 << 16):
            raise ValueError(f"{self!r}: density must be above 0 and at most 1, chunk from 8 to 65536")
        self._kept = math.ceil(self.density * self.chunk)
        self._low = (self.chunk // self._kept).bit_length() - 1
        self._unary = ((self.chunk - 1) >> self._low) + self._kept
        """The number of unary bits of a chunk."""

    def _ends(self, count: int) -> list[int]:
        """Return where levels, low bits, unary bits and codes end."""
        rows = math.ceil(count / self.chunk)
        fields = [(16, 2), (self._low, self._kept), (1, self._unary), (2, self._kept)]
        return list(accumulate(packed_bytes(bits, rows * count) for bits, count in fields))

    def bound(self, count: int) -> int:
        return self._ends(count)[-1]

    def encode(self, vector: Floats) -> bytes:
        rows = chunks(vector, self.chunk)
        places = largest(rows, self._kept)
        values = np.take_along_axis(rows, places, axis=1)
        sizes = np.abs(values).astype(np.float64)
        is_high = sizes >= sizes.mean(axis=1, keepdims=True)
        levels = [(sizes * each).sum(axis=1) / np.maximum(each.sum(axis=1), 1) for each in (~is_high, is_high)]
        codes = (values < 0) + 2 * is_high
        unary = np.zeros((len(rows), self._unary), np.uint8)
        np.put_along_axis(unary, (places >> self._low) + np.arange(self._kept), 1, axis=1)
        low = packed(places & ((1 << self._low) - 1), self._low)
        return short(np.stack(levels, axis=1)) + low + packed(unary, 1) + packed(codes, 2)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        rows, ends = math.ceil(out.size / self.chunk), self._ends(out.size)
        levels = long(data[: ends[0]]).reshape(rows, 2)
        low = unpacked(data[ends[0] : ends[1]], self._low, rows * self._kept).reshape(rows, -1)
        unary = np.unpackbits(
            np.frombuffer(data[ends[1] : ends[2]], np.uint8), count=rows * self._unary, bitorder="little"
        )
        codes = unpacked(data[ends[2] :], 2, rows * self._kept).reshape(rows, -1)
        values = np.take_along_axis(levels, codes >> 1, axis=1)
        np.negative(values, out=values, where=(codes & 1).astype(bool))
        high = np.nonzero(unary.reshape(rows, -1))[1].reshape(rows, -1) - np.arange(self._kept)
        places = (high << self._low) + low + self.chunk * np.arange(rows)[:, None]
        is_inside = places < out.size  # the last chunk is padded
        out[places[is_inside]] += values[is_inside]


@dataclass
class RandomK(Compressor):
    """Sparsified SGD with memory (Stich et al. 2018, arXiv:1809.07599), rand_k: a random part of the elements.

    Elements are sent in float32. Their places, one in each of equal parts of the vector, follow from a number that is
    sent with them.
    """

    density: float = 1 / 16
    seed: int = 0
    decay: float = 1.0
    _steps: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 < self.density <= 1 and 0 <= self.seed < 1 << 32):
            raise ValueError(f"{self!r}: density must be above 0 and at most 1, seed from 0 to 2**32 - 1")

    def bound(self, count: int) -> int:
        return 8 + 4 * math.ceil(self.density * count)

    def _places(self, number: int, count: int) -> NDArray[np.int64]:
        parts = math.ceil(self.density * count)
        edges = np.arange(parts + 1) * count // max(parts, 1)
        # NumPy keeps the raw output of a bit generator the same in all versions.
        random = np.asarray(np.random.PCG64(number).random_raw(parts))
        places: NDArray[np.int64] = edges[:-1] + (random % np.diff(edges).astype(np.uint64)).astype(np.int64)
        return places

    def encode(self, vector: Floats) -> bytes:
        number, self._steps = self.seed << 32 | self._steps & 0xFFFFFFFF, self._steps + 1
        return number.to_bytes(8, "little") + vector[self._places(number, vector.size)].astype("<f4").tobytes()

    def decode_add(self, data: memoryview, out: Floats) -> None:
        out[self._places(int.from_bytes(data[:8], "little"), out.size)] += np.frombuffer(data[8:], "<f4")
