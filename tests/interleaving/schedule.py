"""A schedule of the interleavings: what a seed stands for, and its playing."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from tests.interleaving.choosers import Priorities, Straight, Switching, Walk
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.scheduler import ScheduleError, Scheduler
from tests.interleaving.tracing import Grain, trace_this_thread
from tests.interleaving.world import World, seeded

MODES = ("walk", "priorities")
STEPS = {Grain.HANDOVERS: 500, Grain.LINES: 5_000, Grain.BYTECODES: 5_000}
"""About how many choices a schedule has: the change points of PCT are spread over that many."""
DEPTH_MAX = 5
COLLECT_EVERY = 25

Fault = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Plan:
    """All that decides a schedule."""

    seed: int
    scenario: str
    grain: Grain
    mode: str
    switch: float
    depth: int
    early: float
    engine_threads: int

    @classmethod
    def of_seed(
        cls, seed: int, scenario: str | None = None, grain: Grain | None = None, mode: str | None = None
    ) -> Plan:
        """Return the plan of a seed, where what is given is fixed."""
        rng = seeded(seed, "plan")
        scenario_drawn = rng.choice(("turns", "turns", *SCENARIOS))
        grain_drawn = rng.choices(list(Grain), (3, 1, 1))[0]
        mode_drawn = rng.choice(MODES)
        switch = rng.choice((0.01, 0.03, 0.1, 0.3))
        depth = rng.randrange(2, DEPTH_MAX + 1)
        made = SCENARIOS[scenario or scenario_drawn]
        early = rng.choice((0.0, made.early))
        threads = rng.choice(made.engine_threads)
        return cls(
            seed, scenario or scenario_drawn, grain or grain_drawn, mode or mode_drawn, switch, depth, early, threads
        )

    def __str__(self) -> str:
        how = f"depth {self.depth}" if self.mode == "priorities" else f"switches {self.switch:g}"
        early = f", time passes early {self.early:g}" if self.early else ""
        threads = f", {self.engine_threads} engine threads" if self.engine_threads > 1 else ""
        return f"seed {self.seed}: {self.scenario}, {self.grain.value}, {self.mode} ({how}){early}{threads}"

    @property
    def command(self) -> str:
        """The command that plays it again."""
        fixed = f"--scenario {self.scenario} --grain {self.grain.value} --mode {self.mode}"
        return f"python -m tests.interleaving --schedules 1 --seed {self.seed} {fixed}"


@dataclass(frozen=True)
class Played:
    """What a schedule was like."""

    steps: int
    switches: int
    digest: str
    virtual_s: float


_played = 0


def play(plan: Plan, fault: Fault | None = None) -> Played:
    """Play a schedule. ScheduleError says what went wrong. `fault` is put in for its time."""
    global _played
    rng = seeded(plan.seed, "chooser")
    later: Walk | Priorities
    if plan.mode == "walk":
        later = Walk(rng, plan.switch, plan.early)
    else:
        later = Priorities(rng, plan.depth, STEPS[plan.grain], plan.early)
    chooser = Switching(Straight(), later)
    # Ctrl-C comes wherever the interpreter looks for signals, so the grain is that of bytecodes there.
    grain = plan.grain

    def begin_thread() -> None:
        own = grain
        me = scheduler.me
        if me is not None and me.name == "interrupted":
            own = Grain.BYTECODES
        trace_this_thread(own, scheduler.step)

    scheduler = Scheduler(plan.seed, chooser, begin_thread)
    made = SCENARIOS[plan.scenario]
    world = World(scheduler, plan.engine_threads, made.may_keep_tags)
    scenario = made(world, chooser, plan.seed, is_strict=plan.early == 0)
    if _played % COLLECT_EVERY == 0:
        gc.collect()
    _played += 1
    gc.disable()  # finalizers run where the seed has them run
    try:
        with world.installed(), fault() if fault is not None else nullcontext():
            scheduler.spawn("main", scenario.main)
            try:
                scheduler.play()
            except ScheduleError as error:
                raise ScheduleError(f"{plan}\n{error}\n\nagain: {plan.command}") from None
    finally:
        gc.enable()
    digest = hashlib.sha256(repr((scheduler.digest, scheduler.steps)).encode()).hexdigest()[:12]
    return Played(scheduler.steps, scheduler.switches, digest, scheduler.now)
