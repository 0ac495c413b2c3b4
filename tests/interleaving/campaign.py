"""Plays many interleavings, and stops at the first that fails.

    python -m tests.interleaving --schedules 10000 --seed 1 --jobs 2
    python -m tests.interleaving --minutes 5
    python -m tests.interleaving --schedules 1 --seed 4711            one of them again
    python -m tests.interleaving --scenario turns --mode priorities   of one kind only
    python -m tests.interleaving --faults                             how soon is each known fault found, once put in?
    python -m tests.interleaving --faults mixed-ops                   the same for some of them

The schedules of a campaign are those of the seeds from `--seed` on. Exit code 1 if one failed; with a fault put in, if
none did.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count, islice

from tests.interleaving.faults import FAULTS
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.schedule import MODES, Plan, play
from tests.interleaving.scheduler import ScheduleError
from tests.interleaving.tracing import Grain
from tests.support.arguments import minutes, positive

BLOCK = 25
"""Schedules handed to a process at a time."""
REPORT_EVERY_S = 15.0
SCHEDULES_TO_FIND = 1000
"""Number of schedules within which a known fault is to be found."""


@dataclass(frozen=True)
class Choice:
    """What is fixed for all schedules of a campaign."""

    scenario: str | None = None
    grain: str | None = None
    mode: str | None = None
    fault: str | None = None

    def plan(self, seed: int) -> Plan:
        return Plan.of_seed(seed, self.scenario, Grain(self.grain) if self.grain else None, self.mode)


@dataclass
class Block:
    """What came of some schedules."""

    played: int = 0
    steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    failed: int | None = None
    text: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.interleaving", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--schedules", type=positive, metavar="N", help="how many (default 1000, or as --minutes allows)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="the first one's (default 1)")
    parser.add_argument("--minutes", type=minutes, metavar="M", help="stop after this time")
    parser.add_argument("--jobs", type=positive, default=1, metavar="J", help="processes (default 1)")
    parser.add_argument("--scenario", choices=SCENARIOS, help="what the callers do (default: any)")
    parser.add_argument("--grain", choices=[each.value for each in Grain], help="where threads are preempted")
    parser.add_argument("--mode", choices=MODES, help="the chooser (default: either)")
    parser.add_argument("--fault", choices=FAULTS, help="put this known fault in")
    parser.add_argument(
        "--faults", nargs="*", choices=FAULTS, metavar="NAME", help="put in each known fault, or these, one by one"
    )
    options = parser.parse_args()
    if options.faults is not None:
        return _find_faults(options.faults or list(FAULTS), options.seed)
    choice = Choice(options.scenario, options.grain, options.mode, options.fault)
    schedules = options.schedules or (1000 if options.minutes is None else None)
    return _play_all(choice, _blocks(options.seed, schedules, options.minutes), options.jobs)


def _play_all(choice: Choice, blocks: Iterator[range], jobs: int) -> int:
    begun_at = reported_at = time.monotonic()
    total = Block()
    for block in _play_blocks(choice, blocks, jobs):
        total.played += block.played
        total.steps += block.steps
        total.kinds += block.kinds
        if block.failed is not None:
            print(f"{total.played} schedules, then this one failed:\n{block.text}", flush=True)
            return 0 if choice.fault else 1
        if time.monotonic() >= reported_at + REPORT_EVERY_S:
            reported_at = time.monotonic()
            print(_account(total, reported_at - begun_at), flush=True)
    kinds = ", ".join(f"{name} {number}" for name, number in sorted(total.kinds.items()))
    print(f"{_account(total, time.monotonic() - begun_at)} ({kinds}), all well")
    return 1 if choice.fault else 0


def _account(total: Block, seconds: float) -> str:
    a_minute = total.played / seconds * 60
    return f"{total.played} schedules in {seconds:.0f} s, {a_minute:.0f} a minute, {total.steps} hand-overs"


def _play_blocks(choice: Choice, blocks: Iterator[range], jobs: int) -> Iterator[Block]:
    if jobs == 1:
        for seeds in blocks:
            yield play_block(choice, seeds)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        under_way = {pool.submit(play_block, choice, block) for block in islice(blocks, jobs)}
        while under_way:
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            under_way |= {pool.submit(play_block, choice, block) for block in islice(blocks, len(ended))}
            for future in ended:
                yield future.result()


def _blocks(first: int, schedules: int | None, minutes: float | None) -> Iterator[range]:
    end_at = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    for start in count(first, BLOCK) if schedules is None else range(first, first + schedules, BLOCK):
        if time.monotonic() >= end_at:
            return
        yield range(start, start + BLOCK if schedules is None else min(start + BLOCK, first + schedules))


def play_block(choice: Choice, seeds: range) -> Block:
    """Play schedules until one fails."""
    block = Block()
    fault = FAULTS[choice.fault] if choice.fault else None
    for seed in seeds:
        plan = choice.plan(seed)
        block.played += 1
        block.kinds[plan.scenario] += 1
        try:
            block.steps += play(plan, fault.put_in if fault is not None else None).steps
        except ScheduleError as error:
            block.failed, block.text = seed, str(error)
            break
    return block


def find(fault: str, seed: int = 1, schedules: int = SCHEDULES_TO_FIND) -> tuple[int, str]:
    """Return after how many schedules a known fault is found, 0 if it is not, and what was found. They are played in a
    process of their own: what a failed one leaves behind would disturb those that follow."""
    known = FAULTS[fault]
    choice = Choice(known.scenario, known.grain.value, fault=fault)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        block = pool.submit(play_block, choice, range(seed, seed + schedules)).result()
    return (0, "") if block.failed is None else (block.played, block.text)


def _find_faults(names: list[str], seed: int) -> int:
    missed = 0
    for name in names:
        begun_at = time.monotonic()
        played, text = find(name, seed)
        missed += not text
        found = f"found after {played} schedules: {text.splitlines()[1][:150]}" if text else "NOT FOUND"
        print(f"{name}: {FAULTS[name].what}\n    {found} ({time.monotonic() - begun_at:.0f} s)", flush=True)
    print(f"{len(names) - missed} of {len(names)} known faults were found")
    return 1 if missed else 0
