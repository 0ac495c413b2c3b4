"""Plays many schedules, and makes the first one that fails small.

    python -m tests.simulation --schedules 10000 --seed 1 --jobs 2
    python -m tests.simulation --minutes 1
    python -m tests.simulation --minutes 1 --masters 2 --one-name
    python -m tests.simulation --minutes 5 --keep-going        name all that fail, and make none small
    python -m tests.simulation --schedules 1 --seed 4711       one of them again
    python -m tests.simulation --plan '[...]'                  a plan as a failure prints it
    python -m tests.simulation --engine real --minutes 1       over the C engine

The schedules of a campaign are those of the seeds from `--seed` on. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from itertools import count, islice

from tests.simulation.plan import MASTERS_MAX, ONE_NAME, Plan
from tests.simulation.real.sanitizers import sanitized
from tests.simulation.schedule import play
from tests.simulation.shrink import failure_of, shrink
from tests.support.arguments import minutes, positive

BLOCK = 50
"""Schedules handed to a process at a time."""
REAL_BLOCK = 10
"""The same with real engines, which take longer."""
REPORT_EVERY_S = 15.0

Draw = Callable[[int], Plan]
"""Makes the plan of a seed."""
Play = Callable[[Plan], object]
PLAYS: dict[str, Play] = {"model": play, "real": partial(play, is_real=True)}
"""What plays plans, by the engines that it has."""
Failed = tuple[int, str]
"""The seed of a schedule that failed, and its error."""
Played = tuple[int, list[Failed]]
"""The number of schedules played, and those that failed."""
PlayBlock = Callable[[range], Played]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--schedules", type=positive, metavar="N", help="how many (default 1000, or as --minutes allows)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first one's (default 1)")
    parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after this time")
    parser.add_argument("--jobs", type=positive, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument(
        "--masters",
        type=int,
        choices=range(MASTERS_MAX + 1),
        help="0: one, and its peers end with it; 1: killed, it restarts; 2, 3: and has standbys (default: any)",
    )
    parser.add_argument("--one-name", action="store_true", help="the masters, 2 unless it is said, are behind one name")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    parser.add_argument(
        "--engine",
        choices=PLAYS,
        default="model",
        help="model: an engine in Python (default); real: the C engine",
    )
    parser.add_argument("--sanitize", metavar="LIST", help="build the real engine so, such as address,undefined")
    parser.add_argument("--plan", type=_plan, help="play this plan only")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the processes that play end with this one
    if options.sanitize:
        sanitized(options.sanitize)
    engine = options.engine
    if options.plan is not None:
        return _explain(options.plan, "", engine)
    masters, traits = options.masters, None
    if options.one_name:
        masters, traits = max(2, masters or 0), (ONE_NAME,)
    draw = partial(_draw, engine == "real", masters, traits)
    schedules = options.schedules or (1000 if options.minutes is None else None)
    begun_at = reported_at = time.monotonic()
    played = failures = 0
    blocks = _blocks(options.seed, schedules, options.minutes, BLOCK if engine == "model" else REAL_BLOCK)
    for number, failed in _play_blocks(blocks, options.jobs, partial(_play_block, draw, options.keep_going, engine)):
        played += number
        failures += len(failed)
        for seed, error in failed:
            print(f"seed {seed} failed: {error}", flush=True)
        if failed and not options.keep_going:
            seed = failed[0][0]
            plan = draw(seed)
            print(f"after {played} schedules", flush=True)
            one_name = " --one-name" if options.one_name else ""
            return _explain(plan, f"--schedules 1 --seed {seed} --masters {plan.masters}{one_name}", engine)
        if time.monotonic() >= reported_at + REPORT_EVERY_S:
            reported_at = time.monotonic()
            print(_account(played, reported_at - begun_at), flush=True)
    print(f"{_account(played, time.monotonic() - begun_at)}, {f'{failures} failed' if failures else 'all well'}")
    return 1 if failures else 0


def _draw(is_real: bool, masters: int | None, traits: tuple[str, ...] | None, seed: int) -> Plan:
    plan = Plan.of_seed(seed, masters, traits)
    return plan.with_streams() if is_real else plan


def _plan(text: str) -> Plan:
    try:
        return Plan.loads(text)
    except Exception as error:
        raise argparse.ArgumentTypeError(f"not a plan: {error}") from None


def _play_blocks(blocks: Iterator[range], jobs: int, play_block: PlayBlock) -> Iterator[Played]:
    if jobs == 1:
        yield from map(play_block, blocks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(play_block, block) for block in islice(blocks, jobs)}
        while under_way:
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            under_way |= {pool.submit(play_block, block) for block in islice(blocks, len(ended))}
            for future in ended:
                yield future.result()


def _blocks(first: int, schedules: int | None, minutes: float | None, size: int) -> Iterator[range]:
    end_at = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    for start in count(first, size) if schedules is None else range(first, first + schedules, size):
        if time.monotonic() >= end_at:
            return
        yield range(start, start + size if schedules is None else min(start + size, first + schedules))


def _play_block(draw: Draw, keeps_going: bool, engine: str, seeds: range) -> Played:
    """Play schedules until one fails, or all."""
    failed = []
    for at, seed in enumerate(seeds):
        try:
            PLAYS[engine](draw(seed))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append((seed, f"{type(error).__name__} in {where.name}, {where.lineno}: {error}"[:300]))
            if not keeps_going:
                return at + 1, failed
    return len(seeds), failed


def _account(played: int, seconds: float) -> str:
    return f"{played} schedules in {seconds:.0f} s, {played / seconds * 60:.0f} a minute"


def _explain(plan: Plan, arguments: str, engine: str) -> int:
    """Play a plan once more; if it fails, say how, and what of it matters. `arguments`: those that play it again."""
    try:
        PLAYS[engine](plan)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    else:
        print("it plays without a failure")
        return 1 if arguments else 0
    small = shrink(plan, partial(failure_of, play=PLAYS[engine]))
    traits = f", {', '.join(small.traits)}" if small.traits else ""
    print(
        f"\nmade small: {len(small.steps)} of {len(plan.steps)} steps are left, {small.peers} peers at a time{traits}"
    )
    for step in small.steps:
        print(f"    {step.action}, then up to {step.deliveries} deliveries")
    again = "python -m tests.simulation" + (f" --engine {engine}" if engine != "model" else "")
    print(f"\nthe small one again:  {again} --plan '{small.dumps()}'")
    if arguments:
        print(f"the whole one again:  {again} {arguments}")
    return 1
