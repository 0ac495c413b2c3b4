"""Link metrics: ages, hosts, and which metrics stand for which pairs."""

from __future__ import annotations

import pytest

from pccl.protocol.link_metrics import FAILURE_FRESH_S, FRESH_S, LinkMetrics
from pccl.protocol.master.ring import with_newcomers

A, B, C = ["10.0.0.1"], ["10.0.0.2"], ["10.0.0.3"]
FAST, SLOW = 1e8, 1e6


def metrics_of(*hosts: list[str]) -> LinkMetrics:
    """Peers 1, 2, ... on these hosts."""
    metrics = LinkMetrics()
    for peer, addresses in enumerate(hosts, 1):
        metrics.arrived(peer, addresses)
    return metrics


def rate(metrics: LinkMetrics, sender: int, receiver: int) -> float | None:
    found = metrics.get((sender, receiver))
    return found.bytes_per_s if found is not None else None


def test_directions_are_separate() -> None:
    metrics = metrics_of(A, B)
    metrics.measured((1, 2), FAST, 0.05, 1.0)
    assert rate(metrics, 1, 2) == FAST
    assert metrics.get((2, 1)) is None


def test_old_metric_is_due_and_kept() -> None:
    metrics = metrics_of(A, B)
    assert metrics.is_due((1, 2), 0.0)
    metrics.measured((1, 2), FAST, 0.05, 0.0)
    assert not metrics.is_due((1, 2), FRESH_S - 1)
    assert metrics.is_due((1, 2), FRESH_S)
    found = metrics.get((1, 2))
    assert found is not None
    assert (found.at, found.latency_s) == (0.0, 0.025)


def test_failed_pair_is_unreachable() -> None:
    metrics = metrics_of(A, B)
    metrics.failed((1, 2), 0.0)
    assert metrics.is_unreachable((1, 2))
    assert not metrics.is_due((1, 2), FAILURE_FRESH_S - 1)
    assert metrics.is_due((1, 2), FAILURE_FRESH_S)
    metrics.measured((1, 2), FAST, 0.05, FAILURE_FRESH_S)
    assert not metrics.is_unreachable((1, 2))


@pytest.mark.parametrize("told", [(float("nan"), 0.1), (0.0, 0.1), (-1.0, 0.1), (1e300, 0.1), (1e6, -1.0)])
def test_invalid_metric_is_a_failure(told: tuple[float, float]) -> None:
    metrics = metrics_of(A, B)
    metrics.measured((1, 2), *told, 0.0)
    assert metrics.get((1, 2)) is None
    assert metrics.is_unreachable((1, 2))


def test_host_metric_covers_other_pairs() -> None:
    metrics = metrics_of(A, B, A)
    metrics.measured((1, 2), FAST, 0.05, 0.0)
    assert rate(metrics, 3, 2) == FAST
    metrics.measured((3, 2), SLOW, 0.05, 1.0)
    assert (rate(metrics, 1, 2), rate(metrics, 3, 2)) == (FAST, SLOW)
    problem = metrics.problem([1, 2, 3])
    assert problem.links[1, 2][0] == FAST
    assert problem.between_hosts[problem.hosts[0], problem.hosts[1]][0] == SLOW


def test_host_metric_outlives_peer() -> None:
    metrics = metrics_of(A, B)
    metrics.measured((1, 2), FAST, 0.05, 0.0)
    metrics.gone(1)
    metrics.arrived(9, A)
    assert rate(metrics, 9, 2) == FAST


def test_same_host_is_assumed_fast() -> None:
    metrics = metrics_of(A, A, B)
    assert (rate(metrics, 1, 2) or 0) > FAST
    assert metrics.is_due((1, 2), 0.0)
    metrics.measured((1, 2), SLOW, 0.05, 0.0)
    assert rate(metrics, 1, 2) == SLOW


def test_unknown_newcomers_are_appended() -> None:
    assert with_newcomers([3, 1], [5, 4], LinkMetrics()) == [3, 1, 4, 5]
    assert with_newcomers([], [5, 4], LinkMetrics()) == [4, 5]


def test_newcomer_joins_its_host() -> None:
    assert with_newcomers([1, 2, 3], [4], metrics_of(A, B, C, A)) == [1, 4, 2, 3]
    assert with_newcomers([1, 2, 3], [4, 5], metrics_of(A, B, C, A, A)) == [1, 4, 5, 2, 3]


def test_newcomer_takes_best_measured_place() -> None:
    """The newcomer's host is known from a peer that is gone; only between 2 and 3 are both of its links fast."""
    metrics = metrics_of(A, B, C, ["10.0.0.4"])
    for pair in ((1, 2), (2, 3), (3, 1)):
        metrics.measured(pair, FAST, 0.01, 0.0)
    for other in (1, 2, 3):
        metrics.measured((other, 4), FAST if other == 2 else SLOW, 0.01, 0.0)
        metrics.measured((4, other), FAST if other == 3 else SLOW, 0.01, 0.0)
    metrics.gone(4)
    metrics.arrived(5, ["10.0.0.4"])
    assert with_newcomers([1, 2, 3], [5], metrics) == [1, 2, 5, 3]


def test_newcomer_adds_least_latency() -> None:
    metrics = metrics_of(A, B, C, ["10.0.0.4"])
    for pair in ((1, 2), (2, 3), (3, 1)):
        metrics.measured(pair, SLOW, 0.05, 0.0)
    for other, round_trip_s in ((1, 0.01), (2, 0.2), (3, 0.01)):
        metrics.measured((other, 4), FAST, round_trip_s, 0.0)
        metrics.measured((4, other), FAST, round_trip_s, 0.0)
    assert with_newcomers([1, 2, 3], [4], metrics) == [1, 2, 3, 4]
