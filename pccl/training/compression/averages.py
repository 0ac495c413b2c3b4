"""Compressors that learn from the codes of all peers together: from the sums of sketches, or from the averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.training.compression.compressor import Compressor, Floats, chunks, long, packed, packed_bytes, short
from pccl.training.compression.quantizers import Sign


def first_largest(sizes: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the places of the `count` largest numbers in ascending order; of equal ones, the first: which ones
    `argpartition` selects depends on the processor."""
    limit = np.partition(sizes, sizes.size - count)[sizes.size - count]
    above = np.flatnonzero(sizes > limit)
    return np.sort(np.concatenate([above, np.flatnonzero(sizes == limit)[: count - above.size]]))


@dataclass
class Sketch(Compressor):
    """Sketched SGD (Ivkin et al. 2019, arXiv:1903.04488) and FetchSGD (Rothchild et al. 2020, arXiv:2007.07682): a
    count sketch of `size` times as many numbers as elements, in bfloat16. The average has the elements whose estimates
    from the sum of the sketches are largest, as many as `density` says. An estimate is the median of `rows` numbers.

    A peer's residual is its vector without these elements. Each step has other hashes. In the first paper, a second
    round exchanges the exact values of these elements; in the second one, residual and momentum are common sketches.
    """

    size: float = 1 / 4
    rows: int = 5
    density: float = 1 / 64
    decay: float = 1.0
    _sent: Floats | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (0 < self.size <= 1 and 0 < self.density <= 1 and self.rows >= 1 and self.rows % 2):
            raise ValueError(f"{self!r}: size and density must be above 0 and at most 1, rows must be odd")

    def _columns(self, count: int) -> int:
        return math.ceil(self.size * count / self.rows)

    def bound(self, count: int) -> int:
        return 2 * self.rows * self._columns(count)

    def _hashes(self, count: int) -> Iterator[tuple[NDArray[np.int64], Floats]]:
        """Yield the columns and the signs of all elements, for each row."""
        for row in range(self.rows):
            raw = np.asarray(np.random.PCG64(self.step * self.rows + row).random_raw(count))
            places = (raw % np.uint64(self._columns(count))).astype(np.int64)
            yield places, 1 - 2 * (raw >> np.uint64(63)).astype(np.float32)

    def encode(self, vector: Floats) -> bytes:
        self._sent, columns = vector, self._columns(vector.size)
        table = [np.bincount(places, signs * vector, columns) for places, signs in self._hashes(vector.size)]
        return short(np.array(table, np.float32))

    def decode_add(self, data: memoryview, out: Floats) -> None:
        self._recover(long(data), out)

    def _recover(self, table: Floats, out: Floats) -> None:
        pairs = zip(self._hashes(out.size), table.reshape(self.rows, -1), strict=True)
        middle = np.sort([signs * sums[places] for (places, signs), sums in pairs], axis=0)[self.rows // 2]
        places = first_largest(np.abs(middle), math.ceil(self.density * out.size))
        out[places] += middle[places]

    def average(self, codes: Sequence[tuple[float, memoryview]], out: Floats) -> None:
        table = np.zeros(self.bound(out.size) // 2, np.float32)
        for weight, data in codes:
            table += np.float32(weight) * long(data)
        out[...] = 0
        self._recover(table, out)
        if self._residual is not None and self._sent is not None:
            self._residual = np.where(out == 0, self._sent, np.float32(0))
        self._sent = None


@dataclass
class ARCTopK(Compressor):
    """ARC-Top-K (Chen et al. 2025, arXiv:2510.26709): all peers send the same rows of `width` elements, in bfloat16:
    those whose norms are largest in the average of the peers' sketches. A sketch is a product with `sketch` random
    vectors of signs.

    In the paper, sketches are averaged in a round before the rows. Here they are of what a peer has not sent yet, and
    travel with the rows of the step before. Bits that name the rows are sent too, so that decoding needs nothing else:
    a new peer selects by its own norms once.
    """

    density: float = 1 / 16
    width: int = 64
    sketch: int = 4
    decay: float = 1.0
    _places: NDArray[np.int64] | None = field(default=None, init=False, repr=False, compare=False)
    """The rows that all peers send next."""

    def __post_init__(self) -> None:
        if not (0 < self.density <= 1 and self.width >= 1 and self.sketch >= 1):
            raise ValueError(f"{self!r}: density must be above 0 and at most 1, width and sketch must be at least 1")

    def _sizes(self, count: int) -> tuple[int, int, int, int]:
        """Return the number of rows, of selected rows, and the bytes of bits and of values."""
        rows = math.ceil(count / self.width)
        kept = math.ceil(self.density * rows)
        return rows, kept, packed_bytes(1, rows), 2 * kept * self.width

    def bound(self, count: int) -> int:
        rows, _, bits, values = self._sizes(count)
        return bits + values + 2 * rows * self.sketch

    def encode(self, vector: Floats) -> bytes:
        count, kept, _, _ = self._sizes(vector.size)
        rows, is_sent = chunks(vector, self.width), np.zeros(count, np.uint8)
        places = (
            first_largest(np.linalg.norm(rows.astype(np.float64), axis=1), kept)
            if self._places is None
            else self._places
        )
        is_sent[places] = 1
        values = short(rows[places])
        rows[places] = 0
        raw = np.asarray(np.random.PCG64(self.step).random_raw(self.width * self.sketch))
        signs = 1 - 2 * (raw >> np.uint64(63)).astype(np.float32)
        return packed(is_sent, 1) + values + short(rows @ signs.reshape(self.width, -1))

    def decode_add(self, data: memoryview, out: Floats) -> None:
        count, kept, bits, size = self._sizes(out.size)
        is_sent = np.unpackbits(np.frombuffer(data[:bits], np.uint8), count=count, bitorder="little")
        rows = np.zeros((count, self.width), np.float32)
        rows[np.flatnonzero(is_sent)] = long(data[bits : bits + size]).reshape(kept, self.width)
        out += rows.reshape(-1)[: out.size]

    def average(self, codes: Sequence[tuple[float, memoryview]], out: Floats) -> None:
        super().average(codes, out)
        count, kept, bits, size = self._sizes(out.size)
        sums = np.zeros(count * self.sketch)
        for weight, data in codes:
            sums += weight * long(data[bits + size :])
        squares = (sums * sums).reshape(count, self.sketch)
        for column in range(1, self.sketch):
            squares[:, 0] += squares[:, column]
        self._places = first_largest(np.nan_to_num(squares[:, 0]), kept)


@dataclass
class OneBitAdam(Compressor):
    """1-bit Adam (Tang et al. 2021, arXiv:2102.02888): vectors in bfloat16 in the first `warmup` averages, then signs,
    with frozen variances as preconditioner.

    The variance of an element is its mean square in the averages of the warm-up. A vector is divided by the standard
    deviations, encoded as by `Sign`, and multiplied by them again when it is decoded. In the paper they divide the
    update, and the momentum is sent; here the inner optimizer has divided, and the outer optimizer has the momentum.
    When a peer joins, which lacks them, they are measured again, on as many averages of plain signs.
    """

    warmup: int = 4
    block: int = 4096
    decay: float = 1.0
    _squares: Any = field(default=None, init=False, repr=False, compare=False)
    _count: int = field(default=0, init=False, repr=False, compare=False)
    _deviations: Floats | None = field(default=None, init=False, repr=False, compare=False)
    _members: frozenset[int] = field(default=frozenset(), init=False, repr=False, compare=False)
    """The peers of the first of these averages. Numbers are not used again: those that are not lost were in all."""

    def __post_init__(self) -> None:
        self._sign = Sign(self.block)
        if self.warmup < 1:
            raise ValueError(f"{self!r}: warmup must be at least 1")

    def bound(self, count: int) -> int:
        return 1 + (2 * count if self.step < self.warmup else self._sign.bound(count))

    def encode(self, vector: Floats) -> bytes:
        """Encode, after a byte: 2 if divided by deviations; 0 if they are to be measured, and 1 if they are already."""
        is_known = bool(self._members) and self._members.issuperset(self._peers)
        if self.step < self.warmup:
            return bytes([is_known]) + short(vector)
        if is_known and self._deviations is not None:
            return b"\2" + self._sign.encode(vector / self._deviations)
        return bytes([is_known]) + self._sign.encode(vector)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        if self.step < self.warmup:
            out += long(data[1:])
            return
        decoded = np.zeros_like(out)
        self._sign.decode_add(data[1:], decoded)
        if data[0] == 2:
            assert self._deviations is not None
            decoded *= self._deviations
        out += decoded

    def average(self, codes: Sequence[tuple[float, memoryview]], out: Floats) -> None:
        super().average(codes, out)
        if any(data[0] == 0 for _, data in codes):
            self._squares, self._count, self._deviations = np.zeros(out.size), 0, None
            self._members = frozenset(self._peers)
        if self._squares is None:
            return
        self._squares += out.astype(np.float64) ** 2
        self._count += 1
        if self._count == self.warmup:
            found = np.sqrt(self._squares / self._count)
            found = np.maximum(found, found.max() / 256) if found.any() else np.ones(out.size)
            self._squares, self._deviations = None, found.astype(np.float32)

    def forget(self) -> None:
        super().forget()
        self._squares = self._deviations = None
        self._members = frozenset()
