"""Kills of masters: what comes back, and what may be expected of the run then."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pccl.stress.masters import LOSS_S, PEER_TIMEOUT_S, PROGRESS_S, START_S, Masters
from pccl.stress.plan import Interval, Plan


def _masters(standbys: int) -> Masters:
    return Masters(Plan(kill_master=Interval(3, 5), standbys=standbys), Random(1), 0.0)


def test_none_is_killed_where_it_is_not_asked_for() -> None:
    assert Masters(Plan(standbys=1), Random(1), 0.0).next_at == float("inf")


def test_one_that_founds_runs_is_always_left() -> None:
    masters = _masters(2)
    assert 3 <= masters.next_at <= 5
    assert not any(masters.kill(1.0, is_founder_left=False) for _ in range(50))
    assert {masters.kill(1.0, is_founder_left=True) for _ in range(50)} == {True, False}
    assert 4 <= masters.next_at <= 6
    assert not any(_masters(0).kill(1.0, is_founder_left=True) for _ in range(50))


@pytest.mark.parametrize(("standbys", "listens_at"), [(0, 2.0), (1, 1.0)])
def test_steps_are_due_once_a_successor_listens(standbys: int, listens_at: float) -> None:
    masters = _masters(standbys)
    masters.kill(1.0, is_founder_left=False)
    assert masters.progress_due_at == (1.0 + PEER_TIMEOUT_S + PROGRESS_S if standbys else float("inf"))
    masters.listens(2.0)
    assert masters.progress_due_at == listens_at + PEER_TIMEOUT_S + PROGRESS_S
    assert masters.stepped(0, begun_at=listens_at - 0.1) is None
    assert masters.stepped(0, begun_at=listens_at) == listens_at
    assert masters.stepped(0, begun_at=listens_at) is None
    assert masters.progress_due_at == float("inf")


def test_nothing_is_due_when_something_else_happens() -> None:
    masters = _masters(1)
    masters.kill(1.0, is_founder_left=False)
    masters.disturbed()
    masters.listens(2.0)
    assert masters.progress_due_at == float("inf")
    assert masters.stepped(0, begun_at=9.0) is None


def test_too_few_may_be_left_until_a_step_is_made_without_those_who_ended() -> None:
    masters = _masters(1)
    assert not masters.may_run_end(0.0, sound=2, others=1)
    assert masters.may_run_end(0.0, sound=2, others=2)
    masters.lost(1.0, group=0)
    masters.lost(1.0, group=1)
    assert masters.may_run_end(1.0, sound=2, others=0)
    masters.stepped(0, begun_at=0.9)
    assert masters.may_run_end(1.0, sound=2, others=0)
    masters.stepped(0, begun_at=1.1)
    assert not masters.may_run_end(1.0, sound=2, others=0)
    assert masters.may_run_end(1.0, sound=1, others=0)
    assert not masters.may_run_end(1.1 + LOSS_S, sound=1, others=0)


def test_with_one_address_only_a_dead_master_needs_a_majority() -> None:
    masters = _masters(0)
    assert not masters.may_run_end(1.0, sound=1, others=3)
    masters.kill(1.0, is_founder_left=False)
    assert masters.is_starting(1.0)
    assert masters.may_run_end(1.0, sound=1, others=3)
    assert not masters.may_run_end(1.0 + START_S, sound=1, others=3)


@pytest.mark.parametrize(
    ("options", "keeps"),
    [
        ({}, False),
        ({"kill_master": Interval(1, 2)}, True),
        ({"kill_master": Interval(1, 2), "standbys": 1}, False),
        ({"kill_master": Interval(1, 2), "state": False}, False),
        ({"standbys": 1, "state": True}, True),
    ],
)
def test_a_master_that_is_killed_alone_keeps_its_run_on_disk(options: dict[str, Any], keeps: bool) -> None:
    assert Plan(**options).keeps_state is keeps
