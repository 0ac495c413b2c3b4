"""Compressors of pseudo-gradients, for `DiLoCo(compression=...)`: what the engine's quantization does not do itself.

Each peer encodes its vector into bytes, an all-gather carries the bytes, and each peer decodes all of them and adds
them up in float32, by rank. *Error feedback* (Karimireddy et al. 2019, arXiv:1901.09847): a peer keeps what its
encoding has lost, times `decay`, and adds it to the vector of the next step. The residual belongs to one object on one
peer: it is discarded when the peers of the average change, and is not in checkpoints.

Decoding uses only NumPy's elementwise float32 operations, tables of exact values, and a fixed order, so that equal
bytes give equal vectors on all processors. Encoding need not be reproducible.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl._floating_point import default_environment

Floats: TypeAlias = NDArray[np.float32]
Shapes: TypeAlias = Sequence[tuple[int, ...]]


def _packed(numbers: Any, bits: int) -> bytes:
    """Return numbers below 2**bits as consecutive fields of `bits` bits."""
    places = np.arange(bits, dtype=np.uint32)
    return np.packbits(
        (numbers.reshape(-1, 1).astype(np.uint32) >> places & 1).astype(np.uint8), None, "little"
    ).tobytes()


def _unpacked(data: memoryview, bits: int, count: int) -> NDArray[np.int64]:
    fields = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count, bitorder="little").reshape(count, bits)
    return fields.astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))


def _packed_bytes(bits: int, count: int) -> int:
    return (bits * count + 7) // 8


def _short(values: Floats) -> bytes:
    """Return values as bfloat16, rounded to nearest."""
    return ((np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes()


def _long(data: memoryview) -> Floats:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _chunks(vector: Floats, chunk: int) -> Floats:
    """Return the vector as rows of `chunk` elements, the last one padded with zeros."""
    padded = np.zeros((math.ceil(vector.size / chunk), chunk), np.float32)
    padded.reshape(-1)[: vector.size] = vector
    return padded


def _largest(rows: Floats, count: int) -> NDArray[np.int64]:
    """Return the places of the `count` largest magnitudes of each row, in ascending order."""
    return np.sort(np.argpartition(np.abs(rows), rows.shape[1] - count, axis=1)[:, -count:], axis=1)


class Compressor(ABC):
    """A lossy encoding of float32 vectors, with error feedback. All peers need equal objects, by `repr`.

    A subclass has `decay`, the factor of the residual, and implements `bound`, `encode` and `decode_add`.
    """

    decay: float
    _residual: Floats | None = None
    _pending: Floats | None = None
    _peers: tuple[int, ...] = ()

    def prepare(self, shapes: Shapes) -> None:  # noqa: B027 - optional
        """Called once, with the shapes of the tensors whose elements make up the vector."""

    @abstractmethod
    def bound(self, count: int) -> int:
        """Return the largest number of bytes of an encoded vector of `count` elements."""

    @abstractmethod
    def encode(self, vector: Floats) -> bytes:
        """Encode a vector of finite values, which must not be changed."""

    @abstractmethod
    def decode_add(self, data: memoryview, out: Floats) -> None:
        """Add the decoded vector to `out`, in exactly reproducible arithmetic."""

    @default_environment()
    def compress(self, vector: Floats, peers: tuple[int, ...]) -> bytes | None:
        """Encode the vector plus the residual of an average of the same peers. `commit` then keeps the new residual.

        Return None if a number is not finite or becomes so. Raises ValueError if the code is longer than `bound`.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if self._peers != peers:
                self._residual = None
            if self._residual is not None:
                vector = vector + np.float32(self.decay) * self._residual
            self._peers, self._pending = peers, None
            if not np.isfinite(vector).all():
                return None
            data = self.encode(vector)
            if len(data) > self.bound(vector.size):
                raise ValueError(f"{self!r} encodes in {len(data)} bytes, above its bound {self.bound(vector.size)}")
            decoded = np.zeros_like(vector)
            self.decode_add(memoryview(data), decoded)
            lost = vector - decoded
        if not np.isfinite(lost).all():
            return None
        if self.decay:
            self._pending = lost
        return data

    def commit(self) -> None:
        """Keep the residual of the last `compress`: its average has ended."""
        self._residual, self._pending = self._pending, None

    def forget(self) -> None:
        """Discard the residual."""
        self._residual = self._pending = None


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
        return list(accumulate(_packed_bytes(bits, rows * count) for bits, count in fields))

    def bound(self, count: int) -> int:
        return self._ends(count)[-1]

    def encode(self, vector: Floats) -> bytes:
        rows = _chunks(vector, self.chunk)
        places = _largest(rows, self._kept)
        values = np.take_along_axis(rows, places, axis=1)
        sizes = np.abs(values).astype(np.float64)
        is_high = sizes >= sizes.mean(axis=1, keepdims=True)
        levels = [(sizes * each).sum(axis=1) / np.maximum(each.sum(axis=1), 1) for each in (~is_high, is_high)]
        codes = (values < 0) + 2 * is_high
        unary = np.zeros((len(rows), self._unary), np.uint8)
        np.put_along_axis(unary, (places >> self._low) + np.arange(self._kept), 1, axis=1)
        low = _packed(places & ((1 << self._low) - 1), self._low)
        return _short(np.stack(levels, axis=1)) + low + _packed(unary, 1) + _packed(codes, 2)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        rows, ends = math.ceil(out.size / self.chunk), self._ends(out.size)
        levels = _long(data[: ends[0]]).reshape(rows, 2)
        low = _unpacked(data[ends[0] : ends[1]], self._low, rows * self._kept).reshape(rows, -1)
        unary = np.unpackbits(
            np.frombuffer(data[ends[1] : ends[2]], np.uint8), count=rows * self._unary, bitorder="little"
        )
        codes = _unpacked(data[ends[2] :], 2, rows * self._kept).reshape(rows, -1)
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


