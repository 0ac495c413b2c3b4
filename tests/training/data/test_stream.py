"""Pools and deals of a few positions, worked out by hand."""

from __future__ import annotations

import pytest

from pccl.training.data.stream import Assignment, Pool, Range


@pytest.mark.parametrize(
    ("free", "begun", "left"),
    [
        ([(0, 2), (3, 4)], 5, ((0, 2), (3, 4))),
        ([(3, 5), (0, 2)], 3, ((0, 2),)),
        ([(0, 3), (3, 5)], 0, ()),
    ],
)
def test_rest_joins_adjacent_free_ranges(free: list[Range], begun: int, left: tuple[Range, ...]) -> None:
    pool = Pool(5, free)
    assert (pool.begun, pool.free) == (begun, left)
    positions = [position for each in sorted(free) for position in range(*each)] + [5, 6]
    assert [pool.position(offset) for offset in range(len(positions))] == positions


def test_members_get_blocks_in_turn() -> None:
    deal = Assignment(Pool(), [2, 3])
    assert deal.ranges(0, 0, 5) == [(0, 2), (5, 7), (10, 11)]
    assert deal.ranges(1, 0, 5) == [(2, 5), (7, 9)]
    assert deal.ranges(1, 1, 4) == [(3, 5), (7, 8)]
