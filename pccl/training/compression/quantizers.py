"""Compressors that send a few bits of each element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pccl.training.compression.compressor import Compressor, Floats, packed, packed_bytes


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
