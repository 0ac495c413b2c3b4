"""The lists of mutants: each can be applied to the sources as they are, and says what it breaks."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import ROOT, Mutant, MutantError, load
from tests.mutation.results import KILLERS, Cache, Killers, Outcome, scores

MUTANTS = load()
MUTANT = Mutant("area", "name", "pccl/x.py", "if a and b:", "if a:", "It breaks a promise.")
TEXT = """\
def one(
    a: int,
) -> None:
    if a and b:
        return

def two() -> None:
    if a and b:
        return
"""


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_every_mutant_can_be_applied() -> None:
    errors = []
    for mutant in MUTANTS:
        try:
            mutant.check(_text(mutant.path))
            mutated = mutant.apply(_text(mutant.path))
        except MutantError as error:
            errors.append(str(error))
        else:
            if mutated == _text(mutant.path):
                errors.append(f"{mutant.area}/{mutant.name} changes nothing")
    assert not errors, "bring tests/mutation/mutants up to date"


def test_every_mutant_says_what_it_breaks_and_what_is_equivalent_why() -> None:
    for mutant in MUTANTS:
        assert mutant.breaks.endswith((".", "?")), mutant.name
        assert not mutant.equivalent or mutant.equivalent.endswith("."), mutant.name


def test_what_is_known_to_be_killed_is_a_mutant() -> None:
    """Else `--known` would play fewer and fewer, and say nothing."""
    assert set(json.loads(KILLERS.read_text())) <= {mutant.name for mutant in MUTANTS}


def test_there_are_mutants_of_every_part() -> None:
    for part in ("pccl/protocol/master/", "pccl/protocol/peer/", "pccl/runtime/", "pccl/training/", "native/src/"):
        assert any(mutant.path.startswith(part) for mutant in MUTANTS), part
    assert sum(not mutant.equivalent for mutant in MUTANTS) >= 60


def test_a_line_is_looked_for_within_a_function() -> None:
    mutated = replace(MUTANT, within="def two(").apply(TEXT)
    assert mutated == "    if a:".join(TEXT.rsplit("    if a and b:", 1))
    assert replace(MUTANT, within="def one(").apply(TEXT) == TEXT.replace("if a and b:", "if a:", 1)


def test_a_line_that_is_taken_out_leaves_a_body() -> None:
    mutated = replace(MUTANT, within="def two(", line="return", becomes="").apply(TEXT)
    assert mutated.endswith("    if a and b:\n        pass\n")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, "area/name: found 2 times in pccl/x.py: 'if a and b:'"),
        ({"line": "if c:"}, "area/name: not found in pccl/x.py: 'if c:'"),
        ({"within": "def three("}, "area/name: not found in pccl/x.py: 'def three\\('"),
        ({"within": "def two(", "line": "a: int,"}, "not found in pccl/x.py, within 'def two\\('"),
    ],
)
def test_a_mutant_that_cannot_be_applied_is_named(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(MutantError, match=error):
        replace(MUTANT, **changes).apply(TEXT)


def test_names_are_unique_and_fields_known(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "a"\npath = "p"\nline = "l"\nbecomes = "b"\nbreaks = "x."\n'
    (tmp_path / "one.toml").write_text(entry)
    assert [mutant.name for mutant in load(tmp_path)] == ["a"]
    (tmp_path / "two.toml").write_text(entry)
    with pytest.raises(MutantError, match=r"two\.toml: a second mutant a"):
        load(tmp_path)
    (tmp_path / "two.toml").write_text(entry.replace('"a"', '"b"') + 'braeks = "y."\n')
    with pytest.raises(MutantError, match=r"two\.toml: b: .*braeks"):
        load(tmp_path)


def test_outcomes_are_remembered_by_mutant_and_sources(tmp_path: Path) -> None:
    cache_, outcome = Cache(tmp_path), Outcome("simulation", "seed 7", "AssertionError", schedules=7)
    assert cache_.find(MUTANT, "simulation", "sources") is None
    cache_.keep(MUTANT, "simulation", "sources", outcome)
    assert cache_.find(MUTANT, "simulation", "sources") == outcome
    assert cache_.find(MUTANT, "simulation", "others") is None
    assert cache_.find(replace(MUTANT, becomes="if b:"), "simulation", "sources") is None


def test_killers_are_recorded_and_those_of_unknown_mutants_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "killers.json"
    killers = Killers(path)
    killers.record(
        [(MUTANT, Outcome("simulation", "seed 7")), (replace(MUTANT, name="gone"), Outcome("tests", "t"))], [MUTANT]
    )
    assert Killers(path).of(MUTANT, "simulation") == "seed 7"
    assert Killers(path).of(replace(MUTANT, name="gone"), "tests") == ""


def test_scores_count_equivalent_mutants_apart() -> None:
    killed, survived = Outcome("simulation", "seed 1"), Outcome(survived="5000 schedules")
    equivalent = replace(MUTANT, name="same", equivalent="It is the same.")
    table = scores([(MUTANT, killed), (replace(MUTANT, name="other"), survived), (equivalent, survived)])
    assert table.splitlines()[-1].split() == ["all", "2", "1", "(50", "%)", "0", "(0", "%)", "1", "1"]
