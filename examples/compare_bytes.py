"""Loss against bytes: four peers train one model by each of these methods, on the same number of tokens.

    python examples/compare_bytes.py --seeds 3 --plot bytes.svg

Every method starts from the same pretrained model and takes 2,000 inner steps, or 1,000 of two batches. `--model large`
trains 2.3 million parameters for 1,000 steps, by five of the methods. Every peer takes all steps, so with more
`--peers`, the tokens of a peer stay the same. Each model and number of peers needs a `--folder` of its own. Bytes are
those that a peer sends to other peers and receives from them, with frame headers, by pccl's counters. Settings were
chosen by the validation loss; the table compares losses on another text. The digests of all peers are compared after
every outer step, and exit code 1 means that some differed or that a run failed. `--only NAME ...` selects methods.
`--churn` adds a run of each method in which three peers are killed (SIGKILL) and restarted. Results are kept in
`--folder`, and the same command resumes there; `--again NAME ...` repeats methods.
"""

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.gpt import BATCH
from common.runs import Kind, Outcome, Run, Settings

STEPS = {"small": 2000, "large": 1000}
PRETRAINING = {"small": 500, "large": 300}
KILLS = 3


@dataclass(frozen=True)
class Method:
    script: str
    inner: int
    """Inner steps per outer step."""
    arguments: str = ""
    of_last_peer: str = ""
    batches: int = 1
    """Usual batches per inner step; the method takes fewer steps, so that the tokens are the same."""

    def kind(self, kill_every: int) -> Kind:
        return Kind(self.script, tuple(self.arguments.split()), kill_every, KILLS, tuple(self.of_last_peer.split()))


def ddp(arguments: str = "") -> Method:
    return Method("ddp_gpt.py", 50, arguments)


def diloco(inner: int, rate: float, momentum: float, more: str = "", of_last_peer: str = "") -> Method:
    arguments = f"--outer-learning-rate {rate} --outer-momentum {momentum} {more}"
    return Method("diloco_gpt.py", inner, arguments, of_last_peer)


def late(rate: float, momentum: float, more: str) -> Method:
    """Asynchronous DiLoCo."""
    arguments = f"--outer-learning-rate {rate} --outer-momentum {momentum} {more}"
    return Method("async_diloco_gpt.py", 50, arguments)


def doubled(inner: int, rate: float, momentum: float, end: str, compression: str) -> Method:
    """Muon with fewer inner steps, of two batches each, and a schedule of the outer optimizer."""
    arguments = f"{MUON} --muon-rate 0.024 --muon-momentum 0.9 --outer-end {end} --compression {compression}"
    return replace(diloco(inner, rate, momentum, arguments), batches=2)


