"""What is tried on a mutant, in the order of cost, until something kills it.

    simulation   schedules, for the machines of the protocol: those of the seeds from 1 on, and then children of those
                 in which the mutant makes a difference, or that come nearest to that
    native       the engine's own tests, for C
    unit         the tests that mirror its module, and those that its entry names
    tests        the tests of its folder, then all that run through what it changes

Each runs in a process of its own in the mutant's copy, and is ended with all that it has started.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.mutation.instruments import instrument, reached
from tests.mutation.mutants import ROOT, Mutant
from tests.mutation.results import Cache, Killers, Outcome
from tests.mutation.tree import Base, environment

SCHEDULES_FIRST = 40
"""The number of schedules that each mutant is played with, whether it makes a difference there or not. Most die by
then."""
STAGE_S = 3600.0
"""Seconds after which a stage is given up: it is none that hangs, for schedules and tests have limits of their own."""
NATIVE_TEST_S = 120
NATIVE_TRIES = 3
"""Number of runs of the native tests in which some may fail for the load of the machine."""
CONFIRMATIONS = 2
"""The number of times that a test has to pass without the mutant and to fail with it, in turn, after it has failed: on
a busy machine a test of real processes may fail twice, and pass in between."""
REACH_BLOCK = 250
"""Schedules that are played by one process with instruments."""
SIMULATION_SOURCES = ("pccl/protocol", "pccl/types.py", "tests/simulation")
TEST_SOURCES = ("pccl", "native", "bindings", "tests")
NEAREST: Mapping[str, Sequence[str]] = {
    "pccl/protocol/master/group_calls.py": ("tests/simulation/test_joint_calls.py",),
    "pccl/protocol/master/state_sync.py": ("tests/simulation/test_sync.py",),
    "pccl/protocol/master/run_state.py": (
        "tests/simulation/test_joint_calls.py",
        "tests/protocol/master/test_op_verdicts.py",
    ),
    "pccl/protocol/master/views.py": (
        "tests/protocol/test_failover.py",
        "tests/simulation/test_mortal_master.py",
        "tests/protocol/master/test_views.py",
    ),
    "pccl/protocol/failover/recovery.py": ("tests/protocol/test_failover.py", "tests/simulation/test_mortal_master.py"),
    "pccl/protocol/failover/gathering.py": ("tests/protocol/test_failover.py", "tests/protocol/test_failover_waits.py"),
    "pccl/protocol/failover/bootstrap.py": ("tests/protocol/test_failover_waits.py", "tests/protocol/test_failover.py"),
    "pccl/protocol/completion.py": (
        "tests/protocol/peer/test_stopped_ops.py",
        "tests/protocol/master/test_tags.py",
        "tests/protocol/test_ledger.py",
    ),
    "pccl/protocol/failover/durable_state.py": ("tests/protocol/test_recovery_report.py",),
    "pccl/protocol/peer/view.py": ("tests/protocol/peer/test_views.py", "tests/protocol/peer/test_recovery.py"),
    "pccl/protocol/peer/machine.py": ("tests/protocol/peer/test_machine.py", "tests/protocol/peer/test_recovery.py"),
    "pccl/protocol/peer/ops.py": (
        "tests/protocol/peer/test_ops.py",
        "tests/protocol/peer/test_completion.py",
        "tests/protocol/peer/test_stopped_ops.py",
        "tests/protocol/peer/test_recovery.py",
    ),
    "pccl/runtime/session/inbound.py": (
        "tests/runtime/network/test_intruders.py",
        "tests/runtime/network/test_links.py",
        "tests/api/test_encryption.py",
    ),
    "pccl/runtime/session/outbound.py": ("tests/runtime/session/test_missing_links.py",),
    "pccl/runtime/session/": (
        "tests/api/test_mixed_calls.py",
        "tests/api/test_given_up.py",
        "tests/api/test_handles.py",
        "tests/runtime/session/test_wedged.py",
    ),
    "pccl/runtime/data_plane/engine.py": ("tests/runtime/data_plane/test_staged_ops.py",),
    "pccl/runtime/state/receiver.py": ("tests/runtime/state/test_transfer.py",),
    "pccl/training/data/": (
        "tests/training/data/test_elastic_sampler.py",
        "tests/training/data/test_sample_audit.py",
        "tests/training/data/test_sampler.py",
    ),
    "pccl/training/ddp/gradient": (
        "tests/training/ddp/test_ddp_weights_torch.py",
        "tests/training/test_ddp_torch.py",
        "tests/training/ddp/test_ddp_order_torch.py",
    ),
    "pccl/training/state/": ("tests/training/state/test_ending_torch.py",),
    "pccl/training/spsa/": ("tests/training/test_spsa.py",),
    "pccl/training/diloco/outer": ("tests/training/test_diloco.py", "tests/training/test_async.py"),
}
"""The tests of modules whose tests have other names."""
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


class UnsoundError(Exception):
    """Something fails without a mutant, so it cannot tell whether one is found."""


class EndedError(Exception):
    """What was run has been ended, so it shows nothing."""


class _Running:
    """The processes that run, to be ended all at once."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[Any]] = set()
        self._lock = threading.Lock()
        self._is_ended = False

    def add(self, process: subprocess.Popen[Any]) -> None:
        with self._lock:
            self._processes.add(process)
            if self._is_ended:
                _kill(process)

    def remove(self, process: subprocess.Popen[Any]) -> None:
        with self._lock:
            self._processes.discard(process)

    def refuse_if_ended(self) -> None:
        """Raise EndedError if all were ended: whatever a process has said until then is not its outcome."""
        if self._is_ended:
            raise EndedError

    def end_all(self) -> None:
        with self._lock:
            self._is_ended = True
            for process in self._processes:
                _kill(process)


