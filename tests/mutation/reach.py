"""Says which schedules reach which mutants.

A schedule that never comes to a mutant's line plays as without the mutant, so it need not be played with it. Most lines
of recovery are reached by one schedule in a hundred, and some by none: then the simulator is blind there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.simulation.plan import Plan
from tests.simulation.schedule import play

Lines = dict[str, dict[str, list[int]]]


class Tracer:
    """Notes which of the lines are run that are asked for, in functions."""

    def __init__(self, lines: Lines) -> None:
        self.reached: set[tuple[str, int]] = set()
        self._wanted = {path: {line for ours in mutants.values() for line in ours} for path, mutants in lines.items()}
        self._looked_at: dict[CodeType, Callable[..., Any] | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        try:
            return self._looked_at[code]
        except KeyError:
            wanted = self._wanted.get(code.co_filename, set())
            has_one = any(line in wanted for _, _, line in code.co_lines())
            self._looked_at[code] = self._line if has_one else None
            return self._looked_at[code]

    def _line(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "line":
            self.reached.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def lines_of_functions(path: str) -> set[int]:
    """Return the lines of a file that a call of one of its functions runs."""

    def within(code: CodeType, is_function: bool) -> Iterator[int]:
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield from within(each, is_function or bool(each.co_flags & 2))  # a class body has no fast locals
        if is_function:
            yield from (line for _, _, line in code.co_lines() if line is not None)

    return set(within(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), is_function=False))


def reached(lines: Lines, seeds: Sequence[int]) -> dict[str, list[int]]:
    """Return the seeds whose schedules reach each mutant. `lines` has the lines of mutants by file and mutant. A mutant
    whose lines have no code of their own, or are run on import, counts as reached by all."""
    found: dict[str, list[int]] = {mutant: [] for mutants in lines.values() for mutant in mutants}
    runnable = {path: lines_of_functions(path) for path in lines}
    for seed in seeds:
        tracer = Tracer(lines)
        sys.settrace(tracer)
        try:
            play(Plan.of_seed(seed))
        finally:
            sys.settrace(None)
        for path, mutants in lines.items():
            for mutant, ours in mutants.items():
                known = runnable[path].intersection(ours)
                if not known or any((path, line) in tracer.reached for line in known):
                    found[mutant].append(seed)
    return found
