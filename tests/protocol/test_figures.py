"""What is known of links: ages, hosts, and what stands for what."""

from __future__ import annotations

import pytest

from pccl.protocol import figures as module
from pccl.protocol.figures import FAILURE_FRESH_S, FRESH_S, Figures
from pccl.protocol.insertion import with_newcomers

A, B, C = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
FAST, SLOW = 1e8, 1e6


def figures_of(*hosts: list[str]) -> Figures:
    """Peers 1, 2, ... on these hosts."""
    figures = Figures()
    for peer, addresses in enumerate(hosts, 1):
        figures.arrived(peer, addresses)
    return figures


def rate(figures: Figures, sender: int, receiver: int) -> float | None:
    found = figures.get((sender, receiver))
    return found.bytes_per_s if found is not None else None


def test_each_direction_has_its_own() -> None:
    figures = figures_of(A, B)
    figures.measured((1, 2), FAST, 0.05, 1.0)
    assert rate(figures, 1, 2) == FAST
    assert figures.get((2, 1)) is None


def test_an_old_figure_is_due_and_still_stands() -> None:
    figures = figures_of(A, B)
    assert figures.is_due((1, 2), 0.0)
    figures.measured((1, 2), FAST, 0.05, 0.0)
    assert not figures.is_due((1, 2), FRESH_S - 1)
    assert figures.is_due((1, 2), FRESH_S)
    found = figures.get((1, 2))
    assert found is not None
    assert (found.at, found.latency_s) == (0.0, 0.025)


def test_a_pair_that_failed_is_unreachable_until_it_is_measured() -> None:
    figures = figures_of(A, B)
    figures.failed((1, 2), 0.0)
    assert figures.is_unreachable((1, 2))
    assert not figures.is_due((1, 2), FAILURE_FRESH_S - 1)
    assert figures.is_due((1, 2), FAILURE_FRESH_S)
    figures.measured((1, 2), FAST, 0.05, FAILURE_FRESH_S)
    assert not figures.is_unreachable((1, 2))


@pytest.mark.parametrize("told", [(float("nan"), 0.1), (0.0, 0.1), (-1.0, 0.1), (1e300, 0.1), (1e6, -1.0)])
def test_nonsense_is_no_figure(told: tuple[float, float]) -> None:
    figures = figures_of(A, B)
    figures.measured((1, 2), *told, 0.0)
    assert figures.get((1, 2)) is None
    assert figures.is_unreachable((1, 2))


def test_one_pair_stands_for_others_between_the_same_hosts() -> None:
    figures = figures_of(A, B, A)
    figures.measured((1, 2), FAST, 0.05, 0.0)
    assert rate(figures, 3, 2) == FAST
    figures.measured((3, 2), SLOW, 0.05, 1.0)
    assert (rate(figures, 1, 2), rate(figures, 3, 2)) == (FAST, SLOW)
    problem = figures.problem([1, 2, 3])
    assert problem.links[1, 2][0] == FAST
    assert problem.between_hosts[problem.hosts[0], problem.hosts[1]][0] == SLOW


def test_what_is_known_of_a_host_outlives_its_peer() -> None:
    figures = figures_of(A, B)
    figures.measured((1, 2), FAST, 0.05, 0.0)
    figures.gone(1)
    figures.arrived(9, A)
    assert rate(figures, 9, 2) == FAST


def test_peers_of_one_host_are_close_unless_measured() -> None:
    figures = figures_of(A, A, B)
    assert (rate(figures, 1, 2) or 0) > FAST
    assert figures.is_due((1, 2), 0.0)
    figures.measured((1, 2), SLOW, 0.05, 0.0)
    assert rate(figures, 1, 2) == SLOW


def test_what_an_op_carried_counts_as_measured() -> None:
    figures = figures_of(A, B)
    figures.carried((1, 2), FAST, 0.0)
    assert figures.get((1, 2)) is None, "its round trip would be unknown"
    figures.measured((1, 2), SLOW, 0.05, 0.0)
    figures.carried((1, 2), FAST, FRESH_S)
    found = figures.get((1, 2))
    assert found is not None
    assert (found.bytes_per_s, found.round_trip_s, found.source) == (FAST, 0.05, "op")
    assert not figures.is_due((1, 2), FRESH_S)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_PAIRS_MAX", 8)
    figures = Figures()
    for peer in range(1, 40):
        figures.arrived(peer, [f"10.0.0.{peer}"])
        figures.measured((peer, 1), FAST, 0.05, 0.0)
        if peer > 1:
            figures.gone(peer)
    assert len(figures._between_hosts) <= 8
    assert len(figures._known_hosts) <= 16
    assert not figures._of_pairs.keys() - {(1, 1)}


# Newcomers.


def test_with_nothing_known_newcomers_come_last() -> None:
    assert with_newcomers([3, 1], [5, 4], Figures()) == [3, 1, 4, 5]
    assert with_newcomers([], [5, 4], Figures()) == [4, 5]


def test_a_newcomer_comes_beside_those_on_its_host() -> None:
    assert with_newcomers([1, 2, 3], [4], figures_of(A, B, C, A)) == [1, 4, 2, 3]
    assert with_newcomers([1, 2, 3], [4, 5], figures_of(A, B, C, A, A)) == [1, 4, 5, 2, 3]


def test_a_newcomer_comes_where_its_host_was_measured_to_hurt_least() -> None:
    """Its host is known from a peer that is gone; only between 2 and 3 are both of its links fast."""
    figures = figures_of(A, B, C, ["10.0.0.4"])
    for pair in ((1, 2), (2, 3), (3, 1)):
        figures.measured(pair, FAST, 0.01, 0.0)
    for other in (1, 2, 3):
        figures.measured((other, 4), FAST if other == 2 else SLOW, 0.01, 0.0)
        figures.measured((4, other), FAST if other == 3 else SLOW, 0.01, 0.0)
    figures.gone(4)
    figures.arrived(5, ["10.0.0.4"])
    assert with_newcomers([1, 2, 3], [5], figures) == [1, 2, 5, 3]


def test_where_all_are_fast_enough_a_newcomer_makes_the_ring_least_longer() -> None:
    figures = figures_of(A, B, C, ["10.0.0.4"])
    for pair in ((1, 2), (2, 3), (3, 1)):
        figures.measured(pair, SLOW, 0.05, 0.0)
    for other, round_trip_s in ((1, 0.01), (2, 0.2), (3, 0.01)):
        figures.measured((other, 4), FAST, round_trip_s, 0.0)
        figures.measured((4, other), FAST, round_trip_s, 0.0)
    assert with_newcomers([1, 2, 3], [4], figures) == [1, 2, 3, 4]
