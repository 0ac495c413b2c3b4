"""The search for the best ring, beside brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.topology import RingProblem
from pccl.runtime.master import ring_search
from pccl.runtime.master.ring_search import KNOWN, UNKNOWN, UNREACHABLE, best_order, best_ring, price

Matrices = tuple[ring_search.Grades, ring_search.Latencies]
grades = st.sampled_from([UNREACHABLE, UNKNOWN, KNOWN, KNOWN + 1, KNOWN + 2, KNOWN + 9])


@st.composite
def networks(draw: st.DrawFn, peers_max: int) -> Matrices:
    count = draw(st.integers(3, peers_max))
    links = count * count
    found = draw(st.lists(grades, min_size=links, max_size=links))
    latencies_ms = draw(st.lists(st.integers(0, 20), min_size=links, max_size=links))
    return (
        np.array(found, dtype=np.int32).reshape(count, count),
        np.array(latencies_ms).reshape(count, count) / 1e3,
    )


def of_seed(count: int, seed: int, known: float = 1.0, steps: int = 50) -> Matrices:
    rng = np.random.default_rng(seed)
    found = KNOWN + rng.integers(0, steps, (count, count))
    found = np.where(rng.random((count, count)) < known, found, UNKNOWN).astype(np.int32)
    return found, rng.random((count, count)) / 10


def brute_force(network: Matrices) -> ring_search.Price:
    rest = range(1, len(network[0]))
    return min(price(*network, [0, *tail]) for tail in permutations(rest))


@given(networks(6))
def test_no_ring_is_better(network: Matrices) -> None:
    order = best_order(*network)
    assert sorted(order) == list(range(len(network[0])))
    assert order[0] == 0
    assert price(*network, order) == pytest.approx(brute_force(network))


@given(st.integers(7, 8), st.integers(0, 2**32), st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from([1, 3, 50]))
@settings(max_examples=8)
def test_no_ring_of_eight_is_better(count: int, seed: int, known: float, steps: int) -> None:
    network = of_seed(count, seed, known, steps)
    assert price(*network, best_order(*network)) == pytest.approx(brute_force(network))


@given(networks(12))
@settings(max_examples=30)
def test_heuristic_gives_valid_ring(network: Matrices) -> None:
    links = ring_search._Links(network[0], np.where(network[0] >= KNOWN, network[1], 0.0))
    order = ring_search._heuristic(links)
    assert sorted(order) == list(range(links.count))
    # Rounded sums of latencies may differ in the last place.
    best, found = price(*network, best_order(*network)), price(*network, order)
    assert best[:3] < found[:3] or best[3] <= found[3] + 1e-6


def test_direction_counts() -> None:
    """Fast one way round and slow the other, whichever way the ring goes."""
    count = 5
    found = np.full((count, count), KNOWN, dtype=np.int32)
    for at in range(count):
        found[at - count + 1, at] = KNOWN + 50
    assert best_order(found, np.zeros((count, count))) == [0, 4, 3, 2, 1]


@pytest.mark.parametrize("count", [4, 8, 16, 17, 40])
def test_best_ring_is_kept(count: int) -> None:
    """Changing it would stop every op of the group and make links anew, for nothing."""
    same = np.full((count, count), KNOWN, dtype=np.int32)
    assert best_order(same, np.full((count, count), 0.01)) == list(range(count))
    assert best_order(np.full_like(same, UNKNOWN), np.zeros((count, count))) == list(range(count))


@pytest.mark.parametrize("count", [16, 40, 200])
def test_a_hidden_ring_is_found(count: int) -> None:
    """The links of one ring are fast; all others are slow, and many of them faster than others."""
    rng = np.random.default_rng(count)
    found, latencies = of_seed(count, seed=count)
    hidden = rng.permutation(count)
    found[hidden, np.roll(hidden, -1)] = KNOWN + 100
    order = best_order(found, latencies)
    assert price(found, latencies, order)[2] == -(KNOWN + 100)


def test_slowest_link_of_large_ring() -> None:
    """No ring is faster than the best way out of some peer, which random networks nearly reach."""
    found, latencies = of_seed(120, seed=1)
    bound = min(found.max(axis=0).min(), found.max(axis=1).min())
    assert -price(found, latencies, best_order(found, latencies))[2] >= bound - 2


def test_sites_stay_together_in_a_large_ring() -> None:
    """Latencies alone tell them apart."""
    count, site = 60, 6
    sites = np.random.default_rng(3).permutation(count) // site
    apart = sites[:, None] != sites[None, :]
    order = best_order(np.full((count, count), KNOWN, dtype=np.int32), np.where(apart, 0.02, 1e-4))
    assert sum(sites[order[at - 1]] != sites[order[at]] for at in range(count)) == count // site


def test_unreachable_links_are_avoided_first() -> None:
    ring = (1, 2, 3, 4)
    links = {(2, 4): (1e3, 0.5), (3, 2): (1e3, 0.5), (4, 3): (1e3, 0.5)}
    links |= {(1, 2): (1e9, 0.001), (2, 3): (1e9, 0.001), (4, 1): (1e9, 0.001)}
    found = best_ring(RingProblem(ring, links, frozenset({(3, 4)})))
    assert (3, 4) not in zip(found, [*found[1:], found[0]], strict=True)


def test_similar_rates_are_equal() -> None:
    """Then the shorter way counts."""
    assert ring_search.grade(25.00e6) <= ring_search.grade(25.01e6) <= ring_search.grade(25.00e6) + 1
    assert ring_search.grade(25e6) < ring_search.grade(28e6)
    assert ring_search.grade(0.0) == KNOWN


@pytest.mark.parametrize("ring", [(), (7,), (7, 3)])
def test_small_rings(ring: tuple[int, ...]) -> None:
    assert best_ring(RingProblem(ring, {})) == list(ring)
