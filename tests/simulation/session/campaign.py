"""Plays many schedules of whole sessions, and says how to play the one that fails again.

    python -m tests.simulation.session --schedules 1000 --seed 1
    python -m tests.simulation.session --minutes 1
    python -m tests.simulation.session --seed 4711 --schedules 1     one of them again
    python -m tests.simulation.session --founding --minutes 1        runs that several peers found together

Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from itertools import count

from tests.simulation.session.founding import FoundingSchedule
from tests.simulation.session.schedule import Schedule
from tests.simulation.session.world import LOG_LINES_SHOWN, World, play
from tests.support.arguments import minutes, positive

HASH_SEED = "0"
REPORT_EVERY_S = 15.0


def play_seed(seed: int, has_faults: bool = True, is_founding: bool = False) -> World:
    """Play the schedule of a seed."""
    schedule = FoundingSchedule(seed) if is_founding else Schedule(seed, has_faults)
    world = schedule.world()
    try:
        play(world, schedule.faults)
    except BaseException as error:
        error.add_note(f"to play it again: {_again(seed, is_founding)}")
        error.add_note("\n".join(world.log[-LOG_LINES_SHOWN:]))
        raise
    return world


def fingerprint(world: World) -> str:
    """Return a digest of all that has happened in a run."""
    return hashlib.blake2s("\n".join(world.log).encode()).hexdigest()[:16]


def _again(seed: int, is_founding: bool) -> str:
    return f"python -m tests.simulation.session{' --founding' if is_founding else ''} --seed {seed} --schedules 1"


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        # The order of sets of text follows it, and it cannot be set later.
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.session", *sys.argv[1:]])
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.session", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--schedules", type=positive, metavar="N", help="how many (default 100, or as --minutes allows)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first one's (default 1)")
    parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after this time")
    parser.add_argument("--founding", action="store_true", help="several peers found each run together: see `founding`")
    parser.add_argument("--log", metavar="FILE", help="write the log of each schedule to this file")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure, and list them in the end")
    options = parser.parse_args()
    schedules = options.schedules or (100 if options.minutes is None else None)
    begun_at = reported_at = time.monotonic()
    cpu_s = time.process_time()
    end_at = begun_at + 60 * options.minutes if options.minutes is not None else float("inf")
    played = commits = aborts = syncs = 0
    failed: list[int] = []
    for seed in count(options.seed) if schedules is None else range(options.seed, options.seed + schedules):
        if time.monotonic() >= end_at:
            break
        schedule = FoundingSchedule(seed) if options.founding else Schedule(seed)
        world = schedule.world()
        try:
            play(world, schedule.faults)
        except Exception as error:
            failed.append(seed)
            if not options.keep_going:
                traceback.print_exc(file=sys.stdout)
                print("\n".join(["", "the end of its log:", *world.log[-LOG_LINES_SHOWN:]]))
            print(f"{_named(error)}\nagain:  {_again(seed, options.founding)}", flush=True)
        if options.log:
            with open(options.log, "w", encoding="utf-8") as file:
                file.write("\n".join(world.log) + "\n")
        played += 1
        commits += world.checker.commits
        aborts += world.checker.aborts
        syncs += world.checker.syncs
        if failed and not options.keep_going:
            return 1
        if schedules == 1:
            print(f"fingerprint {fingerprint(world)}")
        if time.monotonic() >= reported_at + REPORT_EVERY_S:
            reported_at = time.monotonic()
            print(f"{played} schedules, {60 * played / (reported_at - begun_at):.0f} a minute", flush=True)
    seconds = time.monotonic() - begun_at
    print(
        f"{played} schedules in {seconds:.0f} s, {60 * played / seconds:.0f} a minute, "
        f"{60 * played / (time.process_time() - cpu_s):.0f} a minute of processor time; {commits} ops committed, "
        f"{aborts} failed, {syncs} syncs; {f'failed: {failed}' if failed else 'all well'}"
    )
    return 1 if failed else 0


def _named(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
