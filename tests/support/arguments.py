"""What test commands share: argument types, and how they end on Ctrl-C.

An empty campaign is refused, because it would be reported as a success.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

from pccl.cli.arguments import natural, positive

__all__ = ["minutes", "natural", "positive", "until_interrupted"]
INTERRUPTED = 130
"""The exit status of a command that was ended by Ctrl-C."""


def minutes(text: str) -> float:
    """Parse a number of minutes or seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length of time")
    return value


def until_interrupted(main: Callable[[], int]) -> int:
    """Run a command, and return its exit status."""
    try:
        return main()
    except BaseException as error:
        is_group = isinstance(error, BaseExceptionGroup) and error.subgroup(KeyboardInterrupt) is not None
        if not is_group and not isinstance(error, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
