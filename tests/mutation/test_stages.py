"""What counts as killed: nothing that fails without the mutant, that fails once only, or that is no program."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mutation import command, stages
from tests.mutation.mutants import Mutant, MutantError
from tests.mutation.results import Cache, Killers
from tests.mutation.stages import Players, Stages, UnsoundError
from tests.mutation.tree import Base

MUTANT = Mutant("area", "name", "pccl/protocol/x.py", "if a and b:", "if a:", "It breaks a promise.")
TEXT = "def one(a: int, b: int) -> int:\n    if a and b:\n        return 1\n    return 0\n"
NATIVE = Mutant("area", "native", "native/src/x.c", "if (a && b)", "if (a)", "It breaks a promise.")


class Tree(Base):
    """A base of one file, which is its own copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for path, text in ((MUTANT.path, TEXT), (NATIVE.path, "if (a && b)\n")):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def digest(self, *folders: str) -> str:
        return "digest"

    @contextmanager
    def with_mutant(self, mutant: Mutant | None) -> Iterator[Path]:
        yield self.root / ("mutated" if mutant else "base")


class Scripted(Players):
    """Players that answer as is said, with the mutant and without."""

    def __init__(self, mutated: list[dict[str, Any]], base: dict[str, Any]) -> None:
        self._mutated = mutated
        self._base = base

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        return self._base if request["text"] == TEXT else self._mutated.pop(0)


def made(folder: Path, stage: str, players: Players | None = None) -> Stages:
    tree = Tree(folder / "tree")
    killers = Killers(folder / "killers.json")
    return Stages(tree, Cache(folder / "cache"), killers, (10, 0), stage, players=players or Scripted([], {}))


FAILS = {"failed": 6, "is_hang": False, "what": "AssertionError: x"}
DIES = {"died": "it does not begin"}
PLAYED = {"played": 10}


def test_a_schedule_that_fails_with_the_mutant_alone_kills(tmp_path: Path) -> None:
    outcome = made(tmp_path, "simulation", Scripted([FAILS], PLAYED)).run(MUTANT)
    assert (outcome.stage, outcome.killer, outcome.schedules) == ("simulation", "seed 7", 7)


@pytest.mark.parametrize("answer", [FAILS, DIES], ids=["fails", "dies"])
def test_a_schedule_that_fails_without_a_mutant_kills_nothing(tmp_path: Path, answer: dict[str, Any]) -> None:
    of_run = made(tmp_path, "simulation", Scripted([answer, answer], answer))
    with pytest.raises(UnsoundError, match="without a mutant"):
        of_run.run(MUTANT)
    assert not list((tmp_path / "cache").rglob("*.json")), "it must not be remembered"


def test_a_process_that_dies_once_kills_nothing(tmp_path: Path) -> None:
    assert not made(tmp_path, "simulation", Scripted([DIES, PLAYED], PLAYED)).run(MUTANT).stage
    outcome = made(tmp_path / "again", "simulation", Scripted([DIES, DIES], PLAYED)).run(MUTANT)
    assert outcome.killer == "the process"


@pytest.mark.parametrize("fails_without", [True, False])
def test_tests_that_cannot_be_collected_without_the_mutant_kill_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_without: bool
) -> None:
    def run(copy: Path, *arguments: str) -> dict[str, object] | None:
        is_broken = copy.name == "mutated" or fails_without
        return {"test": "collection", "is_hang": False, "what": "exit status 4"} if is_broken else None

    monkeypatch.setattr(stages, "pytest", run)
    of_run = made(tmp_path, "unit")
    (tmp_path / "tree/mutated/tests").mkdir(parents=True)
    mutant = Mutant("a", "n", MUTANT.path, MUTANT.line, MUTANT.becomes, "It.", tests=("tests/test_x.py",))
    (tmp_path / "tree/mutated/tests/test_x.py").touch()
    if fails_without:
        with pytest.raises(UnsoundError, match="without a mutant"):
            of_run.run(mutant)
    else:
        assert of_run.run(mutant).killer == "collection"


