"""The endless stream of samples: its order, and how free positions are assigned to peers.

*The order* of an epoch is computed, never stored. A Feistel network with cycle walking (Black and Rogaway 2002)
permutes the numbers below n. Round keys are Philox's output for (seed, epoch), the same on every machine.

*A pool* is all positions from `begun` up and the free ranges below it; in ascending order they have *offsets* 0, 1, ...
*An assignment* repeatedly gives each member i in turn a block of b_i offsets.

*Random streams* are Philox4x64 (Salmon et al. 2011): the key consists of the seed and the purpose, and the upper
half of the counter is (step, peer). Within a stream, only the lower half counts up, so streams never overlap.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl._integers import as_int

ROUNDS = 12
SIZE_MAX = 1 << 62

_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS = tuple(np.uint64(factor) for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Permutation:
    """The numbers 0 to `size` - 1 in an order derived from `seed` and `epoch`, 64 bits each. Immutable."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = np.uint64(size)
        bits = max(2, (size - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low, self._high = (np.uint64((1 << n) - 1) for n in (bits // 2, bits - bits // 2))
        self._keys = np.random.Philox(key=seed + (epoch << 64)).random_raw(ROUNDS)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers at these positions in the order, as an int64 array of the same length."""
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


permutation = lru_cache(maxsize=64)(Permutation)


Range: TypeAlias = tuple[int, int]
"""A half-open range (begin, end)."""


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in the given order, with adjacent ones joined."""
    done: list[Range] = []
    for begin, end in ranges:
        if done and begin == done[-1][1]:
            done[-1] = (done[-1][0], end)
        else:
            done.append((begin, end))
    return done


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the non-empty ranges in ascending order, with adjacent ones joined. Asserts that none overlap."""
    ordered = sorted(each for each in ranges if each[0] < each[1])
    for (_, end), (begin, _) in pairwise(ordered):
        assert end <= begin, f"position {begin} occurs twice"
    return joined(ordered)


class Pool:
    """A set of positions: all from `begun` on, and those in `free`, which are lower. Immutable."""

    def __init__(self, begun: int = 0, free: Iterable[Range] = ()) -> None:
        ranges = merged(free)
        if ranges and ranges[-1][1] == begun:
            begun = ranges.pop()[0]
        assert not ranges or ranges[-1][1] < begun, f"{ranges[-1]} is not below {begun}"
        self.begun = begun
        self.free = tuple(ranges)
        self._ends = list(accumulate(end - begin for begin, end in ranges))

    @property
    def free_count(self) -> int:
        return self._ends[-1] if self._ends else 0

    def position(self, offset: int) -> int:
        """Return the position at this offset."""
        return next(self.ranges(offset, offset + 1))[0]

    def ranges(self, begin: int, end: int) -> Iterator[Range]:
        """Yield the positions at these offsets."""
        number = bisect_right(self._ends, begin)
        while begin < end and number < len(self.free):
            last = self.free[number][1]
            here = last - (self._ends[number] - begin)
            count = min(end - begin, last - here)
            yield here, here + count
            begin += count
            number += 1
        if begin < end:
            yield self.begun + begin - self.free_count, self.begun + end - self.free_count

    def with_back(self, ranges: Iterable[Range]) -> Pool:
        """Return this pool with `ranges` added back."""
        return Pool(self.begun, [*self.free, *ranges])


class Assignment:
    """A pool assigned to members in blocks of the given sizes, each at least 1. Immutable."""

    def __init__(self, pool: Pool, blocks: Sequence[int]) -> None:
        assert min(blocks) >= 1, blocks
        self.pool = pool
        self.blocks = tuple(blocks)
        self.round = sum(blocks)
        self._starts = list(accumulate(blocks, initial=0))

    def _offset(self, member: int, count: int) -> int:
        done, within = divmod(count, self.blocks[member])
        return done * self.round + self._starts[member] + within

    def _offsets(self, member: int, begin: int, end: int) -> Iterator[Range]:
        while begin < end:
            offset = self._offset(member, begin)
            count = min(end - begin, self.blocks[member] - begin % self.blocks[member])
            yield offset, offset + count
            begin += count

    def ranges(self, member: int, begin: int, end: int) -> list[Range]:
        """Return a member's positions from number `begin` up to, but not including, `end`, in ascending order."""
        return joined(each for offsets in self._offsets(member, begin, end) for each in self.pool.ranges(*offsets))

    def lowest(self, counts: Sequence[int]) -> int:
        """Return the lowest position left after each member has used its first `counts` positions."""
        return self.pool.position(min(self._offset(member, count) for member, count in enumerate(counts)))

    def rest(self, counts: Sequence[int]) -> Pool:
        """Return the pool left after each member has used its first `counts` positions."""
        top = max(self._offset(member, count - 1) + 1 if count else 0 for member, count in enumerate(counts))
        left: list[Range] = []
        for member, count in enumerate(counts):
            rounds, within = divmod(top, self.round)
            below_top = rounds * self.blocks[member] + min(max(within - self._starts[member], 0), self.blocks[member])
            left += self._offsets(member, count, below_top)
        free = [each for offsets in left for each in self.pool.ranges(*offsets)]
        untouched = self.pool.free_count - top
        if untouched > 0:
            return Pool(self.pool.begun, [*free, *self.pool.ranges(top, self.pool.free_count)])
        return Pool(self.pool.begun - untouched, free)


NUMBERS, SEEDS = 0, 1


class RandomStreams:
    """Random generators for each step and peer, from one seed.

    Pass it to a training class as `shared={"random": streams}` so that newcomers use the run's seed. Pass `peer`
    numbers that differ between peers, such as their ranks, or one number on all peers for common random numbers.
    Thread-safe, except for `load_state_dict`.
    """

    def __init__(self, seed: int = 0) -> None:
        """Raises ValueError if the seed is not an unsigned 64-bit integer."""
        self._seed = _word("seed", seed)

    def numpy(self, step: int, peer: int = 0) -> np.random.Generator:
        """Return a generator at its stream's start. Raises ValueError if `step` or `peer` does not fit in 64 bits."""
        return np.random.Generator(self._philox(NUMBERS, step, peer))

    def torch(self, step: int, peer: int = 0, device: Any = "cpu") -> Any:
        """Return a `torch.Generator` on `device`, seeded with `number(step, peer)`. Raises ValueError like `numpy`."""
        return sys.modules["torch"].Generator(device=device).manual_seed(self.number(step, peer))

    def number(self, step: int, peer: int = 0) -> int:
        """Return 63 random bits, for `torch.manual_seed` and the like. Raises ValueError like `numpy`."""
        return int(self._philox(SEEDS, step, peer).random_raw()) >> 1

    def _philox(self, purpose: int, step: int, peer: int) -> np.random.Philox:
        counter = np.array([0, 0, _word("step", step), _word("peer", peer)], np.uint64)
        return np.random.Philox(key=np.array([self._seed, purpose], np.uint64), counter=counter)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        """Load the run's seed. Raises KeyError or ValueError if the state is malformed."""
        self._seed = _word("seed", int(state_dict["seed"]))


def _word(name: str, value: int) -> int:
    return as_int(name, value, 0, 2**64 - 1)
