"""Puts one fault after the other into a copy of pccl, and says what finds it.

    python -m tests.mutation --jobs 2                       all mutants
    python -m tests.mutation --only recovery                those of an area, or one by its name
    python -m tests.mutation --only mends                   those that pccl has had, wherever they stand
    python -m tests.mutation --stage simulation             schedules alone
    python -m tests.mutation --sample 15 --seed 1           some of them, the same each time
    python -m tests.mutation --stage simulation --known     what schedules have killed before, they kill again
    python -m tests.mutation --fresh --report table.md      all anew, with a table

Exit code 1 if a mutant survives that is not said to be equivalent, or cannot be applied.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NoReturn

from tests.mutation.mutants import ROOT, Mutant, MutantError, load
from tests.mutation.results import Cache, Killers, Outcome, account, scores
from tests.mutation.stages import Players, Reach, Stages, UnsoundError, end_all
from tests.mutation.tree import Base
from tests.support.arguments import positive

SCHEDULES = 3000
CHILDREN = 2000
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "pccl-mutation"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="areas and names (default: all)")
    parser.add_argument(
        "--stage", default="", choices=("simulation", "native", "unit", "tests"), help="this stage alone"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="J", help="mutants at a time (default 1)")
    parser.add_argument(
        "--schedules", type=positive, default=SCHEDULES, metavar="N", help=f"by seed, at most (default {SCHEDULES})"
    )
    parser.add_argument(
        "--children", type=int, default=CHILDREN, metavar="N", help=f"of these, at most (default {CHILDREN})"
    )
    parser.add_argument("--sample", type=positive, metavar="N", help="so many of them, by chance")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the sample (default 1)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write all outcomes as a table in Markdown")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"(default {CACHE})")
    parser.add_argument("--fresh", action="store_true", help="use nothing that is remembered of earlier runs")
    parser.add_argument("--known", action="store_true", help="those that killers.json says have been killed by --stage")
    parser.add_argument("--record", action="store_true", help="write what has killed each to killers.json")
    parser.add_argument("--equivalent", action="store_true", help="also those that are said to be equivalent")
    parser.add_argument("--list", action="store_true", help="say which there are, and run none")
    options = parser.parse_args()
    try:
        known = load()
        killers = Killers()
        chosen = choose(known, killers, options)
    except MutantError as error:
        print(error)
        return 1
    if options.list:
        for mutant in chosen:
            print(f"{mutant.area}/{mutant.name}: {mutant.path}\n    {mutant.breaks}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)  # so that nothing is left behind
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pccl-mutation-"))
        base = Base(ROOT, Path(scratch))
        remembered = Cache(options.cache)
        simulated = [mutant for mutant in known if mutant.is_simulated]
        players = stack.enter_context(Players(base.root))
        reach = Reach(base, remembered, simulated, options.jobs, players)
        numbers = (options.schedules, options.children)
        stages = Stages(base, remembered, killers, numbers, options.stage, options.fresh, reach, players)
        found: dict[Mutant, Outcome] = {}
        ended_by = 0
        try:
            _run_all(stages, chosen, found, options.jobs, options.equivalent)
        except UnsoundError as error:
            print(error)
            ended_by = 1
        except KeyboardInterrupt:
            print("interrupted: this is what has an outcome", file=sys.stderr)
            ended_by = 130
    outcomes = [(mutant, found[mutant]) for mutant in chosen if mutant in found]
    if options.record:
        killers.record(outcomes, known)
    status = _report(outcomes, options.report)
    return ended_by or status


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def choose(known: list[Mutant], killers: Killers, options: argparse.Namespace, root: Path = ROOT) -> list[Mutant]:
    """Return the mutants that are asked for. Raises MutantError if one of all cannot be applied, and for names
    that nobody has."""
    text_of = cache(lambda path: (root / path).read_text(encoding="utf-8"))
    errors = []
    for mutant in known:
        try:
            mutant.check(text_of(mutant.path))
        except MutantError as error:
            errors.append(str(error))
    if errors:
        raise MutantError("\n".join(errors))
    wanted = set(options.only)
    chosen = [each for each in known if not wanted or wanted & {each.name, each.area, "mends" if each.mends else ""}]
    names = {"mends"}.union(*({each.name, each.area} for each in known))
    if wanted - names:
        raise MutantError(f"no area and no mutant is called so: {', '.join(sorted(wanted - names))}")
    if options.stage == "simulation":
        chosen = [each for each in chosen if each.is_simulated]
    elif options.stage == "native":
        chosen = [each for each in chosen if each.is_native]
    if options.known:
        chosen = [each for each in chosen if killers.of(each, options.stage)]
    if options.sample is not None:
        chosen = [each for each in chosen if not each.equivalent]
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    return chosen


def _run_all(
    stages: Stages, chosen: list[Mutant], outcomes: dict[Mutant, Outcome], jobs: int, equivalent: bool
) -> None:
    """Run mutants, and fill in what becomes of each."""
    begun_at = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        running = {}
        for mutant in chosen:
            if mutant.equivalent and not equivalent:
                outcomes[mutant] = Outcome()
            else:
                running[pool.submit(stages.run, mutant)] = mutant
        try:
            for future in as_completed(running):
                mutant = running[future]
                outcomes[mutant] = future.result()
                at = f"[{len(outcomes)}/{len(chosen)}, {time.monotonic() - begun_at:.0f} s]"
                print(f"{at} {mutant.area}/{mutant.name}: {outcomes[mutant]}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _report(outcomes: list[tuple[Mutant, Outcome]], path: Path | None) -> int:
    """Print scores and survivors. Return the exit code."""
    if path is not None:
        rows = [account(mutant, outcome) for mutant, outcome in outcomes]
        path.write_text("\n".join(["| mutant | file | what became of it |", "| --- | --- | --- |", *rows]) + "\n")
    print(f"\n{scores(outcomes)}\n")
    survivors = [mutant for mutant, outcome in outcomes if not outcome.stage and not mutant.equivalent]
    refuted = [mutant for mutant, outcome in outcomes if outcome.stage and mutant.equivalent]
    for mutant in survivors:
        print(f"SURVIVED: {mutant.area}/{mutant.name}, {mutant.path}: {mutant.breaks}")
    for mutant in refuted:
        print(f"NOT EQUIVALENT: {mutant.area}/{mutant.name}: {mutant.equivalent}")
    killed = sum(bool(outcome.stage) for _, outcome in outcomes)
    equivalents = sum(bool(mutant.equivalent) for mutant, _ in outcomes)
    print(f"{len(outcomes)} mutants: {killed} killed, {len(survivors)} survive, {equivalents} equivalent")
    return 1 if survivors or refuted or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