@dataclass
class Sign(Compressor):
    """EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847): the signs of each block times its mean magnitude."""

    block: int = 4096
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"{self!r}: block must be a multiple of 8")

    def bound(self, count: int) -> int:
        return 4 * math.ceil(count / self.block) + _packed_bytes(1, count)

    def encode(self, vector: Floats) -> bytes:
        starts = np.arange(0, vector.size, self.block)
        lengths = np.diff(starts, append=vector.size)
        scales = np.add.reduceat(np.abs(vector), starts, dtype=np.float64) / lengths
        return scales.astype("<f4").tobytes() + _packed(vector < 0, 1)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        blocks = math.ceil(out.size / self.block)
        values = np.repeat(np.frombuffer(data[: 4 * blocks], "<f4"), self.block)[: out.size]
        is_negative = np.unpackbits(np.frombuffer(data[4 * blocks :], np.uint8), count=out.size, bitorder="little")
        out += np.where(is_negative, -values, values)


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
def _cosines(size: int) -> Floats:
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
            (2 * cut[0] * cut[2] * kept, _packed_bytes(bits, cut[0] * cut[2] * kept))
            for _, cut, kept, bits in self._parts()
        ]

    def bound(self, count: int) -> int:
        return sum(map(sum, self._sizes()))

    def encode(self, vector: Floats) -> bytes:
        sent = []
        for place, cut, kept, bits in self._parts():
            chunks = vector[place].reshape(cut).transpose(0, 2, 1, 3)
            found: Any = _cosines(cut[1]) @ chunks @ _cosines(cut[3]).T
            rows = found.reshape(cut[0] * cut[2], cut[1] * cut[3])
            places = _largest(rows, kept)
            sent.append(_short(np.take_along_axis(rows, places, axis=1)) + _packed(places, bits))
        return b"".join(sent)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        for (place, cut, kept, bits), (values_size, places_size) in zip(self._parts(), self._sizes(), strict=True):
            values = _long(data[:values_size]).reshape(-1, kept)
            places = _unpacked(data[values_size : values_size + places_size], bits, values.size).reshape(-1, kept)
            data = data[values_size + places_size :]
            chunks = np.zeros((cut[0] * cut[2], cut[1], cut[3]), np.float32)
            rows, columns = _cosines(cut[1])[places // cut[3]], _cosines(cut[3])[places % cut[3]]
            for each in range(kept):
                rows[:, each] *= values[:, each, None]
                chunks += rows[:, each, :, None] * columns[:, each, None, :]
            target = out[place].reshape(cut)
            target += chunks.reshape(cut[0], cut[2], cut[1], cut[3]).transpose(0, 2, 1, 3)
