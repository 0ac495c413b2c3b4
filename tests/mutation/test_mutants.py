"""Every mutant can be applied to the sources as they are, and has a test that finds it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.__main__ import choose
from tests.mutation.copies import Base, call
from tests.mutation.mutants import ROOT, Mutant, MutantError, load

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
                errors.append(f"{mutant} has no effect")
    assert not errors, "bring tests/mutation/mutants up to date"


def test_every_mutant_has_a_test_that_finds_it() -> None:
    for mutant in MUTANTS:
        native = mutant.killer.removeprefix("native/")
        if native != mutant.killer:
            assert (ROOT / f"native/tests/{native}.c").exists(), f"{mutant}: {mutant.killer}"
        elif mutant.killer:
            assert (ROOT / mutant.killer).exists(), f"{mutant}: {mutant.killer}"
        else:
            assert mutant.path.startswith("pccl/protocol/"), f"{mutant}: schedules play pccl/protocol only"


def test_line_is_looked_for_within_a_function() -> None:
    mutated = replace(MUTANT, within="def two(").apply(TEXT)
    assert mutated == "    if a:".join(TEXT.rsplit("    if a and b:", 1))
    assert replace(MUTANT, within="def one(").apply(TEXT) == TEXT.replace("if a and b:", "if a:", 1)


def test_removed_line_leaves_a_body() -> None:
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
def test_mutant_that_cannot_be_applied_is_an_error(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(MutantError, match=error):
        replace(MUTANT, **changes).apply(TEXT)


def test_mutant_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(MutantError, match="if a and:"):
        replace(MUTANT, within="def two(", becomes="if a and:").check(TEXT)


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


def test_choice_by_name_and_area() -> None:
    mutants = [MUTANT, replace(MUTANT, name="other", killer="tests/test_x.py")]
    assert choose(mutants, ["name"]) == [MUTANT]
    assert choose(mutants, ["area"]) == mutants
    assert choose(mutants, [], schedules=True) == [MUTANT]
    with pytest.raises(MutantError, match="misspelt"):
        choose(mutants, ["name", "misspelt"])


def test_failure_of_a_test_is_its_error(tmp_path: Path) -> None:
    assert call([sys.executable, "-c", ""], tmp_path) == ""
    assert call([sys.executable, "-c", "raise ValueError('x')"], tmp_path) == "ValueError: x"


def test_mutant_lives_in_a_copy(tmp_path: Path) -> None:
    source = tmp_path / "tree/pccl/x.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = b = 1\nif a and b:\n    pass\n")
    (tmp_path / "tree/test_x.py").write_text("import pccl.x\n\ndef test() -> None:\n    assert pccl.x\n")
    (tmp_path / "scratch").mkdir()
    base = Base(tmp_path / "tree", tmp_path / "scratch")
    failing = replace(MUTANT, becomes="if c:", killer="test_x.py")
    assert not base.run("test_x.py")
    assert "NameError" in base.run_with(failing)
    assert not base.run_with(replace(failing, becomes="if b:"))
    assert "if a and b:" in source.read_text()
