"""Who is slow: told soon, however rounds cut its ops, and not by chance."""

from __future__ import annotations

from random import Random

import pytest

from pccl.protocol.diagnosis.findings import Kind
from pccl.protocol.diagnosis.lateness import CHANCE_S, Lateness, OpRound
from tests.protocol.diagnosis_world import NAMED_WITHIN_S, SETTLED_S, World

UNEVEN = (0.3, 1.0, 3.0)


@pytest.mark.parametrize("op_s", [0.01, 0.1, 0.25])
def test_whoever_takes_three_times_as_long_is_named_however_rounds_cut_its_ops(op_s: float) -> None:
    """Two ops of a second end in three rounds, at other places for each peer."""
    in_time = 0
    for seed in range(40):
        world = World(5, seed, step_s=0.2, op_s=op_s, noise=0.2)
        world.run(SETTLED_S)
        world.factors[2] = 3.0
        world.run(NAMED_WITHIN_S, until=lambda world=world: world.names() != [])
        in_time += world.names() == [(Kind.SLOW, 2, None)]
    assert in_time >= 39


@pytest.mark.parametrize(("peers", "step_s"), [(2, 0.1), (2, 0.2), (2, 0.5), (3, 0.5)])
def test_uneven_steps_make_nobody_slow(peers: int, step_s: float) -> None:
    """Chance may do once, as long as it is not known how steps vary."""
    later = []
    for seed in range(4):
        world = World(peers, seed, step_s=step_s, op_s=0.1, noise=0.2, uneven=UNEVEN)
        world.run(90.0)
        begun = len(world.named)
        world.run(510.0)
        later += [change for _, change in world.named[begun:] if not change.is_over]
    assert len(later) <= 1


@pytest.mark.parametrize("peers", [2, 3])
def test_rare_long_steps_of_all_make_nobody_slow(peers: int) -> None:
    """What one peer was late by chance is known of the others, too."""
    names = []
    for seed in range(4):
        world = World(peers, seed, step_s=0.1, op_s=0.05, noise=0.2, uneven=(1.0, 1.0, 1.0, 1.0, 6.0))
        world.run(180.0)
        names += world.names()
    assert len(names) <= 1


@pytest.mark.parametrize("pause_s", [1.0, 6.0])
def test_whoever_is_a_little_slower_and_pauses_now_and_then_is_not_slow(pause_s: float) -> None:
    worlds = [World(3, seed, step_s=0.1, op_s=0.05, noise=0.2, factors={1: 1.5}) for seed in range(4)]
    for world in worlds:
        chance = Random(world.seed)
        while world.now < 400.0:
            world.pauses[1] = pause_s * chance.uniform(0.8, 1.2)
            world.run(chance.uniform(2.0, 25.0))
    assert [world.names() for world in worlds] == [[], [], [], []]


def test_whoever_was_late_by_chance_is_named_after_a_longer_look() -> None:
    world = World(2, seed=5, step_s=0.1, op_s=0.1, noise=0.2, uneven=UNEVEN)
    world.run(120.0)
    assert world.names() == []
    world.factors[1] = 6.0
    world.run(20.0)
    assert world.names() == [(Kind.SLOW, 1, None)]


def test_whoever_is_named_stays_so_until_it_is_over() -> None:
    for seed in range(10):
        world = World(4, seed, step_s=0.2, op_s=0.25, noise=0.2)
        world.run(SETTLED_S)
        world.factors[3] = 2.6
        world.run(60.0)
        assert world.names() == [(Kind.SLOW, 3, None)]
        assert world.diagnosis.findings(world.now) != []
        world.factors[3] = 1.0
        world.run(10.0)
        assert world.diagnosis.findings(world.now) == []


def rounds(lateness: Lateness, count: int, between: float, begun_at: float) -> float:
    """Add rounds of half a second in which peer 1 is between ops for this share, and peer 2 for a fifth."""
    for number in range(count):
        lateness.add(OpRound(begun_at + number / 2, 0.5, 3, {1: 1 - between, 2: 0.8}))
    return begun_at + count / 2


def test_a_streak_that_ended_by_itself_counts_for_a_while() -> None:
    lateness = Lateness()
    now = rounds(lateness, 4, 0.5, 0.0)
    assert not lateness.slow(is_named=False)
    now = rounds(lateness, 1, 0.1, now)
    now = rounds(lateness, 7, 0.5, now)
    assert not lateness.slow(is_named=False)
    now = rounds(lateness, 1, 0.5, now)
    assert len(lateness.slow(is_named=False)) == 8
    lateness.slow(is_named=True)
    now = rounds(lateness, 1, 0.1, now)
    now = rounds(lateness, 7, 0.5, now)
    assert not lateness.slow(is_named=False), "only the streak for which it was named does not count"
    now = rounds(lateness, 1, 0.1, now)
    now = rounds(lateness, 1, 0.1, now + CHANCE_S)
    rounds(lateness, 5, 0.5, now)
    assert len(lateness.slow(is_named=False)) == 5


def test_a_streak_is_judged_without_its_pauses_and_as_a_whole() -> None:
    lateness = Lateness()
    now = rounds(lateness, 3, 0.3, 0.0)
    rounds(lateness, 2, 1.0, now)
    assert not lateness.slow(is_named=False), "two rounds say all"
    now = rounds(lateness, 20, 0.35, 10.0)
    rounds(lateness, 5, 0.45, now)
    assert not lateness.slow(is_named=False), "it takes 1.75 times as long for ever"


def test_whoever_is_always_a_little_slower_hides_nobody() -> None:
    """A streak of peer 1, which is never slow, is no measure of how steps vary."""
    lateness = Lateness()
    shares = [{1: 0.3, 2: 0.5, 3: 0.5}] * 12 + [{1: 0.5, 2: 0.5, 3: 0.5}] * 2 + [{1: 0.85, 2: 0.2, 3: 0.85}] * 5
    for number, each in enumerate(shares):
        assert not lateness.slow(is_named=False)
        lateness.add(OpRound(number / 2, 0.5, 3, each))
    assert len(lateness.slow(is_named=False)) == 5


def test_whoever_is_always_a_little_slower_is_named_after_a_longer_look() -> None:
    lateness = Lateness()
    now = rounds(lateness, 4, 0.35, 0.0)
    now = rounds(lateness, 1, 0.1, now)
    now = rounds(lateness, 7, 0.5, now)
    assert not lateness.slow(is_named=False), "of its own streaks all rounds count"
    rounds(lateness, 1, 0.5, now)
    assert len(lateness.slow(is_named=False)) == 8


def test_whoever_becomes_slow_is_named_beside_a_peer_that_is_always_a_little_slower() -> None:
    in_time = 0
    for seed in range(20):
        world = World(3, seed, step_s=0.1, op_s=0.05, noise=0.2, factors={1: 1.4})
        world.run(40.0)
        world.factors[2] = 5.0
        world.run(NAMED_WITHIN_S, until=lambda world=world: world.names() != [])
        in_time += world.names() == [(Kind.SLOW, 2, None)]
    assert in_time >= 17
