"""Compressors that send a few bits of each element."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl.training.compression.compressor import Compressor, Floats, chunks, long, packed, packed_bytes, short


@dataclass
class Sign(Compressor):
    """EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847): the signs of each block times its mean magnitude."""

    block: int = 4096
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"{self!r}: block must be a multiple of 8")

    def bound(self, count: int) -> int:
        return 4 * math.ceil(count / self.block) + packed_bytes(1, count)

    def encode(self, vector: Floats) -> bytes:
        starts = np.arange(0, vector.size, self.block)
        lengths = np.diff(starts, append=vector.size)
        scales = np.add.reduceat(np.abs(vector), starts, dtype=np.float64) / lengths
        return scales.astype("<f4").tobytes() + packed(vector < 0, 1)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        blocks = math.ceil(out.size / self.block)
        values = np.repeat(np.frombuffer(data[: 4 * blocks], "<f4"), self.block)[: out.size]
        is_negative = np.unpackbits(np.frombuffer(data[4 * blocks :], np.uint8), count=out.size, bitorder="little")
        out += np.where(is_negative, -values, values)


_QUARTERS = np.array([0x3F800000, 0x3F9837F0, 0x3FB504F3, 0x3FD744FD], np.uint32).view(np.float32)
"""The powers of 2 with exponents 0, 1/4, 1/2 and 3/4."""
_OCTAVE_MIN = -44
_LEVELS = 2
"""The number of magnitudes other than 0."""
_TRIPLE = (2 * _LEVELS + 1) ** np.arange(3)
_STEPS = 2.0 ** (np.arange(-32, 256) / 64)
"""The distances of levels to choose from, in multiples of a block's root mean square."""


def _scale_bytes(rows: Floats) -> Any:
    """Return the root mean square of each row in quarters of an octave, 0 for zeros, as LLOYD_MAX sends it."""
    sizes = np.sqrt(np.mean(rows.astype(np.float64) ** 2, axis=1))
    quarters = np.rint(4 * np.log2(np.maximum(sizes, 2.0**-100))).astype(int) - 4 * _OCTAVE_MIN + 1
    return np.clip(quarters, 0, 255).astype(np.uint8)


def _scales(data: Any) -> Floats:
    scales = np.ldexp(_QUARTERS[(data - 1) % 4], (data.astype(np.int32) - 1) // 4 + _OCTAVE_MIN)
    return np.where(data == 0, np.float32(0), scales).astype(np.float32)


def _huffman(parts: list[bytes]) -> bytes:
    """Return the Huffman codes (deflate) of some parts of different statistics."""
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return b"".join([coder.compress(part) + coder.flush(zlib.Z_PARTIAL_FLUSH) for part in parts]) + coder.flush()


@dataclass
class Entropy(Compressor):
    """Entropy-coded uniform quantization (Farvardin and Modestino 1984) in a fixed number of bits per element.

    Each block is divided by its root mean square, and its elements are rounded to multiples of a step, at most two.
    Huffman codes of three elements each, and of the differences between scales, need about 1 % more than the entropy.
    The step is the smallest one whose codes fit into `bits`, so peers know the size of a code without being told.
    """

    bits: float = 1.75
    block: int = 64
    decay: float = 0.4

    def __post_init__(self) -> None:
        if not (1 <= self.bits <= 2.25 and self.block >= 8):
            raise ValueError(f"{self!r}: bits must be from 1 to 2.25, block at least 8")

    def bound(self, count: int) -> int:
        return max(math.ceil(self.bits * count / 8), min(32 + count, 256))

    def encode(self, vector: Floats) -> bytes:
        rows = chunks(vector, self.block)
        scales = _scale_bytes(rows)
        relative = np.zeros_like(rows)
        np.divide(rows, _scales(scales)[:, None], out=relative, where=scales[:, None] != 0)
        flat = relative.reshape(-1)[: vector.size]
        differences = np.diff(scales, prepend=np.uint8(0)).tobytes()
        low, high, best = 0, len(_STEPS), b"\0"  # zeros
        while low < high:
            middle = (low + high) // 2
            data = self._coded(flat, _STEPS[middle], differences)
            if len(data) <= self.bound(vector.size):
                high, best = middle, data
            else:
                low = middle + 1
        return best

    def _coded(self, relative: Floats, step: float, differences: bytes) -> bytes:
        codes = np.clip(np.rint(relative / np.float32(step)), -_LEVELS, _LEVELS).astype(np.int8)
        sizes, magnitudes = np.abs(codes), np.abs(relative)
        levels = [magnitudes[sizes == level].mean() if (sizes == level).any() else 0 for level in range(1, _LEVELS + 1)]
        symbols = np.full(3 * math.ceil(codes.size / 3), _LEVELS)
        symbols[: codes.size] += codes
        triples = (symbols.reshape(-1, 3) @ _TRIPLE).astype(np.uint8).tobytes()
        return short(np.array(levels, np.float32)) + _huffman([differences, triples])

    def decode_add(self, data: memoryview, out: Floats) -> None:
        if len(data) <= 2 * _LEVELS:
            return
        blocks, count = math.ceil(out.size / self.block), math.ceil(out.size / 3)
        found = np.frombuffer(zlib.decompressobj(-15).decompress(data[2 * _LEVELS :], blocks + count), np.uint8)
        scales = _scales(np.add.accumulate(found[:blocks], dtype=np.uint8))
        symbols = (found[blocks:, None] // _TRIPLE % (2 * _LEVELS + 1)).reshape(-1)[: out.size]
        magnitudes = long(data[: 2 * _LEVELS])
        levels = np.concatenate([-magnitudes[::-1], np.zeros(1, np.float32), magnitudes])
        out += levels[symbols] * np.repeat(scales, self.block)[: out.size]
