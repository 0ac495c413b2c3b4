"""The interface of a compressor, error feedback, and fields of bits."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl._floating_point import default_environment

Floats: TypeAlias = NDArray[np.float32]
Shapes: TypeAlias = Sequence[tuple[int, ...]]


def packed(numbers: Any, bits: int) -> bytes:
    """Return numbers below 2**bits as consecutive fields of `bits` bits."""
    places = np.arange(bits, dtype=np.uint32)
    return np.packbits(
        (numbers.reshape(-1, 1).astype(np.uint32) >> places & 1).astype(np.uint8), None, "little"
    ).tobytes()


def unpacked(data: memoryview, bits: int, count: int) -> NDArray[np.int64]:
    fields = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count, bitorder="little").reshape(count, bits)
    return fields.astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))


def packed_bytes(bits: int, count: int) -> int:
    return (bits * count + 7) // 8


def short(values: Floats) -> bytes:
    """Return values as bfloat16, rounded to nearest."""
    return ((np.ascontiguousarray(values, np.float32).view(np.uint32) + 0x8000) >> 16).astype("<u2").tobytes()


def long(data: memoryview) -> Floats:
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def chunks(vector: Floats, chunk: int) -> Floats:
    """Return the vector as rows of `chunk` elements, the last one padded with zeros."""
    padded = np.zeros((math.ceil(vector.size / chunk), chunk), np.float32)
    padded.reshape(-1)[: vector.size] = vector
    return padded


def largest(rows: Floats, count: int) -> NDArray[np.int64]:
    """Return the places of the `count` largest magnitudes of each row, in ascending order."""
    return np.sort(np.argpartition(np.abs(rows), rows.shape[1] - count, axis=1)[:, -count:], axis=1)


class Compressor(ABC):
    """A lossy encoding of float32 vectors, with error feedback. All peers need equal objects, by `repr`.

    A subclass has `decay`, the factor of the residual, and implements `bound`, `encode` and `decode_add`.
    """

    decay: float
    step: int = 0
    """The number of the average that comes next or is in progress, the same on all peers."""
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

    def average(self, codes: Sequence[tuple[float, memoryview]], out: Floats) -> None:
        """Set `out` to the sum of the decoded vectors times their weights, added up in float32 by rank.

        Called after `commit`, with equal codes on all peers. An override may keep state from them, which a peer that
        joins before the next average lacks.
        """
        out[...], decoded = 0, np.empty_like(out)
        for weight, data in codes:
            decoded[...] = 0
            self.decode_add(data, decoded)
            decoded *= np.float32(weight)
            out += decoded

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
        self._residual, self._pending, self._peers = None, None, ()


@dataclass
class Owners:
    """Each peer owns a part of the vector: it receives the others' codes of this part, and encodes their mean again.

    A peer sends and receives each element about twice, whatever the number of peers. All peers decode the same bytes.
    Each part has compressors of its own, copies of `up`, and its owner a copy of `down`. All are discarded, with their
    residuals, when the peers of the average change.
    """

    up: Compressor
    down: Compressor | None = None
    """By default a copy of `up`."""
    peers: tuple[int, ...] = field(default=(), init=False, repr=False, compare=False)
    parts: list[slice] = field(default_factory=list, init=False, repr=False, compare=False)
    """The part of each peer, by rank."""
    ups: list[Compressor] = field(default_factory=list, init=False, repr=False, compare=False)
    downs: list[Compressor] = field(default_factory=list, init=False, repr=False, compare=False)
    """The compressors of parts and of their means."""

    def __post_init__(self) -> None:
        self.down = copy.deepcopy(self.up) if self.down is None else self.down
        for each in (self.up, self.down):
            if not isinstance(each, Compressor):
                raise TypeError(f"Owners needs compressors, not {each!r}")
            if type(each).average is not Compressor.average:
                raise ValueError(f"{each!r} averages the codes of all peers: use it without Owners")

    def divide(self, count: int, peers: tuple[int, ...], step: int) -> None:
        """Divide `count` elements among the peers of an outer step, unless they are divided like this already."""
        if self.peers != peers:
            edges = [rank * count // len(peers) for rank in range(len(peers) + 1)]
            self.peers, self.parts = peers, [slice(*ends) for ends in pairwise(edges)]
            self.ups, self.downs = ([copy.deepcopy(each) for _ in peers] for each in (self.up, self.down or self.up))
            for compressors in (self.ups, self.downs):
                for compressor, part in zip(compressors, self.parts, strict=True):
                    compressor.prepare([(part.stop - part.start,)])
        for compressor in (*self.ups, *self.downs):
            compressor.step = step

    def forget(self) -> None:
        """Discard the residuals."""
        self.peers = ()
