"""Churn: who is disturbed when, within the plan's limits, the same for the same seed."""

from __future__ import annotations

from random import Random

import pytest

from pccl.stress.churn import Action, Churn, Dismiss, Hit, Start
from pccl.stress.plan import Interval, Plan, PlanError, parse_interval


def _play(plan: Plan, disturbances: int) -> tuple[list[Action], list[int]]:
    """All that is done to a run whose peers obey at once, and how many run after each."""
    now = 0.0
    churn = Churn(plan, Random(plan.seed), now)
    running = list(range(len(churn.initial())))
    actions: list[Action] = []
    sizes = []
    newest = running[-1]
    for _ in range(disturbances):
        assert plan.disturb_every.least_s <= churn.next_at - now <= plan.disturb_every.most_s
        now = churn.next_at
        for action in churn.disturb(now, len(running), 0, running):
            actions.append(action)
            if isinstance(action, Start):
                newest += 1
                running.append(newest)
            elif isinstance(action, Dismiss) or action.freeze_s is None:
                running.remove(action.peer)
        sizes.append(len(running))
    return actions, sizes


@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_peers_stays_in_its_limits(seed: int) -> None:
    plan = Plan(seed=seed, peers_max=6, freeze=True, groups=2)
    actions, sizes = _play(plan, 400)
    assert min(sizes) <= 1  # all may go, where others come
    assert 5 <= max(sizes) <= 6
    kinds = {
        type(action) if not isinstance(action, Hit) else ("kill", "freeze")[action.freeze_s is not None]
        for action in actions
    }
    assert kinds == {Start, Dismiss, "kill", "freeze"}
    assert {action.group for action in actions if isinstance(action, Start)} == {0, 1}
    assert _play(plan, 400) == (actions, sizes)


def test_without_joins_two_are_left() -> None:
    actions, sizes = _play(Plan(peers=5, join=False, freeze=False), 50)
    assert len(actions) == 3
    assert sizes[-1] == 2


def test_nothing_to_do() -> None:
    assert _play(Plan(kill=False, join=False, leave=False, freeze=False), 20)[0] == []


def test_intervals() -> None:
    assert parse_interval("0.5..3") == Interval(0.5, 3.0)
    assert parse_interval("2") == Interval(2.0, 2.0)
    for text in ("", "3..0.5", "0", "0..0", "a..b", "-1..2", "1..2..3"):
        with pytest.raises(ValueError, match="is no interval"):
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
def test_plans_that_cannot_be_run(option: str, changes: dict[str, float]) -> None:
    from msgspec.structs import replace

    with pytest.raises(PlanError, match=f"^{option} "):
        replace(Plan(), **changes).check()
