"""Compressors that send a part of the elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pccl.training.compression.compressor import (
    Compressor,
    Floats,
    Shapes,
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


top_k = cache(TopK)


@dataclass
class DGC(Compressor):
    """Deep gradient compression (Lin et al. 2018, arXiv:1712.01887), with the codes of `TopK`.

    A vector whose norm is above `clip / sqrt(peers)` is scaled down to that. Its momentum is added to the residual
    before the largest elements are selected (momentum correction) and cleared where they are sent (momentum factor
    masking). In the first `warmup` averages the density falls exponentially. Replaces the outer momentum: use it with
    `OuterNesterov(momentum=0)`. In the paper values are exact; here the residual also has what their codes have lost.
    """

    density: float = 1 / 64
    momentum: float = 0.9
    clip: float = math.inf
    warmup: int = 4
    chunk: int = 4096
    decay: float = 1.0
    _velocity: Floats | None = field(default=None, init=False, repr=False, compare=False)
    _next_velocity: Floats | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        top_k(self.density, self.chunk)
        if not (0 <= self.momentum < 1 and self.clip > 0 and self.warmup >= 0):
            raise ValueError(f"{self!r}: momentum must be from 0 to below 1, clip above 0, warmup at least 0")

    def _codec(self) -> TopK:
        share = min(1.0, (self.step + 1) / (self.warmup + 1))
        density = self.density if share == 1 else round(self.density**share, 6)  # the last bits depend on the library
        return top_k(density, self.chunk)

    def bound(self, count: int) -> int:
        return self._codec().bound(count)

    def encode(self, vector: Floats) -> bytes:
        return self._codec().encode(vector)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        self._codec().decode_add(data, out)

    def compress(self, vector: Floats, peers: tuple[int, ...]) -> bytes | None:
        with np.errstate(over="ignore", invalid="ignore"):
            norm, limit = float(np.linalg.norm(vector.astype(np.float64))), self.clip / math.sqrt(len(peers))
            if norm > limit:
                vector = vector * np.float32(limit / norm)
            if self._peers != peers:
                self._velocity = None
            if self._velocity is not None:
                vector = vector + np.float32(self.momentum) * self._velocity
        data = super().compress(vector, peers)
        self._next_velocity = None
        if data is not None:
            sent = np.zeros_like(vector)
            self.decode_add(memoryview(data), sent)
            self._next_velocity = np.where(sent == 0, vector, np.float32(0))
        return data

    def commit(self) -> None:
        super().commit()
        self._velocity, self._next_velocity = self._next_velocity, None


_DENSITIES = (1 / 256, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
_UNITS = 1 << 13


@cache
def _codecs(size: int) -> list[TopK]:
    return [TopK(density, min(max(size, 8), 4096)) for density in _DENSITIES]


def least(costs: Sequence[Sequence[int]], errors: Sequence[Sequence[float]], units: int) -> list[int]:
    """Return one choice for each row so that the sum of their costs is at most `units` and that of their errors is
    minimal: a dynamic programme over rows and costs. The first choice of each row costs 0."""
    best, chosen = np.zeros(units + 1), np.zeros((len(costs), units + 1), np.uint8)
    for row, pairs in enumerate(zip(costs, errors, strict=True)):
        found = np.full(units + 1, math.inf)
        for choice, (cost, error) in enumerate(zip(*pairs, strict=True)):
            if cost <= units:
                sums = best[: units + 1 - cost] + error
                is_better = sums < found[cost:]
                found[cost:][is_better], chosen[row, cost:][is_better] = sums[is_better], choice
        best = found
    choices, left = [], units
    for row in reversed(range(len(costs))):
        choices.append(int(chosen[row, left]))
        left -= costs[row][choices[-1]]
    return choices[::-1]


@dataclass
class PerLayer(Compressor):
    """L-GreCo (Alimohammadi et al. 2022, arXiv:2210.17357): `TopK` with a density for each tensor, or nothing, so that
    the squared error is minimal among those that encode in `budget` bytes.

    The paper minimizes the bytes for an error, and all workers use one choice, since they sum the codes. Here each peer
    chooses by the vector that it sends, and its code begins with a byte of each tensor's choice.
    """

    budget: int
    decay: float = 0.95
    _sizes: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def prepare(self, shapes: Shapes) -> None:
        self._sizes = [math.prod(shape) for shape in shapes]
        if self.budget <= len(self._sizes):
            raise ValueError(f"{self!r}: budget must be above a byte for each of {len(self._sizes)} tensors")

    def bound(self, count: int) -> int:
        return self.budget

    def encode(self, vector: Floats) -> bytes:
        costs, errors, parts = [], [], np.split(vector, np.cumsum(self._sizes)[:-1])
        for part in parts:
            lost = np.cumsum(np.sort(part.astype(np.float64) ** 2))[::-1]  # from the elements that are not kept
            codecs, unit = _codecs(part.size), (self.budget - len(parts)) / _UNITS
            kept = [0, *(math.ceil(part.size / codec.chunk) * codec._kept for codec in codecs)]
            errors.append([float(lost[count]) if count < part.size else 0.0 for count in kept])
            costs.append([0, *(math.ceil(codec.bound(part.size) / unit) for codec in codecs)])
        choices = least(costs, errors, _UNITS)
        pairs = zip(choices, parts, strict=True)
        codes = (_codecs(part.size)[choice - 1].encode(part) for choice, part in pairs if choice)
        return bytes(choices) + b"".join(codes)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        choices, data, first = data[: len(self._sizes)], data[len(self._sizes) :], 0
        for choice, size in zip(choices, self._sizes, strict=True):
            if choice:
                codec = _codecs(size)[choice - 1]
                codec.decode_add(data[: codec.bound(size)], out[first : first + size])
                data = data[codec.bound(size) :]
            first += size