@pytest.mark.parametrize(("failures", "is_killed"), [(1, False), (9, True)])
def test_a_native_test_that_fails_once_kills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, is_killed: bool
) -> None:
    left = [failures]

    def run(command: list[str], copy: Path, *_: object) -> tuple[int, str]:
        if copy.name == "base" or left[0] <= 0:
            return 0, ""
        left[0] -= 1
        return 2, "x.c:1: CHECK(a) failed\nmake: *** [Makefile:70: run_test_x] Error 1\n"

    monkeypatch.setattr(stages, "call", run)
    monkeypatch.setattr(Stages, "_build_base", lambda _: None)
    monkeypatch.setattr(Stages, "_take_builds", lambda *_: None)
    outcome = made(tmp_path, "native").run(NATIVE)
    assert (outcome.killer == "test_x") == is_killed


@pytest.mark.parametrize("stage", ["native", "unit"])
def test_what_the_compiler_refuses_is_found_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    said = "src/x.c:1: error: suggest braces\nmake: *** [Makefile:74: build/plain/x.o] Error 1\n"
    monkeypatch.setattr(stages, "call", lambda *_: (2, said))
    monkeypatch.setattr(Stages, "_build_base", lambda _: None)
    monkeypatch.setattr(Stages, "_take_builds", lambda *_: None)
    outcome = made(tmp_path, stage).run(NATIVE)
    assert not outcome.stage
    assert outcome.survived == "the compiler refuses it: src/x.c:1: error: suggest braces"


def options(**changes: Any) -> argparse.Namespace:
    usual = {"only": [], "stage": "", "known": False, "sample": None, "seed": 1}
    return argparse.Namespace(**{**usual, **changes})


def chosen(folder: Path, mutant: Mutant, **changes: Any) -> list[Mutant]:
    Tree(folder)
    return command.choose([mutant], Killers(folder / "none.json"), options(**changes), folder)


def test_what_is_no_program_is_no_mutant(tmp_path: Path) -> None:
    assert chosen(tmp_path, MUTANT) == [MUTANT]
    broken = Mutant("area", "broken", MUTANT.path, MUTANT.line, "if a and:", "It breaks a promise.")
    with pytest.raises(MutantError, match=r"area/broken: .*if a and:"):
        chosen(tmp_path, broken)


def test_a_name_that_nobody_has_is_an_error_also_among_others(tmp_path: Path) -> None:
    assert chosen(tmp_path, MUTANT, only=["name"]) == [MUTANT]
    with pytest.raises(MutantError, match="misspelt"):
        chosen(tmp_path, MUTANT, only=["name", "misspelt"])


@pytest.mark.parametrize(
    ("with_mutant", "without", "is_killed"),
    [("fff", "ppp", True), ("ffp", "ppp", False), ("fff", "fpp", False), ("fff", "pfp", False), ("p", "", False)],
)
def test_a_test_kills_that_fails_with_the_mutant_each_time_and_never_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_mutant: str, without: str, is_killed: bool
) -> None:
    left = {"mutated": list(with_mutant), "base": list(without)}

    def run(copy: Path, *arguments: str) -> dict[str, object] | None:
        fails = left[copy.name].pop(0) == "f" if left[copy.name] else False
        return {"test": "tests/test_x.py::test", "is_hang": False, "what": "assert"} if fails else None

    monkeypatch.setattr(stages, "pytest", run)
    (tmp_path / "tree/mutated/tests").mkdir(parents=True)
    (tmp_path / "tree/mutated/tests/test_x.py").touch()
    mutant = Mutant("a", "n", MUTANT.path, MUTANT.line, MUTANT.becomes, "It.", tests=("tests/test_x.py",))
    assert bool(made(tmp_path, "unit").run(mutant).stage) == is_killed
