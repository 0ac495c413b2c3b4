"""Rings and evictions, beside brute force."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import topology

peers = st.integers(1, 8)
pairs = st.sets(st.tuples(peers, peers).filter(lambda p: p[0] != p[1]).map(lambda p: topology.pair(*p)), max_size=10)


def covers(chosen: set[int], failed: set[tuple[int, int]]) -> bool:
    return all(a in chosen or b in chosen for a, b in failed)


@given(pairs, st.sets(peers))
def test_fewest_are_evicted(failed: set[tuple[int, int]], newcomers: set[int]) -> None:
    evicted = topology.fewest_evictions(failed, newcomers)
    assert covers(evicted, failed)
    involved = {peer for each in failed for peer in each}
    for size in range(len(evicted)):
        assert not any(covers(set(chosen), failed) for chosen in combinations(involved, size))
    for rival in combinations(involved, len(evicted)):
        if covers(set(rival), failed):
            assert len(newcomers.intersection(rival)) <= len(newcomers.intersection(evicted))


def test_newcomer_is_evicted_first() -> None:
    assert topology.fewest_evictions([(1, 5)], {5}) == {5}
    assert topology.fewest_evictions([(5, 1)], {5}) == {5}
    assert topology.fewest_evictions([(1, 5)], {1}) == {1}


def test_latest_is_evicted_on_tie() -> None:
    assert topology.fewest_evictions([(1, 2)], set()) == {2}


def test_many_failed_pairs_are_covered() -> None:
    failed = {(1, other) for other in range(2, 40)} | {(50, other) for other in range(51, 80)}
    assert topology.fewest_evictions(failed, set()) == {1, 50}


@given(st.lists(peers, unique=True), st.sets(peers))
def test_ring_keeps_order(ring: list[int], members: set[int]) -> None:
    updated = topology.updated_ring(ring, members)
    assert sorted(updated) == sorted(members)
    kept = [peer for peer in ring if peer in members]
    assert updated[: len(kept)] == kept


def test_neighbours() -> None:
    assert topology.neighbours([3, 1, 2], 3) == (2, 1)
    assert topology.neighbours([3, 1, 2], 2) == (1, 3)
    assert topology.neighbours([4, 5], 4) == (5, 5)
    assert topology.neighbours([4], 4) == (4, 4)


def test_most_failing_links_is_evicted() -> None:
    assert topology.fewest_evictions([(1, 4)], set(), [(1, 2), (1, 3)]) == {1}
    assert topology.fewest_evictions([(1, 4)], set(), [(2, 4), (3, 4), (1, 2)]) == {4}
    assert topology.fewest_evictions([(1, 2), (3, 4)], set(), [(1, 5), (3, 5)]) == {1, 3}


def test_newcomer_is_evicted_despite_evidence() -> None:
    assert topology.fewest_evictions([(1, 4)], {4}, [(1, 2), (1, 3)]) == {4}
