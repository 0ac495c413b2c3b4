"""Rings and evictions, beside brute force."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import topology

peers = st.integers(1, 8)
pairs = st.sets(st.tuples(peers, peers).filter(lambda p: p[0] != p[1]).map(lambda p: topology.pair(*p)), max_size=10)


def covers(chosen: set[int], failed: set[tuple[int, int]]) -> bool:
    return all(a in chosen or b in chosen for a, b in failed)


@given(pairs, st.sets(peers))
def test_the_fewest_are_evicted(failed: set[tuple[int, int]], newcomers: set[int]) -> None:
    evicted = topology.fewest_evictions(failed, newcomers)
    assert covers(evicted, failed)
    involved = {peer for each in failed for peer in each}
    for size in range(len(evicted)):
        assert not any(covers(set(chosen), failed) for chosen in combinations(involved, size))
    for rival in combinations(involved, len(evicted)):
        if covers(set(rival), failed):
            assert len(newcomers.intersection(rival)) <= len(newcomers.intersection(evicted))


def test_a_newcomer_goes_before_an_incumbent_whoever_reports() -> None:
    assert topology.fewest_evictions([(1, 5)], {5}) == {5}
    assert topology.fewest_evictions([(5, 1)], {5}) == {5}
    assert topology.fewest_evictions([(1, 5)], {1}) == {1}


def test_one_peer_that_reaches_nobody_goes_alone() -> None:
    assert topology.fewest_evictions([(1, 2), (2, 3), (2, 4)], set()) == {2}


def test_between_equals_the_latest_goes() -> None:
    assert topology.fewest_evictions([(1, 2)], set()) == {2}


def test_many_failed_pairs_are_covered_without_trying_all_sets() -> None:
    failed = {(1, other) for other in range(2, 40)} | {(50, other) for other in range(51, 80)}
    assert topology.fewest_evictions(failed, set()) == {1, 50}


@given(st.lists(peers, unique=True), st.sets(peers))
def test_a_changed_ring_keeps_the_order_of_those_who_stay(ring: list[int], members: set[int]) -> None:
    updated = topology.updated_ring(ring, members)
    assert sorted(updated) == sorted(members)
    kept = [peer for peer in ring if peer in members]
    assert updated[: len(kept)] == kept


def test_neighbours() -> None:
    assert topology.neighbours([3, 1, 2], 3) == (2, 1)
    assert topology.neighbours([3, 1, 2], 2) == (1, 3)
    assert topology.neighbours([4, 5], 4) == (5, 5)
    assert topology.neighbours([4], 4) == (4, 4)


@pytest.mark.parametrize(
    ("ring", "expected"),
    [([], set()), ([1], set()), ([1, 2], {(1, 2)}), ([3, 1, 2], {(1, 3), (1, 2), (2, 3)})],
)
def test_ring_pairs(ring: list[int], expected: set[tuple[int, int]]) -> None:
    assert topology.ring_pairs(ring) == expected


def price(ring: list[int], cost: dict[tuple[int, int], float]) -> tuple[float, float]:
    costs = [cost.get(topology.pair(a, b), float("inf")) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return max(costs), sum(costs)


@given(st.integers(1, 7), st.data())
def test_the_best_ring_is_as_good_as_the_best_of_all(size: int, data: st.DataObject) -> None:
    members = list(range(1, size + 1))
    cost = {each: data.draw(st.integers(1, 20)) / 1 for each in combinations(members, 2)}
    best = topology.best_ring(members, cost)
    assert sorted(best) == members
    if size > 1:
        assert price(best, cost) == min(price(list(ring), cost) for ring in permutations(members))


def test_a_large_ring_follows_a_line_of_near_pairs() -> None:
    members = list(range(24))
    cost = {(a, b): float(min(b - a, 24 - (b - a))) for a, b in combinations(members, 2)}
    assert price(topology.best_ring(members[::-1], cost), cost) == (1.0, 24.0)


def test_pairs_of_unknown_cost_are_avoided() -> None:
    cost = {(1, 2): 1.0, (2, 3): 1.0, (3, 4): 1.0, (1, 4): 1.0}
    assert topology.ring_pairs(topology.best_ring([1, 3, 2, 4], cost)) == set(cost)
