"""Shows what peers gain by taking steps by speed: four peers, one of them five times slower, train to the same loss.

    python examples/compare_unequal.py

Runs diloco_gpt.py three times: with the same number of steps for all peers, so that all wait for the slow one; with
`--steps-by-speed`; and also with `--weighted`, which weights peers by the tokens they have trained on. Inner steps take
at least `--step-ms`, and five times that on the slow peer. This is far more than the computation takes, so the
processes on one machine do not slow each other down. The runs by speed have half as many outer steps again
(`--longer`).

Ends with a table: the last validation loss; when peer 0 first had the loss that all runs reached, in seconds from the
start; and the share of its time that peer 0 waited. Exit code 1 means that digests differed or a run failed.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.runs import Kind, Run, Settings

RUNS = {"equal steps": (), "by speed": ("--steps-by-speed",), "by speed, weighted": ("--steps-by-speed", "--weighted")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help=", ".join(RUNS))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--slower", type=float, default=5, help="slowdown of the last peer (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=40, help="step time of the others (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=50, help="inner steps of a fast peer (default: %(default)s)")
    parser.add_argument("--longer", type=float, default=1.5, help="outer step factor by speed (default: %(default)s)")
    parser.add_argument("--pretrain", type=int, default=500, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; created if missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows of each run to those in this file")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    if options.json is not None and options.json.exists():
        rows = json.loads(options.json.read_text())
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        start = options.start or Path(scratch, "start.pt")
        settings = Settings(start, options.peers, options.steps, options.inner, options.pretrain, seed=options.seed)
        for name in options.only:
            arguments = (*RUNS[name], "--step-ms", str(options.step_ms))
            slow = ("--step-ms", str(options.step_ms * options.slower))
            is_longer = "--steps-by-speed" in arguments
            own = replace(settings, steps=round(options.steps * options.longer)) if is_longer else settings
            outcome = Run(name, Kind("diloco_gpt.py", arguments, of_last_peer=slow), own, Path(scratch, name)).make()
            for problem in outcome.problems:
                print(f"{name}: {problem}", file=sys.stderr)
                failed = True
            if outcome.rows:
                rows[name] = outcome.rows
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=1))
    if not rows:
        return 1
    target = max(min(row["validation_loss"] for row in each) for each in rows.values())
    print(f"\n{options.peers} peers, one {options.slower:g} times slower; {options.inner} inner steps")
    print(f"| run | validation loss | {target:.4f} after | outer steps until then | share of time waited |")
    print("| --- | --- | --- | --- | --- |")
    for name, each in rows.items():
        reached = next(i for i, row in enumerate(each) if row["validation_loss"] <= target)
        waited = sum(row["waited_s"] for row in each) / each[-1]["seconds"]
        print(
            f"| {name} | {each[-1]['validation_loss']:.4f} | {each[reached]['seconds']:.1f} s | {reached + 1} | "
            f"{100 * waited:.0f} % |"
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
