"""What DiLoCo saves and what it costs: one model, one text, as many tokens, trained in eight ways by four peers each.

    python examples/compare_diloco.py

Runs diloco_gpt.py, async_diloco_gpt.py and ddp_gpt.py one after the other, with a master of its own, and ends with a
table: the validation loss against that of data parallelism at every step, and the bytes that a peer sent. In the runs
with churn a peer is killed (SIGKILL) every few outer steps and started again at once, which then joins; the next kill
waits until it has. All digests that any two peers have after the same outer step are compared. Exit code 1: digests
differed, or a run failed. `--only NAME ...` makes some of the runs, `--plot FILE` draws the losses, `--steps` and
`--inner` make it longer or shorter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pccl import MasterNode

FOLDER = Path(__file__).resolve().parent
STALL_S = 300
"""A run without progress for so long has failed."""


@dataclass(frozen=True)
class Kind:
    script: str
    arguments: tuple[str, ...] = ()
    kill_every: int = 0
    """Least number of outer steps between two kills; 0: none."""


KINDS = {
    "ddp": Kind("ddp_gpt.py"),
    "diloco": Kind("diloco_gpt.py"),
    "diloco-8bit": Kind("diloco_gpt.py", ("--quantize", "8")),
    "async": Kind("async_diloco_gpt.py"),
    "async-whole": Kind("async_diloco_gpt.py", ("--fragments", "1")),
    "async-5": Kind("async_diloco_gpt.py", ("--fragments", "5")),
    "diloco-churn": Kind("diloco_gpt.py", (), 4),
    "async-churn": Kind("async_diloco_gpt.py", (), 4),
}


@dataclass
class Outcome:
    seconds: float = 0.0
    kills: int = 0
    joins: int = 0
    compared: int = 0
    """Outer states that at least two peers had."""
    problems: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of peer 0, which is never killed."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Run:
    """The processes of one run, and what they write."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self.name, self.kind, self.options, self.folder = name, KINDS[name], options, folder
        self.outcome = Outcome()
        self.files: list[Path] = []
        self.killed_at = 0
        self.latest: dict[int, Path] = {}
        """What those who were started again write."""

    def start(self, master: str, index: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"{len(self.files)}.jsonl"
        self.files.append(path)
        numbers = {"--peers": self.options.peers, "--index": index, "--steps": self.options.steps}
        numbers |= {"--inner": self.options.inner, "--pretrain": self.options.pretrain}
        command = [sys.executable, str(FOLDER / self.kind.script), "--json", str(path), *self.kind.arguments]
        command += [text for name, number in numbers.items() for text in (name, str(number))]
        command += ["--start", str(self.options.start)]
        with (self.folder / "output.txt").open("ab") as output:
            environment = {**os.environ, "PCCL_MASTER": master}
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def make(self) -> Outcome:
        started_s = progress_s = time.monotonic()
        with MasterNode("127.0.0.1:0") as master:
            peers = {0: self.start(master.address, 0)}
            try:
                while not self.options.start.exists() and peers[0].poll() is None:
                    time.sleep(0.05)  # it pretrains the model for all
                peers |= {index: self.start(master.address, index) for index in range(1, self.options.peers)}
                shown = 0
                while any(process.poll() is None for process in peers.values()):
                    time.sleep(0.05)
                    rows = rows_of(self.files[0])
                    if len(rows) > shown:
                        shown, progress_s = len(rows), time.monotonic()
                        print(
                            f"{self.name}: step {rows[-1]['step']}, {rows[-1]['peers']} peers, "
                            f"loss {rows[-1]['validation_loss']:.4f}",
                            flush=True,
                        )
                        self.churn(shown, peers, master.address)
                    if peers[0].poll() is not None:
                        self.dismiss_latecomers(peers)
                    if time.monotonic() > progress_s + STALL_S:
                        self.outcome.problems.append(f"no progress in {STALL_S} s")
                        break
            finally:
                for process in peers.values():
                    process.kill()
                    process.wait()
        self.outcome.seconds = time.monotonic() - started_s
        for index, process in peers.items():
            if process.returncode != 0:
                output = (self.folder / "output.txt").read_text(errors="replace")[-2000:]
                self.outcome.problems.append(f"peer {index} ended with {process.returncode}:\n{output}")
        self.check()
        return self.outcome

    def dismiss_latecomers(self, peers: dict[int, subprocess.Popen[bytes]]) -> None:
        """The run is over: who was started again and has not been let in would wait for another."""
        for index, path in list(self.latest.items()):
            if peers[index].poll() is None and not rows_of(path):
                peers[index].kill()
                peers.pop(index).wait()
                del self.latest[index]

    def churn(self, step: int, peers: dict[int, subprocess.Popen[bytes]], master: str) -> None:
        """A kill, `kill_every` outer steps after the last one, once everybody is there again."""
        every, rows = self.kind.kill_every, rows_of(self.files[0])
        is_due = every and step >= self.killed_at + every and step + every <= self.options.steps
        if not is_due or rows[-1]["peers"] < self.options.peers:
            return
        self.killed_at = step
        index = 1 + self.outcome.kills % (self.options.peers - 1)
        peers[index].kill()
        peers[index].wait()
        self.outcome.kills += 1
        peers[index] = self.start(master, index)
        self.latest[index] = self.files[-1]

    def check(self) -> None:
        everybody = [rows_of(path) for path in self.files]
        self.outcome.rows = everybody[0]
        self.outcome.joins = sum(bool(rows) for rows in everybody[self.options.peers :])
        digests: dict[tuple[int, int], list[str]] = {}
        for rows in everybody:
            for row in rows:
                digests.setdefault((row["step"], row["revision"]), []).append(row["digest"])
        for (step, _), found in digests.items():
            self.outcome.compared += len(found) > 1
            if len(set(found)) > 1:
                self.outcome.problems.append(f"digests differ after step {step}")
        if not everybody[0] or everybody[0][-1]["step"] != self.options.steps * self.options.inner:
            self.outcome.problems.append("peer 0 has not come to the end")


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME", help=", ".join(KINDS))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=50, help="inner steps in an outer one (default: %(default)s)")
    parser.add_argument("--pretrain", type=int, default=500, help="steps before the first (default: %(default)s)")
    parser.add_argument("--start", type=Path, metavar="FILE", help="keeps the pretrained model, or has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to those in this file")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        options.start = options.start or Path(scratch, "start.pt")
        outcomes: dict[str, Outcome] = {}
        for name in options.only:
            folder = Path(scratch, name)
            folder.mkdir()
            outcome = Run(name, options, folder).make()
            outcomes[name] = outcome
            for problem in outcome.problems:
                print(f"{name}: {problem}", file=sys.stderr)
                failed = True
            if outcome.rows:
                last = outcome.rows[-1]
                results[name] = {
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
    print(f"\n{options.peers} peers, {options.steps} outer steps of {options.inner}")
    print("| run | validation loss | against ddp | MB sent by a peer | fewer bytes | kills, joins | equal digests |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base = results.get("ddp")
    for name, result in results.items():
        worse = f"{100 * (result['loss'] / base['loss'] - 1):+.1f} %" if base else ""
        fewer = f"{base['sent_bytes'] / result['sent_bytes']:.1f} times" if base and result["sent_bytes"] else ""
        digests = f"{result['compared'] - result['differing']} of {result['compared']}"
        print(
            f"| {name} | {result['loss']:.4f} | {worse} | {result['sent_bytes'] / 1e6:.2f} | {fewer} | "
            f"{result['kills']}, {result['joins']} | {digests} |"
        )
    if options.plot is not None:
        draw(options.plot, outcomes)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
