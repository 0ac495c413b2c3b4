"""Shows what SPSA with shared seeds promises: many peers that send a byte each do as well as one machine alone.

    python examples/compare_spsa.py

Runs spsa.py with its own master, and prints a table:

    reference  one machine, four directions per step, projected gradients not rounded: no peers, no bytes
    one        one machine, four directions per step, gradients rounded to bytes
    peers      four peers with one direction each: must have the bits of `one` after every step
    churn      as `peers`, but every few steps a peer is killed (SIGKILL) and restarted; the next kill waits until it
               has joined

The logs of the last two are replayed from the pretrained model and must end with the bits of the run. All digests that
any two peers have after the same step are compared. Exit code 1 means that bits differ or a run failed. `--plot FILE`
plots the losses, `--steps` makes the runs longer or shorter, `--only NAME ...` selects some of the last three runs.

`--relatives` instead runs published relatives on one machine, with as many forward passes as the reference: other
numbers of directions in a step, and past slopes that are used again in later steps (see `Relative`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccl import MasterNode

FOLDER = Path(__file__).resolve().parent
NAMES = ("one", "peers", "churn")
SHOW_EVERY = 10
STALL_S = 300
"""A run without progress for this long has failed."""
PAUSE_S = 0.15
"""Minimum time of a step with churn; without it, the run would be over before a killed peer has rejoined."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Run:
    """The processes of one run, and their output."""

    name: str
    options: argparse.Namespace
    folder: Path
    extra: tuple[str, ...] = ()
    kill_every: int = 0
    """Minimum number of steps between two kills; 0: no kills."""
    files: list[Path] = field(default_factory=list)
    killed_at: int = 0
    kills: int = 0

    def command(self, *arguments: str) -> list[str]:
        options = self.options
        return [sys.executable, str(FOLDER / "spsa.py"), "--start", str(options.start), *self.extra, *arguments]

    def start(self, master: str, index: int, peers: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"{len(self.files)}.jsonl"
        self.files.append(path)
        numbers = {"--peers": peers, "--index": index, "--steps": self.options.steps, "--show-every": SHOW_EVERY}
        arguments = [text for name, number in numbers.items() for text in (name, str(number))]
        # A restarted peer starts a new log, because the old one may lack the last step.
        arguments += ["--json", str(path), "--log", str(self.folder / f"logs-{len(self.files)}")]
        with (self.folder / "output.txt").open("ab") as output:
            environment = {**os.environ, "PCCL_MASTER": master}
            return subprocess.Popen(self.command(*arguments), env=environment, stdout=output, stderr=output)

    def make(self, count: int) -> None:
        progress_s, shown = time.monotonic(), 0
        with MasterNode("127.0.0.1:0") as master:
            peers = {index: self.start(master.address, index, count) for index in range(count)}
            try:
                while peers[0].poll() is None:
                    time.sleep(0.02)
                    rows = rows_of(self.files[0])
                    if len(rows) > shown:
                        shown, progress_s = len(rows), time.monotonic()
                        self.churn(rows[-1], peers, master.address)
                    if time.monotonic() > progress_s + STALL_S:
                        raise SystemExit(f"{self.name}: no progress in {STALL_S} s")
                if peers[0].returncode != 0:
                    raise SystemExit(f"{self.name} failed:\n" + (self.folder / "output.txt").read_text()[-2000:])
                for index, process in peers.items():
                    if rows_of(self.files[-1]) or not self.kills:  # else it came too late, and waits for others
                        assert process.wait(STALL_S) == 0, f"{self.name}: peer {index} failed"
            finally:
                for process in peers.values():
                    process.kill()
                    process.wait()

    def churn(self, row: dict[str, Any], peers: dict[int, subprocess.Popen[bytes]], master: str) -> None:
        is_due = self.kill_every and row["step"] >= self.killed_at + self.kill_every
        if not is_due or row["peers"] < self.options.peers or row["step"] + self.kill_every > self.options.steps:
            return
        self.killed_at = row["step"]
        index = 1 + self.kills % (self.options.peers - 1)  # peer 0 shows the table
        peers[index].kill()
        peers[index].wait()
        self.kills += 1
        peers[index] = self.start(master, index, self.options.peers)

    def replayed(self) -> str:
        """Replay peer 0's log in a separate process, and return the digest."""
        command = self.command("--replay", str(self.folder / "logs-1" / "peer-0.log"))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    @property
    def digests(self) -> dict[int, set[str]]:
        """All digests that any peer had, by step."""
        found: dict[int, set[str]] = {}
        for path in self.files:
            for row in rows_of(path):
                found.setdefault(row["step"], set()).add(row["digest"])
        return found


@dataclass(frozen=True)
class Relative:
    """A method that sends no more than SPSA.

    `memory` is the weight of past slopes, as in FZooS (Shu et al. 2023, arXiv:2308.04077), which estimates gradients by
    a Gaussian process from past evaluations. Random directions of many elements are nearly orthogonal. Then the mean of
    a process that forgets exponentially is the sum of past estimates with decaying weights: each slope moves the
    weights again, `memory` times as far, in each of the next steps. All peers know directions and slopes, so this sends
    no more bytes. FZooS itself fits random features to function values, and sends all parameters in each round.
    """

    directions: int
    rate: float
    memory: float = 0.0


RELATIVES = {
    "4 directions": Relative(4, 3e-3),
    "1 direction": Relative(1, 1e-3),
    "2 directions": Relative(2, 2e-3),
    "16 directions": Relative(16, 8e-3),
    "4 directions, memory 0.5": Relative(4, 1.5e-3, 0.5),
    "4 directions, memory 0.9": Relative(4, 6e-4, 0.9),
}
REUSES = 20
"""The number of later steps that use a slope again."""


def reference_losses(options: argparse.Namespace, method: Relative | None = None) -> list[float]:
    """Run SPSA as in the papers, with the same directions and batches. Return the initial loss and that of each row."""
    method = method or Relative(options.peers, 3e-3)
    share = options.peers / method.directions  # of steps, so that all methods have as many forward passes
    import torch
    from common.bytecode import Bytecode
    from common.gpt import CONTEXT, GPT, Trainer
    from common.text import Corpus

    from pccl.training import SPSAOptions
    from pccl.training.spsa.grid import Grid, tensors_of

    torch.set_num_threads(1)
    model, data = GPT(), Bytecode()
    Trainer(model, Corpus(shards=4), 0, 1).warm_start(options.pretrain, options.start)
    settings = SPSAOptions(learning_rate=method.rate, decay_steps=400 * share)
    grid = Grid(list(tensors_of(model)[0].values()), settings.epsilon, settings.seed)
    with torch.no_grad():
        losses = [float(model.loss(data.validation(CONTEXT + 1)))]
        recent: deque[tuple[int, dict[int, float]]] = deque(maxlen=REUSES if method.memory else 0)
        for step in range(round(options.steps * share)):
            moves = {}
            for direction in range(method.directions):
                batch = data.batch(step, direction, 16, CONTEXT + 1)
                grid.displace(step, {direction: 1})
                plus = float(model.loss(batch))
                grid.displace(step, {direction: -1})
                minus = float(model.loss(batch))
                moves[direction] = -settings.rate(step) * (plus - minus) / (2 * settings.epsilon) / method.directions
            grid.update(step, moves)
            for age, (past, made) in enumerate(reversed(recent), 1):
                grid.update(past, {each: method.memory**age * move for each, move in made.items()})
            recent.append((step, moves))
            if (step + 1) % round(SHOW_EVERY * share) == 0:
                losses.append(float(model.loss(data.validation(CONTEXT + 1))))
    return losses


def compare_relatives(options: argparse.Namespace) -> None:
    print("| method | validation loss | forward passes in all | bytes sent by a peer, of four |")
    print("| --- | --- | --- | --- |")
    for name, method in RELATIVES.items():
        losses = reference_losses(options, method)
        passes = 2 * options.steps * options.peers
        sent = options.steps * (options.peers - 1)
        print(f"| {name} | {losses[-1]:.4f} | {passes} | {sent} |", flush=True)


def draw(path: Path, losses: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        axes.plot([SHOW_EVERY * i for i in range(len(values))], values, label=name)
    axes.set(xlabel="step", ylabel="validation loss, nats per byte", yscale="log")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400, help="steps (default: %(default)s)")
    parser.add_argument("--kill-every", type=int, default=20, help="steps between kills (default: %(default)s)")
    parser.add_argument("--pretrain", type=int, default=500, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; created if missing")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--relatives", action="store_true", help="compare SPSA's relatives instead, on one machine")
    options = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        options.start = options.start or Path(scratch, "start.pt")
        if options.relatives:
            compare_relatives(options)
            return 0
        losses = {"reference": reference_losses(options)}
        print(f"reference: loss {losses['reference'][-1]:.4f}", flush=True)
        runs = {
            "one": Run("one", options, Path(scratch, "one"), ("--directions", str(options.peers))),
            "peers": Run("peers", options, Path(scratch, "peers")),
            "churn": Run("churn", options, Path(scratch, "churn"), ("--pause", str(PAUSE_S)), options.kill_every),
        }
        table = [f"| reference | {losses['reference'][-1]:.4f} | | | |"]
        for name in options.only:
            run = runs[name]
            run.folder.mkdir()
            count = 1 if name == "one" else options.peers
            run.make(count)
            rows = rows_of(run.files[0])
            losses[name] = [losses["reference"][0], *(row["validation_loss"] for row in rows)]
            print(f"{name}: loss {losses[name][-1]:.4f}", flush=True)
            problems += [f"{name}: digests differ after step {s}" for s, found in run.digests.items() if len(found) > 1]
            replay = ""
            if name != "one":
                is_same = run.replayed() == rows[-1]["digest"][:16]
                replay = "the same bits" if is_same else "other bits"
                problems += [] if is_same else [f"{name}: the replayed log gives other bits"]
            joins = sum(bool(rows_of(path)) for path in run.files) - count
            sent = int(rows[-1]["sent_bytes"])
            table.append(f"| {name} | {losses[name][-1]:.4f} | {sent} | {run.kills}, {joins} | {replay} |")
        if {"one", "peers"} <= {*options.only} and runs["one"].digests != runs["peers"].digests:
            problems.append("four peers and one machine with four directions differ")
    print(f"\n{options.steps} steps of {options.peers} directions, from a loss of {losses['reference'][0]:.4f}")
    print("| run | validation loss | bytes sent by a peer | kills, joins | replay of its log gives |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(table))
    if options.plot is not None:
        draw(options.plot, losses)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
