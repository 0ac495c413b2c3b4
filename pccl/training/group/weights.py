"""The weight that a peer gives to its part of an average, such as the tokens it has trained on."""

from __future__ import annotations

import math


def checked_weight(weight: float | None) -> float | None:
    """ValueError for what is no weight."""
    if weight is None:
        return None
    weight = float(weight)
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight {weight}: must be finite and at least 0, such as the number of tokens trained on")
    return weight
