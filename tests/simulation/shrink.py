"""Makes a failing plan small: fewer steps, fewer deliveries, fewer peers, as long as it fails in the same way."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

from tests.simulation.plan import Plan
from tests.simulation.schedule import play

PLAYS_MAX = 3_000
"""The number of smaller plans that are tried."""

Failure = tuple[str, str, int]
"""The type of an exception and where it was raised."""


def failure_of(plan: Plan, play: Callable[[Plan], object] = play) -> Failure | None:
    try:
        play(plan)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return type(error).__name__, where.filename, where.lineno or 0
    return None


def shrink(plan: Plan, failure: Callable[[Plan], object] = failure_of, plays_max: int = PLAYS_MAX) -> Plan:
    """The smallest plan found that fails as `plan` does."""
    expected = failure(plan)
    assert expected is not None, "it does not fail"
    plays = 0
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(plan):
            plays += 1
            if plays > plays_max:
                return plan
            if failure(candidate) == expected:
                plan, progress = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Delta debugging: pieces of half the steps are left out, then of a quarter, ... then single ones; then each step
    is followed by fewer deliveries; then the run is made smaller."""
    size = len(plan.steps)
    while size:
        for start in range(0, len(plan.steps), size):
            yield plan._replace(steps=plan.steps[:start] + plan.steps[start + size :])
        size //= 2
    for at, step in enumerate(plan.steps):
        for deliveries in (0, 1, 3, 10, 40):
            if deliveries < step.deliveries:
                yield plan._replace(
                    steps=(*plan.steps[:at], step._replace(deliveries=deliveries), *plan.steps[at + 1 :])
                )
    if plan.groups > 1:
        yield plan._replace(groups=plan.groups - 1)
    if plan.peers > 2:
        yield plan._replace(peers=plan.peers - 1)
    if plan.founders > 1:
        yield plan._replace(founders=plan.founders - 1)
    for trait in plan.traits:
        yield plan._replace(traits=tuple(each for each in plan.traits if each != trait))
