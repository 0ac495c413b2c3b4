"""Compressors of matrices: low rank, and cosine transforms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from pccl.training.compression.compressor import (
    Compressor,
    Floats,
    Shapes,
    largest,
    long,
    packed,
    packed_bytes,
    short,
    unpacked,
)


@dataclass
class PowerSGD(Compressor):
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727): a low-rank approximation of each matrix, by one power iteration
    that starts from the factor of the last step. Other tensors are sent in float32.

    The paper averages the factors of all peers, in two rounds. Here each peer sends its own factors, in one round, so
    the average may have the rank times the number of peers.
    """

    rank: int = 4
    decay: float = 1.0
    _shapes: Shapes = field(default=(), init=False, repr=False, compare=False)
    _factors: dict[int, Floats] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"{self!r}: rank must be at least 1")

    def prepare(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def _parts(self) -> list[tuple[slice, int, int, int]]:
        """Return the place, rows, columns and rank of each tensor; the rank is 0 if it is sent as it is."""
        parts, first = [], 0
        for shape in self._shapes:
            count = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            columns = count // max(rows, 1)
            rank = min(self.rank, rows, columns)
            is_smaller = len(shape) > 1 and rank * (rows + columns) < count
            parts.append((slice(first, first + count), rows, columns, rank if is_smaller else 0))
            first += count
        return parts

    def bound(self, count: int) -> int:
        parts = self._parts()
        return 4 * sum(rank * (rows + columns) if rank else rows * columns for _, rows, columns, rank in parts)

    def encode(self, vector: Floats) -> bytes:
        sent: list[Any] = []
        for number, (place, rows, columns, rank) in enumerate(self._parts()):
            if not rank:
                sent.append(vector[place])
                continue
            matrix = vector[place].reshape(rows, columns)
            start = self._factors.get(number)
            if start is None:
                start = np.random.default_rng(number).standard_normal((columns, rank)).astype(np.float32)
            left, _ = np.linalg.qr(matrix @ start)
            right = matrix.T @ left
            if right.any():  # from zeros, the iteration would stay there
                self._factors[number] = right
            sent += [left.reshape(-1), right.reshape(-1)]
        return np.concatenate(sent).astype("<f4").tobytes()

    def decode_add(self, data: memoryview, out: Floats) -> None:
        values, first = np.frombuffer(data, "<f4"), 0
        for place, rows, columns, rank in self._parts():
            target = out[place].reshape(rows, columns)
            if not rank:
                target += values[first : first + target.size].reshape(rows, columns)
                first += target.size
                continue
            left = values[first : first + rows * rank].reshape(rows, rank)
            right = values[first + rows * rank : first + (rows + columns) * rank].reshape(columns, rank)
            for each in range(rank):  # a matrix product has another order on each processor
                target += left[:, each, None] * right[:, each]
            first += (rows + columns) * rank


@cache
def cosines(size: int) -> Floats:
    """Return the orthonormal DCT-II of `size` points as a matrix, in multiples of 2**-20: the bits of a cosine depend
    on the library."""
    rows = [
        [math.sqrt((2 if row else 1) / size) * math.cos(math.pi * (place + 0.5) * row / size) for place in range(size)]
        for row in range(size)
    ]
    return np.array([[round(value * 2**20) / 2**20 for value in row] for row in rows], np.float32)


@dataclass
class DCTTopK(Compressor):
    """DeMo (Peng et al. 2024, arXiv:2411.19870): the largest coefficients of a discrete cosine transform, in chunks.

    Each dimension of a matrix is cut into pieces of the largest divisor up to `chunk`; `kept` coefficients of each
    chunk are sent, as their places and bfloat16 values. In the paper the residual is the momentum, and `decay` its
    factor: use it with `OuterNesterov(momentum=0)`.
    """

    kept: int = 32
    chunk: int = 64
    decay: float = 0.95
    _shapes: Shapes = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (self.kept >= 1 and 2 <= self.chunk <= 256):
            raise ValueError(f"{self!r}: kept must be at least 1, chunk from 2 to 256")

    def prepare(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def _parts(self) -> list[tuple[slice, tuple[int, int, int, int], int, int]]:
        """Return the place of each tensor, its shape as rows of chunks of rows and columns of chunks of columns, the
        number of coefficients of a chunk, and the bits of a coefficient's place."""
        parts, first = [], 0
        for shape in self._shapes:
            count = math.prod(shape)
            rows = shape[0] if len(shape) > 1 else 1
            sides = [
                max(n for n in range(1, self.chunk + 1) if side % n == 0) for side in (rows, count // max(rows, 1))
            ]
            size = sides[0] * sides[1]
            cut = (rows // sides[0], sides[0], count // max(rows, 1) // sides[1], sides[1])
            parts.append((slice(first, first + count), cut, min(self.kept, size), (size - 1).bit_length()))
            first += count
        return parts

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the bytes of the values and of the places of each tensor."""
        return [
            (2 * cut[0] * cut[2] * kept, packed_bytes(bits, cut[0] * cut[2] * kept))
            for _, cut, kept, bits in self._parts()
        ]

    def bound(self, count: int) -> int:
        return sum(map(sum, self._sizes()))

    def encode(self, vector: Floats) -> bytes:
        sent = []
        for place, cut, kept, bits in self._parts():
            chunks = vector[place].reshape(cut).transpose(0, 2, 1, 3)
            found: Any = cosines(cut[1]) @ chunks @ cosines(cut[3]).T
            rows = found.reshape(cut[0] * cut[2], cut[1] * cut[3])
            places = largest(rows, kept)
            sent.append(short(np.take_along_axis(rows, places, axis=1)) + packed(places, bits))
        return b"".join(sent)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        for (place, cut, kept, bits), (values_size, places_size) in zip(self._parts(), self._sizes(), strict=True):
            values = long(data[:values_size]).reshape(-1, kept)
            places = unpacked(data[values_size : values_size + places_size], bits, values.size).reshape(-1, kept)
            data = data[values_size + places_size :]
            chunks = np.zeros((cut[0] * cut[2], cut[1], cut[3]), np.float32)
            rows, columns = cosines(cut[1])[places // cut[3]], cosines(cut[3])[places % cut[3]]
            for each in range(kept):
                rows[:, each] *= values[:, each, None]
                chunks += rows[:, each, :, None] * columns[:, each, None, :]
            target = out[place].reshape(cut)
            target += chunks.reshape(cut[0], cut[2], cut[1], cut[3]).transpose(0, 2, 1, 3)
