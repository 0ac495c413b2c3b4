"""The output of a training example: a table of losses that grows during the run, a file of JSON lines, and a plot."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

HEADER = f"{'step':>6} {'peers':>5} {'train loss':>10} {'validation':>10} {'sent MB':>9} {'waited s':>8} {'seconds':>7}"


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser for the options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    environment = os.environ
    parser.add_argument(
        "--index",
        type=int,
        default=int(environment.get("PCCL_LAUNCH_INDEX", 0)),
        help="which part of the data is this peer's; peer 0 shows the table (default: PCCL_LAUNCH_INDEX, else 0)",
    )
    parser.add_argument(
        "--peers",
        type=int,
        default=int(environment.get("PCCL_LAUNCH_COUNT", 1)),
        help="start when this many are connected (default: PCCL_LAUNCH_COUNT, else 1)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="peer 0 draws its losses: .png, .svg (matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a JSON line for each row of the table")
    return parser


def gpt_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser for the options of the examples that train the GPT."""
    parser = arguments(description)
    parser.add_argument("--steps", type=int, default=40, help="outer steps (default: %(default)s)")
    parser.add_argument("--inner", type=int, default=50, help="inner steps per outer step (default: %(default)s)")
    parser.add_argument("--quantize", type=int, choices=[8, 4], help="bits per element on the wire")
    parser.add_argument(
        "--compression",
        metavar="NAME",
        help="8bit, 4bit, 2bit or 1bit; or topk, randomk, dgc, perlayer, sign, onebitadam, powersgd, dct, sketch, arc "
        "or entropy, and its first settings: dgc=0.1,0.6; entropy=1.3/2.1 is for both directions through owners",
    )
    parser.add_argument("--decay", type=float, help="of the residual of --compression")
    parser.add_argument("--pretrain", type=int, default=500, help="pretraining steps (default: %(default)s)")
    parser.add_argument("--start", type=Path, metavar="FILE", help="the pretrained model; created if missing")
    parser.add_argument("--seed", type=int, default=0, help="for the weights and the order of the text")
    parser.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="muon: for the blocks' matrices"
    )
    parser.add_argument(
        "--outer", choices=["nesterov", "momentum", "adam"], default="nesterov", help="outer optimizer of DiLoCo"
    )
    parser.add_argument("--muon-rate", type=float, default=0.012, help="of --optimizer muon (default: %(default)s)")
    parser.add_argument("--muon-momentum", type=float, default=0.95, help="of --optimizer muon (default: %(default)s)")
    parser.add_argument("--outer-learning-rate", type=float, help="for DiLoCo (default: the class's)")
    parser.add_argument("--outer-momentum", type=float, help="for DiLoCo (default: the class's)")
    parser.add_argument("--outer-clip", type=float, default=math.inf, help="with --outer momentum")
    parser.add_argument("--model", choices=["small", "large"], default="small", help="68,544 or 2.3 million parameters")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step and peer (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=0, help="minimum duration of an inner step")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save every outer step there, and resume")
    return parser


def announce(options: argparse.Namespace) -> None:
    """Print this process's pid and the command that starts a replacement."""
    where = f"PCCL_MASTER={os.environ['PCCL_MASTER']}"
    who = f"--peers {options.peers} --index {options.index}"
    print(f"pid {os.getpid()}; {where} python {' '.join(sys.argv)} {who} starts it again", flush=True)


@dataclass(frozen=True)
class Row:
    """A row of the table. `sent_bytes` is the gradient payload sent since the start, and `waited_s` the time that
    computation waited for the network since the last row."""

    step: int
    revision: int
    """The revision of the state whose digest this is."""
    peers: int
    train_loss: float
    validation_loss: float | None
    sent_bytes: int
    waited_s: float
    seconds: float
    digest: str
    wire_bytes: tuple[int, int] = (0, 0)
    """Bytes sent and received since the start, with frame headers, by pccl's counters."""
    test_loss: float | None = None
    """The loss on another text, after the last step."""


class Progress:
    """One peer's table. Only peer 0 prints it; every peer writes JSON if asked."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.plot is not None:
            import matplotlib.figure  # noqa: F401 - fails now rather than at the end
        self._options = options
        self._started_s = time.monotonic()
        self._sent_bytes = 0
        self._rows: list[Row] = []

    def begin(self) -> None:
        """Start the clock."""
        self._started_s = time.monotonic()

    @property
    def is_shown(self) -> bool:
        """Whether this peer shows the table."""
        return bool(self._options.index == 0)

    def add(
        self,
        step: int,
        revision: int,
        peers: int,
        train_loss: float,
        validation_loss: float | None,
        sent_bytes: int,
        waited_s: float,
        digest: str,
        stats: Mapping[str, int] | None = None,
        test_loss: float | None = None,
    ) -> None:
        """`stats` is the communicator's."""
        wire = (stats["tx_wire_bytes"], stats["rx_wire_bytes"]) if stats is not None else (0, 0)
        self._sent_bytes += sent_bytes
        elapsed_s = time.monotonic() - self._started_s
        row = Row(step, revision, peers, train_loss, validation_loss, self._sent_bytes, waited_s, elapsed_s, digest)
        row = replace(row, wire_bytes=wire, test_loss=test_loss)
        if self._options.json is not None:
            with self._options.json.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
        if self.is_shown:
            if not self._rows:
                print(HEADER, flush=True)
            loss = "" if validation_loss is None else f"{validation_loss:.4f}"
            print(
                f"{step:>6} {peers:>5} {train_loss:>10.4f} {loss:>10} {self._sent_bytes / 1e6:>9.3f} "
                f"{waited_s:>8.2f} {elapsed_s:>7.1f}",
                flush=True,
            )
        self._rows.append(row)

    def finish(self, digest: str) -> None:
        print(f"digest {digest[:16]}", flush=True)
        if self._options.plot is not None and self.is_shown:
            self._draw(self._options.plot)

    def _draw(self, path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        steps = [row.step for row in self._rows]
        axes.plot(steps, [row.train_loss for row in self._rows], color="0.6", label="training, peer 0")
        shown = [(row.step, row.validation_loss) for row in self._rows if row.validation_loss is not None]
        axes.plot(*zip(*shown, strict=True), marker="o", label="validation")
        axes.set(xlabel="step", ylabel="loss, nats per byte", title=f"{self._rows[-1].peers} peers")
        axes.legend(frameon=False)
        figure.savefig(path)
        print(f"plot: {path}", flush=True)
