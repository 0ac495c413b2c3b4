"""Private copies of the working tree, and the tests that run in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.mutation.mutants import Mutant

SCHEDULES = 100
"""Number of schedules that must find a mutant."""
PLAY = f"""\
from tests.simulation.plan import Plan
from tests.simulation.schedule import play
for seed in range(1, {SCHEDULES} + 1):
    play(Plan.of_seed(seed))
"""
KILLER_S = 120
"""Seconds after which a test hangs."""
IGNORED = (".git", ".venv", "build", ".*_cache", ".hypothesis", "*.egg-info")


class Base:
    """A copy of the working tree without a mutant."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self._scratch = scratch
        self._root = scratch / "base"
        shutil.copytree(root, self._root, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
        self._is_built = False

    def run(self, killer: str) -> str:
        """Run a test without a mutant, and return its failure, or an empty text."""
        if killer.startswith("native/") and not self._is_built:
            self._is_built = True
            subprocess.run(["make", "-s", "-j2", "-C", "native", "build"], cwd=self._root, check=True)
        return call(command_of(killer), self._root)

    def run_with(self, mutant: Mutant) -> str:
        """Run a mutant's test, and return its failure, or an empty text if the mutant survives."""
        with self._with(mutant) as copy:
            return call(command_of(mutant.killer), copy)

    @contextmanager
    def _with(self, mutant: Mutant) -> Iterator[Path]:
        copy = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            shutil.copytree(self._root, copy, copy_function=_link, symlinks=True, dirs_exist_ok=True)
            path = copy / mutant.path
            text = mutant.apply(path.read_text(encoding="utf-8"))
            path.unlink()
            path.write_text(text, encoding="utf-8")
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def command_of(killer: str) -> list[str]:
    """Return the command of a test: a test file, `native/NAME`, or by default schedules."""
    if not killer:
        return [sys.executable, "-c", PLAY]
    if killer.startswith("native/"):
        return ["make", "-s", "-C", "native", "check", f"TESTS={killer.removeprefix('native/')}"]
    return [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", killer]


def call(command: Sequence[str], folder: Path) -> str:
    """Run a command in a copy, end everything that it has started, and return its failure, or an empty text."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PCCL_", "PYTEST_"))}
    environment = {**kept, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(KILLER_S)
        except subprocess.TimeoutExpired:
            return f"hangs for {KILLER_S} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if status == 0:
        return ""
    errors = [line for line in lines if "Error" in line]
    return (errors[-1:] or lines[-1:] or [f"exit status {status}"])[0][:160]


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where a build overwrites it."""
    if "/native/" in source:
        shutil.copy2(source, target)
    else:
        os.link(source, target)
