"""Weights that callers give: numbers of any library, and errors that name the parameter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl.training.step import as_float, checked_weight


@pytest.mark.parametrize(
    ("given", "weight"),
    [(None, None), (0, 0.0), (3, 3.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(7), 7.0), (2**1023, 2.0**1023)],
)
def test_numbers_of_any_library_are_weights(given: Any, weight: float | None) -> None:
    assert checked_weight(given) == weight


@pytest.mark.parametrize(
    "given",
    [-1, float("nan"), float("inf"), 10**400, -(10**400), pytest.param(10**9999, id="beyond"), "many", [1], 1j],
)
def test_invalid_weights_are_named(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^weight .*must be .*finite.* at least 0"):
        checked_weight(given)


def test_numbers_beyond_float_are_named() -> None:
    assert as_float("amount", -3) == -3.0
    with pytest.raises(ValueError, match=r"^amount of type int: must be a number that a float can hold"):
        as_float("amount", 10**400)
    with pytest.raises(ValueError, match=r"^amount of type str: must be a number"):
        as_float("amount", "many")
