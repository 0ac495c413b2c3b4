"""The share of a step that comparing digests takes.

    python -m tests.training.comparison_cost [--peers 2] [--only NAME ...]

Peers are processes on this machine with one thread for torch each; they train with `check_every=None`, so that they
choose themselves how often they compare. What `pccl.training.state.digests` does in each step is clocked on each
peer: hashing, launching, and waiting for the comparison's op, which a busy machine lengthens as it lengthens the steps.
The table has the peer with the highest share of the time: over the whole run, in which the intervals double from one
step up, and from the comparison on at which they no longer do. CPU time is that of the process while it hashes (BLAKE3
has threads of its own for large tensors), and of the calling thread while it launches and waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pccl import Communicator, MasterNode
from pccl.training import DDP, DiLoCo
from pccl.training.state.digests import Check

INNER_STEPS = 50
LIMIT_S = 1200


@dataclass(frozen=True)
class Case:
    name: str
    kind: type[DDP] | type[DiLoCo]
    width: int
    """The width of a perceptron with two hidden layers."""
    batch: int
    steps: int


CASES = {
    case.name: case
    for case in (
        Case("ddp", DDP, 128, 512, 4_000),
        Case("ddp-8mib", DDP, 960, 64, 1_500),
        Case("diloco", DiLoCo, 128, 512, 80),
    )
}


class Clock:
    """Times what a `Check` does, by wrapping its methods."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.wall_s = self.cpu_s = 0.0
        self.begun_s = self.settled_s = time.monotonic()
        self.settled_from = (0.0, 0.0)
        """The values of `wall_s` and `cpu_s` at `settled_s`."""
        self.comparisons = 0
        self.is_settled = False
        vars(check).update(
            note=self._timed(check.note, time.process_time),
            launch=self._timed(check.launch, time.thread_time),
            land=self._timed(self._land(check.land), time.thread_time),
        )

    def _timed(self, call: Callable[..., None], cpu: Callable[[], float]) -> Callable[..., None]:
        def timed(*arguments: Any, **options: Any) -> None:
            if not arguments and self.check._snapshot is None:
                call(**options)  # most steps compare nothing, and to clock them would cost more than they do
                return
            wall_s, cpu_s = time.monotonic(), cpu()
            call(*arguments, **options)
            self.cpu_s += cpu() - cpu_s
            self.wall_s += time.monotonic() - wall_s

        return timed

    def _land(self, land: Callable[..., None]) -> Callable[..., None]:
        def landed(**options: Any) -> None:
            is_comparison = self.check._op is not None
            land(**options)
            if is_comparison:
                self.comparisons += 1
                if not self.is_settled and self.comparisons > 2 and self.check._gap == self.check._words[8]:
                    self.is_settled = True
                    self.settled_s, self.settled_from = time.monotonic(), (self.wall_s, self.cpu_s)

        return landed

    def report(self, steps: int) -> dict[str, Any]:
        now_s = time.monotonic()
        run_s, settled_s = now_s - self.begun_s, now_s - self.settled_s
        wall_s, cpu_s = self.settled_from
        return {
            "step_ms": 1e3 * run_s / steps,
            "comparisons": self.comparisons,
            "interval": self.check._gap,
            "comparison_ms": 1e3 * self.wall_s / max(1, self.comparisons),
            "share": self.wall_s / run_s,
            "cpu_share": self.cpu_s / run_s,
            "settled_share": (self.wall_s - wall_s) / settled_s if self.is_settled else None,
            "settled_cpu_share": (self.cpu_s - cpu_s) / settled_s if self.is_settled else None,
        }


def train(case: Case, peers: int) -> dict[str, Any]:
    """One peer's part."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = case.width
    model = nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Communicator(os.environ["PCCL_MASTER"]) as communicator:
        trained = case.kind(communicator, model, optimizer)
        trained.join(peers)
        torch.manual_seed(communicator.membership.rank)

        def backward() -> None:
            images, labels = torch.randn(case.batch, 64), torch.randint(10, (case.batch,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()

        clock = Clock(trained._contract._check)
        while trained.revision < case.steps:
            if isinstance(trained, DDP):
                backward()
                trained.step()
                continue
            for _ in range(INNER_STEPS):
                backward()
                optimizer.step()
            trained.outer_step()
        return clock.report(case.steps)


def measure(case: Case, peers: int) -> dict[str, Any]:
    """Return the figures of the peer that comparing took the largest share of."""
    command = [sys.executable, "-m", "tests.training.comparison_cost", "--peers", str(peers), "--peer-of", case.name]
    with MasterNode("127.0.0.1:0") as master:
        environment = {**os.environ, "PCCL_MASTER": master.address}
        processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(peers)]
        try:
            reports = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
    return max(reports, key=lambda report: float(report["share"]))


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.3f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--peer-of", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer_of is not None:
        print(json.dumps(train(CASES[options.peer_of], options.peers)))
        return
    print("| run | a step | comparisons, one takes | last interval | share, of it CPU | once settled, of it CPU |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.only:
        found = measure(CASES[name], options.peers)
        settled = f"{percent(found['settled_share'])}, {percent(found['settled_cpu_share'])}"
        print(
            f"| {name} | {found['step_ms']:.2f} ms | {found['comparisons']}, {found['comparison_ms']:.2f} ms | "
            f"{found['interval']} steps | {percent(found['share'])}, {percent(found['cpu_share'])} | {settled} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
