"""What is tried on a mutant, in the order of cost, until something kills it.

    simulation   schedules, for the machines of the protocol: those of the seeds from 1 on
    native       the engine's own tests, for C
    tests        the tests of its folder, then all that run through what it changes

Each runs in a process of its own in the mutant's copy, and is ended with all that it has started.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.mutation.mutants import Mutant
from tests.mutation.results import Cache, Killers, Outcome
from tests.mutation.tree import Base, environment

STAGE_S = 3600.0
"""Seconds after which a stage is given up: it is none that hangs, for schedules and tests have limits of their own."""
NATIVE_TEST_S = 120
SIMULATION_SOURCES = ("pccl/protocol", "pccl/types.py", "tests/simulation")
TEST_SOURCES = ("pccl", "native", "bindings", "tests")
UNIT_TESTS: Mapping[str, Sequence[str]] = {
    "pccl/protocol/master/": ("tests/protocol/master", "tests/protocol", "tests/simulation"),
    "pccl/protocol/peer/": ("tests/protocol/peer", "tests/protocol", "tests/simulation"),
    "pccl/protocol/": ("tests/protocol", "tests/simulation"),
    "pccl/runtime/state/": ("tests/runtime/state", "tests/api/test_shared_state.py", "tests/runtime"),
    "pccl/runtime/network/": ("tests/runtime/network", "tests/runtime"),
    "pccl/runtime/": ("tests/runtime",),
    "pccl/training/diloco/": ("tests/training/diloco", "tests/training/test_diloco.py", "tests/training"),
    "pccl/training/ddp/": ("tests/training/ddp", "tests/training"),
    "pccl/training/": ("tests/training",),
    "pccl/devices/": ("tests/devices",),
    "pccl/": ("tests/api",),
    "native/": (),
}
"""The tests of each folder, the nearest first. The first prefix that fits counts."""
WIDE_TESTS: Mapping[str, Sequence[str]] = {
    "pccl/training/": (),
    "native/": ("tests/native", "tests/api", "tests/runtime", "tests/devices"),
    "pccl/": ("tests/api", "tests/processes", "tests/devices"),
}


class Stages:
    """All stages of a run, with what they share."""

    def __init__(
        self, base: Base, cache: Cache, killers: Killers, schedules: int, stage: str = "", is_fresh: bool = False
    ) -> None:
        """`stage` is the only one to run; empty: all. With `is_fresh` nothing that is remembered is used."""
        self._base = base
        self._cache = cache
        self._killers = killers
        self._schedules = schedules
        self._stage = stage
        self._is_fresh = is_fresh
        self._build_lock = threading.Lock()
        self._is_built = False

    def run(self, mutant: Mutant) -> Outcome:
        """Return what became of a mutant."""
        stages = ["simulation"] if mutant.is_simulated else ["native"] if mutant.is_native else []
        outcome = Outcome(survived="nothing was tried")
        for stage in [*stages, "tests"]:
            if self._stage not in ("", stage):
                continue
            before = outcome if outcome.survived != "nothing was tried" else Outcome()
            outcome = self._cached(mutant, stage).after(before)
            if outcome.stage:
                break
        return outcome

    def _cached(self, mutant: Mutant, stage: str) -> Outcome:
        folders = SIMULATION_SOURCES if stage == "simulation" else TEST_SOURCES
        sources = self._base.digest(*folders) + (f" {self._schedules}" if stage == "simulation" else "")
        found = None if self._is_fresh else self._cache.find(mutant, stage, sources)
        if found is None:
            begun_at = time.monotonic()
            with self._base.with_mutant(mutant) as copy:
                found = getattr(self, f"_{stage}")(mutant, copy)
            found = Outcome(**{**vars(found), "seconds": time.monotonic() - begun_at})
            self._cache.keep(mutant, stage, sources, found)
        return found

    # Schedules.

    def _simulation(self, mutant: Mutant, copy: Path) -> Outcome:
        hint = "" if self._is_fresh else self._killers.of(mutant, "simulation").removeprefix("seed ")
        command = [sys.executable, "-m", "tests.mutation.play", "1", str(self._schedules), *filter(None, [hint])]
        status, said = _call(command, copy)
        try:
            told = json.loads(said.strip().splitlines()[-1])
        except (ValueError, IndexError):
            # It does not even begin, or the process died.
            lines = said.strip().splitlines() or [f"exit status {status}"]
            return Outcome("simulation", "its first schedule", lines[-1][:160], schedules=1)
        if "seed" not in told:
            return Outcome(survived=f"{told['played']} schedules", schedules=told["played"])
        return Outcome("simulation", f"seed {told['seed']}", told["what"], told["is_hang"], schedules=told["seed"])

    # Python tests.

    def _tests(self, mutant: Mutant, copy: Path) -> Outcome:
        if mutant.is_native:
            self._build_base()
            self._take_builds(mutant, copy)
            status, said = _call([sys.executable, "-m", "tests.mutation.extension"], copy)
            if status:
                return Outcome("tests", "the compiler", (said.strip().splitlines() or [""])[-1][:160])
        hint = "" if self._is_fresh else self._killers.of(mutant, "tests")
        paths = [hint.partition("::")[0] and hint, *mutant.tests, *_fitting(UNIT_TESTS, mutant.path)]
        tried: list[str] = []
        ignored: list[str] = []
        for path in filter(None, [*paths, *_fitting(WIDE_TESTS, mutant.path)]):
            if path in tried or path.startswith("test_") or not (copy / path.partition("::")[0]).exists():
                continue
            outcome = self._one_by_one(path, tried, ignored, copy)
            if outcome is not None:
                return outcome
            tried.append(path)
        return Outcome(survived=f"tests of {len(tried)} folders")

    def _one_by_one(self, path: str, tried: Sequence[str], ignored: list[str], copy: Path) -> Outcome | None:
        """Run tests until one fails that fails again, and passes without the mutant."""
        while True:
            told = pytest(copy, path, *(f"--ignore={each}" for each in tried if "::" not in each), *_deselect(ignored))
            if told is None:
                return None
            test = str(told["test"])
            is_mutants = "::" not in test or (self._passes_without(test) and pytest(copy, test) is not None)
            if is_mutants:
                return Outcome("tests", test, str(told["what"]), bool(told["is_hang"]))
            ignored.append(test)

    def _passes_without(self, test: str) -> bool:
        with self._base.with_mutant(None) as copy:
            return pytest(copy, test) is None

    # C.

    def _native(self, mutant: Mutant, copy: Path) -> Outcome:
        self._build_base()
        self._take_builds(mutant, copy)
        hint = "" if self._is_fresh else self._killers.of(mutant, "native")
        nearest = [each for each in (hint, *mutant.tests) if each.startswith("test_")]
        for tests in dict.fromkeys([*nearest, ""]):
            run = [f"RUN=timeout {NATIVE_TEST_S}", *([f"TESTS={tests}"] if tests else [])]
            status, said = _call(["make", "-s", "-C", "native", "check", *run], copy)
            if status:
                return _failure_of_make(said)
        return Outcome(survived="native tests")

    def _build_base(self) -> None:
        """Build the native tests and the extension, unless that has been done for these sources."""
        with self._build_lock:
            kept = self._builds
            if not self._is_built and not kept.exists():
                with self._base.with_mutant(None) as copy:
                    for command in (
                        ["make", "-s", "-j2", "-C", "native", "build"],
                        [sys.executable, "-m", "tests.mutation.extension"],
                    ):
                        status, said = _call(command, copy)
                        if status:
                            raise RuntimeError(f"{' '.join(command)} failed:\n{said}")
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.rmtree(unfinished := kept.with_suffix(".new"), ignore_errors=True)
                    shutil.copytree(copy / "native/build", unfinished / "native/build", copy_function=shutil.copy2)
                    shutil.copytree(copy / "build", unfinished / "build", copy_function=shutil.copy2)
                    os.rename(unfinished, kept)
            self._is_built = True

    @property
    def _builds(self) -> Path:
        return self._cache.folder / "builds" / self._base.digest("native", "bindings", "setup.py")[:16]

    def _take_builds(self, mutant: Mutant, copy: Path) -> None:
        """Put what the base was built to into a copy, where only the mutant's file is newer than that."""
        for folder in ("native/build", "build"):
            shutil.copytree(self._builds / folder, copy / folder, dirs_exist_ok=True)
        built_at = time.time()
        mutated = copy / mutant.path
        for path in [*(copy / "native").rglob("*"), *(copy / "build").rglob("*")]:
            if path.is_file():
                age_s = 0 if path == mutated else 60 if "build" in path.relative_to(copy).parts else 3600
                os.utime(path, (built_at - age_s, built_at - age_s))
        if mutated.suffix == ".h":
            for path in (copy / "build").rglob("*.o"):
                path.unlink()


