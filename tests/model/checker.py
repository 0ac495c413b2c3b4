"""Runs Spin on a model: generates the verifier, compiles it, searches all states, and reads what it says.

A configuration is a model with values for its switches. It `holds` when the whole state space was searched and no
assertion was violated; a mutant is expected to be `refuted`. A statement counts as reached when some configuration of
its model that holds has reached it: one that is not reached is not checked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

DEPTH_MAX = 1_000_000
MEMORY_MB = 3500
"""Of one search."""
TRAIL_LINES = 80
MAY_BE_UNREACHED = "unreached:"
"""In a comment on a line: why it need not be reached."""


@dataclass(frozen=True)
class Configuration:
    model: str
    """The file's name without its ending."""
    name: str
    switches: Mapping[str, int] = field(default_factory=dict)
    mutation: str = ""
    """The rule that is taken out (WITHOUT_...): a counterexample is expected. Empty: the model must hold."""

    def __str__(self) -> str:
        return f"{self.model}/{self.name}"

    @property
    def defines(self) -> list[str]:
        found = [f"-D{name}={value}" for name, value in self.switches.items()]
        return [*found, f"-DWITHOUT_{self.mutation}"] if self.mutation else found


@dataclass
class Finding:
    configuration: Configuration
    violation: str = ""
    """What Spin says of the first one; empty: none."""
    failure: str = ""
    """Why the search is void; empty: it was complete, or ended with a violation."""
    states: int = 0
    depth: int = 0
    seconds: float = 0.0
    memory_mb: float = 0.0
    statements: set[tuple[str, int, int]] = field(default_factory=set)
    """All, as process, number and line."""
    unreached: set[tuple[str, int]] = field(default_factory=set)
    trail: str = ""
    """The counterexample."""

    @property
    def is_as_expected(self) -> bool:
        return not self.failure and bool(self.violation) == bool(self.configuration.mutation)

    @property
    def verdict(self) -> str:
        if self.failure:
            return f"FAILED: {self.failure}"
        if self.configuration.mutation:
            return f"refuted: {self.violation}" if self.violation else "FAILED: no error found without this rule"
        return f"FAILED: {self.violation}" if self.violation else "holds"


def missing_tools() -> list[str]:
    return [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]


def check(folder: Path, configuration: Configuration, limit_s: float, memory_mb: int = MEMORY_MB) -> Finding:
    """Search one configuration of `folder`/model.pml."""
    finding = Finding(configuration)
    name = f"{configuration.model}.pml"
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / name, scratch)
        begun_at = time.monotonic()
        try:
            _run(scratch, limit_s, "spin", "-a", "-o3", *configuration.defines, name)
            options = ["-O1", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={memory_mb}"]
            _run(scratch, limit_s, "gcc", *options, "-o", "pan", "pan.c")
            said = _run(scratch, limit_s, "./pan", f"-m{DEPTH_MAX}", "-w24")
            _read(said, finding)
            if not configuration.mutation:
                _read_statements(_run(scratch, limit_s, "./pan", "-d"), finding)
            if finding.violation:
                trail = _run(scratch, limit_s, "spin", "-t", "-p", *configuration.defines, name)
                finding.trail = "\n".join(trail.splitlines()[-TRAIL_LINES:])
        except subprocess.TimeoutExpired:
            finding.failure = f"not done within {limit_s:g} s"
        except subprocess.CalledProcessError as error:
            finding.failure = f"{error.cmd[0]} ended with {error.returncode}: {error.stdout[-500:]}"
        finding.seconds = time.monotonic() - begun_at
    return finding


def _run(folder: str, limit_s: float, *command: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        timeout=limit_s,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.stdout


def _read(said: str, finding: Finding) -> None:
    """Take in what a verifier says at its end."""
    violation = re.search(r"^pan:1: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    finding.violation = violation[1] if violation else ""
    errors = re.search(r"depth reached (\d+).*errors: (\d+)", said)
    states = re.search(r"^\s*([\d.e+]+) states, stored", said, re.MULTILINE)
    memory = re.search(r"^\s*([\d.]+)\s+total actual memory usage", said, re.MULTILINE)
    if errors is None or states is None:
        finding.failure = f"no summary: {said[-300:]}"
        return
    finding.depth = int(errors[1])
    finding.states = round(float(states[1]))
    finding.memory_mb = float(memory[1]) if memory else 0.0
    if "max search depth too small" in said:
        finding.failure = "truncated at the greatest depth"
    elif "Search not completed" in said and not finding.violation:
        finding.failure = "truncated: " + " ".join(re.findall(r"^pan: .*$", said, re.MULTILINE)[:2])
    process = ""
    for line in said.splitlines():
        header = re.match(r"unreached in (?:proctype|claim) (\S+)|unreached in (init)", line)
        statement = re.match(r"\s+\S+:\d+, state (\d+), ", line)
        if header:
            process = header[1] or header[2]
        elif statement and process:
            finding.unreached.add((process, int(statement[1])))


def _read_statements(tables: str, finding: Finding) -> None:
    process = ""
    for line in tables.splitlines():
        header = re.match(r"(?:proctype|claim|init) (\S+)|^(init)$", line)
        statement = re.match(r"\s*state\s+(\d+) -.*\] \S+:(\d+) => (.*)", line)
        if header:
            process = header[1] or header[2]
        elif statement and "-end-" not in statement[3]:
            finding.statements.add((process, int(statement[1]), int(statement[2])))


def unreached_lines(findings: Iterable[Finding], text: str) -> list[int]:
    """Lines of a model that none of these searches has reached, of those that they have."""
    reached: dict[int, bool] = defaultdict(bool)
    for finding in findings:
        for process, number, line in finding.statements:
            reached[line] |= (process, number) not in finding.unreached
    lines = text.splitlines()
    return sorted(line for line, is_reached in reached.items() if not is_reached and _must_be(lines, line))


def _must_be(lines: list[str], line: int) -> bool:
    return line > len(lines) or MAY_BE_UNREACHED not in lines[line - 1]
