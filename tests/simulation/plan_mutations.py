"""Plans made of others: steps taken out, put in, moved, done again with other chances, and halves of two joined."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.plan import (
    ACTIONS,
    DELIVERIES,
    FAILOVERS,
    GROUPS_MAX,
    MASTERS_MAX,
    ONE_NAME,
    PEERS_MAX,
    SEEDS,
    TRAITS,
    Plan,
    Step,
)

MUTATIONS_MAX = 4
"""The number of mutations of one plan, at most."""
STEPS_MAX = 200
NEW_TRIAL_SHARE = 0.7
"""The probability that another trial follows."""
FAILOVER_SHARE = 0.4
"""The probability that a step which is put in is one that happens to masters."""

Steps = list[Step]


def mutate(plan: Plan, other: Plan, rng: random.Random) -> Plan:
    """Return a plan like this one, for which parts of another one may be taken."""
    for _ in range(rng.randint(1, MUTATIONS_MAX)):
        plan = rng.choice(_MUTATIONS)(plan, other, rng)
    trial = rng.randrange(1, SEEDS) if rng.random() < NEW_TRIAL_SHARE else plan.trial
    return plan._replace(steps=plan.steps[:STEPS_MAX], trial=trial)


def _on_steps(change: Callable[[Steps, random.Random], Steps]) -> Callable[[Plan, Plan, random.Random], Plan]:
    def mutated(plan: Plan, _: Plan, rng: random.Random) -> Plan:
        return plan._replace(steps=tuple(change(list(plan.steps), rng)) if plan.steps else (_step(rng),))

    return mutated


def _step(rng: random.Random) -> Step:
    actions = tuple(FAILOVERS) if rng.random() < FAILOVER_SHARE else ACTIONS
    return Step(rng.choice(actions), rng.randrange(SEEDS), rng.choice(DELIVERIES))


def _drop(steps: Steps, rng: random.Random) -> Steps:
    start = rng.randrange(len(steps))
    return steps[:start] + steps[start + rng.choice((1, 1, 2, 5)) :]


def _insert(steps: Steps, rng: random.Random) -> Steps:
    at = rng.randint(0, len(steps))
    return steps[:at] + [_step(rng) for _ in range(rng.choice((1, 1, 2, 4)))] + steps[at:]


def _swap(steps: Steps, rng: random.Random) -> Steps:
    a, b = rng.randrange(len(steps)), rng.randrange(len(steps))
    steps[a], steps[b] = steps[b], steps[a]
    return steps


def _repeat(steps: Steps, rng: random.Random) -> Steps:
    """Do some steps once more, later."""
    start = rng.randrange(len(steps))
    again = [step._replace(seed=rng.randrange(SEEDS)) for step in steps[start : start + rng.choice((1, 3, 6))]]
    at = rng.randint(start, len(steps))
    return steps[:at] + again + steps[at:]


def _reseed(steps: Steps, rng: random.Random) -> Steps:
    at = rng.randrange(len(steps))
    steps[at] = steps[at]._replace(seed=rng.randrange(SEEDS))
    return steps


def _retime(steps: Steps, rng: random.Random) -> Steps:
    at = rng.randrange(len(steps))
    steps[at] = steps[at]._replace(deliveries=rng.choice(DELIVERIES))
    return steps


def _join(plan: Plan, other: Plan, rng: random.Random) -> Plan:
    """The beginning of one plan and the end of another."""
    cut, at = rng.randint(0, len(plan.steps)), rng.randint(0, len(other.steps))
    return plan._replace(steps=plan.steps[:cut] + other.steps[at:])


def _rebuild(plan: Plan, other: Plan, rng: random.Random) -> Plan:
    """The same steps in another world."""
    what = rng.randrange(5)
    if what == 0:
        return plan._replace(seed=rng.randrange(SEEDS))
    if what == 1:
        return plan._replace(groups=rng.randint(1, GROUPS_MAX))
    if what == 2:
        return plan._replace(peers=rng.randint(2, PEERS_MAX))
    if what == 3:
        masters = rng.randint(0, MASTERS_MAX)
        return plan._replace(masters=masters, traits=_fitting(plan.traits, masters))
    trait = rng.choice(TRAITS)
    return plan._replace(traits=_fitting(tuple({*plan.traits} ^ {trait}), plan.masters))


def _fitting(traits: tuple[str, ...], masters: int) -> tuple[str, ...]:
    return tuple(sorted(trait for trait in traits if trait != ONE_NAME or masters > 1))


_MUTATIONS = (
    _on_steps(_drop),
    _on_steps(_insert),
    _on_steps(_insert),
    _on_steps(_swap),
    _on_steps(_repeat),
    _on_steps(_reseed),
    _on_steps(_retime),
    _join,
    _rebuild,
)
