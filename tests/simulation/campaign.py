"""Plays many schedules, and makes the first one that fails small.

    python -m tests.simulation --schedules 10000 --seed 1 --jobs 2
    python -m tests.simulation --minutes 1
    python -m tests.simulation --schedules 1 --seed 4711       one of them again
    python -m tests.simulation --plan '[...]'                  a plan as a failure prints it

The schedules of a campaign are those of the seeds from `--seed` on. Exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from itertools import count, islice

from tests.simulation.schedule import Plan, play
from tests.simulation.shrink import shrink

BLOCK = 50
"""Schedules handed to a process at a time."""
REPORT_EVERY_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schedules", type=int, metavar="N", help="how many (default 1000, or as --minutes allows)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first one's (default 1)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument(
        "--masters",
        type=int,
        choices=(0, 1, 2),
        help="0: one, and its peers end with it; 1: killed, it begins anew; 2: and has a standby (default: any)",
    )
    parser.add_argument("--plan", help="play this plan only")
    options = parser.parse_args()
    if options.plan is not None:
        return _explain(Plan.loads(options.plan), None)
    schedules = options.schedules or (1000 if options.minutes is None else None)
    begun_at = reported_at = time.monotonic()
    played = 0
    for number, failed in _play_blocks(
        _blocks(options.seed, schedules, options.minutes), options.jobs, options.masters
    ):
        played += number
        if failed is not None:
            print(f"{played} schedules, then seed {failed} failed", flush=True)
            return _explain(Plan.of_seed(failed, options.masters), failed)
        if time.monotonic() >= reported_at + REPORT_EVERY_S:
            reported_at = time.monotonic()
            print(_account(played, reported_at - begun_at), flush=True)
    print(f"{_account(played, time.monotonic() - begun_at)}, all well")
    return 0


def _play_blocks(blocks: Iterator[range], jobs: int, masters: int | None) -> Iterator[tuple[int, int | None]]:
    play_block = partial(_play_block, masters=masters)
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


def _blocks(first: int, schedules: int | None, minutes: float | None) -> Iterator[range]:
    end_at = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    for start in count(first, BLOCK) if schedules is None else range(first, first + schedules, BLOCK):
        if time.monotonic() >= end_at:
            return
        yield range(start, start + BLOCK if schedules is None else min(start + BLOCK, first + schedules))


def _play_block(seeds: range, masters: int | None) -> tuple[int, int | None]:
    """Play schedules until one fails. Return how many were played, and the seed of the last one if it failed."""
    for at, seed in enumerate(seeds):
        try:
            play(Plan.of_seed(seed, masters))
        except Exception:
            return at + 1, seed
    return len(seeds), None


def _account(played: int, seconds: float) -> str:
    return f"{played} schedules in {seconds:.0f} s, {played / seconds * 60:.0f} a minute"


def _explain(plan: Plan, seed: int | None) -> int:
    """Plays it once more; if it fails, says how, and what of it matters."""
    try:
        play(plan)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    else:
        print("it plays without a failure")
        return 0 if seed is None else 1
    small = shrink(plan)
    print(f"\nmade small: {len(small.steps)} of {len(plan.steps)} steps are left, {small.peers} peers at a time")
    for step in small.steps:
        print(f"    {step.action}, then up to {step.deliveries} deliveries")
    print(f"\nthe small one again:  python -m tests.simulation --plan '{small.dumps()}'")
    if seed is not None:
        print(f"the whole one again:  python -m tests.simulation --schedules 1 --seed {seed} --masters {plan.masters}")
    return 1
