"""Real machines under random faults and random delivery: whatever happens, everybody agrees and no peer hangs.

Longer campaigns: `python -m tests.simulation`.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.plan import ACTIONS, DELIVERIES, GROUPS_MAX, MASTERS_MAX, PEERS_MAX, SEEDS, Plan, Step
from tests.simulation.schedule import Schedule, play
from tests.simulation.shrink import shrink

SCHEDULES = 40
"""The campaign of CI plays more."""
EXAMPLES = 30
FOUND = (
    # What goes over a new connection of a link waits there until the dialer has taken it over.
    '[16425,2,5,true,[["break_link",34426,0],["break_link",40291,40],["break_link",52738,1],["add",32084,1],'
    '["launch_all",51811,10]]]',
    # A call that has ended under the last master is told so before another of its kind ends, also if a link breaks.
    '[59105,1,4,true,[["sync",5692,0],["block_master",50363,10],["sync",49618,0],["kill_master",42243,0],'
    '["break_link",53995,0]],1]',
    # The last accepted peer of a run is sent away by the master that waits for others: a newcomer has none to wait for.
    '[22518,3,5,true,[["cut_master",63456,0],["long_wait",5514,0],["kill_master",59277,3],["leave",49709,0],'
    '["cut_master",20791,0],["replace_master",63137,3]],1]',
    # A sync of those that are left ends, and a further loss in the same event deposes the master.
    '[16085,2,5,true,[["sync",16161,3],["kill",39971,0],["kill",49780,0]],2]',
    # Two masters that take over from the same last view number the next one differently.
    '[1379,1,5,true,[["launch_pair",16119,1],["replace_master",1480,100],["leave",33281,40],'
    '["replace_master",13463,10]],2]',
    # A peer is brought up under one master, is a donor under the next, and tells a third one what it has.
    '[52593,3,5,true,[["sync",41433,0],["block",3470,40],["kill_master",1124,0],["catch_up",16393,100],'
    '["leave",29481,0],["kill_master",106,0]],2]',
    # A peer leaves that has come again, while its former session is still expected back.
    '[60593,1,2,true,[["kill",64640,0],["kill_master",34956,0],["kill",20778,0],["add",27889,3],'
    '["replace_master",28089,10],["long_wait",35669,40],["leave",60517,10],["update",59954,0]],2]',
    # A newcomer founds a run while another master leads on the first.
    '[4900,1,5,true,[["kill_master",5989,40],["freeze_master",63666,0],["long_wait",9691,0],'
    '["restart_master",21844,10],["add",11134,3],["long_wait",11528,0]],2]',
    # A standby without the only peer that has heard a sync's success is deposed, and the next master leads that peer.
    '[39950,2,5,true,[["cut_master_off",21446,0],["sync",33440,10],["freeze_master",33008,0],["hang",21507,0],'
    '["long_wait",17310,0],["rest",23929,0],["long_wait",10952,0]],2]',
    # A newcomer waits for founders at a standby whose run has ended, and all others at the master that founds runs.
    '[33196,2,5,true,[["kill_master_within",2340,0],["leave",65066,100],["kill",38416,0],["add",18370,0],'
    '["leave",63809,10],["leave",13058,0]],3,[],2]',
)
"""Plans that found something, made small."""
STEPS_MAX = 60

seeds = st.integers(0, SEEDS - 1)
steps = st.builds(Step, st.sampled_from(ACTIONS), seeds, st.sampled_from(DELIVERIES))
plans = st.builds(
    Plan,
    seeds,
    st.integers(1, GROUPS_MAX),
    st.integers(2, PEERS_MAX),
    st.booleans(),
    st.lists(steps, max_size=STEPS_MAX).map(tuple),
    st.integers(0, MASTERS_MAX),
    st.just(()),
    st.integers(1, 2),
)


def test_random_schedules() -> None:
    for seed in range(SCHEDULES):
        play(Plan.of_seed(seed))


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_random_plans(plan: Plan) -> None:
    play(plan)


@pytest.mark.parametrize("plan", FOUND, ids=range(len(FOUND)))
def test_plan_that_found_something(plan: str) -> None:
    play(Plan.loads(plan))


def test_a_schedule_is_replayed_by_its_seed() -> None:
    def log(seed: int) -> list[str]:
        return play(Plan.of_seed(seed)).log

    assert log(7) == log(7) != log(8)


def test_plan_is_replayed_by_its_text() -> None:
    plan = Plan.of_seed(3)
    assert Plan.loads(plan.dumps()) == plan


def test_every_action_of_a_plan_is_a_step() -> None:
    assert [action for action in ACTIONS if not callable(getattr(Schedule, action, None))] == []


def test_shrinking_leaves_the_steps_that_matter() -> None:
    def fails(candidate: Plan) -> bool | None:
        actions = [step.action for step in candidate.steps]
        return ("launch_all" in actions and "kill" in actions[actions.index("launch_all") :]) or None

    plan = next(plan for plan in map(Plan.of_seed, count()) if fails(plan) and len(plan.steps) > 20)
    small = shrink(plan, fails)
    assert [(step.action, step.deliveries) for step in small.steps] == [("launch_all", 0), ("kill", 0)]
    assert (small.groups, small.peers) == (1, 2)
