"""Mutants as data: one list for each area, `mutants/AREA.toml`, and how one of them is applied to a text.

    [[mutant]]
    name = "commits-what-it-promised-not-to"
    path = "pccl/protocol/peer/ops.py"
    within = "def completed("
    line = "if entry is None or entry.verdict is not None or entry.has_voted_abort or not self.is_running:"
    becomes = "if entry is None or entry.verdict is not None or not self.is_running:"
    breaks = "An abort vote is a promise: ..."

`line` is a line, or several in a row, as they stand in the file except for the indentation, and occurs once, or once
within the function or class whose first line begins with `within`. An empty `becomes` takes it out.
"""

from __future__ import annotations

import ast
import json
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTS = Path(__file__).parent / "mutants"
KILLERS = Path(__file__).parent / "killers.json"


class MutantError(Exception):
    """A mutant that cannot be applied: its list has to be brought up to date."""


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    area: str
    name: str
    path: str
    line: str
    becomes: str
    breaks: str
    """The reason to write it, and which promise it breaks."""
    within: str = ""
    mends: str = ""
    """The subject of the commit that has mended this fault, if it was once in pccl."""
    killer: str = ""
    """The test file, or `native/NAME`, that finds it; empty: schedules."""

    def __str__(self) -> str:
        return f"{self.area}/{self.name}"

    @property
    def is_native(self) -> bool:
        return self.path.startswith("native/")

    def apply(self, text: str) -> str:
        """Return the text of its file with the fault in it. Raises MutantError if the line is not found once."""
        lines, numbers = text.splitlines(), self.find(text)
        first = lines[numbers[0] - 1]
        indent = first[: len(first) - len(first.lstrip())]
        becomes = textwrap.dedent(self.becomes).strip("\n") or (";" if self.is_native else "pass")
        lines[numbers[0] - 1 : numbers[-1]] = textwrap.indent(becomes, indent).split("\n")
        return "\n".join(lines) + "\n"

    def check(self, text: str) -> None:
        """Raise MutantError if it cannot be applied to the text of its file, or the result does not parse: that
        would be found by whatever is tried. C is left to the compiler, and what that refuses survives."""
        mutated = self.apply(text)
        if not self.is_native:
            try:
                ast.parse(self.enclosing(mutated))  # to parse whole files takes seconds
            except SyntaxError as error:
                raise MutantError(f"{self.area}/{self.name}: {error.msg}: {(error.text or '').strip()}") from None

    def find(self, text: str) -> range:
        """Return the numbers of its lines in the text of its file. Raises MutantError if they are not found once."""
        lines = text.splitlines()
        begin, end = self._scope(lines)
        wanted = _bare(self.line)
        found = [at for at in range(begin, end) if _bare_lines(lines[at : at + len(wanted)]) == wanted]
        if len(found) != 1:
            times = "not found" if not found else f"found {len(found)} times"
            where = f"{self.path}, within {self.within!r}" if self.within else self.path
            raise MutantError(f"{self.area}/{self.name}: {times} in {where}: {wanted[0]!r}")
        return range(found[0] + 1, found[0] + 1 + len(wanted))

    def enclosing(self, text: str) -> str:
        """Return the part of its file among whose lines its own stands, as a text of its own."""
        lines = text.splitlines()
        begin, end = self._scope(lines)
        return textwrap.dedent("\n".join(lines[begin:end]))

    def _scope(self, lines: list[str]) -> tuple[int, int]:
        """Return the lines among which its line stands: first, and end."""
        if not self.within:
            return 0, len(lines)
        heads = [at for at, line in enumerate(lines) if line.strip().removeprefix("async ").startswith(self.within)]
        if len(heads) != 1:
            times = "not found" if not heads else f"found {len(heads)} times"
            raise MutantError(f"{self.area}/{self.name}: {times} in {self.path}: {self.within!r}")
        head = lines[heads[0]]
        indent = len(head) - len(head.lstrip())
        for at in range(heads[0] + 1, len(lines)):
            line = lines[at]
            if self.is_native and line == "}":
                return heads[0], at + 1
            is_outside = line.strip() and len(line) - len(line.lstrip()) <= indent
            if not self.is_native and is_outside and not line.strip().startswith(")"):
                return heads[0], at
        return heads[0], len(lines)


def _bare(text: str) -> list[str]:
    return _bare_lines(text.strip().splitlines())


def _bare_lines(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines]


def load(folder: Path = LISTS) -> list[Mutant]:
    """Return all mutants. Raises MutantError for two of one name, and for what is missing or unknown in an entry."""
    killers: dict[str, str] = json.loads(KILLERS.read_text(encoding="utf-8"))
    found: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        with path.open("rb") as file:
            entries = tomllib.load(file)["mutant"]
        for entry in entries:
            try:
                mutant = Mutant(area=path.stem, killer=killers.get(entry.get("name", ""), ""), **entry)
            except TypeError as error:
                raise MutantError(f"{path.name}: {entry.get('name')}: {error}") from None
            if mutant.name in found:
                raise MutantError(f"{path.name}: a second mutant {mutant.name}")
            found[mutant.name] = mutant
    return list(found.values())
