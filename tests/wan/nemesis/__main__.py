"""`sudo python -m tests.wan.nemesis`: does to a run whatever can be done, and judges what its peers report.

    sudo python -m tests.wan.nemesis --list
    sudo python -m tests.wan.nemesis --scenario vanish --scenario halves
    sudo python -m tests.wan.nemesis --minutes 60            all scenarios, then mixtures with fresh seeds
    sudo python -m tests.wan.nemesis --seed 7 --mixtures 1   the mixture of seed 7 alone

Exit status 0, or 1 where a promise was broken: then the violations, a timeline and the command that plays it again are
printed, and the folder with the picture, the histories and the logs is kept. 2: it cannot run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from tests.support.arguments import minutes, positive
from tests.wan.lab import unavailable
from tests.wan.nemesis import clock, timeline
from tests.wan.nemesis.mixtures import mixture
from tests.wan.nemesis.scenarios import SCENARIOS, Scenario
from tests.wan.nemesis.supervisor import NotReadyError, Outcome, Supervisor

MIXTURE_S = 60.0


def main() -> int:
    options = _parser().parse_args()
    if options.list:
        for each in SCENARIOS.values():
            print(f"{each.name:26} {each.text}")
        return 0
    if reason := unavailable() or clock.unavailable():
        print(f"no nemesis here: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    end_s = time.monotonic() + 60 * options.minutes
    failed, played = [], 0
    try:
        for scenario, own_seed in _todo(options, seed):
            if options.minutes and time.monotonic() > end_s:
                break
            played += 1
            if not play(scenario, own_seed, options):
                failed.append(f"{scenario.name} (seed {own_seed})")
                if not options.keep_going:
                    break
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(f"{played} played, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else ""))
    return bool(failed)


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wan.nemesis",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", action="append", metavar="NAME", choices=SCENARIOS, help="may be repeated")
    parser.add_argument("--list", action="store_true", help="print the scenarios and end")
    parser.add_argument("--minutes", type=minutes, default=0.0, help="end after this number; 0: when all were played")
    parser.add_argument("--mixtures", type=positive, metavar="N", help="number of mixtures instead of the scenarios")
    parser.add_argument("--seconds", type=minutes, default=MIXTURE_S, help="of a mixture's faults (default: 60)")
    parser.add_argument("--seed", type=int, help="of the first that is played (default: a fresh one)")
    parser.add_argument("--keep-going", action="store_true", help="after a violation too")
    parser.add_argument("--folder", type=Path, help="keep histories, logs and pictures here, of what passed too")
    parser.add_argument("--verbose", action="store_true", help="print each fault as it happens")
    return parser


def _todo(options: argparse.Namespace, seed: int) -> Iterator[tuple[Scenario, int]]:
    """The scenarios asked for, or all; and where there is time for it, mixtures without end."""
    if options.mixtures is None:
        for name in options.scenario or SCENARIOS:
            scenario = SCENARIOS[name]
            if scenario.needs_torch and importlib.util.find_spec("torch") is None:
                print(f"{name}: left out, torch is missing")
                continue
            yield scenario, seed
        if options.scenario or not options.minutes:
            return
    number = 0
    while options.mixtures is None or number < options.mixtures:
        yield mixture(seed + number, options.seconds), seed + number
        number += 1


def play(scenario: Scenario, seed: int, options: argparse.Namespace) -> bool:
    """Play one, print what became of it, and say whether every promise was kept."""
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"pccl-nemesis-{scenario.name}-", dir=options.folder))
    print(f"{scenario.name}: {scenario.text}", flush=True)
    start_s = time.monotonic()

    def say(line: str) -> None:
        if options.verbose:
            print(f"    {time.monotonic() - start_s:7.2f} {line}", flush=True)

    is_kept = options.folder is not None
    try:
        supervisor = Supervisor(scenario.setting, scenario.timed(seed), scenario.seconds, seed, folder, say)
        try:
            outcome = supervisor.run()
        except NotReadyError as error:
            is_kept = True
            print(f"    not begun: {error}\n    logs: {folder}")
            return False
        is_kept |= bool(outcome.violations)
        _report(scenario, seed, folder, outcome, is_kept, options)
        return not outcome.violations
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def _report(
    scenario: Scenario, seed: int, folder: Path, outcome: Outcome, is_kept: bool, options: argparse.Namespace
) -> None:
    verdict = f"{len(outcome.violations)} violations" if outcome.violations else "kept every promise"
    print(
        f"    {verdict} in {outcome.seconds:.0f} s: {outcome.counts}; the longest time without a step "
        f"{outcome.standstill.seconds:.1f} s",
        flush=True,
    )
    if is_kept:
        title = f"{scenario.name}, seed {seed}: {verdict}"
        hosts = scenario.setting.hosts
        picture = timeline.svg(title, outcome.world, outcome.histories, outcome.violations, hosts)
        (folder / "timeline.svg").write_text(picture)
        words = timeline.text(outcome.world, outcome.histories, outcome.violations)
        (folder / "timeline.txt").write_text(words + "\n")
    if outcome.violations:
        print("\n".join(f"    {each}" for each in outcome.violations[:20]))
        print(words)
        what = f"--mixtures 1 --seconds {options.seconds:g}" if "mixture" in scenario.name else "--scenario "
        what += "" if "mixture" in scenario.name else scenario.name
        print(f"    picture, histories and logs: {folder}")
        print(
            f"    again: sudo {os.path.basename(sys.executable)} -m tests.wan.nemesis {what} --seed {seed}", flush=True
        )


if __name__ == "__main__":
    sys.exit(main())
