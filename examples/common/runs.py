"""Runs of the GPT training examples, for programs that compare them: their processes, kills and output."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.gpt import BATCH
from pccl import MasterNode

FOLDER = Path(__file__).resolve().parent.parent
STALL_S = 900
"""A run without progress for this long has failed."""


@dataclass(frozen=True)
class Kind:
    script: str
    arguments: tuple[str, ...] = ()
    kill_every: int = 0
    """Minimum number of outer steps between two kills; 0: no kills."""
    kills_max: int | None = None
    of_last_peer: tuple[str, ...] = ()
    """Additional arguments for the peer with the highest index."""


@dataclass(frozen=True)
class Settings:
    """The settings that the runs of a comparison have in common."""

    start: Path
    """The pretrained model, which the first run creates."""
    peers: int = 4
    steps: int = 40
    """Outer steps."""
    inner: int = 50
    pretrain: int = 500
    batch: int = BATCH
    """Sequences per step and peer."""
    seed: int = 0
    model: str = "small"


@dataclass
class Outcome:
    seconds: float = 0.0
    kills: int = 0
    joins: int = 0
    compared: int = 0
    """Number of outer states that at least two peers reported."""
    problems: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The rows of peer 0, which is never killed."""
    wire_bytes: tuple[float, float] = (0, 0)
    """Bytes sent and received, with frame headers: the mean of the peers that made all steps."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Run:
    """The processes of one run, and their output."""

    def __init__(self, name: str, kind: Kind, settings: Settings, folder: Path) -> None:
        """`folder` is created for the output of the processes."""
        folder.mkdir()
        self.name, self.kind, self.settings, self.folder = name, kind, settings, folder
        self.outcome = Outcome()
        self.files: list[Path] = []
        self.killed_at = 0
        self.latest: dict[int, Path] = {}
        """The files that restarted peers write."""

    def start(self, master: str, index: int) -> subprocess.Popen[bytes]:
        path = self.folder / f"{len(self.files)}.jsonl"
        self.files.append(path)
        numbers = {f"--{name}": value for name, value in asdict(self.settings).items()} | {"--index": index}
        command = [sys.executable, str(FOLDER / self.kind.script), "--json", str(path), *self.kind.arguments]
        command += [text for name, number in numbers.items() for text in (name, str(number))]
        command += self.kind.of_last_peer if index == self.settings.peers - 1 else ()
        with (self.folder / "output.txt").open("ab") as output:
            environment = {**os.environ, "PCCL_MASTER": master}
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output)

    def make(self) -> Outcome:
        started_s = time.monotonic()
        with MasterNode("127.0.0.1:0") as master:
            peers = {0: self.start(master.address, 0)}
            try:
                while not self.settings.start.exists() and peers[0].poll() is None:
                    time.sleep(0.05)  # peer 0 pretrains the model for all
                peers |= {index: self.start(master.address, index) for index in range(1, self.settings.peers)}
                shown, progress_s = 0, time.monotonic()
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
        """Kill restarted peers that were not admitted before the end of the run."""
        for index, path in list(self.latest.items()):
            if peers[index].poll() is None and not rows_of(path):
                peers[index].kill()
                peers.pop(index).wait()
                del self.latest[index]

    def churn(self, step: int, peers: dict[int, subprocess.Popen[bytes]], master: str) -> None:
        """Kill and restart a peer if `kill_every` outer steps have passed since the last kill and all peers are
        connected."""
        every, rows = self.kind.kill_every, rows_of(self.files[0])
        is_due = every and step >= self.killed_at + every and step + every <= self.settings.steps
        if not is_due or rows[-1]["peers"] < self.settings.peers or self.outcome.kills == self.kind.kills_max:
            return
        self.killed_at = step
        index = 1 + self.outcome.kills % (self.settings.peers - 1)
        peers[index].kill()
        peers[index].wait()
        self.outcome.kills += 1
        peers[index] = self.start(master, index)
        self.latest[index] = self.files[-1]

    def check(self) -> None:
        everybody = [rows_of(path) for path in self.files]
        self.outcome.rows = everybody[0]
        whole = [rows[-1]["wire_bytes"] for rows in everybody if rows and len(rows) == len(everybody[0])]
        if whole:
            self.outcome.wire_bytes = (
                statistics.fmean(sent for sent, _ in whole),
                statistics.fmean(got for _, got in whole),
            )
        self.outcome.joins = sum(bool(rows) for rows in everybody[self.settings.peers :])
        digests: dict[tuple[int, int], list[str]] = {}
        for rows in everybody:
            for row in rows:
                digests.setdefault((row["step"], row["revision"]), []).append(row["digest"])
        for (step, _), found in digests.items():
            self.outcome.compared += len(found) > 1
            if len(set(found)) > 1:
                self.outcome.problems.append(f"digests differ after step {step}")
        if not everybody[0] or everybody[0][-1]["step"] != self.settings.steps * self.settings.inner:
            self.outcome.problems.append("peer 0 has not reached the end")
