"""A compressor with a scale for each element, measured on the averages at the start of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl.training.compression.compressor import Compressor, Floats, long, short
from pccl.training.compression.quantizers import Sign


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
    """Peers that were in the first average of `_squares`, and perhaps some that were lost in it. Their numbers are not
    used again, so all of them have been in each average since then, or are lost."""

    def __post_init__(self) -> None:
        self._sign = Sign(self.block)
        if self.warmup < 1:
            raise ValueError(f"{self!r}: warmup must be at least 1")

    @property
    def _is_dense(self) -> bool:
        return self.step < self.warmup

    def bound(self, count: int) -> int:
        return 1 + (2 * count if self._is_dense else self._sign.bound(count))

    def encode(self, vector: Floats) -> bytes:
        """Encode, after a byte: 2 if divided by deviations; 0 if they are to be measured, and 1 if they are already."""
        is_known = bool(self._members) and self._members.issuperset(self._peers)
        if self._is_dense:
            return bytes([is_known]) + short(vector)
        if is_known and self._deviations is not None:
            return b"\2" + self._sign.encode(vector / self._deviations)
        return bytes([is_known]) + self._sign.encode(vector)

    def decode_add(self, data: memoryview, out: Floats) -> None:
        if self._is_dense:
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
            largest = found.max()
            found = np.maximum(found, largest / 256) if largest else np.ones(out.size)
            self._squares, self._deviations = None, found.astype(np.float32)

    def forget(self) -> None:
        super().forget()
        self._squares = self._deviations = None
        self._members = frozenset()
