"""Proves from the logs of a run's samplers which samples its training has used, and how often.

    python -m pccl.training.audit logs/*.jsonl

Theory of operation. Each peer logs which samples it draws before it trains on them, and of each committed step whose
contributions are in it (`pccl.training.data.sample_log`). Steps form a hash chain. The audit takes the state that the
most steps have led to, and goes back from there link by link: these steps made the model, others were rolled back, as
when a run was resumed from an earlier checkpoint. Of each of them it asks:

1. Is the link what its step, its positions and the link before make it? Do all logs tell the same of it?
2. Has each peer in it drawn the very positions that the others say it has used, and no more for this step?
3. Were the samples that it drew those that the seed puts at these positions?
4. Was none of the positions used in a step before?

and of the whole: whether each sample of each complete epoch was used, which is counted by sample, not by position. What
was drawn for a step that is not in the chain, or that was made without its peer, was given up; it counts as given out
again where it was used later.

It needs the logs of all peers that took part, those of killed ones too. It exits with 0 where everything is in order.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl.training.data.elastic_sampler import indices_at
from pccl.training.data.sample_ledger import GENESIS, history_after
from pccl.training.data.stream import Range, merged

PROBLEMS_MAX = 100


class AuditError(Exception):
    """Logs that cannot be read, or not together."""


@dataclass(slots=True)
class Audit:
    """The findings of an audit over the logs of one run. Counts are of samples unless told otherwise."""

    dataset_size: int = 0
    steps: int = 0
    """The number of steps in the chain that led to the last state."""
    peers: int = 0
    """The number of peers in any of these steps; a peer that has joined anew counts anew."""
    epochs: int = 0
    """Complete ones."""
    used: int = 0
    """Samples in committed steps, also of epochs that are not complete."""
    given_up: int = 0
    """Samples drawn for steps that were not committed, or without their peer."""
    again: int = 0
    """The given-up samples that were used later."""
    rolled_back: int = 0
    """Steps that did not lead to the last state."""
    problems: list[str] = field(default_factory=list)
    """Empty where each sample of each complete epoch was used exactly once; at most 100 of them."""

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {self.peers} peers used {self.used} samples; {self.epochs} epochs of "
            f"{self.dataset_size} samples are complete",
            f"{self.given_up} samples were drawn for steps that were lost, {self.again} of them used later",
        ]
        if self.rolled_back:
            lines.append(f"{self.rolled_back} steps did not lead to the last state")
        verdict = "each sample of each complete epoch was used exactly once"
        return "\n".join(
            [*lines, *(f"PROBLEM: {each}" for each in self.problems or ())] + [verdict] * (not self.problems)
        )


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    before: str
    after: str
    used: Mapping[str, Sequence[Range]]


@dataclass(slots=True)
class _Drawn:
    positions: list[Range] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


class Coverage:
    """The use count of each position, kept as ranges of one count: the memory grows with the number of ranges."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        changes: dict[int, int] = defaultdict(int)
        for begin, end in ranges:
            if begin < end:
                changes[begin] += 1
                changes[end] -= 1
        self._bounds = sorted(changes)
        self._counts = list(accumulate(changes[bound] for bound in self._bounds))
        """The use count from each bound to before the next one; the last is 0."""

    def _parts(self, begin: int = 0) -> Iterator[tuple[int, int, int]]:
        """Begin, end and count, from the part on in which `begin` is."""
        first = max(bisect_right(self._bounds, begin) - 1, 0)
        for i in range(first, len(self._bounds) - 1):
            yield self._bounds[i], self._bounds[i + 1], self._counts[i]

    @property
    def used(self) -> int:
        """Uses of all positions."""
        return sum((end - begin) * count for begin, end, count in self._parts())

    @property
    def lowest(self) -> int:
        """The lowest position that was not used."""
        reached = 0
        for begin, end, count in self._parts():
            if begin > reached or not count:
                break
            reached = end
        return reached

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Positions that were used more than once, and how often."""
        for begin, end, count in self._parts():
            if count > 1:
                yield from ((position, count) for position in range(begin, end))

    def used_within(self, begin: int, end: int) -> int:
        """Return how many positions from `begin` to before `end` were used."""
        total = 0
        for first, last, count in self._parts(begin):
            if first >= end:
                break
            if count:
                total += max(min(last, end) - max(first, begin), 0)
        return total


class _Logs:
    """All that is in the files."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self.streams: set[tuple[int, int, bool]] = set()
        self.drawn: dict[tuple[str, int], _Drawn] = defaultdict(_Drawn)
        """The drawn positions and samples by peer's name and step."""
        self.steps: dict[str, list[_Step]] = defaultdict(list)
        """The steps by the state that they led to. Several are steps of the same positions."""
        for path in paths:
            for number, event in _events(Path(path)):
                try:
                    self._add(event)
                except (KeyError, TypeError, ValueError) as error:
                    raise AuditError(f"{path}, line {number}: this is no line of a sampler's log: {error!r}") from error
        if len(self.streams) != 1:
            streams = ", ".join(map(str, sorted(self.streams))) or "none"
            raise AuditError(f"the logs must be of one data stream (size, seed, shuffled), but there are: {streams}")

    def _add(self, event: dict[str, Any]) -> None:
        if "drawn" in event:
            drawn = self.drawn[event["by"], event["drawn"]]
            drawn.positions += _ranges(event["positions"])
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


def _ranges(found: Any) -> list[Range]:
    return [(int(begin), int(end)) for begin, end in found]


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what is behind the last newline was not written whole
        try:
            event = json.loads(line)
        except ValueError as error:
            raise AuditError(f"{path}, line {number}: this is no JSON: {error}") from error
        if not isinstance(event, dict):
            raise AuditError(f"{path}, line {number}: this is no line of a sampler's log")
        yield number, event


