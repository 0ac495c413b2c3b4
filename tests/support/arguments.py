"""Types of arguments of the test commands. What would play nothing is refused, for it would be reported as all well."""

from __future__ import annotations

import argparse
import math

from pccl.cli.arguments import natural, positive

__all__ = ["minutes", "natural", "positive"]


def minutes(text: str) -> float:
    """Return a number of minutes, or of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time")
    return value
