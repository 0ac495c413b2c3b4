"""The diagnosis: whoever is at fault is named soon, and nobody else ever is."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol.diagnosis import Diagnosis, GroupScene, Scene
from pccl.protocol.diagnosis.findings import Kind
from pccl.protocol.messages import LinkReport, OpRef, PathTrial, Report
from pccl.protocol.point_to_point import PAIR_BIT
from tests.protocol.diagnosis_world import EPOCH, SETTLED_S, World, few, named_within, worlds

TRIALS = [PathTrial.NONE, PathTrial.NOTHING, PathTrial.SMALL_ONLY, PathTrial.CARRIES]


@few
@given(worlds, st.randoms(use_true_random=False))
def test_a_fleet_that_differs_a_little_names_nobody(world: World, chance: Random) -> None:
    world.factors = {peer: chance.uniform(1.0, 1.2) for peer in range(1, world.peers + 1)}
    world.run(40.0)
    assert world.names() == []


@few
@given(worlds, st.randoms(use_true_random=False))
def test_pauses_and_load_that_all_share_name_nobody(world: World, chance: Random) -> None:
    for _ in range(8):
        world.pauses[chance.randint(1, world.peers)] = chance.uniform(0.2, 8.0)
        world.run(chance.uniform(4.0, 10.0))
        world.factors = dict.fromkeys(range(1, world.peers + 1), chance.choice([1.0, 3.0, 10.0]))
        world.run(chance.uniform(1.0, 5.0))
    assert world.names() == []


@few
@given(worlds, st.randoms(use_true_random=False))
def test_whoever_is_slow_is_named(world: World, chance: Random) -> None:
    world.run(SETTLED_S)
    peer = chance.randint(1, world.peers)
    world.factors[peer] = 3.0 + world.op_s / world.step_s * 2
    if world.step_s * world.factors[peer] + world.op_s > 0.6:
        return  # it takes four steps to tell
    named_within(world, (Kind.SLOW, peer, None))
    world.factors[peer] = 1.0
    world.run(30.0)
    assert world.diagnosis.findings(world.now) == []


@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_far_slower_is_named_after_three_long_steps(seed: int) -> None:
    world = World(3, seed, step_s=0.2, op_s=0.2)
    world.run(SETTLED_S)
    world.factors[2] = 5.0
    named_within(world, (Kind.SLOW, 2, None))


@pytest.mark.parametrize("seed", range(6))
def test_pauses_in_a_row_name_nobody(seed: int) -> None:
    world = World(3, seed, step_s=0.2, op_s=0.1)
    world.run(SETTLED_S)
    for _ in range(3):
        world.pauses[2] = 6.0
        world.run(15.0, until=lambda: 2 not in world.pauses)
    world.run(30.0)
    assert world.names() == []


def test_whoever_is_slow_is_named_where_minutes_lie_between_two_ops() -> None:
    """As outer steps of DiLoCo do."""
    world = World(2, step_s=30.0, op_s=0.4)
    world.factors[2] = 3.0
    world.run(95.0 * 7, until=lambda: (Kind.SLOW, 2, None) in world.names())
    begun = len(world.named)
    assert (Kind.SLOW, 2, None) in world.names()
    world.run(95.0 * 3)
    assert world.named[begun:] == []
    world.factors[2] = 1.0
    world.run(95.0 + 3 * 35.0)
    assert world.diagnosis.findings(world.now) == []


def test_nobody_stays_slow_when_nobody_reduces_any_more() -> None:
    world = World(2)
    world.run(SETTLED_S)
    world.factors[2] = 8.0
    world.run(20.0)
    assert [each.kind for each in world.diagnosis.findings(world.now)] == [Kind.SLOW]
    world.pauses = dict.fromkeys((1, 2), 1000.0)
    world.run(20.0)
    assert world.diagnosis.findings(world.now) == []


def test_a_wait_that_was_given_up_does_not_say_that_the_next_may_be_as_long() -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    for at in range(1, 78):
        waited_s = at / 2 - 5 if at < 44 else at / 2 - 24  # given up after 16 s
        for peer in (1, 2):
            wait_ms = round(1000 * max(0.0, waited_s)) if peer == 1 else 0
            report = Report([(EPOCH, min(at, 10), at >= 44)], 0, 0, links=[], op_wait_ms=wait_ms, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        named = [(each.kind, each.peer) for each in diagnosis.findings(100 + at / 2)]
        assert (named == [(Kind.ABSENT, 2)]) or at not in (40, 76), f"{named} after {waited_s} s"


@few
@given(worlds, st.randoms(use_true_random=False))
def test_whoever_is_silent_is_named_and_nobody_who_waits(world: World, chance: Random) -> None:
    world.run(SETTLED_S)
    peer = chance.randint(1, world.peers)
    world.silent.add(peer)
    named_within(world, (Kind.SILENT, peer, None))


@pytest.mark.parametrize(
    ("trial", "says"), [(PathTrial.CARRIES, "the process stands still"), (PathTrial.NOTHING, "it is down, or cut off")]
)
def test_it_is_said_whether_the_machine_of_whoever_is_silent_answers(trial: int, says: str) -> None:
    """Once that is known, which may be some seconds after it was named."""
    world = World(3)
    world.run(SETTLED_S)
    world.silent.add(2)
    world.run(5.0)
    world.tried = {(1, 2): trial}
    world.run(5.0)
    said = [change.suspect.text for _, change in world.named if not change.is_over]
    assert [says in text for text in said] == [False, True]
    assert world.names() == [(Kind.SILENT, 2, None)] * 2


@few
@given(worlds, st.randoms(use_true_random=False))
def test_a_path_that_drops_large_packets_is_named(world: World, chance: Random) -> None:
    world.run(SETTLED_S)
    way = tuple(chance.sample(range(1, world.peers + 1), 2))
    world.stuck[way[0], way[1]] = PathTrial.SMALL_ONLY
    named_within(world, (Kind.MTU, way[0], way[1]))


def test_whoever_gets_no_cpu_is_named_unless_all_lack_it() -> None:
    """An engine that is only busy, at the root of large ops, comes late for a quarter of the time."""
    world = World(4)
    world.starved = dict.fromkeys((1, 2, 3, 4), 0.5)
    world.run(30.0)
    assert world.names() == []
    world.starved = {3: 0.3, 1: 0.05}
    world.run(30.0)
    assert world.names() == []
    world.starved = {3: 0.6, 1: 0.1}
    named_within(world, (Kind.SLOW, 3, None))


def test_whoever_does_not_call_is_named_after_a_while() -> None:
    world = World(3)
    world.run(SETTLED_S)
    world.pauses[2] = 60.0
    world.run(9.0)
    assert world.names() == []
    world.run(3.0)
    assert world.names() == [(Kind.ABSENT, 2, None)]
    world.run(60.0)
    assert world.diagnosis.findings(world.now) == []


@pytest.mark.parametrize(
    ("peers", "missing", "named"),
    [(2, [2], [2]), (4, [2, 3], [2, 3]), (5, [2, 3], [2, 3]), (6, [1, 2, 3], [1, 2, 3]), (4, [1, 2, 3], [])],
)
def test_up_to_half_of_a_group_is_named_for_what_it_does_not_call(
    peers: int, missing: list[int], named: list[int]
) -> None:
    world = World(peers)
    world.run(SETTLED_S)
    world.pauses = dict.fromkeys(missing, 60.0)
    world.run(12.0)
    assert sorted(world.names()) == [(Kind.ABSENT, peer, None) for peer in named]


@pytest.mark.parametrize(
    ("peers", "waits", "named"),
    [
        (3, {7: {1, 3}, 8: {2}}, [2]),
        (4, {7: {1, 3, 4}, 9: {1, 3, 4}, 8: {2}}, [2]),
        (2, {7: {1}, 8: {2}}, [2, 1]),
        (20, {tag: {tag} for tag in range(1, 21)}, [2, 3, 4, 5, 6, 7, 8, 9]),
        (3, {7: {1, 2, 3}, 8: {2}}, []),
        (3, {7: {1, 3}, PAIR_BIT | 8: {2}}, []),
        (3, {7: {1, 3}}, []),
    ],
    ids=["one", "several in flight", "two peers", "each its own", "all in one", "a send", "not told yet"],
)
def test_who_waits_in_another_op_than_most_is_named(peers: int, waits: dict[int, set[int]], named: list[int]) -> None:
    world = World(peers)
    world.run(SETTLED_S)
    world.stalled = {OpRef(tag, 5): waiting for tag, waiting in waits.items()}
    world.run(9.0)
    assert world.names() == []
    world.run(3.0)
    assert world.names() == [(Kind.ABSENT, peer, None) for peer in named]
    if named == [2]:
        text = world.named[0][1].suspect.text
        assert f"peer 2 has not called the op with tag 7 that {peers - 1} other peers have waited in for" in text
        assert "and waits in the op with tag 8" in text


@pytest.mark.parametrize("peers", [2, 4])
def test_who_does_not_call_what_a_thread_waits_in_is_not_called_slow(peers: int) -> None:
    """Other threads reduce on meanwhile, so that the waiting peer seems to do nothing but to wait."""
    world = World(peers, step_s=0.5, beside=set(range(1, peers)))
    world.run(8.0)
    assert world.names() == []
    world.run(20.0)
    assert set(world.names()) == {(Kind.ABSENT, peers, None)}


def test_long_waits_that_ended_by_themselves_are_usual() -> None:
    world = World(3)
    world.run(SETTLED_S)
    for _ in range(3):
        world.pauses[2] = 9.0
        world.run(20.0)
    world.pauses[2] = 20.0
    world.run(25.0)
    assert world.names() == []


def test_whoever_does_not_come_to_a_joint_call_is_named() -> None:
    world = World(3)
    world.run(SETTLED_S)
    world.pauses = dict.fromkeys((1, 2, 3), 1000.0)
    world.waits = {"sync_shared_state": (31.0, 2, [3])}
    world.run(1.0)
    assert world.names() == [(Kind.ABSENT, 3, None)]


def reports(peers: int, chance: Random, holes: float, resent: int, stuck_ms: int) -> Iterator[dict[int, Report]]:
    """What peers report, round by round, where one way is hot: any report may be missing, and any link in it."""
    counts = {(a, b): [0] * 6 for a in range(peers) for b in range(peers) if a != b}
    hot = chance.choice([*counts])
    for at in range(1, 24):
        for way, own in counts.items():
            is_hot = way == hot
            if chance.random() < 0.02:
                own[:] = [0] * 6  # the link was made anew
            steps = (500, 200, 100_000, resent if is_hot else 0, 1_000_000 if is_hot else 1000, 50)
            for i, most in enumerate(steps):
                own[i] += chance.randint(most // 2 if is_hot else 0, most)
        yield {
            peer: Report(
                [(EPOCH, at * chance.choice([1, 10]), 0)],
                0,
                0,
                links=[
                    LinkReport(
                        way[1],
                        own[2],
                        busy_ms=own[0],
                        receiver_ms=own[5],
                        delivered=own[1],
                        resent=own[3],
                        lying_byte_s=own[4],
                        full_ms=own[5],
                        stuck_ms=chance.choice([0, stuck_ms]),
                        trial=chance.choice(TRIALS),
                        round_trip_us=chance.choice([0, 100, 1000, 100_000]),
                    )
                    for way, own in counts.items()
                    if way[0] == peer and chance.random() >= holes
                ],
                in_ops_ms=490 * at,
                op_wait_ms=chance.choice([0, 0, 20_000]),
                at_ms=500 * at,
                late_ms=chance.choice([0, 100]) * at,
            )
            for peer in range(peers)
            if chance.random() >= holes
        }


@settings(max_examples=300, deadline=None)
@given(
    peers=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    holes=st.sampled_from([0.0, 0.02, 0.05, 0.3]),
    resent=st.sampled_from([0, 100]),
    stuck_ms=st.sampled_from([0, 2000]),
)
def test_whatever_is_missing_from_reports_they_can_be_judged(
    peers: int, seed: int, holes: float, resent: int, stuck_ms: int
) -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, list(range(peers)), EPOCH, True, {})], {}, frozenset())
    for number, round_ in enumerate(reports(peers, Random(seed), holes, resent, stuck_ms)):
        now = 100 + 0.5 * number
        for peer, report in round_.items():
            diagnosis.reported(peer, 0, report, now)
        diagnosis.judge(scene, now)


def test_links_to_peers_that_do_not_exist_take_no_memory() -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    diagnosis.judge(scene, 100.0)
    tracemalloc.start()
    for at in range(1, 101):
        made_up = [LinkReport(1000 * at + other, 1, round_trip_us=7, stuck_ms=9_000) for other in range(500)]
        diagnosis.reported(1, 0, Report([], 0, 0, links=made_up, at_ms=500 * at), 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    del made_up
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000
    assert diagnosis.findings(200.0) == []
