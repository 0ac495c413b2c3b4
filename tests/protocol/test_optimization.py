"""The course of an optimize_topology: what is measured when, and what is made of it."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.link_metrics import LinkMetrics
from pccl.protocol.master.ring import (
    ALL_PAIRS_PEERS_MAX,
    MEASURING_S_MAX,
    ROUND_S_MAX,
    Optimization,
    decide,
    rounds,
    wanted,
)

FAST, SLOW = 25e6, 2.5e6


def known(**rates: tuple[float, float]) -> LinkMetrics:
    """Such as a12=(bytes per second, round trip in seconds) for the link from peer 1 to peer 2."""
    metrics = LinkMetrics()
    for name, (bytes_per_s, round_trip_s) in rates.items():
        metrics.measured((int(name[1]), int(name[2])), bytes_per_s, round_trip_s, 0.0)
    return metrics


@given(st.permutations(range(1, 10)), st.integers(1, 9))
def test_ring_links_are_measured_first(peers: list[int], count: int) -> None:
    ring = peers[:count]
    links = list(wanted(ring, LinkMetrics(), 0, 0.0))
    assert sorted(links) == sorted(permutations(ring, 2))
    if count > 1:
        assert set(links[:count]) == set(zip(ring, [*ring[1:], ring[0]], strict=True))


def test_large_group_measures_in_parts() -> None:
    ring = list(range(200))
    metrics = LinkMetrics()
    seen: set[tuple[int, int]] = set()
    for salt in range(4):
        links = set(wanted(ring, metrics, salt, 0.0))
        assert 0 < len(links - seen) <= 200 * ALL_PAIRS_PEERS_MAX
        for link in links:
            metrics.measured(link, FAST, 0.01, 0.0)
        seen |= links
    assert len(seen) > 3 * 200 * ALL_PAIRS_PEERS_MAX // 2


@given(st.lists(st.integers(0, 4), min_size=2, max_size=9))
def test_round_uses_each_host_once(host_of: list[int]) -> None:
    metrics = LinkMetrics()
    for peer, host in enumerate(host_of):
        metrics.arrived(peer, [f"10.0.0.{host}"])
    links = list(permutations(range(len(host_of)), 2))
    schedule = rounds(links, metrics)
    for together in schedule:
        across = [(host_of[a], host_of[b]) for a, b in together if host_of[a] != host_of[b]]
        for links_at_once in (together, across):
            assert len({sender for sender, _ in links_at_once}) == len(links_at_once)
            assert len({receiver for _, receiver in links_at_once}) == len(links_at_once)
            assert len({frozenset(link) for link in links_at_once}) == len(links_at_once)
    pairs_of_hosts = [(host_of[a], host_of[b]) for together in schedule for a, b in together]
    assert sorted(pairs_of_hosts) == sorted({(host_of[a], host_of[b]) for a, b in links})


def test_measurement_course() -> None:
    metrics = LinkMetrics()
    course = Optimization(metrics, {0: [1, 2]}, 0, 0.0)
    asked = course.next_round(7, 0.0)
    assert asked == {2: [(1, 2)]}, "the end that dials measures both ways, one after the other"
    assert course.is_asked(7, 2)
    assert not course.is_asked(6, 2)
    assert course.answered(2, {(1, 2): (FAST, 0.05)}, 0.5) == []
    assert course.next_round(8, 0.5) == {2: [(2, 1)]}
    assert course.answered(2, {}, 1.0) == [(2, 1)]
    assert course.next_round(9, 1.0) == {}
    assert (course.measured, course.failed) == (1, 1)
    assert metrics.is_unreachable((2, 1))
    problems = course.search(9, {0: [1, 2]})
    assert course.is_waiting
    assert problems[0].links == {(1, 2): (FAST, 0.025)}


def test_unasked_measurement_is_ignored() -> None:
    metrics = LinkMetrics()
    course = Optimization(metrics, {0: [1, 2, 3]}, 0, 0.0)
    (asked,) = [course.next_round(1, 0.0)]
    course.answered(3, dict.fromkeys(permutations((1, 2, 3), 2), (FAST, 0.1)), 0.1)
    told = {link for link in permutations((1, 2, 3), 2) if metrics.get(link) is not None}
    assert told == set(asked[3])


def test_round_timeout() -> None:
    metrics = LinkMetrics()
    course = Optimization(metrics, {0: [1, 2, 3, 4]}, 0, 0.0)
    now, asked_of_4, answers = 0.0, 0, 0
    while asked := course.next_round(answers, now):
        for peer, links in asked.items():
            asked_of_4 += peer == 4
            if peer != 4:
                course.answered(peer, dict.fromkeys(links, (FAST, 0.05)), now)
        answers += 1
        if course.is_waiting:
            deadline = course.deadline()
            assert deadline == now + ROUND_S_MAX
            now = deadline
            assert all(4 in link for link in course.expire(now))
    assert asked_of_4 == 1
    assert all(metrics.get(link) for link in permutations((1, 2, 3), 2))


def test_measuring_time_limit() -> None:
    metrics = LinkMetrics()
    course = Optimization(metrics, {0: list(range(30))}, 0, 0.0)
    now = 0.0
    while asked := course.next_round(1, now):
        now += 3.0
        for peer, links in asked.items():
            course.answered(peer, dict.fromkeys(links, (FAST, 0.05)), now)
    assert MEASURING_S_MAX <= now < MEASURING_S_MAX + 3.0 + ROUND_S_MAX
    missed = [link for link in permutations(range(30), 2) if metrics.is_due(link, now)]
    assert set(missed) == set(wanted(list(range(30)), metrics, 1, now)), "the next call measures the rest"


def test_lost_peers_are_not_measured() -> None:
    course = Optimization(LinkMetrics(), {0: [1, 2, 3]}, 0, 0.0)
    course.next_round(1, 0.0)
    course.lost(3)
    while True:
        for peer in (1, 2):
            if course.is_asked(course.number, peer):
                course.answered(peer, {}, 0.0)
        asked = course.next_round(2, 0.0)
        assert not any(3 in link for links in asked.values() for link in links)
        if not asked:
            break


# The decision.


def test_faster_ring_is_adopted() -> None:
    metrics = known(a12=(SLOW, 0.05), a23=(FAST, 0.05), a31=(FAST, 0.05))
    for link in ((1, 3), (3, 2), (2, 1)):
        metrics.measured(link, FAST, 0.05, 0.0)
    ring, reason = decide([1, 2, 3], [1, 3, 2], metrics)
    assert ring == [1, 3, 2]
    assert "1->2 at 20 Mbit/s" in reason
    assert "200 Mbit/s" in reason


@pytest.mark.parametrize("gain", [1.0, 1.04])
def test_similar_ring_is_kept(gain: float) -> None:
    metrics = known(a12=(FAST, 0.05), a23=(FAST, 0.05), a31=(FAST, 0.05))
    for link in ((1, 3), (3, 2), (2, 1)):
        metrics.measured(link, FAST * gain, 0.048, 0.0)
    ring, reason = decide([1, 2, 3], [1, 3, 2], metrics)
    assert ring == [1, 2, 3]
    assert "stays" in reason


def test_shorter_ring_is_adopted() -> None:
    metrics = known(a12=(FAST, 0.05), a23=(FAST, 0.05), a31=(FAST, 0.05))
    for link in ((1, 3), (3, 2), (2, 1)):
        metrics.measured(link, FAST * 0.98, 0.04, 0.0)
    assert decide([1, 2, 3], [1, 3, 2], metrics)[0] == [1, 3, 2]


def test_lost_peer_is_removed_from_found_ring() -> None:
    metrics = known(a12=(SLOW, 0.05), a23=(SLOW, 0.05), a31=(SLOW, 0.05))
    for link in ((1, 3), (3, 2), (2, 1)):
        metrics.measured(link, FAST, 0.05, 0.0)
    assert decide([1, 2, 3], [1, 4, 3, 2], metrics)[0] == [1, 3, 2]
