"""A peer that must go on, when, and what a standstill and a hang look like."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wan.nemesis import progress, timeline
from tests.wan.nemesis.checker import Violation
from tests.wan.nemesis.faults import among, both_ways, one_way
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.progress import Life, Span, World

END_S = 200.0
MASTERS, PEERS = (0, 1), (2, 3, 4)


def world(*spans: Span, **changes: Any) -> World:
    lives = [Life(f"{host}.1", host, 0.0, END_S, host in MASTERS) for host in (*MASTERS, *PEERS)]
    given = {"lives": lives, "peer_hosts": PEERS, "peer_timeout_s": 3.0, "master_timeout_s": 20.0, "end_s": END_S}
    return World(spans, **{**given, **changes})


def cut(*pairs: frozenset[tuple[int, int]], frozen: frozenset[int] = frozenset()) -> Span:
    return Span("cut", 0.0, END_S, frozenset(), frozenset().union(*pairs), frozen)


def steps(*hosts: int, until_s: float = END_S) -> dict[str, list[Event]]:
    return {
        f"{host}.1": [Event(float(at), f"{host}.1", "state", {}) for at in range(int(until_s))] if host in hosts else []
        for host in PEERS
    }


def rules(given: World, histories: dict[str, list[Event]]) -> set[str]:
    return {each.rule for each in progress.check(given, histories)}


@pytest.mark.parametrize(
    ("spans", "able"),
    [
        ([], {2, 3, 4}),
        ([cut(both_ways([2], [0, 1, 3, 4]))], {3, 4}),
        ([cut(one_way([2], [3]))], {2, 4}),
        ([cut(among(PEERS))], set()),
        ([cut(both_ways([0], [1, 2, 3, 4]))], {2, 3, 4}),  # the other master may lead
        ([cut(one_way([0], [2, 3, 4]))], set()),  # it hears them and leads them to no master
        ([cut(frozen=frozenset({2, 3}))], set()),
        ([cut(frozen=frozenset({0, 1}))], set()),
    ],
)
def test_able_hosts(spans: list[Span], able: set[int]) -> None:
    assert progress.able_hosts(world(*spans), 0.0, END_S) == able


def test_slow_start_is_excused() -> None:
    lives = [*world().lives[:3], Life("3.1", 3, 0.0, END_S, ready_s=150.0), Life("4.1", 4, 0.0, END_S, ready_s=150.0)]
    given = world(lives=lives)
    assert progress.able_hosts(given, 0.0, 150.0) == set()
    assert progress.able_hosts(given, 150.0, END_S) == {2, 3, 4}
    histories = {name: [event for event in events if event.at_s >= 150] for name, events in steps(3, 4).items()}
    assert rules(given, {**histories, "2.1": steps(2)["2.1"]}) == set()


def test_progress() -> None:
    assert rules(world(), steps(*PEERS)) == set()
    assert rules(world(cut(both_ways([2], [0, 1, 3, 4]))), steps(3, 4)) == {"hang"}  # of the one that is cut off


def test_standstill() -> None:
    histories = steps(*PEERS, until_s=100)
    for host in PEERS:  # that report to be alive
        histories[f"{host}.1"] += [Event(100.0 + at, f"{host}.1", "alone", {}) for at in range(100)]
    assert rules(world(), histories) == {"progress"}
    assert rules(world(cut(among(PEERS))), histories) == set()


def test_hang() -> None:
    histories = steps(2, 3)
    histories["4.1"] = steps(4, until_s=60)["4.1"]
    assert rules(world(), histories) == {"hang"}
    assert rules(world(cut(frozen=frozenset({4}))), histories) == set()


def test_timeline() -> None:
    violation = Violation(50.0, "verdict", "2.1", "op <3> was committed by peer 3.1")
    given = world(cut(both_ways([2], [3])))
    histories = {**steps(2, 3), "4.1": [Event(49.0, "4.1", "left", {"verdict": "X", "text": "evicted & gone"})]}
    picture = timeline.svg("a title", given, histories, [violation], hosts=5)
    assert picture.startswith("<svg")
    assert picture.count('stroke="#27ae60"') > 100
    assert "op &lt;3&gt; was committed" in picture
    assert "evicted &amp; gone" in picture
    words = timeline.text(given, histories, [violation])
    assert "!!! verdict: peer 2.1: op <3>" in words
    assert "peer 4.1: left" in words
