"""A mutant is noted where it makes a difference, and an instrumented text does what it did before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.mutation.instruments import NOTE, instrument, noter
from tests.mutation.mutants import Mutant

TEXT = """\
LIMIT = 3


def one(a, b, kept):
    if a and b and change(kept):
        kept.append(a)
    found = set(kept)
    return [each for each in found if each > 1 and each < 5], kept


def change(kept):
    kept.append(0)
    return True
"""


def noted(line: str, becomes: str, *arguments: Any) -> tuple[bool, object]:
    """Run `one` with instruments for one mutant. Return whether it was noted, and the result."""
    text, everywhere = instrument(TEXT, [Mutant("area", "name", "x.py", line, becomes, "It breaks a promise.")])
    assert not everywhere
    names: set[str] = set()
    scope: dict[str, Any] = {NOTE: noter(names)}
    exec(compile(text, "x.py", "exec"), scope)
    result = scope["one"](*arguments)
    return "name" in names, result


@pytest.mark.parametrize(
    ("line", "becomes", "arguments", "is_noted"),
    [
        ("if a and b and change(kept):", "if b and b and change(kept):", (1, 1, []), False),
        ("if a and b and change(kept):", "if b and b and change(kept):", (0, 1, []), True),
        ("if a and b and change(kept):", "if a and change(kept):", (0, 0, []), True),  # has side effects: whenever run
        ("found = set(kept)", "found = set(kept[:1])", (0, 1, [2]), False),
        ("found = set(kept)", "found = set(kept[:1])", (0, 1, [2, 3]), True),
        ("found = set(kept)", "found = kept", (0, 1, [2]), True),  # it could be changed
        ("found = set(kept)", "found = set(kept[0][0])", (0, 1, [2]), True),  # it would raise
        ("kept.append(a)", "", (1, 1, []), True),
        ("kept.append(a)", "", (1, 0, []), False),
        (
            "return [each for each in found if each > 1 and each < 5], kept",
            "return [each for each in found if each > 1 and each <= 5], kept",
            (0, 0, [1, 2, 6]),
            False,
        ),
        (
            "return [each for each in found if each > 1 and each < 5], kept",
            "return [each for each in found if each > 1 and each <= 5], kept",
            (0, 0, [1, 2, 5]),
            True,
        ),
    ],
)
def test_a_difference_is_noted(line: str, becomes: str, arguments: tuple[Any, ...], is_noted: bool) -> None:
    scope: dict[str, Any] = {}
    exec(compile(TEXT, "x.py", "exec"), scope)
    a, b, kept = arguments
    expected = scope["one"](a, b, list(kept))
    assert noted(line, becomes, a, b, list(kept)) == (is_noted, expected)


def test_several_mutants_may_have_one_line() -> None:
    line = "found = set(kept)"
    mutants = [
        Mutant("area", "first", "x.py", line, "found = set(kept[:1])", "It breaks a promise."),
        Mutant("area", "second", "x.py", line, "found = set(kept[1:])", "It breaks a promise."),
        Mutant("area", "third", "x.py", line, "pass", "It breaks a promise."),
    ]
    text, _ = instrument(TEXT, mutants)
    names: set[str] = set()
    scope: dict[str, Any] = {NOTE: noter(names)}
    exec(compile(text, "x.py", "exec"), scope)
    scope["one"](0, 0, [2])
    assert names == {"second", "third", "first?", "second?", "third?"}


def test_what_is_in_no_function_is_said_to_be_everywhere() -> None:
    mutant = Mutant("area", "name", "x.py", "LIMIT = 3", "LIMIT = 4", "It breaks a promise.")
    assert instrument(TEXT, [mutant])[1] == ["name"]
