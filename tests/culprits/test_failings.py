"""What a count of injections has to show."""

from __future__ import annotations

import pytest

from tests.culprits.__main__ import Tally, failings


@pytest.mark.parametrize(
    ("right", "others", "false_names", "in_quiet", "words"),
    [
        (200, 0, 0, 0, []),
        (198, 4, 4, 0, []),
        (197, 0, 0, 0, ["197 of 200 were named rightly"]),
        (200, 5, 0, 0, ["5 further names during 200 faults"]),
        (200, 0, 5, 0, ["5 names between 200 faults"]),
        (200, 0, 0, 1, ["1 names in runs without"]),
        (0, 200, 200, 9, ["0 of 200", "200 further", "200 names between", "9 names in runs"]),
    ],
)
def test_false_names_count_as_missed_ones_do(
    right: int, others: int, false_names: int, in_quiet: int, words: list[str]
) -> None:
    tallies = [Tally(100, [1.0] * (right // 2), others=others), Tally(100, [1.0] * (right - right // 2))]
    found = failings(tallies, false_names, in_quiet)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_quiet_minutes_alone_are_enough() -> None:
    assert failings([], 0, 0) == []
    assert failings([], 0, 1) != []
