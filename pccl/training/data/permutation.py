"""A pseudo-random order of the numbers 0 to n - 1 that is computed number by number and never stored.

Theory of operation. A Feistel network is a bijection of b-bit numbers whatever its round function: a number is two
halves, and each round adds to one half, by exclusive or, a function of the other. With b the bits of n - 1, numbers
from n on are put through it again until one below n comes out (*cycle walking*, Black and Rogaway 2002), which leaves a
bijection of the numbers below n; there are fewer than n above, so twice is enough in the mean. Halves of unequal size
take turns. Round keys are Philox's output under (seed, epoch), the round function is the finalizer of SplitMix64
(Steele et al. 2014) in integers, so the order is the same on every machine and with every version of NumPy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

ROUNDS = 12
SIZE_MAX = 1 << 62

_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS = tuple(np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Permutation:
    """The numbers 0 to `size` - 1 in an order of (`seed`, `epoch`), each of 64 bits. Immutable."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        """ValueError for a size below 1 or above 2**62."""
        if not 1 <= size <= SIZE_MAX:
            raise ValueError(f"size {size}: must be from 1 to 2**62")
        self._size = np.uint64(size)
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low, self._high = (np.uint64((1 << n) - 1) for n in (bits // 2, bits - bits // 2))
        self._keys = np.random.Philox(key=seed + (epoch << 64)).random_raw(ROUNDS)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers at these places of the order, an int64 array of the same length."""
        numbers = self._network(places.astype(np.uint64))
        while (outside := np.flatnonzero(numbers >= self._size)).size:
            numbers[outside] = self._network(numbers[outside])
        return numbers.astype(np.int64)

    def _network(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = numbers & self._low, numbers >> self._low_bits
        for low_key, high_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            low = low ^ (_mixed(high ^ low_key) & self._low)
            high = high ^ (_mixed(low ^ high_key) & self._high)
        return (high << self._low_bits) | low


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    values = (values ^ (values >> _SHIFTS[1])) * _FACTORS[1]
    return values ^ (values >> _SHIFTS[2])


@lru_cache(maxsize=64)
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """Return the `Permutation` of an epoch; the last ones are kept."""
    return Permutation(size, seed, epoch)