_running = _Running()


def end_all() -> None:
    """End all that runs, for good: nothing more can be tried in this process."""
    _running.end_all()


def _kill(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Stages:
    """All stages of a run, with what they share."""

    def __init__(
        self,
        base: Base,
        cache: Cache,
        killers: Killers,
        numbers: tuple[int, int],
        stage: str = "",
        is_fresh: bool = False,
        reach: Reach | None = None,
        players: Players | None = None,
    ) -> None:
        """`numbers` of schedules by seed, and of children of these. `stage` is the only one to run; empty: all. With
        `is_fresh` nothing that is remembered is used. `reach` tells which schedules need be played; None: all."""
        self._reach = reach
        self._players = players or Players(base.root)
        self._base = base
        self._cache = cache
        self._killers = killers
        self._schedules, self._children = numbers
        self._stage = stage
        self._is_fresh = is_fresh
        self._build_lock = threading.Lock()
        self._is_built = False
        self._sound: set[str] = set()
        """Schedules that are known to be well without a mutant."""

    def run(self, mutant: Mutant) -> Outcome:
        """Return what became of a mutant."""
        stages = ["simulation"] if mutant.is_simulated else ["native"] if mutant.is_native else []
        outcome = Outcome(survived="nothing was tried")
        for stage in [*stages, "unit", "tests"]:
            if self._stage not in ("", stage):
                continue
            before = outcome if outcome.survived != "nothing was tried" else Outcome()
            outcome = self._cached(mutant, stage).after(before)
            if outcome.stage:
                break
        return outcome

    def _cached(self, mutant: Mutant, stage: str) -> Outcome:
        sources = self._base.digest(*(SIMULATION_SOURCES if stage == "simulation" else TEST_SOURCES))
        found = None if self._is_fresh else self._cache.find(mutant, stage, sources)
        is_enough = found is not None and found.schedules >= self._schedules and found.children >= self._children
        if found is not None and (found.stage or stage != "simulation" or is_enough):
            return found
        begun_at = time.monotonic() - (found.seconds if found is not None else 0.0)
        if stage == "simulation":
            found = self._simulation(mutant, found or Outcome())
        else:
            with self._base.with_mutant(mutant) as copy:
                found = self._native(mutant, copy) if stage == "native" else self._tests(mutant, stage, copy)
        found = replace(found, seconds=time.monotonic() - begun_at)
        self._cache.keep(mutant, stage, sources, found)
        return found

    # Schedules.

    def _simulation(self, mutant: Mutant, earlier: Outcome) -> Outcome:
        """Play schedules, after those that it has survived before."""
        seeds = list(range(earlier.schedules + 1, self._schedules + 1))
        hint = "" if self._is_fresh or earlier.schedules else self._killers.of(mutant, "simulation")
        first = seeds[: max(0, SCHEDULES_FIRST - earlier.schedules)]
        outcome = self._play(mutant, [*_parsed(hint), *([seed] for seed in first)])
        rest = seeds[len(first) :]
        if rest and not outcome.stage:
            if self._reach is not None:
                rest = self._reach.of(mutant, rest[0], rest[-1])
            outcome = self._play(mutant, [[seed] for seed in rest])
        if self._reach is not None and not outcome.stage and self._children > earlier.children:
            parents = self._reach.near(mutant, self._schedules)
            numbers = range(earlier.children, self._children)
            outcome = self._play(mutant, [[parents[at % len(parents)], at // len(parents)] for at in numbers])
        if outcome.stage:
            return replace(outcome, schedules=outcome.schedules or self._schedules)
        told = f"{self._schedules} schedules"
        if self._reach is not None:
            differs = len(self._reach.of(mutant, 1, self._schedules))
            told += f", in {differs} of which it differs, and {self._children} children"
        return Outcome(survived=told, schedules=self._schedules, children=self._children)

    def _play(self, mutant: Mutant, schedules: Sequence[Sequence[int]]) -> Outcome:
        """Play schedules with a mutant until one fails."""
        path = self._base.root / mutant.path
        text = mutant.apply(path.read_text(encoding="utf-8"))
        if not schedules:
            return Outcome()
        told = self._ask(mutant, path, text, schedules)
        if "died" in told:
            told = self._ask(mutant, path, text, schedules)  # it may have been the machine
        if "died" in told:
            self._check_without(path, schedules[0])
            return Outcome("simulation", "the process", f"it ended: {told['died']}"[-160:], schedules=1)
        if "failed" not in told:
            return Outcome()
        failed = schedules[told["failed"]]
        self._check_without(path, failed)
        if len(failed) > 1:
            return Outcome("simulation", _said(failed), told["what"], told["is_hang"], children=told["failed"] + 1)
        return Outcome("simulation", _said(failed), told["what"], told["is_hang"], schedules=failed[0])

    def _ask(self, mutant: Mutant, path: Path, text: str, schedules: Sequence[Sequence[int]]) -> dict[str, Any]:
        told = self._players.ask({"path": str(path), "text": text, "schedules": schedules})
        if "unfit" in told:
            with self._base.with_mutant(mutant) as copy, Players(copy) as players:
                told = players.ask({"path": str(copy / mutant.path), "text": text, "schedules": schedules})
        return told

    def _check_without(self, path: Path, schedule: Sequence[int]) -> None:
        """Raise UnsoundError if a schedule fails without a mutant."""
        name = _said(schedule)
        if name not in self._sound:
            text = path.read_text(encoding="utf-8")
            told = self._players.ask({"path": str(path), "text": text, "schedules": [schedule]})
            if "played" not in told:
                raise UnsoundError(f"the schedule of {name} fails without a mutant, so mend that first: {told}")
            self._sound.add(name)

    # Python tests.

    def _tests(self, mutant: Mutant, stage: str, copy: Path) -> Outcome:
        if mutant.is_native:
            self._build_base()
            self._take_builds(mutant, copy)
            status, said = call([sys.executable, "-m", "tests.mutation.extension"], copy)
            if status:
                return _refused(said)
        if stage == "unit":
            named = [each for each in mutant.tests if each.startswith("tests/")]
            nearest = next((found for prefix, found in NEAREST.items() if mutant.path.startswith(prefix)), ())
            paths = [*named, *mirrors(mutant.path), *nearest]
        else:
            paths = [*_fitting(UNIT_TESTS, mutant.path), *_fitting(WIDE_TESTS, mutant.path)]
        hint = "" if self._is_fresh else self._killers.of(mutant, stage)
        tried: list[str] = []
        ignored: list[str] = []
        for path in [*([hint] if "::" in hint else []), *paths]:
            if path not in tried and (copy / path.partition("::")[0]).exists():
                outcome = self._one_by_one(stage, path, tried, ignored, copy)
                if outcome is not None:
                    return outcome
                tried.append(path)
        return Outcome(survived=", ".join(tried) or "no unit tests")

    def _one_by_one(
        self, stage: str, path: str, tried: Sequence[str], ignored: list[str], copy: Path
    ) -> Outcome | None:
        """Run tests until one fails that fails again and again, and passes without the mutant."""
        while True:
            told = pytest(copy, path, *(f"--ignore={each}" for each in tried if "::" not in each), *_deselect(ignored))
            if told is None:
                return None
            test = str(told["test"])
            if "::" not in test:
                if not self._passes_without(path):
                    raise UnsoundError(f"{path} cannot be run without a mutant, so mend that first: {told['what']}")
                return Outcome(stage, test, str(told["what"]), bool(told["is_hang"]))
            if all(self._passes_without(test) and pytest(copy, test) is not None for _ in range(CONFIRMATIONS)):
                return Outcome(stage, test, str(told["what"]), bool(told["is_hang"]))
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
            status, said = call(["make", "-s", "-C", "native", "check", *run], copy)
            for _ in range(NATIVE_TRIES):
                outcome = _failure_of_make(said) if status else Outcome()
                if status and (not outcome.stage or self._fails_again(mutant, outcome.killer, copy)):
                    return outcome
                if not status:
                    break
                status, said = call(["make", "-s", "-C", "native", "check", *run], copy)
        return Outcome(survived="native tests")

    def _fails_again(self, mutant: Mutant, test: str, copy: Path) -> bool:
        """Whether a native test fails with the mutant once more, and passes without it."""
        command = ["make", "-s", "-C", "native", "check", f"RUN=timeout {NATIVE_TEST_S}", f"TESTS={test}"]
        if not call(command, copy)[0]:
            return False
        with self._base.with_mutant(None) as base:
            self._take_builds(mutant, base)
            return not call(command, base)[0]

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
                        status, said = call(command, copy)
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


def mirrors(path: str) -> list[str]:
    """Return the tests that mirror a module, if they are there: of its name, or in files whose names begin with it."""
    module = Path(path)
    if module.parts[0] != "pccl":
        return []
    folder = Path("tests", *module.parts[1:-1])
    names = [f"test_{module.stem}.py", *sorted(each.name for each in (ROOT / folder).glob(f"test_{module.stem}_*.py"))]
    return [str(folder / name) for name in names]


def _said(schedule: Sequence[int]) -> str:
    """Return the name of a schedule."""
    seed, *child = schedule
    return f"child {child[0]} of seed {seed}" if child else f"seed {seed}"


def _parsed(name: str) -> list[list[int]]:
    """Return the schedule of a name, if it is one."""
    found = re.fullmatch(r"(?:child (\d+) of )?seed (\d+)", name)
    return [[int(each) for each in (found[2], found[1]) if each]] if found else []


class Players:
    """Processes that play schedules in a copy, see `play`: one for each thread that asks."""

    def __init__(self, copy: Path) -> None:
        self._copy = copy
        self._of_thread = threading.local()
        self._all: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Players:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            _kill(process)
            process.communicate()
            _running.remove(process)

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return the answer to a request."""
        process: subprocess.Popen[str] | None = getattr(self._of_thread, "process", None)
        if process is None:
            process = self._of_thread.process = subprocess.Popen(
                [sys.executable, "-m", "tests.mutation.play"],
                cwd=self._copy,
                env=environment(self._copy),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._all.append(process)
            _running.add(process)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        _running.refuse_if_ended()
        if not answer:
            self._of_thread.process = None
            return {"died": "it does not begin"}
        found: dict[str, Any] = json.loads(answer)
        return found


class Reach:
    """The schedules in which each of some mutants could make a difference, looked for as they are asked for, and
    remembered."""

    def __init__(self, base: Base, cache: Cache, mutants: Sequence[Mutant], jobs: int, players: Players) -> None:
        self._base = base
        self._cache = cache
        self._mutants = mutants
        self._jobs = jobs
        self._players = players
        self._texts: dict[str, str] = {}
        self._everywhere: set[str] = set()
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def _prepare(self) -> None:
        if self._folder is not None:
            return
        for path in {mutant.path for mutant in self._mutants}:
            text = (self._base.root / path).read_text(encoding="utf-8")
            ours = [mutant for mutant in self._mutants if mutant.path == path]
            self._texts[str(self._base.root / path)], everywhere = instrument(text, ours)
            self._everywhere.update(everywhere)
        told = json.dumps([self._base.digest(*SIMULATION_SOURCES), sorted(self._texts.values())])
        self._folder = self._cache.folder / "reach" / hashlib.sha256(told.encode()).hexdigest()[:16]

    def of(self, mutant: Mutant, first: int, last: int) -> list[int]:
        """Return the seeds from `first` to `last` whose schedules need be played with a mutant."""
        return self._seeds([mutant.name], first, last)

    def near(self, mutant: Mutant, last: int) -> list[int]:
        """Return seeds up to `last`, at least one, of schedules in which a mutant makes a difference. Where there are
        none: in which its line is run, or in which its function, module, or anything is."""
        function = [other for other in self._mutants if (other.path, other.within) == (mutant.path, mutant.within)]
        module = [other for other in self._mutants if other.path == mutant.path]
        for names in ([mutant.name], [reached(mutant.name)], _reached(function), _reached(module)):
            if found := self._seeds(names, 1, last):
                return found
        return list(range(1, last + 1))

    def _seeds(self, names: Sequence[str], first: int, last: int) -> list[int]:
        blocks = range((first - 1) // REACH_BLOCK, (last - 1) // REACH_BLOCK + 1)
        with self._lock, ThreadPoolExecutor(self._jobs) as pool:
            self._prepare()
            if self._everywhere.intersection(names):
                return list(range(first, last + 1))
            noted = list(pool.map(self._block, blocks))
        found = {seed for block in noted for name in names for seed in block.get(name, ()) if first <= seed <= last}
        return sorted(found)

    def _block(self, number: int) -> dict[str, list[int]]:
        assert self._folder is not None
        path = self._folder / f"{number}.json"
        if not path.exists():
            seeds = list(range(number * REACH_BLOCK + 1, (number + 1) * REACH_BLOCK + 1))
            told = self._players.ask({"texts": self._texts, "seeds": seeds})
            if "reached" not in told:
                raise RuntimeError(f"a schedule fails without a mutant, or its instruments do:\n{told}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(told["reached"]))
        found: dict[str, list[int]] = json.loads(path.read_text())
        return found


def _reached(mutants: Iterable[Mutant]) -> list[str]:
    return [reached(mutant.name) for mutant in mutants]


def pytest(copy: Path, *arguments: str) -> dict[str, object] | None:
    """Run tests in a copy. Return what failed first, or None."""
    told = copy / "outcome.json"
    told.unlink(missing_ok=True)
    options = ["-q", "-x", "-n0", "-p", "no:cacheprovider", "-p", "tests.mutation.watchdog"]
    more = {"MUTATION_OUTCOME": str(told)}
    status, said = call([sys.executable, "-m", "pytest", *options, *arguments], copy, more)
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
    lines = said.strip().splitlines()
    test = re.search(r"\[Makefile:\d+: run_(test_\w+)\] (.*)", said)
    if test is None:
        return _refused(said)
    is_hang = test[2].strip() == "Error 124"
    what = next((line for line in reversed(lines) if "make" not in line and "build/" not in line), test[2])
    return Outcome("native", test[1], what[:160], is_hang)


def _refused(said: str) -> Outcome:
    """Return the outcome of a mutant that the compiler refuses: nothing that is tried could find it."""
    lines = said.strip().splitlines() or [""]
    line = next((line for line in lines if "error" in line), lines[-1])
    return Outcome(survived=f"the compiler refuses it: {line[:160]}")


def call(command: Sequence[str], copy: Path, more: Mapping[str, str] | None = None, said: str = "") -> tuple[int, str]:
    """Run a command in a copy, with `said` on its standard input, and end all that it has started. Return its exit
    status and its output."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(said.encode())
        given.seek(0)
        _running.refuse_if_ended()
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment(copy, more),
            stdin=given,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            status = process.wait(STAGE_S)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            _kill(process)
            process.wait()
            _running.remove(process)
        _running.refuse_if_ended()
        output.seek(0)
        return status, output.read().decode(errors="replace")
