"""Shows what DiLoCo saves and what it costs: four peers train one model in eight ways, on the same number of tokens.

    python examples/compare_diloco.py

Runs diloco_gpt.py, async_diloco_gpt.py and ddp_gpt.py one after the other, each with its own master, and prints a
table: the validation loss compared with data parallelism at every step, and the bytes that a peer sent. In the runs
with churn, a peer is killed (SIGKILL) every few outer steps and restarted at once; the next kill waits until it has
joined. All digests that any two peers have after the same outer step are compared. Exit code 1 means that digests
differed or a run failed. `--only NAME ...` selects runs, `--plot FILE` plots the losses, `--steps` and `--inner` make
the runs longer or shorter. `--seeds 3` repeats each run three times, with different weights and order of the text, and
prints means and standard deviations.

    python examples/compare_diloco.py --sweep

runs DDP, and DiLoCo with 1, 2, 4 and 8 peers and 10, 50 and 200 inner steps. All runs have the same total number of
tokens, so each of two peers has half the batch of a single one. The letters M (peers) and H (inner steps) are those of
"Scaling Laws for DiLoCo" (Charles et al. 2025, arXiv:2503.09799).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.runs import Kind, Outcome, Run, Settings

PAPER = ("--outer-learning-rate", "0.7", "--outer-momentum", "0.9")
"""The outer optimizer of the paper."""
KINDS = {
    "ddp": Kind("ddp_gpt.py"),
    "diloco": Kind("diloco_gpt.py", PAPER),
    "diloco-8bit": Kind("diloco_gpt.py", (*PAPER, "--quantize", "8")),
    "async": Kind("async_diloco_gpt.py"),
    "async-whole": Kind("async_diloco_gpt.py", ("--fragments", "1")),
    "async-5": Kind("async_diloco_gpt.py", ("--fragments", "5")),
    "diloco-churn": Kind("diloco_gpt.py", PAPER, 4),
    "async-churn": Kind("async_diloco_gpt.py", (), 4),
}
Results = dict[str, dict[str, dict[str, Any]]]
"""The results by name and seed."""


def draw(path: Path, outcomes: dict[str, Outcome]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for name, outcome in outcomes.items():
        losses = [row["validation_loss"] for row in outcome.rows]
        by_step.plot([row["step"] for row in outcome.rows], losses, label=name)
        by_bytes.plot([max(1, row["sent_bytes"]) / 1e6 for row in outcome.rows], losses, label=name)
    by_step.set(xlabel="step", ylabel="validation loss, nats per byte")
    by_bytes.set(xlabel="MB sent by a peer", xscale="log")
    by_step.legend(frameon=False)
    figure.savefig(path)


def sweep_name(peers: int, inner: int) -> str:
    return f"M = {peers}, H = {inner}"


def planned(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[str, Kind, Settings]]:
    """Yield the runs for one seed."""
    if not options.sweep:
        for name in options.only:
            yield name, KINDS[name], settings
        return
    yield "ddp", KINDS["ddp"], settings
    steps, batch = settings.steps * settings.inner, settings.peers * settings.batch
    for peers in options.sweep_peers:
        for inner in options.sweep_inner:
            if steps % inner or batch % peers:
                raise SystemExit(f"{steps} steps of {batch} sequences cannot be dealt to {sweep_name(peers, inner)}")
            cell = replace(settings, peers=peers, batch=batch // peers, inner=inner, steps=steps // inner)
            yield sweep_name(peers, inner), KINDS["diloco"], cell


def mean(values: list[float], form: str) -> str:
    """Return the mean as text, with the standard deviation if there are several values."""
    text = format(statistics.fmean(values), form)
    return f"{text} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else text


def compared(results: Results, name: str, key: str) -> list[tuple[float, float]]:
    """Return a figure of ddp and of another run, for each seed that both have."""
    base = results.get("ddp", {}) if name != "ddp" else {}
    return [(base[seed][key], result[key]) for seed, result in results[name].items() if seed in base]


def show(results: Results) -> None:
    print("| run | validation loss | against ddp | MB sent by a peer | fewer bytes | kills, joins | equal digests |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, by_seed in results.items():
        seeds = list(by_seed.values())
        worse = [100 * (own / base - 1) for base, own in compared(results, name, "loss")]
        fewer = [base / own for base, own in compared(results, name, "sent_bytes") if own]
        kills, joins, digests, differing = (
            sum(result[key] for result in seeds) for key in ("kills", "joins", "compared", "differing")
        )
        print(
            f"| {name} | {mean([result['loss'] for result in seeds], '.4f')} | "
            f"{mean(worse, '+.1f') + ' %' if worse else ''} | "
            f"{statistics.fmean(result['sent_bytes'] for result in seeds) / 1e6:.2f} | "
            f"{f'{statistics.fmean(fewer):.1f} times' if fewer else ''} | "
            f"{kills}, {joins} | {digests - differing} of {digests} |"
        )


def show_sweep(results: Results, peers: list[int], inner: list[int]) -> None:
    print("\n| validation loss, against ddp | " + " | ".join(f"H = {each}" for each in inner) + " |")
    print("| --- |" + " --- |" * len(inner))
    for count in peers:
        cells = []
        for each in inner:
            name = sweep_name(count, each)
            losses = [result["loss"] for result in results.get(name, {}).values()]
            worse = [100 * (own / base - 1) for base, own in compared(results, name, "loss")] if losses else []
            cells.append(f"{mean(losses, '.4f')}, {mean(worse, '+.1f')} %" if worse else "")
        print(f"| M = {count} | " + " | ".join(cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=50, help="inner steps per outer step (default: %(default)s)")
    parser.add_argument("--pretrain", type=int, default=500, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds for each run (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="vary the numbers of peers and of inner steps instead")
    parser.add_argument("--sweep-peers", type=int, nargs="+", default=[1, 2, 4, 8], metavar="COUNT")
    parser.add_argument("--sweep-inner", type=int, nargs="+", default=[10, 50, 200], metavar="COUNT")
    parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; created if missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to those in this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the losses of the last seed")
    options = parser.parse_args()
    results: Results = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    failed = False
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            start = options.start or Path(scratch, "start.pt")
            if seed:
                start = start.with_name(f"{start.stem}-{seed}{start.suffix}")
            settings = Settings(start, options.peers, options.steps, options.inner, options.pretrain, seed=seed)
            for name, kind, own in planned(options, settings):
                outcome = Run(name, kind, own, Path(scratch, f"{name} {seed}")).make()
                outcomes[name] = outcome
                for problem in outcome.problems:
                    print(f"{name}, seed {seed}: {problem}", file=sys.stderr)
                    failed = True
                if outcome.rows:
                    last = outcome.rows[-1]
                    results.setdefault(name, {})[str(seed)] = {
                        "loss": last["validation_loss"],
                        "sent_bytes": last["sent_bytes"],
                        "seconds": outcome.seconds,
                        "kills": outcome.kills,
                        "joins": outcome.joins,
                        "compared": outcome.compared,
                        "differing": sum("digests differ" in problem for problem in outcome.problems),
                    }
                if options.json is not None:
                    options.json.write_text(json.dumps(results, indent=1))
    print(f"\n{options.peers} peers, {options.steps} outer steps of {options.inner}, {options.seeds} seeds")
    show(results)
    if options.sweep:
        show_sweep(results, options.sweep_peers, options.sweep_inner)
    if options.plot is not None:
        draw(options.plot, outcomes)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
