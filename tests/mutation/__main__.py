"""Put mutants into a copy of pccl and run the tests that must find them.

    python -m tests.mutation --jobs 2                 all mutants
    python -m tests.mutation --only recovery          an area, or one mutant by its name
    python -m tests.mutation --schedules              only those that schedules find
    python -m tests.mutation --sample 15 --seed 1     a random sample, reproducible

Exit code 1 if a mutant survives or cannot be applied.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.copies import Base
from tests.mutation.mutants import ROOT, Mutant, MutantError, load
from tests.support.arguments import positive, until_interrupted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="areas and names (default: all)")
    parser.add_argument("--schedules", action="store_true", help="only mutants that schedules find")
    parser.add_argument("--sample", type=positive, metavar="N", help="number of mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the sample (default 1)")
    parser.add_argument("--jobs", type=positive, default=1, metavar="J", help="mutants at a time (default 1)")
    options = parser.parse_args()
    try:
        chosen = choose(load(), options.only, options.schedules)
        for mutant in chosen:
            mutant.check((ROOT / mutant.path).read_text(encoding="utf-8"))
    except MutantError as error:
        print(error)
        return 1
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    with tempfile.TemporaryDirectory(prefix="pccl-mutation-") as scratch:
        return run_all(Base(ROOT, Path(scratch)), chosen, options.jobs)


def choose(mutants: list[Mutant], names: list[str], schedules: bool = False) -> list[Mutant]:
    """Return the mutants of these areas and names, or all. Raises MutantError for unknown names."""
    unknown = set(names).difference(*({each.name, each.area} for each in mutants))
    if unknown:
        raise MutantError(f"no such area or mutant: {', '.join(sorted(unknown))}")
    chosen = [each for each in mutants if not names or {each.name, each.area} & set(names)]
    return [each for each in chosen if not schedules or not each.killer]


def run_all(base: Base, mutants: list[Mutant], jobs: int) -> int:
    """Run mutants, report those that survive, and return the exit code."""
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        for killer in dict.fromkeys(each.killer for each in mutants):
            if failure := base.run(killer):
                print(f"{killer or 'schedules'} fails without a mutant: {failure}")
                return 1
        begun_at = time.monotonic()
        for at, (mutant, failure) in enumerate(zip(mutants, pool.map(base.run_with, mutants), strict=True), 1):
            print(
                f"[{at}/{len(mutants)}, {time.monotonic() - begun_at:.0f} s] {mutant}: {failure or 'SURVIVED'}",
                flush=True,
            )
            if not failure:
                survivors.append(mutant)
    for mutant in survivors:
        print(f"SURVIVED: {mutant}, {mutant.path}: {mutant.breaks}")
    print(f"{len(mutants)} mutants: {len(mutants) - len(survivors)} killed, {len(survivors)} survive")
    return 1 if survivors or not mutants else 0


if __name__ == "__main__":
    sys.exit(until_interrupted(main))
