"""One run of `examples/torch_elastic.py` with a killed worker and a new one, and its requirements:

1  Every survivor gets an error that names the lost rank's process and the reason.
2  Survivors get it at the same step; with DDP they have the same parameters.
3  They continue as a smaller world, and then with the new worker.
4  All workers at the end have the same parameters, and have made all steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "torch_elastic.py"
PEERS = 4
LIMIT_S = 240.0

Event = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """What a run has shown."""

    heard_s: list[float]
    """Seconds from the kill until each survivor had the error."""
    reconfigured_s: list[float]
    """Seconds that the first reconfigure after it took each of them."""
    joined_s: list[float]
    """Seconds that the reconfigure with the newcomer took each rank."""
    why: str
    """What one of them was told."""
    faults: list[str]


def run(loop: str, victim: int, steps: int = 80) -> list[Event]:
    """Run the example, kill worker `victim` of it, and return all that its processes have told."""
    command = [sys.executable, str(EXAMPLE), "--loop", loop, "--peers", str(PEERS), "--steps", str(steps)]
    command += ["--kill", f"{victim}@{steps // 4}", "--join", str(steps // 2)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def judge(events: Sequence[Event], loop: str, victim: int) -> Judged:
    """Return what a run has shown, and what is wrong with it."""
    faults: list[str] = []

    def require(condition: bool, what: str) -> None:
        if not condition:
            faults.append(what)

    def of(event: str, **facts: Any) -> list[Event]:
        return [each for each in events if each["event"] == event and all(each.get(key) == facts[key] for key in facts)]

    survivors = [worker for worker in range(PEERS) if worker != victim]
    kills, losses = of("kill"), of("lost", uuid=1)
    require(len(kills) == 1, f"{len(kills)} kills")
    killed_at = kills[0]["at"] if kills else 0.0
    require(sorted(each["worker"] for each in losses) == survivors, "not all survivors have heard of the loss once")
    victims = [each["process"] for each in of("world", uuid=1, worker=victim)]
    for each in losses:
        name = f"rank {victim} ({victims[0]})" if victims else "?"
        require(
            f"{name} lost" in each["why"] or f"{name} was lost" in each["why"], f"{name} is not named: {each['why']}"
        )
        require(f"{name} was lost (" in each["why"] or f"{name}: " in each["why"], f"no reason: {each['why']}")
    require(len({each["step"] for each in losses}) == 1, f"steps differ: {[each['step'] for each in losses]}")
    require(len({each["digest"] for each in losses}) == 1, f"survivors differ: {[each['digest'] for each in losses]}")
    require(loop != "ddp" or all(each["digest"] for each in losses), "no digests")
    smaller, whole = of("world", uuid=2), of("world", uuid=3)
    require([each["size"] for each in smaller] == [PEERS - 1] * (PEERS - 1), "the survivors have made no world")
    require([each["size"] for each in whole] == [PEERS] * PEERS, "the newcomer has not joined")
    ends = of("done")
    require(sorted(each["worker"] for each in ends) == [*survivors, PEERS], "not all have come to the end")
    require(len({(each["step"], each["digest"]) for each in ends}) == 1, "they end with different parameters")
    require(of("over", failed=[]) != [], "a worker has failed")
    return Judged(
        heard_s=[each["at"] - killed_at for each in losses],
        reconfigured_s=[each["seconds"] for each in smaller],
        joined_s=[each["seconds"] for each in whole],
        why=losses[0]["why"] if losses else "",
        faults=faults,
    )