MUON = "--optimizer muon"
METHODS = {
    "ddp": ddp(),
    "diloco": diloco(50, 0.7, 0.9),
    "diloco 1.0/0.7": diloco(50, 1.0, 0.7),
    "diloco 1.0/0.8": diloco(50, 1.0, 0.8),
    "diloco 8-bit": diloco(50, 1.0, 0.8, "--compression 8bit"),
    "diloco 4-bit": diloco(50, 1.0, 0.8, "--compression 4bit"),
    "diloco 2-bit": diloco(50, 1.0, 0.8, "--compression 2bit"),
    "diloco entropy": diloco(50, 1.0, 0.8, "--compression entropy=1.75/2.2"),
    "muon ddp": ddp(f"{MUON} --muon-rate 0.018"),
    "muon": diloco(50, 0.7, 0.8, MUON),
    "muon 4-bit": diloco(50, 0.7, 0.8, f"{MUON} --compression 4bit"),
    "muon 2-bit": diloco(50, 0.7, 0.8, f"{MUON} --compression 2bit"),
    "muon 27 x 2 4-bit": doubled(27, 0.7, 0.75, "0.5 0.5", "4bit"),
    "muon 25 x 2 2-bit": doubled(25, 0.7, 0.75, "0.5 0.5", "2bit"),
    "muon 1-bit": diloco(50, 1.0, 0.6, f"{MUON} --compression 1bit"),
    "muon 100 2-bit": diloco(100, 1.0, 0.6, f"{MUON} --compression 2bit"),
    "muon 50 x 2 entropy": doubled(50, 1.0, 0.6, "0.7 0.4", "entropy=1.6/2.2"),
    "muon 200": diloco(200, 1.0, 0.5, MUON),
    "muon 200 2-bit": diloco(200, 1.0, 0.5, f"{MUON} --compression 2bit"),
    "muon 100 x 2 entropy": doubled(100, 1.0, 0.5, "0.7 0.3", "entropy=1.6/2.2"),
    "topk 1/16": diloco(50, 1.0, 0, "--compression topk=0.0625"),
    "topk 1/64": diloco(50, 1.0, 0, "--compression topk=0.015625"),
    "muon topk 1/16": diloco(50, 1.0, 0, f"{MUON} --compression topk=0.0625"),
    "sign": diloco(50, 1.0, 0.7, "--compression sign --decay 0.4"),
    "muon sign": diloco(50, 1.0, 0.6, f"{MUON} --compression sign=64 --decay 0.4"),
    "powersgd 4": diloco(50, 1.0, 0, "--compression powersgd=4"),
    "muon powersgd 4": diloco(50, 1.0, 0, f"{MUON} --compression powersgd=4"),
    "dct 256": diloco(50, 1.0, 0, "--compression dct=256"),
    "muon dct 256": diloco(50, 1.0, 0, f"{MUON} --compression dct=256"),
    "randomk 1/16": diloco(50, 1.0, 0, "--compression randomk=0.0625"),
    "dgc 1/16": diloco(50, 1.0, 0, "--compression dgc=0.0625,0.3"),
    "muon dgc 1/16": diloco(50, 1.0, 0, f"{MUON} --compression dgc=0.0625,0.3"),
    "muon per layer": diloco(50, 1.0, 0, f"{MUON} --compression perlayer=4400"),
    "muon 1-bit adam": diloco(50, 1.0, 0.6, f"{MUON} --compression onebitadam=4 --decay 0.4"),
    "muon sketch": diloco(50, 1.0, 0, f"{MUON} --compression sketch=0.25 --decay 0.5"),
    "muon arc 1/16": diloco(50, 1.0, 0, f"{MUON} --compression arc=0.0625 --decay 0.5"),
    "outer sgd": diloco(50, 1.0, 0),
    "outer adam": diloco(50, 0.02, 0.9, "--outer adam"),
    "outer momentum": diloco(50, 0.7, 0.7, "--outer momentum"),
    "slow peer": diloco(50, 0.7, 0.9, "", "--slow 2"),
    "slow peer, weighted": diloco(50, 0.7, 0.9, "--weighted", "--slow 2"),
    "fedfix": diloco(50, 0.7, 0.9, "", "--slow 2 --late"),
    "async": late(0.7, 0.9, "--fragments 1"),
    "async share": late(0.4, 0.7, "--fragments 1 --ahead share"),
    "co2": late(0.7, 0.7, "--fragments 1 --outer momentum --outer-clip 0.1"),
    "overlap 5": late(0.7, 0.9, "--fragments 1 --overlap 5"),
    "overlap 5 mixing": late(0.7, 0.9, "--fragments 1 --overlap 5 --mixing 0.5"),
    "streaming": late(0.7, 0.9, "--fragments 5 --overlap 5 --mixing 0.5"),
    "streaming 4-bit": late(0.7, 0.9, "--fragments 5 --overlap 5 --mixing 0.5 --compression 4bit"),
}
LARGE = ["ddp", "diloco", "muon ddp", "muon 2-bit", "muon 200 2-bit"]
CHURN = " with kills"
Results = dict[str, dict[str, dict[str, Any]]]
"""The results by name and seed."""


def result_of(outcome: Outcome) -> dict[str, Any]:
    last = outcome.rows[-1]
    sent, received = outcome.wire_bytes
    return {
        "validation_loss": last["validation_loss"],
        "test_loss": last["test_loss"],
        "sent_bytes": sent,
        "received_bytes": received,
        "seconds": outcome.seconds,
        "kills": outcome.kills,
        "joins": outcome.joins,
        "compared": outcome.compared,
    }


def spread(values: list[float], form: str) -> str:
    """Return the mean as text, with the standard deviation if there are several values."""
    text = format(statistics.fmean(values), form)
    return f"{text} ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else text


def worse(results: Results, name: str, key: str) -> list[float]:
    """Return by how many percent the loss is above DDP's, for each seed that both have."""
    base = results.get("ddp", {})
    return [100 * (each[key] / base[seed][key] - 1) for seed, each in results[name].items() if seed in base]


