"""Numbers in the environment that a program can do without: one that is wrong is warned of, and ends no run."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("pccl")

_warned_of: set[str] = set()
"""Warnings that this process has given: each session asks again."""


def number_of(name: str, default: float, most: float) -> float:
    """Return the number that an environment variable holds, from 0 to `most`; the default where it is not set, or is
    something else. A line of the log warns of that, which no filter of Python's warnings turns into an error."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= most:
        return value
    warning = f"{name}={text}: not a number from 0 to {most:.10g}; {default:.10g} is used"
    if warning not in _warned_of:
        _warned_of.add(warning)
        logger.warning("%s", warning)
    return default
