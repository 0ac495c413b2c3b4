"""What is added by random signs: cases for the kernel and for torch, which must do the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

u32 = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class SignCase:
    count: int
    seed: int
    tensor: int
    step: int
    moves: list[tuple[int, int]]
    """Each a direction and how far."""
    exponent: int

    @property
    def quantum(self) -> float:
        return 2.0**self.exponent

    @property
    def units(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The elements before, in quanta."""
        return np.random.default_rng(0).integers(-(2**23), 2**23, self.count)

    def values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (self.units * self.quantum).astype(np.float32)

    def numbers(self, sign: int = 1) -> dict[str, Any]:
        """The arguments of `add_signs`; -1: of what takes it away again."""
        return {
            "seed": self.seed,
            "tensor": self.tensor,
            "step": self.step,
            "directions": [direction for direction, _ in self.moves],
            "amounts": [sign * amount for _, amount in self.moves],
        }


def sign_cases(count_max: int, amount_max: int) -> st.SearchStrategy[SignCase]:
    return st.builds(
        SignCase,
        count=st.integers(0, count_max),
        seed=st.integers(0, 2**64 - 1),
        tensor=u32,
        step=u32,
        moves=st.lists(st.tuples(u32, st.integers(-amount_max, amount_max)), max_size=4),
        exponent=st.integers(-120, 100),
    )
