"""The choice of faults."""

from __future__ import annotations

from random import Random

import pytest

from pccl.tools.report import PlanError
from pccl.tools.stress.faults import (
    Action,
    Dismiss,
    Hit,
    Start,
    disturbance,
)
from pccl.tools.stress.plan import Interval, Plan, parse_interval


def _churn(plan: Plan, count: int) -> tuple[list[Action], list[int]]:
    """Return the actions of a run whose peers obey at once, and the number of peers after each."""
    chance = Random(plan.seed)
    running = list(range(plan.peers))
    newest = running[-1]
    actions: list[Action] = []
    sizes = []
    for _ in range(count):
        action = disturbance(plan, chance, len(running), 0, running)
        if isinstance(action, Start):
            newest += 1
            running.append(newest)
        elif isinstance(action, Dismiss) or (action is not None and action.freeze_s is None):
            running.remove(action.peer)
        if action is not None:
            actions.append(action)
        sizes.append(len(running))
    return actions, sizes


@pytest.mark.parametrize("seed", range(5))
def test_number_of_peers_stays_within_limits(seed: int) -> None:
    plan = Plan(seed=seed, peers_max=6, freeze=True, groups=2)
    actions, sizes = _churn(plan, 400)
    assert min(sizes) <= 1  # all may go where others may join
    assert 5 <= max(sizes) <= 6
    kinds = {
        type(action) if not isinstance(action, Hit) else ("kill", "freeze")[action.freeze_s is not None]
        for action in actions
    }
    assert kinds == {Start, Dismiss, "kill", "freeze"}
    assert {action.group for action in actions if isinstance(action, Start)} == {0, 1}
    assert _churn(plan, 400) == (actions, sizes)


def test_two_peers_stay_without_joins() -> None:
    actions, sizes = _churn(Plan(peers=5, join=False, freeze=False), 50)
    assert len(actions) == 3
    assert sizes[-1] == 2
    assert _churn(Plan(kill=False, join=False, leave=False, freeze=False), 20)[0] == []


def test_intervals() -> None:
    assert parse_interval("0.5..3") == Interval(0.5, 3.0)
    assert parse_interval("2") == Interval(2.0, 2.0)
    for text in ("", "3..0.5", "0", "0..0", "a..b", "-1..2", "1..2..3"):
        with pytest.raises(ValueError, match="is not an interval"):
            parse_interval(text)


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--minutes", {"minutes": 0.0}),
        ("--peers", {"peers": 9}),
        ("--peers-max", {"peers_max": 99}),
        ("--groups", {"groups": 0}),
        ("--seed", {"seed": -1}),
        ("--hang", {"hang_s": 0.0}),
    ],
)
def test_invalid_plans(option: str, changes: dict[str, float]) -> None:
    from msgspec.structs import replace

    with pytest.raises(PlanError, match=f"^{option} "):
        replace(Plan(), **changes).check()


def test_killed_master_without_standby_keeps_state() -> None:
    kills = Interval(1, 2)
    assert not Plan().keeps_state
    assert Plan(kill_master=kills).keeps_state
    assert not Plan(kill_master=kills, standbys=1).keeps_state
    assert not Plan(kill_master=kills, state=False).keeps_state
    assert Plan(standbys=1, state=True).keeps_state
