"""Random mixtures of all faults by seed: another setting, other faults and other times for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from tests.wan.lab import Link
from tests.wan.lab import Path as Way
from tests.wan.nemesis.faults import BlackHole, Cut, Fault, Freeze, Jump, Kill, Shaped, Vanish, both_ways, one_way
from tests.wan.nemesis.scenarios import DAY_S, HOUR_S, LARGE, Scenario
from tests.wan.nemesis.stage import Setting
from tests.wan.nemesis.supervisor import Timed
from tests.wan.nemesis.values import Load

WORKLOADS = ("steps",) * 8 + ("diloco", "async", "spsa")
SHORT_S, LONG_S = (0.1, 2.5), (3.0, 16.0)
BLACK_HOLE_S = (4.0, 9.0)


def mixture(seed: int, seconds: float) -> Scenario:
    """The mixture of this seed, whose faults go on for that long."""
    random = Random(f"mixture {seed}")
    masters = random.choice((1, 1, 2, 2, 3))
    setting = Setting(
        peers=random.choice((3, 4, 4, 5)),
        masters=masters,
        keeps_state=masters == 1 and random.random() < 0.6,
        workload=random.choice(WORKLOADS),
        load=replace(
            random.choice((Load(), Load(), LARGE, Load(ops=8, small_max=64, state_bytes=4 << 20))),
            impatient=random.choice((0.0, 0.0, 0.02)),
            optimize_every=random.choice((0, 0, 0, 75)),
        ),
        encrypts=random.random() < 0.25,
        log=random.choice(("file", "file", "full pipe")),
        jumps=random.random() < 0.3,
        link=random.choice((Link(delay_ms=1), Link(delay_ms=1), Link(delay_ms=15), Link(delay_ms=5, rate_mbit=100))),
    )
    gap_s = random.choice((1.0, 3.0, 8.0))
    text = f"{setting.peers} peers, {masters} masters, {setting.workload}, a fault every {gap_s:g} s or so"

    def plan(random: Random, setting: Setting) -> Iterator[Timed]:
        at_s = 1.0
        while at_s < seconds:
            fault, bounds = _fault(random, setting)
            yield Timed(at_s, random.uniform(*bounds), fault)
            at_s += random.expovariate(1 / gap_s)

    return Scenario(f"mixture-{seed}", text, setting, plan, seconds)


def _fault(random: Random, setting: Setting) -> tuple[Fault, tuple[float, float]]:
    """A fault, and the bounds of its length."""
    everybody = range(setting.hosts)
    bounds = SHORT_S if random.random() < 0.5 else LONG_S
    host = random.choice(setting.master_hosts if random.random() < 0.2 else setting.peer_hosts)
    others = [each for each in everybody if each != host]
    other = random.choice(others)
    direction: Callable[..., frozenset[tuple[int, int]]] = random.choice((both_ways, both_ways, one_way))
    kind = random.choices(
        ("isolate", "pair", "halves", "kill", "vanish", "freeze", "shape", "slow", "hole", "jump"),
        weights=(2, 3, 1, 3, 3, 3, 2, 2, 1, 2 if setting.jumps else 0),
    )[0]
    match kind:
        case "isolate":
            return Cut(direction([host], others)), bounds
        case "pair":
            pair = [host], [other]
            return Cut(direction(*(pair if random.random() < 0.5 else pair[::-1]))), bounds
        case "halves":
            some = random.sample(everybody, random.randint(1, setting.hosts - 1))
            return Cut(direction(some, [each for each in everybody if each not in some])), bounds
        case "kill":
            return Kill(host), bounds
        case "vanish":
            return Vanish(host), bounds
        case "freeze":
            ahead_s = random.choice((0.0, 60.0, HOUR_S)) if setting.jumps else 0.0
            return Freeze(host, ahead_s), bounds
        case "shape":
            way = Way(
                delay_ms=random.choice((None, 20.0, 80.0)),
                loss=random.choice((None, 0.01, 0.05)),
                reordered=random.choice((0.0, 0.1, 0.3)),
                held_ms=random.choice((5.0, 40.0)),
            )
            return Shaped(direction([host], others), way, is_severe=True), bounds
        case "slow":
            way = Way(rate_mbit=random.uniform(0.3, 5.0))
            return Shaped(direction([host], [other]), way, is_severe=True), bounds
        case "hole":
            return BlackHole(random.choice(setting.peer_hosts), random.choice((600, 1000, 1400))), BLACK_HOLE_S
        case _:
            seconds = random.choice((-1, 1)) * random.choice((1.0, 30.0, HOUR_S, DAY_S))
            return Jump(host, seconds), bounds
