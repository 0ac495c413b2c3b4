"""The weight that a peer gives to its part of an average, such as the tokens it has trained on."""

from __future__ import annotations

import math
from typing import Any

SHOWN_MAX = 60
"""The most characters of a wrong number that an error shows."""


def checked_weight(weight: Any) -> float | None:
    """Return the weight as a float, and None as it is. ValueError: it is no number, negative, or not finite as a
    float."""
    if weight is None:
        return None
    value = _float(weight)
    if value is None or not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"weight {_shown(weight)}: must be finite and at least 0, such as the number of tokens trained on"
        )
    return value


def as_float(name: str, given: Any) -> float:
    """Return `given`, the argument of this name, as a float. ValueError: it is no number, or larger than floats are."""
    value = _float(given)
    if value is None:
        raise ValueError(f"{name} {_shown(given)}: must be a number that a float can hold")
    return value


def _float(given: Any) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, for more than one element
        return None


def _shown(given: Any) -> str:
    try:
        text = repr(given)
    except ValueError:  # an integer of more digits than Python writes
        text = f"of type {type(given).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
