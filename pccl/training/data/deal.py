"""Dealing out an endless stream: pools of free positions, and which peer gets which of them.

Theory of operation. A *pool* is all positions from `begun` on, and some ranges below it that are free again. Seen in
ascending order its positions have *offsets* 0, 1, 2 ... A *deal* gives each of its members a block of offsets, then
each another one, and so on without end: member i's first block, of b_i positions, is followed by its block in the next
round, T = b_0 + ... + b_(n-1) offsets later. So each member has an endless sequence of its own, they are disjoint, and
together they are the whole pool. Where each has used as many rounds as the others, what is left is a pool without
holes. All of it is integer arithmetic on what was given: the same on all machines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
"""A range from its first number to before its second."""


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ascending, without empty ones, and adjacent ones as one. AssertionError where two overlap."""
    done: list[Range] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        if done and begin <= done[-1][1]:
            assert begin == done[-1][1], f"position {begin} is there twice"
            done[-1] = (done[-1][0], end)
        else:
            done.append((begin, end))
    return done


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges in the order they have, with adjacent ones joined."""
    done: list[Range] = []
    for begin, end in ranges:
        if done and begin == done[-1][1]:
            done[-1] = (done[-1][0], end)
        else:
            done.append((begin, end))
    return done


class Pool:
    """The positions from `begun` on and those in `free`, below it. Equal pools have equal attributes. Immutable."""

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
        """Return the position that has this offset."""
        return next(self.ranges(offset, offset + 1))[0]

    def ranges(self, begin: int, end: int) -> Iterator[Range]:
        """The positions of these offsets."""
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
        """This pool and what was taken from it."""
        return Pool(self.begun, [*self.free, *ranges])


class Deal:
    """A pool dealt out to members in blocks of these sizes, each at least 1. Immutable."""

    def __init__(self, pool: Pool, blocks: Sequence[int]) -> None:
        assert min(blocks) >= 1, blocks
        self.pool = pool
        self.blocks = tuple(blocks)
        self.round = sum(blocks)
        self._starts = list(accumulate(blocks, initial=0))

    def _offset(self, member: int, count: int) -> int:
        """Return the offset of a member's position number `count`."""
        done, within = divmod(count, self.blocks[member])
        return done * self.round + self._starts[member] + within

    def _offsets(self, member: int, begin: int, end: int) -> Iterator[Range]:
        """The offsets of a member's positions number `begin` to before `end`, ascending."""
        while begin < end:
            offset = self._offset(member, begin)
            count = min(end - begin, self.blocks[member] - begin % self.blocks[member])
            yield offset, offset + count
            begin += count

    def ranges(self, member: int, begin: int, end: int) -> list[Range]:
        """A member's positions number `begin` to before `end`, ascending."""
        return joined(each for offsets in self._offsets(member, begin, end) for each in self.pool.ranges(*offsets))

    def lowest(self, counts: Sequence[int]) -> int:
        """The lowest position that is left when each member has used so many of its own."""
        return self.pool.position(min(self._offset(member, count) for member, count in enumerate(counts)))

    def rest(self, counts: Sequence[int]) -> Pool:
        """Return the pool that is left when each member has used so many positions of its own."""
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
