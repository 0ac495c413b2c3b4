"""Trials in runs to which nothing has happened before."""

from __future__ import annotations

import random

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.scene import CLOCK_RATES
from tests.simulation.trials import (
    ABSENCE,
    ANY,
    CHAINS,
    CLOSE,
    LATER,
    MEMBERSHIP,
    OUTLIVING,
    RECORDED,
    RIVALS,
    SUCCESSORS,
    WITNESSES,
    Trial,
)
from tests.simulation.trials.membership import CONNECTIONS_MAX, PENDING_MAX
from tests.simulation.world import MASTER, World

SEEDS = 4
TIMEOUT_S = MasterOptions().peer_timeout_s


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, SEEDS))])
@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("masters", [1, 2, 3])
@pytest.mark.parametrize(
    "trial", dict.fromkeys(OUTLIVING + MEMBERSHIP + LATER + CHAINS + CLOSE + ANY + WITNESSES + SUCCESSORS + ABSENCE)
)
def test_promises_are_held_to_the_letter(trial: type[Trial], masters: int, memory: Memory, seed: int) -> None:
    _play(trial, masters, memory, seed)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, SEEDS))])
@pytest.mark.parametrize(
    ("trial", "masters", "memory"),
    [
        *((trial, 1, Memory.DISK) for trial in dict.fromkeys(RECORDED)),
        *((trial, 2, memory) for trial in RIVALS for memory in Memory),
    ],
)
def test_promises_are_held_where_masters_are_of_a_kind(
    trial: type[Trial], masters: int, memory: Memory, seed: int
) -> None:
    _play(trial, masters, memory, seed)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("masters", [1, 2, 3])
@pytest.mark.parametrize("founders", [2, 3])
@pytest.mark.parametrize("trial", dict.fromkeys(SUCCESSORS))
def test_promises_are_held_where_several_found_a_run(
    trial: type[Trial], founders: int, masters: int, memory: Memory
) -> None:
    _play(trial, masters, memory, founders, founders)


def _play(trial: type[Trial], masters: int, memory: Memory, seed: int, founders: int = 1) -> None:
    clocks = random.Random(seed) if seed % 3 == 0 else None
    slack = 1 / CLOCK_RATES[0] if clocks is not None else 1.0
    options = MasterOptions(connections_max=CONNECTIONS_MAX, pending_max=PENDING_MAX, founders=founders)
    world = World(
        random.Random(seed),
        options=options,
        masters=masters,
        has_fast_path=seed % 2 == 1,
        memory=memory,
        clocks=clocks,
    )
    for _ in range(founders):
        world.add()
    world.admit_all()
    played = trial(world, random.Random(f"trial {seed}"), slack, groups=1 + seed % 2)
    if played.gather():
        played.play()


def test_who_was_left_out_hurries_nobody() -> None:
    """A master without few of its peers dies while it puts a view in force, and those few are back long before the
    others. Of these none is lost that comes a moment after the first."""
    world = World(masters=1, memory=Memory.DISK)
    nodes = world.join(0, 0, 0, 0, 0)
    few, rest = nodes[3:], nodes[:3]
    for node in few:
        world.cut(node, MASTER)
    said = len(world.from_masters)
    world.wait(TIMEOUT_S)
    world.run_until(
        lambda: sum(isinstance(message, m.Install) for _, message in world.from_masters[said:]) == len(rest)
    )
    world.run_while_any()
    world.kill_master()
    world.heal()
    for node in rest:
        world.cut(node, MASTER)
    world.restart_master()
    for _ in range(5):
        world.run_while_any()
        world.wait(TIMEOUT_S / 2)
    for node in rest:
        world.network.blocked -= {(node.name, MASTER), (MASTER, node.name)}
        world.wait(TIMEOUT_S / 10)
        world.run_while_any()
    world.run()
    assert [node.ended for node in rest] == [None] * len(rest)
    assert [node.masterless_since for node in rest] == [None] * len(rest)
    assert all(node.ended for node in few)
    assert world.reduce(rest) == [Result.SUCCESS] * len(rest)
