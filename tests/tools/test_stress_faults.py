"""The choice of faults."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from pccl.tools.report import PlanError
from pccl.tools.stress.faults import (
    MASTER,
    PARTITIONS_AT_ONCE_MAX,
    Action,
    Dismiss,
    Hit,
    Partition,
    Partitions,
    Start,
    disturbance,
)
from pccl.tools.stress.plan import Interval, Plan, parse_interval

PLAN = Plan(partition=Interval(1, 2), partition_for=Interval(0.5, 3))
SLOTS = [0, 2, 5, 7]


def _partitions(seed: int, count: int = 200) -> list[Partition]:
    partitions = Partitions(PLAN, Random(seed))
    made = []
    for now in range(count):
        for healed in partitions.heal(now):
            assert healed not in partitions.active
        partition = partitions.begin(now, SLOTS)
        if partition is not None:
            made.append(partition)
            assert 0.5 <= partition.seconds <= 3
            for sender, receiver in partition.blocked:
                assert sender in partitions.blocked_for(receiver)
        assert len(partitions.active) <= PARTITIONS_AT_ONCE_MAX
        assert all(now < partitions.heals_at <= now + 3 for _ in partitions.active)
    partitions.heal(float("inf"))
    assert not partitions.active
    assert not partitions.blocked_for(MASTER)
    return made


def test_partition_kinds() -> None:
    made = _partitions(1)
    assert {partition.kind for partition in made} == {"pair", "peer", "master", "half"}
    assert {len({a in each.island for a, _ in each.blocked}) for each in made} == {1, 2}, "one or both directions"
    for partition in made:
        processes = {each for way in partition.blocked for each in way}
        assert processes <= {*SLOTS, MASTER}
        if partition.kind == "pair":
            assert len(processes - {MASTER}) == len(processes) == 2
        elif partition.kind == "master":
            assert MASTER in processes
            assert len(processes) == 2
        else:
            assert processes == {*SLOTS, MASTER}
    assert made == _partitions(1) != _partitions(2)


def test_partitions_of_masters() -> None:
    plan = msgspec.structs.replace(PLAN, standbys=2)
    masters = {MASTER, MASTER - 1, MASTER - 2}
    cut_off, sides = set(), set()
    for seed in range(400):
        partition = Partitions(plan, Random(seed)).begin(1.0, SLOTS)
        assert partition is not None
        here = masters & {each for way in partition.blocked for each in way}
        if partition.kind == "master":
            cut_off.add(frozenset(here))
        elif partition.kind == "peer":
            assert here == masters
        elif partition.kind == "half":
            sides.add(len(masters & partition.island))
    assert cut_off == {frozenset((master,)) for master in masters} | {frozenset(masters)}
    assert sides == {0, 1, 2, 3}


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
