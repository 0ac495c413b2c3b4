"""Samples of processes that are killed and joined while they train, audited from their logs."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccl import MasterNode
from pccl.tools import audit
from tests.support.streams import TIMEOUT_S
from tests.training.data.sampler_peers import audited
from tests.training.peer_process import started


def churned(master: MasterNode, kind: str, folder: Path, is_enough: Callable[[int], bool]) -> audit.Audit:
    """Kills and replaces one of three at random moments, until that were enough; all logs, audited."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    stop = folder / "stop"
    with ExitStack() as stack:
        living = [stack.enter_context(started(kind, master, number, stop)) for number in range(3)]
        newest, kills = living[0], 0
        while not is_enough(kills):
            newest.lines.expect(r"\d+ 3 .*")
            victim = living.pop(choice.randrange(3))
            victim.kill_within(choice.uniform(0, 0.12))
            kills += 1
            newest = stack.enter_context(started(kind, master, 2 + kills, stop))
            living.append(newest)
        newest.lines.expect(r"\d+ 3 .*")
        stop.touch()
        for peer in living:
            assert peer.process.wait(TIMEOUT_S) == 0
        assert len({peer.lines.rest()[-1] for peer in living}) == 1  # the same digest
    return audited(folder)


@pytest.mark.parametrize("kind", ["sampler", pytest.param("sampler async fixed", marks=pytest.mark.slow)])
def test_kills_use_each_sample_once(master: MasterNode, kind: str, tmp_path: Path) -> None:
    found = churned(master, kind, tmp_path, lambda kills: kills == 3)
    assert found.peers >= 4  # a peer killed at once took part in no step
    assert found.steps > 3  # at least one after each kill
