"""Steers schedules to where coverage is new: plans that took a branch as none had before, or took it more often, are
kept, and others are made of them (`plan_mutations`), recovery first.

    python -m tests.simulation --steer --minutes 10 --jobs 2

It is a fuzzer with feedback, as AFL is one: a *feature* is a branch with the logarithm of how often one schedule takes
it (`coverage_map`). A plan that has features which no plan before had enters the corpus, and is chosen for mutation the
more often the more of them it has, those of the modules of `FIRST` above all, and the less often the more children it
had. One schedule in `FRESH` comes from a seed, so that what the corpus has not, is found, too.

In the end a report says for each module how many branches were taken, and names all that were not. Each of these is
dead, or a guard that tests of the module cover, or stands for a kind of fault that the simulation does not play.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.simulation import coverage_map
from tests.simulation.plan import Plan
from tests.simulation.plan_mutations import mutate
from tests.simulation.schedule import play

FIRST = frozenset(
    f"pccl.protocol.{name}"
    for name in (
        *("recovery", "recovery_report", "summary_tally", "gathering", "failover", "founding", "known_runs", "record"),
        *("state_election", "quorum", "returning", "master.leadership", "master.liveness", "peer.known_views"),
    )
)
"""The modules that matter most."""
FIRST_WEIGHT = 4.0
FRESH = 5
"""One of so many schedules comes from a seed."""


class Played(NamedTuple):
    plan: Plan
    features: dict[int, int]
    """Those that are new to the process that has played it: a branch's number, and how often it was taken."""
    error: str


@dataclass
class Entry:
    plan: Plan
    weight: float
    children: int = 0


class Steering:
    """The corpus, and what it has reached."""

    def __init__(self, seed: int, masters: int | None, traits: tuple[str, ...] | None) -> None:
        self._rng = random.Random(seed)
        self._next_seed = seed
        self._masters = masters
        self._traits = traits
        self._corpus: list[Entry] = []
        self.reached: dict[int, int] = {}
        """The branches that were taken, each with how often at most."""
        self.played = 0

    def plans(self, number: int) -> list[Plan]:
        """Return plans that are worth playing now."""
        return [self._plan() for _ in range(number)]

    def _plan(self) -> Plan:
        rng = self._rng
        if not self._corpus or rng.randrange(FRESH) == 0:
            self._next_seed += 1
            return Plan.of_seed(self._next_seed, self._masters, self._traits)
        weights = [entry.weight / (1 + entry.children) for entry in self._corpus]
        entry, other = rng.choices(self._corpus, weights, k=2)
        entry.children += 1
        plan = mutate(entry.plan, other.plan, rng)
        if self._masters is not None:
            plan = plan._replace(masters=self._masters)
        return plan if self._traits is None else plan._replace(traits=self._traits)

    def note(self, played: Sequence[Played]) -> None:
        """Take in what came of plans that were played."""
        for each in played:
            self.played += 1
            new = {branch for branch, grade in each.features.items() if grade > self.reached.get(branch, 0)}
            if new:
                for branch in new:
                    self.reached[branch] = each.features[branch]
                self._corpus.append(Entry(each.plan, sum(map(_weight_of, new))))

    def account(self) -> str:
        return (
            f"{self.played} schedules, {len(self.reached)} of {len(coverage_map.BRANCHES)} branches, "
            f"{len(self._corpus)} plans kept"
        )


def _weight_of(branch: int) -> float:
    return FIRST_WEIGHT if coverage_map.BRANCHES[branch].module in FIRST else 1.0


_seen: dict[int, int] = {}
"""The features that this process has had."""


def play_plans(plans: Sequence[Plan]) -> list[Played]:
    """Play plans in a process that has the coverage map."""
    played = []
    for plan in plans:
        coverage_map.take()
        error = ""
        try:
            play(plan)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:300]
        features = {branch: grade for branch, grade in coverage_map.take().items() if grade > _seen.get(branch, 0)}
        _seen.update(features)
        played.append(Played(plan, features, error))
    return played


def blocks(steering: Steering, size: int, schedules: int | None, minutes: float | None) -> Iterator[list[Plan]]:
    end_at = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    given = 0
    while time.monotonic() < end_at and (schedules is None or given < schedules):
        number = size if schedules is None else min(size, schedules - given)
        given += number
        yield steering.plans(number)


def report(steering: Steering) -> Iterator[str]:
    """Yield the lines of the report."""
    branches = coverage_map.BRANCHES
    of_module, reached = Counter(each.module for each in branches), Counter[str]()
    for number in steering.reached:
        reached[branches[number].module] += 1
    for module in sorted(of_module, key=lambda module: (module not in FIRST, module)):
        yield f"{reached[module]:5} of {of_module[module]:5} branches of {module}"
    yield "never taken:"
    for number, branch in enumerate(branches):
        if number not in steering.reached:
            yield f"    {branch}"
