"""Says in which schedules mutants could make a difference.

A schedule that never comes to a mutant's line, or in which the line comes to the same with the mutant, plays as without
it, so it need not be played with it. Most conditions are reached by nearly all schedules and differ in few; most lines
of recovery are reached by one schedule in a hundred, and some by none: then the simulator is blind there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.mutation.instruments import NOTE, noter
from tests.mutation.transplant import transplant
from tests.simulation.plan import Plan
from tests.simulation.schedule import play


def reached(texts: Mapping[str, str], seeds: Sequence[int]) -> dict[str, list[int]]:
    """Return the seeds of the schedules in which something is noted, by what is. `texts` has the instrumented text of
    each module's path."""
    noted: set[str] = set()
    for path, text in texts.items():
        vars(transplant(path, text))[NOTE] = noter(noted)
    found: dict[str, list[int]] = {}
    for seed in seeds:
        noted.clear()
        play(Plan.of_seed(seed))
        for name in noted:
            found.setdefault(name, []).append(seed)
    return found