def megabytes(results: Results, name: str, key: str) -> float:
    return statistics.fmean(each[key] for each in results[name].values()) / 1e6


def show(results: Results) -> None:
    print("| method | loss | against ddp | on the validation text | MB sent | received | fewer | digests | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, by_seed in results.items():
        every = list(by_seed.values())
        own, base = (megabytes(results, each, "sent_bytes") if each in results else 0.0 for each in (name, "ddp"))
        cells = [name, spread([each["test_loss"] for each in every], ".4f")]
        for key in ("test_loss", "validation_loss"):
            found = worse(results, name, key)
            cells.append(f"{spread(found, '+.1f')} %" if found else "")
        cells += [f"{own:.3f}", f"{megabytes(results, name, 'received_bytes'):.3f}", f"{base / own:,.0f}"]
        cells.append(f"{sum(each['compared'] for each in every)} equal")
        cells.append(f"{statistics.fmean(each['seconds'] for each in every):.0f}")
        if any(each["kills"] for each in every):
            cells[0] += f" ({sum(each['kills'] for each in every)}, {sum(each['joins'] for each in every)} joins)"
        print(f"| {' | '.join(cells)} |")


def draw(path: Path, results: Results) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    for name in results:
        losses = worse(results, name, "test_loss")
        if losses:
            sent = megabytes(results, name, "sent_bytes")
            middle = statistics.fmean(losses)
            ends = [[middle - min(losses)], [max(losses) - middle]]
            axes.errorbar(sent, middle, ends, marker="o", capsize=3)
            axes.annotate(name, (sent, middle), xytext=(5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="0.8", zorder=0)
    axes.margins(x=0.12)
    axes.set(xscale="log", xlabel="MB sent by a peer", ylabel="loss against data-parallel AdamW, %")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(METHODS)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=[], metavar="NAME", help=names)
    parser.add_argument("--again", nargs="+", choices=METHODS, default=[], metavar="NAME", help="repeat these")
    parser.add_argument("--churn", action="store_true", help="also run the methods other than ddp with kills")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds for each run (default: %(default)s)")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--model", choices=STEPS, default="small", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, help="inner steps in all (default: 2000; large: 1000)")
    parser.add_argument("--pretrain", type=int, help="pretraining steps (default: 500; large: 300)")
    parser.add_argument("--folder", type=Path, default=Path("compare_bytes"), help="of results (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot losses against bytes (matplotlib)")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    only = options.only or (LARGE if options.model == "large" else METHODS)
    inner_steps = options.steps or STEPS[options.model]
    pretraining = PRETRAINING[options.model] if options.pretrain is None else options.pretrain
    file = options.folder / "results.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for name in options.again:
        results.pop(name, None)
        results.pop(name + CHURN, None)
    planned = [
        (seed, name, has_kills)
        for seed in range(options.seeds)
        for name in only
        for has_kills in ([False, True] if options.churn and METHODS[name].script != "ddp_gpt.py" else [False])
    ]
    failed = False
    for number, (seed, name, has_kills) in enumerate(planned, 1):
        shown = name + CHURN * has_kills
        if str(seed) in results.get(shown, {}):
            continue
        print(f"run {number} of {len(planned)}: {shown}, seed {seed}", flush=True)
        method = METHODS[name]
        steps = inner_steps // (method.inner * method.batches)
        start = options.folder / f"start-{seed}.pt"
        batch = BATCH * method.batches
        settings = Settings(start, options.peers, steps, method.inner, pretraining, batch, seed, options.model)
        kind = method.kind(max(1, steps // (KILLS + 2)) if has_kills else 0)
        scratch = options.folder / "run"
        shutil.rmtree(scratch, ignore_errors=True)
        outcome = Run(shown, kind, settings, scratch).make()
        for problem in outcome.problems:
            print(f"{shown}, seed {seed}: {problem}", file=sys.stderr)
            failed = True
        if not outcome.problems:
            results.setdefault(shown, {})[str(seed)] = result_of(outcome)
            file.write_text(json.dumps(results, indent=1))
    chosen = {"ddp", *only}
    order = [each for name in METHODS if name in chosen for each in (name, name + CHURN) if each in results]
    results = {name: results[name] for name in order}
    show(results)
    if options.plot is not None:
        draw(options.plot, results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
