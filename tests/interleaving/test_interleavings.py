"""Some interleavings of each kind, and what makes the others worth playing: they repeat, and find what is known."""

from __future__ import annotations

import random

import pytest

from tests.interleaving.campaign import SCHEDULES_TO_FIND, find
from tests.interleaving.choosers import Walk
from tests.interleaving.faults import FAULTS
from tests.interleaving.primitives import Lock
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.schedule import Plan, play
from tests.interleaving.scheduler import ScheduleError, Scheduler
from tests.interleaving.tracing import Grain

SEEDS = (1, 2)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_few_interleavings(scenario: str) -> None:
    for seed in SEEDS:
        play(Plan.of_seed(seed, scenario, Grain.HANDOVERS))


@pytest.mark.parametrize("grain", [Grain.HANDOVERS, Grain.BYTECODES])
def test_a_seed_plays_the_same_schedule_again(grain: Grain) -> None:
    plan = Plan.of_seed(7, "turns", grain, "walk")
    first = play(plan)
    assert play(plan) == first
    assert first.switches > 10


@pytest.mark.slow
def test_the_crash_of_mixed_ops_is_found_without_its_mend() -> None:
    played, text = find("mixed-ops")
    assert 0 < played <= SCHEDULES_TO_FIND
    assert "again: python -m tests.interleaving" in text


@pytest.mark.slow
def test_more_interleavings() -> None:
    for seed in range(1_000_000, 1_000_040):
        play(Plan.of_seed(seed))


def test_known_faults_can_be_put_in() -> None:
    for fault in FAULTS.values():
        fault.edit.edited()


def opposite_orders(seed: int) -> str:
    """Have two threads take two locks in opposite orders. Return what the scheduler says."""
    scheduler = Scheduler(seed, Walk(random.Random(seed), 0.5))
    locks = Lock(scheduler), Lock(scheduler)

    def take(first: Lock, second: Lock) -> None:
        with first, second:
            pass

    scheduler.spawn("forward", lambda: take(*locks))
    scheduler.spawn("backward", lambda: take(*locks[::-1]))
    try:
        scheduler.play()
    except ScheduleError as error:
        return str(error)
    return ""


def test_a_deadlock_is_found_at_once_with_the_stacks_of_all() -> None:
    found = [opposite_orders(seed) for seed in range(20)]
    assert "" in found
    text = next(text for text in found if text)
    assert "deadlock" in text
    assert text.count("with first, second") == 2
