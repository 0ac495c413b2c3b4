"""Injects faults into real peers, and checks whom pccl names, and how soon:

    sudo python -m tests.culprits --injections 60 [--seed 1] [--kinds frozen lossy] [--quiet-minutes 5]

Each run is a lab (`tests.wan.lab`) of two to five peers with links, steps and sizes drawn by the seed, in which one
fault after the other is injected, named, and taken away. A name is right if its kind and its culprit are, and it was
given within 5 s; whatever else is named while the fault is there, or while nothing is wrong, is counted as well.
`--quiet-minutes` then watches runs without any fault, in which programs have habits: uneven steps, pauses, saving,
broadcasts, ops that overlap with what is computed, threads.

Exit status 1: fewer than RIGHT_SHARE are named rightly, or further names, while there is a fault or between two, are
more than FALSE_SHARE of the injections each, or anybody is named in the quiet minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tests.culprits.faults import FAULTS
from tests.culprits.peer import HABITS
from tests.culprits.stage import Plan, Stage
from tests.support.arguments import minutes, natural, until_interrupted
from tests.wan.lab import unavailable

NAMED_WITHIN_S = 5.0
WATCHED_S = 8.0
PER_RUN = 8
SETTLE_S = 60.0
QUIET_S = 3.0
RIGHT_SHARE = 0.99
FALSE_SHARE = 0.02
UNSETTLED_MAX = 3
"""Number of runs in a row that may come to nothing."""


@dataclass
class Tally:
    """What has come of the injections of one kind."""

    injected: int = 0
    right_s: list[float] = field(default_factory=list)
    late: int = 0
    missed: int = 0
    others: int = 0
    """Further names while the fault was there."""

    def row(self, kind: str) -> str:
        times = sorted(self.right_s)
        median = f"{statistics.median(times):.1f}" if times else "-"
        worst = f"{times[-1]:.1f}" if times else "-"
        share = f"{len(times) / self.injected:.1%}" if self.injected else "-"
        return (
            f"{kind:12} {self.injected:9} {len(times):6} {share:>7} {self.late:5} {self.missed:7} {self.others:12} "
            f"{median:>9} {worst:>8}"
        )


HEAD = (
    f"{'fault':12} {'injected':>9} {'right':>6} {'':>7} {'late':>5} {'missed':>7} {'other names':>12} "
    f"{'median s':>9} {'worst s':>8}"
)


def inject(stage: Stage, kind: str, chance: random.Random, tally: Tally, number: int) -> None:
    """Inject one fault, and count whom pccl names for it."""
    begun = len(stage.begun)
    start_s = time.monotonic()
    fault = FAULTS[kind](stage, chance)
    try:
        stage.until(lambda: stage.now & fault.names, WATCHED_S)
        if not stage.now & fault.names:
            stage.explain()
        elif kind not in ("frozen", "black hole"):
            time.sleep(0.5)
    finally:
        fault.end()
    named = stage.begun[begun:]
    tally.injected += 1
    right = [at_s - start_s for at_s, name, _ in named if name in fault.names]
    wrong = [(at_s - start_s, name, text) for at_s, name, text in named if name not in fault.names]
    tally.others += len(wrong)
    outcome = "missed"
    if right and right[0] <= NAMED_WITHIN_S:
        tally.right_s.append(right[0])
        outcome = f"named after {right[0]:.1f} s"
    elif right:
        tally.late += 1
        outcome = f"late, after {right[0]:.1f} s"
    else:
        tally.missed += 1
    print(f"{number:5} {kind}, {fault.what}: {outcome}", flush=True)
    for at_s, name, text in wrong:
        print(f"          also {name} after {at_s:.1f} s: {text}", flush=True)


def failings(tallies: Collection[Tally], false_names: int, false_in_quiet: int) -> list[str]:
    """Return what is not as it has to be. `false_names` were given between two faults."""
    total, right = sum(t.injected for t in tallies), sum(len(t.right_s) for t in tallies)
    others = sum(t.others for t in tallies)
    found = []
    if right < RIGHT_SHARE * total:
        found.append(f"{right} of {total} were named rightly within {NAMED_WITHIN_S:g} s, fewer than {RIGHT_SHARE:.0%}")
    if others > FALSE_SHARE * total:
        found.append(f"{others} further names during {total} faults, more than {FALSE_SHARE:.0%}")
    if false_names > FALSE_SHARE * total:
        found.append(f"{false_names} names between {total} faults, more than {FALSE_SHARE:.0%}")
    if false_in_quiet:
        found.append(f"{false_in_quiet} names in runs without a fault")
    return found


def _no_run(text: str) -> NoReturn:
    """End: who is not in a run cannot be named, and that shows nothing."""
    raise SystemExit(f"{text}; is the machine too busy for it, or do peers not even begin?")


def watch_quiet(seconds: float, seed: int) -> int:
    """Watch a run in which nothing is wrong. Return how many names were given."""
    plan = replace(Plan.draw(random.Random(f"quiet {seed}")), habit=HABITS[seed % len(HABITS)])
    with Stage(plan, seed) as stage:
        if not stage.settle(SETTLE_S, QUIET_S):
            _no_run(f"quiet run {seed}: did not settle: ring {stage.ring}, named {stage.now}")
        begun = len(stage.begun)
        time.sleep(seconds)
        for _, name, text in stage.begun[begun:]:
            print(f"quiet run {seed}, {plan}: false name {name}: {text}", flush=True)
        return len(stage.begun) - begun


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.culprits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--injections", type=natural, default=30)
    parser.add_argument("--seed", type=int, default=None, help="of the first run (default: a fresh one)")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--quiet-minutes", type=minutes, default=0.0)
    arguments = parser.parse_args()
    if not arguments.injections and not arguments.quiet_minutes:
        parser.error("--injections 0 needs --quiet-minutes: else nothing is looked at")
    reason = unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    tallies = {kind: Tally() for kind in arguments.kinds}
    done = false_names = unsettled = 0
    quiet_s = 0.0
    while done < arguments.injections:
        chance = random.Random(seed)
        plan = Plan.draw(chance)
        print(f"run with --seed {seed}: {plan}", flush=True)
        with Stage(plan, seed) as stage:
            for _ in range(min(PER_RUN, arguments.injections - done)):
                begun = len(stage.begun)
                if not stage.settle(SETTLE_S, QUIET_S):
                    print(f"      does not settle: ring {stage.ring}, named {stage.now}", flush=True)
                    unsettled += 1
                    if unsettled >= UNSETTLED_MAX:
                        _no_run(f"{unsettled} runs in a row do not settle")
                    break
                unsettled = 0
                quiet_s += QUIET_S
                for _, name, text in stage.begun[begun:]:
                    false_names += 1
                    print(f"      afterwards {name}: {text}", flush=True)
                kind = min(tallies, key=lambda kind: (tallies[kind].injected, chance.random()))
                done += 1
                inject(stage, kind, chance, tallies[kind], done)
        seed += 1
    print(HEAD)
    for kind, tally in tallies.items():
        print(tally.row(kind))
    total, right = sum(t.injected for t in tallies.values()), sum(len(t.right_s) for t in tallies.values())
    others = sum(t.others for t in tallies.values())
    print(
        f"{right} of {total} named rightly within {NAMED_WITHIN_S:g} s; {others} further names during faults, and "
        f"{false_names} while nothing was wrong"
    )
    end_s = time.monotonic() + 60 * arguments.quiet_minutes
    false_in_quiet = 0
    while (left_s := end_s - time.monotonic()) > 0:
        false_in_quiet += watch_quiet(min(left_s, 120.0), seed)
        seed += 1
    if arguments.quiet_minutes:
        print(f"{false_in_quiet} names in {arguments.quiet_minutes:g} minutes without a fault")
    failed = failings(tallies.values(), false_names, false_in_quiet)
    for each in failed:
        print(f"not good enough: {each}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(until_interrupted(main))
