"""Proves from the logs of a run's samplers that each sample in each epoch was used exactly once.

    python -m pccl.tools.audit logs/*.jsonl

Each peer logs the samples that it draws, before it trains on them, and the committed steps (`pccl.training.data.
sample_log`). The steps form a hash chain. The audit follows the chain back from the state with the most steps; other
steps were rolled back, for example by a resume from a checkpoint. It checks for each step in the chain that

1. its hash follows from its number, its positions and the previous hash;
2. each peer has drawn the positions that it used according to the step;
3. the drawn samples are those that the seed places at these positions;
4. no position was used before.

It needs the logs of all peers, including killed ones. Exit codes: 0 for no problems, 1 for problems, 2 for bad logs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.training.data.elastic_sampler import indices_at
from pccl.training.data.sample_ledger import GENESIS, history_after
from pccl.training.data.stream import Range

PROBLEMS_MAX = 100


class AuditError(Exception):
    """The logs cannot be read, or are not from one data stream."""


@dataclass(slots=True)
class Audit:
    """The result of an audit. Counts are numbers of samples unless stated otherwise."""

    dataset_size: int = 0
    steps: int = 0
    """The number of steps in the chain."""
    peers: int = 0
    """The number of peers in these steps; a peer that rejoins is counted again."""
    epochs: int = 0
    """The number of complete epochs."""
    used: int = 0
    given_up: int = 0
    """Samples drawn for steps that are not in the chain."""
    again: int = 0
    """Samples in `given_up` that were used later."""
    rolled_back: int = 0
    """The number of steps that are not in the chain."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of at most PROBLEMS_MAX problems."""

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {self.peers} peers used {self.used} samples; {self.epochs} epochs of "
            f"{self.dataset_size} samples are complete",
            f"{self.given_up} samples were drawn for steps that were lost; {self.again} of them were used later",
        ]
        if self.rolled_back:
            lines.append(f"{self.rolled_back} steps did not lead to the last state")
        lines += [f"PROBLEM: {each}" for each in self.problems]
        if not self.problems:
            lines.append("each sample in each complete epoch was used exactly once")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    before: str
    after: str
    used: Mapping[str, Sequence[Range]]


@dataclass(slots=True)
class _Drawn:
    ranges: list[Range] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    @property
    def positions(self) -> NDArray[np.int64]:
        return _positions(self.ranges)


class _Logs:
    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self.streams: set[tuple[int, int, bool]] = set()
        self.drawn: dict[tuple[str, int], _Drawn] = defaultdict(_Drawn)
        """Drawn samples by peer name and step number."""
        self.steps: dict[str, list[_Step]] = defaultdict(list)
        """Steps by the state that they led to."""
        for path in paths:
            lines = Path(path).read_bytes().split(b"\n")
            for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is incomplete
                try:
                    self._add(json.loads(line))
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise AuditError(f"{path}, line {number}: not a valid sampler log line: {error!r}") from error
        if len(self.streams) != 1:
            streams = ", ".join(map(str, sorted(self.streams))) or "none"
            raise AuditError(f"the logs must be from one data stream (size, seed, shuffled); found: {streams}")

    def _add(self, event: dict[str, Any]) -> None:
        if "drawn" in event:
            drawn = self.drawn[event["by"], event["drawn"]]
            drawn.ranges += _ranges(event["positions"])
            drawn.samples += event["samples"]
        elif "discarded" in event:
            self.drawn.pop((event["by"], event["discarded"]), None)
        elif "step" in event:
            used = {name: _ranges(ranges) for name, ranges in event["used"].items()}
            step = _Step(event["step"], event["before"], event["after"], used)
            if step not in self.steps[step.after]:
                self.steps[step.after].append(step)
        else:
            stream = event["stream"]
            self.streams.add((stream["dataset_size"], stream["seed"], stream["shuffle"]))


def _positions(ranges: Iterable[Range]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.arange(begin, end) for begin, end in ranges)])


def _ranges(found: Any) -> list[Range]:
    return [(int(begin), int(end)) for begin, end in found]


def audit(paths: Iterable[str | os.PathLike[str]]) -> Audit:
    """Audit the logs of all peers in a run. Raise AuditError or OSError if they cannot be read."""
    logs = _Logs(paths)
    ((size, seed, shuffle),) = logs.streams
    found = Audit(dataset_size=size)
    chain = _chain(logs, found.problems)
    in_chain = {(name, step.number) for step in chain for name in step.used}
    positions = [np.empty(0, np.int64)]
    for step in chain:
        if history_after(step.before, step.number, step.used) != step.after:
            found.problems.append(f"step {step.number}: its positions do not match its hash {step.after}")
        for name, ranges in sorted(step.used.items()):
            drawn = logs.drawn.get((name, step.number), _Drawn())
            positions.append(drawn.positions)
            if ranges:
                found.problems += _differences(f"step {step.number}: peer {name}", ranges, drawn, size, seed, shuffle)
    used, counts = np.unique(np.concatenate(positions), return_counts=True)
    for index in np.flatnonzero(counts > 1)[:PROBLEMS_MAX].tolist():
        sample = int(indices_at(used[index : index + 1], size, seed, shuffle)[0])
        found.problems.append(f"sample {sample} was used {counts[index]} times in epoch {used[index] // size}")
    gaps = np.flatnonzero(used != np.arange(used.size))
    found.epochs = int(gaps[0] if gaps.size else used.size) // size
    found.steps = len(chain)
    found.rolled_back = len(logs.steps) - len({step.after for step in chain})
    found.peers = len({name for name, _ in in_chain})
    found.used = int(counts.sum())
    for key, drawn in logs.drawn.items():
        if key not in in_chain:
            found.given_up += drawn.positions.size
            found.again += int(np.isin(drawn.positions, used).sum())
    del found.problems[PROBLEMS_MAX:]
    return found


def _chain(logs: _Logs, problems: list[str]) -> list[_Step]:
    """Return, in order, the steps that led to the state with the most steps."""
    chain: list[_Step] = []
    step = max((each for steps in logs.steps.values() for each in steps), key=lambda each: each.number, default=None)
    while step is not None:
        chain.append(step)
        if step.before == GENESIS:
            break
        former = logs.steps.get(step.before, [])
        if not former:
            problems.append(f"step {step.number - 1}, which led to {step.before}, is in no log")
        # If steps with the same positions name different peers, the run was resumed. Take the one with logged draws.
        step = max(former, key=lambda each: all((name, each.number) in logs.drawn for name in each.used), default=None)
    return chain[::-1]


def _differences(
    peer: str, ranges: Sequence[Range], drawn: _Drawn, size: int, seed: int, shuffle: bool
) -> Iterator[str]:
    positions = drawn.positions
    if not drawn.ranges:
        yield f"{peer} took part, but no log has its draws; is its log missing?"
    elif not np.array_equal(np.sort(positions), np.sort(_positions(ranges))):
        yield f"{peer} has drawn positions {drawn.ranges}, but the other peers recorded {ranges}"
    elif drawn.samples != indices_at(positions, size, seed, shuffle).tolist():
        yield f"{peer} has drawn samples other than those that the seed places at positions {drawn.ranges}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pccl.tools.audit",
        description="Proves from the logs of a run's samplers that each sample in each epoch was used exactly once.",
    )
    parser.add_argument("logs", nargs="+", metavar="FILE", help="the logs of all peers, including killed ones")
    try:
        found = audit(parser.parse_args(arguments).logs)
    except (OSError, AuditError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    print(found)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
