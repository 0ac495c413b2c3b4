"""Steering: plans made of others can be played, and the coverage map counts without changing what a module does."""

from __future__ import annotations

import ast
import random

import pytest

from tests.simulation import coverage_map
from tests.simulation.plan import ACTIONS, DRIFT, ONE_NAME, Plan
from tests.simulation.plan_mutations import STEPS_MAX, mutate
from tests.simulation.schedule import Schedule, play
from tests.simulation.steering import Played, Steering

SOURCE = '''\
"""A module."""

from __future__ import annotations


def sign(number: int, is_strict: bool = False) -> str:
    """Return the sign."""
    if number > 0 and (is_strict or number > 1):
        return "+"
    return "-" if number < 0 else ", ".join([str(each) for each in (0, 1) if not each])
'''


def test_every_action_of_a_plan_is_a_step() -> None:
    assert [action for action in ACTIONS if not callable(getattr(Schedule, action, None))] == []


@pytest.mark.parametrize("seed", range(4))
def test_plans_made_of_others_play(seed: int) -> None:
    rng = random.Random(seed)
    plan = Plan.of_seed(seed)
    for other in range(10, 30):
        plan = mutate(plan, Plan.of_seed(other), rng)
        assert len(plan.steps) <= STEPS_MAX
        assert ONE_NAME not in plan.traits or plan.masters > 1
    assert Plan.loads(plan.dumps()) == plan
    play(plan._replace(steps=plan.steps[:40]))


def test_a_plan_without_traits_is_read_as_it_was_written() -> None:
    plan = Plan.of_seed(5, masters=2, traits=(DRIFT,))
    *shorter, _, _, _ = plan.dumps().rsplit(",", 3)
    assert Plan.loads(f"{','.join(shorter)}]") == plan._replace(traits=(), founders=1, trial=0)


def test_steering_keeps_the_plans_that_reach_something_new(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = [coverage_map.Branch("pccl.protocol.failover.machine.recovery", line, "then") for line in range(9)]
    monkeypatch.setattr(coverage_map, "BRANCHES", branches)
    steering = Steering(1, masters=2, traits=None)
    first, second, third = steering.plans(3)
    steering.note([Played(first, {1: 1}, ""), Played(second, {1: 1}, ""), Played(third, {1: 2, 4: 1}, "")])
    assert steering.reached == {1: 2, 4: 1}
    assert "2 plans kept" in steering.account()
    assert {plan.masters for plan in steering.plans(20)} == {2}


def test_the_coverage_map_counts_both_sides_of_each_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("BRANCHES", []), ("COUNTS", []), ("REACHED", bytearray())):
        monkeypatch.setattr(coverage_map, name, empty)
    tree = coverage_map.instrument("module", ast.parse(SOURCE))
    plain: dict[str, object] = {}
    counted: dict[str, object] = {}
    exec(compile(SOURCE, "module", "exec"), plain)
    exec(compile(tree, "module", "exec"), counted)
    taken = []
    for arguments in ((1, True), (1,), (-1,), (0,)):
        assert counted["sign"](*arguments) == plain["sign"](*arguments)  # type: ignore[operator]
        numbers = coverage_map.take()
        taken.append(sorted((coverage_map.BRANCHES[number].kind, grade) for number, grade in numbers.items()))
    assert taken == [
        [("function", 1), ("operand", 1), ("then", 1)],
        [("else", 1), ("else", 1), ("function", 1), ("loop", 1), ("operand", 1), ("operand", 1)],
        [("else", 1), ("function", 1), ("then", 1)],
        [("else", 1), ("else", 1), ("function", 1), ("loop", 1)],
    ]
