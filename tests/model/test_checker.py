"""The checker finds violations in models of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.checker import Configuration, Finding, check, missing_tools, unreached_lines

pytestmark = pytest.mark.skipif(bool(missing_tools()), reason="needs spin and gcc")

COUNTER = """
byte n;
active proctype Count() {
    do
    :: atomic { n < LAST -> n++ }
    :: atomic { n == LAST ->
        break }
    :: atomic { n > LAST ->
        n = 0 }
    od;
#ifndef WITHOUT_BOUND
    n = 0;
#endif
    assert(n == 0)
}
"""


def search(folder: Path, last: int, mutation: str = "", text: str = COUNTER) -> Finding:
    (folder / "counter.pml").write_text(text)
    return check(folder, Configuration("counter", "few", {"LAST": last}, mutation), limit_s=60.0)


def test_a_model_that_holds(tmp_path: Path) -> None:
    found = search(tmp_path, last=5)
    assert found.is_as_expected
    assert found.verdict == "holds"
    assert found.states > 5
    assert unreached_lines([found], COUNTER) == [COUNTER.splitlines().index("        n = 0 }") + 1]
    marked = COUNTER.replace("n = 0 }", "n = 0 } /* unreached: it cannot be more */")
    assert unreached_lines([found], marked) == []


def test_violation_fails_a_model_and_not_a_mutant(tmp_path: Path) -> None:
    mutant = search(tmp_path, last=5, mutation="BOUND")
    assert mutant.is_as_expected
    assert "n==0" in mutant.verdict
    assert "proc  0 (Count:1)" in mutant.trail
    broken = search(tmp_path, last=5, text=COUNTER.replace("assert(n == 0)", "assert(n == 1)"))
    assert not broken.is_as_expected


def test_mutant_without_a_violation_is_a_failure(tmp_path: Path) -> None:
    found = search(tmp_path, last=0, mutation="BOUND")
    assert not found.is_as_expected
    assert "no error found" in found.verdict


def test_invalid_model_is_a_failure(tmp_path: Path) -> None:
    found = search(tmp_path, last=5, text="no model")
    assert not found.is_as_expected
    assert found.verdict.startswith("FAILED: spin")


@pytest.mark.slow
def test_search_without_enough_memory_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "counter.pml").write_text("int n; active proctype Count() { do :: n < 100000000 -> n++ od }")
    found = check(tmp_path, Configuration("counter", "many"), limit_s=120.0, memory_mb=200)
    assert not found.is_as_expected
    assert "truncated" in found.verdict