def pytest(copy: Path, *arguments: str) -> dict[str, object] | None:
    """Run tests in a copy. Return what failed first, or None."""
    told = copy / "outcome.json"
    told.unlink(missing_ok=True)
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "tests.mutation.watchdog"]
    more = {"MUTATION_OUTCOME": str(told)}
    status, said = _call([sys.executable, "-m", "pytest", *options, *arguments], copy, more)
    if status in (0, 5):
        return None
    if told.exists():
        found: dict[str, object] = json.loads(told.read_text())
        return found
    lines = said.strip().splitlines() or [""]
    return {"test": "collection", "is_hang": False, "what": f"exit status {status}: {lines[-1][:160]}"}


def _deselect(tests: Sequence[str]) -> list[str]:
    return [f"--deselect={test}" for test in tests]


def _fitting(table: Mapping[str, Sequence[str]], path: str) -> Sequence[str]:
    return next(found for prefix, found in table.items() if path.startswith(prefix))


def _failure_of_make(said: str) -> Outcome:
    """Return what the output of a failed `make check` tells."""
    lines = said.strip().splitlines() or [""]
    test = re.search(r"\[Makefile:\d+: run_(test_\w+)\] (.*)", said)
    if test is None:
        return Outcome("native", "the compiler", next((line for line in lines if "error" in line), lines[-1])[:160])
    is_hang = test[2].strip() == "Error 124"
    what = next((line for line in reversed(lines) if "make" not in line and "build/" not in line), test[2])
    return Outcome("native", test[1], what[:160], is_hang)


def _call(command: Sequence[str], copy: Path, more: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run a command in a copy, and end all that it has started. Return its exit status and its output."""
    with (copy / "output.txt").open("w+b") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment(copy, more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(STAGE_S)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode(errors="replace")
