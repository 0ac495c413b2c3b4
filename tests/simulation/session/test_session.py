"""Whole runs of communicators and masters, in one thread and a clock that jumps: see the package."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from pccl.protocol.failover.bootstrap import Start
from pccl.types import Result
from tests.simulation.session.campaign import play_seed
from tests.simulation.session.checks import Checker, CheckError
from tests.simulation.session.world import World, play


@pytest.mark.parametrize("seed", [1])
def test_session_without_faults(seed: int) -> None:
    world = play_seed(seed, has_faults=False)
    assert world.checker.commits > 0
    assert world.checker.syncs > 0


def test_checker_ignores_dead_callers() -> None:
    alive = {0, 1}
    checker = Checker(alive.__contains__)
    calls = [checker.call(caller, np.arange(3)) for caller in (0, 1)]
    result = calls[0].given + calls[1].given
    alive.remove(1)
    checker.unharmed(calls[1], result)
    checker.failed(calls[1], Result.RANK_CONNECTION_LOST)
    checker.committed(calls[0], result, 2)
    checker.finish()
    alive.add(1)
    with pytest.raises(CheckError, match="its array differs"):
        checker.unharmed(calls[1], result)
    checker.failed(calls[1], Result.RANK_CONNECTION_LOST)
    with pytest.raises(CheckError, match="which was told"):
        checker.finish()


@pytest.mark.parametrize("seed", [12, 10210728])
def test_random_sessions(seed: int) -> None:
    play_seed(seed)


@pytest.mark.parametrize("seed", [1, 33, 5100649])
def test_random_bootstraps(seed: int) -> None:
    play_seed(seed, is_founding=True)


def test_a_seed_plays_the_same_run_each_time() -> None:
    assert play_seed(11).log == play_seed(11).log


@pytest.mark.parametrize(("way", "count"), [(0, 0), (0, 3), (0, 40), (1, 0), (1, 5)])
def test_newcomer_retries_when_its_opening_is_cut_off(way: int, count: int) -> None:
    """It asks again, as often as `n_attempts` says, wherever its Hello or the answer to it was cut off."""
    world = World(seed=1, masters=1)

    async def faults(world: World) -> None:
        world.start_master("10.0.1.1", Start.NEW, is_standby=False)
        world.network.cut_next(way, count)
        world.start_peer()
        await trio.sleep(5)
        world.start_peer()
        await trio.sleep(5)

    play(world, faults)
    assert not [line for line in world.log if "is out" in line]
