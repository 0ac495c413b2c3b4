"""Numbers in the environment that a program can do without: one that is wrong is warned of, and ends no run."""

from __future__ import annotations

import os
import warnings


def number_of(name: str, default: float, most: float) -> float:
    """Return the number that an environment variable holds, from 0 to `most`; the default where it is not set, or is
    something else, with a warning."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    warnings.warn(
        f"{name}={text}: not a number from 0 to {most:.10g}; {default:.10g} is used", RuntimeWarning, stacklevel=2
    )
    return default
