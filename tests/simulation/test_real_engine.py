"""The C engine in the simulation: small runs with partial reads and writes, and callers on the fast path.

Longer campaigns: `python -m tests.simulation --engine real`. The library is built when a source has changed, which
takes a while.
"""

from __future__ import annotations

import random

import pytest

from pccl.types import Result
from tests.simulation.plan import Plan
from tests.simulation.schedule import play
from tests.simulation.world import TAG, World

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(2))
def test_two_peers_reduce_over_any_division_of_bytes(seed: int) -> None:
    world = World(random.Random(seed), engine_seed=seed, connections_fail=False)
    nodes = world.join(0, 0)
    for _ in range(10):
        assert world.reduce(nodes) == [Result.SUCCESS] * 2
    world.check_rest()
    world.close()


@pytest.mark.parametrize("seed", range(1))
def test_callers_who_come_back_drive_engines_and_start_ops(seed: int) -> None:
    world = World(random.Random(seed), engine_seed=seed, connections_fail=False, has_fast_path=True)
    nodes = world.join(0, 0)
    assert world.real is not None
    while min(len(node.results) for node in nodes) < 40:
        node = world.pick(nodes)
        if not node.open_ops:
            other = next(each for each in nodes if each is not node)
            pair = (other, node is nodes[0]) if len(node.launched) % 4 == 0 else None
            world.launch(node, TAG, pair=pair)
        if not world.step():
            world.real.rest()
    world.run()
    assert {result.code for node in nodes for result in node.results.values()} == {Result.SUCCESS}
    assert world.real.drives > 0
    assert any(node.fast_path.pairs for node in nodes)
    world.check_rest()
    world.close()


def test_schedules_with_real_engines_are_replayed_by_their_seeds() -> None:
    def log(seed: int) -> list[str]:
        return play(Plan.of_seed(seed).with_streams(), is_real=True).log

    assert log(7) == log(7) != log(8)


def test_fast_path_keeps_its_arrays() -> None:
    """Of several engine threads none knows of an op that was handed over before the machine hears of it."""
    play(Plan.of_seed(2350001655, masters=0), is_real=True)


def test_timeout_of_a_started_op_is_reported_first() -> None:
    play(Plan.of_seed(88116, masters=1).with_streams(), is_real=True)
