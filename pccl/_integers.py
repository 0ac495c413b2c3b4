"""Checks integer arguments, which may be Python's ints or those of another library, such as NumPy or torch."""

from __future__ import annotations

import operator
from typing import Any


def as_int(name: str, given: Any, least: int | None = None, most: int | None = None) -> int:
    """Return `given` as an int. It may be anything that `operator.index` accepts, except bools.

    Raise ValueError if it is not an integer in [least, most].
    """
    value = given if type(given) is int else _index(given)
    if value is not None and (least is None or least <= value) and (most is None or value <= most):
        return value
    kind = "" if value is not None else f" but of type {type(given).__name__}"
    raise ValueError(f"{name} {given!r} is not an integer{_bounds(least, most)}{kind}")


def _index(given: Any) -> int | None:
    """Return an integer's value, or None for anything else. Reject torch's bools, although they have an index."""
    if isinstance(given, bool) or str(getattr(given, "dtype", "")) == "torch.bool":
        return None
    try:
        return int(operator.index(given))
    except (TypeError, ValueError, RuntimeError):  # raised by torch for tensors without values
        return None


def _bounds(least: int | None, most: int | None) -> str:
    if least is None:
        return ""
    if most is None:
        return f" of at least {least}"
    is_power = most > 1 << 16 and most & (most + 1) == 0
    return f" in [{least}, 2**{most.bit_length()})" if is_power else f" in [{least}, {most}]"