def audit(paths: Iterable[str | os.PathLike[str]]) -> Audit:
    """The audit of all logs of a run. OSError; AuditError: they cannot be read, or are not of one data stream."""
    logs = _Logs(paths)
    ((size, seed, shuffle),) = logs.streams
    found = Audit(dataset_size=size)
    chain = _chain(logs, found.problems)
    in_chain: dict[tuple[str, int], Sequence[Range]] = {}
    for step in chain:
        if history_after(step.before, step.number, step.used) != step.after:
            found.problems.append(f"step {step.number}: its positions are not those of its link {step.after}")
        for name, ranges in sorted(step.used.items()):
            in_chain[name, step.number] = ranges
            drawn = logs.drawn.get((name, step.number), _Drawn())
            found.problems += _differences(step.number, name, ranges, drawn, size, seed, shuffle)
    coverage = Coverage(each for step in chain for ranges in step.used.values() for each in ranges)
    for position, count in islice(coverage.repeated(), PROBLEMS_MAX):
        sample = int(indices_at(np.array([position]), size, seed, shuffle)[0])
        found.problems.append(f"sample {sample} was used {count} times in epoch {position // size}")
    found.steps = len(chain)
    found.rolled_back = len(logs.steps) - len({step.after for step in chain})
    found.peers = len({name for name, _ in in_chain})
    found.used = coverage.used
    found.epochs = coverage.lowest // size
    # By sample, from what peers have drawn themselves.
    miscounted = _miscounted(_drawn_in(logs, in_chain, size, found.epochs), found.epochs * size)
    for place, count in islice(miscounted, PROBLEMS_MAX):
        epoch, sample = divmod(place, size)
        found.problems.append(f"sample {sample} was drawn {count} times for steps of epoch {epoch}")
    for key, drawn in logs.drawn.items():
        if key not in in_chain:
            for begin, end in drawn.positions:
                found.given_up += end - begin
                found.again += coverage.used_within(begin, end)
    del found.problems[PROBLEMS_MAX:]
    return found


def _chain(logs: _Logs, problems: list[str]) -> list[_Step]:
    """The steps that led to the state with the most of them, in order."""
    chain: list[_Step] = []
    step = max((each for steps in logs.steps.values() for each in steps), key=lambda each: each.number, default=None)
    while step is not None:
        chain.append(step)
        if step.before == GENESIS:
            break
        former = logs.steps.get(step.before, [])
        if not former:
            problems.append(f"step {step.number - 1}, which led to {step.before}, is in no log")
        # Where peers tell different names for the same positions the run was resumed; either way they were used.
        step = max(former, key=lambda each: all((name, each.number) in logs.drawn for name in each.used), default=None)
    return chain[::-1]


def _differences(
    number: int, name: str, ranges: Sequence[Range], drawn: _Drawn, size: int, seed: int, shuffle: bool
) -> Iterator[str]:
    if not ranges:
        return
    who = f"step {number}: peer {name}"
    if not drawn.positions:
        yield f"{who} took part, but in no log it has drawn anything for it; is its log missing?"
    elif sorted(drawn.positions) != sorted(ranges) and merged(drawn.positions) != merged(ranges):
        yield f"{who} has drawn positions {merged(drawn.positions)}, but the others have noted {merged(ranges)}"
    else:
        count = sum(end - begin for begin, end in drawn.positions)
        if count != len(drawn.samples) or drawn.samples != _samples_at(drawn.positions, size, seed, shuffle):
            yield f"{who} has drawn other samples than the seed puts at positions {merged(drawn.positions)}"


def _samples_at(ranges: Sequence[Range], size: int, seed: int, shuffle: bool) -> list[int]:
    positions = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in ranges])
    samples: list[int] = indices_at(positions, size, seed, shuffle).tolist()
    return samples


def _drawn_in(
    logs: _Logs, in_chain: Mapping[tuple[str, int], Sequence[Range]], size: int, epochs: int
) -> NDArray[np.int64]:
    """Return the samples drawn for steps of the chain in complete epochs, each as `epoch * size + sample`,
    ascending."""
    places = [np.empty(0, np.int64)]
    for key in in_chain:
        drawn = logs.drawn.get(key, _Drawn())
        begin = 0
        for first, last in drawn.positions:
            samples = np.array(drawn.samples[begin : begin + last - first], np.int64)
            of_epochs = np.arange(first, first + samples.size) // size
            is_complete = (of_epochs < epochs) & (samples >= 0) & (samples < size)
            places.append(of_epochs[is_complete] * size + samples[is_complete])
            begin += last - first
    return np.sort(np.concatenate(places))


def _miscounted(places: NDArray[np.int64], end: int) -> Iterator[tuple[int, int]]:
    """Yield each number from 0 to before `end` that is not in `places` exactly once, with how often it is."""
    found, counts = np.unique(places, return_counts=True)
    before = np.concatenate([[-1], found[:-1]]) if found.size else found
    for i in np.flatnonzero((counts != 1) | (found != before + 1)).tolist():
        here = int(found[i])
        yield from ((missing, 0) for missing in range(int(before[i]) + 1, here))
        if counts[i] != 1:
            yield here, int(counts[i])
    next_place = int(found[-1]) + 1 if found.size else 0
    yield from ((missing, 0) for missing in range(next_place, end))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pccl.training.audit",
        description="Proves from the logs of a run's samplers that each sample of each epoch was used exactly once.",
    )
    parser.add_argument("logs", nargs="+", metavar="FILE", help="the logs of all peers, also of killed ones")
    try:
        found = audit(parser.parse_args(arguments).logs)
    except (OSError, AuditError) as error:
        print(f"audit: {error}", file=sys.stderr)
        return 2
    print(found)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
